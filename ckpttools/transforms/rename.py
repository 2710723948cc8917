"""Rules that rename leaves and rearrange the axes of arrays.

    [[rules]]
    from = "model.layers.{layer}.mlp.gate_proj.weight"
    axes = "mlp embed"
    to = "params/params/decoder/layers/mlp/wi_0/kernel"
    to-axes = "embed layer mlp"

Names and axes use the notation of rows (`ckpttools.mapping.axes`, `ckpttools.mapping.keys`).
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from pathlib import Path as FilePath

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Path, Tree, dotted, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CoverageError, MappingError, listing, similar_names, system_error
from ckpttools.core.notes import Notes
from ckpttools.mapping.axes import parse_side
from ckpttools.mapping.build import Mapped
from ckpttools.mapping.documents import fields, length, list_of, mapping, text, truth
from ckpttools.mapping.keys import Field, Key, parse_key
from ckpttools.mapping.row import Row
from ckpttools.mapping.sizes import Size
from ckpttools.mapping.table import Table
from ckpttools.transforms.base import Move, Transformed, move_leaves, path_like


@dataclass(frozen=True)
class Rule:
    """A rule for all leaves whose names match a template.

    Attributes:
        source: Template of the names. Keys are joined by "/" if it or `target` contains a slash, otherwise by
            ".".
        target: Template of the new names; None drops the leaves.
        axes: Axes of each source array; None if arrays are unchanged.
        target_axes: Axes of each target array; None to use `axes`.
        optional: Whether the rule may match nothing.
    """

    source: str
    target: str | None
    axes: str | None = None
    target_axes: str | None = None
    optional: bool = False

    def __post_init__(self) -> None:
        if self.target is None and self.axes is not None:
            raise MappingError("a rule that drops leaves cannot have axes", location=self)
        if self.axes is None and self.target_axes is not None:
            raise MappingError("a rule needs the axes of both sides", location=self, expected="axes")
        self._check_labels()
        if self.axes is None:
            self._check_fields()
        else:
            _ = self.row

    def _check_labels(self) -> None:
        """Raise MappingError if labels would be replaced by their indices, or lost."""
        targets = {slot(item): item for item in self.target_template.fields} if self.target_template else {}
        for template_field in self.template.fields:
            other = targets.get(slot(template_field))
            if template_field.labels and other is not None and not other.labels:
                numbers = ",".join(map(str, range(len(template_field.labels))))
                raise MappingError(
                    "a field has labels in one name of a rule, but numbers in the other",
                    location=self,
                    got=str(other),
                    expected=f"labels, as in {template_field}",
                    hint=f"to use numbers, list them: {{{template_field.axes[0]}:{numbers}}}",
                )
            if (
                template_field.labels
                and other is not None
                and len(template_field.labels) != len(other.labels)
            ):
                raise MappingError(
                    "the labels of a field differ in number between the two names of a rule",
                    location=self,
                    got=f"{len(template_field.labels)} in {template_field}, {len(other.labels)} in {other}",
                    expected="one label for each label in the other name, in the same order",
                )

    def _check_fields(self) -> None:
        """Check that both names have the same fields if no axes are named."""
        expected = {slot(item) for item in self.template.fields}
        got = {slot(item) for item in self.target_template.fields} if self.target_template else expected
        texts = self.target_template is None or _has_text(self.template) == _has_text(self.target_template)
        if got != expected or not texts:
            raise MappingError(
                "the two names of a rule have different fields",
                location=self,
                hint="to move an axis into or out of the name, add the axes of the arrays",
            )

    @cached_property
    def template(self) -> Template:
        return parse_template(self.source)

    @cached_property
    def target_template(self) -> Template | None:
        return None if self.target is None else parse_template(self.target)

    @cached_property
    def row(self) -> Row:
        """Return the rule as a row with the source on the right. Only for rules with axes."""
        if _has_text(self.template) or (self.target_template and _has_text(self.target_template)):
            raise MappingError("a rule cannot have both {...} and axes", location=self)
        axes = self.axes or ""
        targets = axes if self.target_axes is None else self.target_axes
        return Row(parse_side(self.target or "", targets), parse_side(self.source, axes))

    def match(self, path: Path) -> Bindings | None:
        """Match the name of `path`; return the field values, or None if the rule does not apply."""
        return self.template.match(self.name(path))

    def name(self, path: Path) -> str:
        """Return the path as a name of this rule."""
        return keystr(path) if self.has_slash else dotted(path)

    def path(self, name: str, source: Path) -> Path:
        """Convert a new name to a path; `source` is the old path of the leaf."""
        return path_like(self._keys(name, source), source)

    @property
    def has_slash(self) -> bool:
        """Return whether "/" joins keys in both templates."""
        return "/" in self.source or "/" in (self.target or "")

    def _keys(self, name: str, source: Path) -> list[str]:
        if self.has_slash:
            return name.split("/")
        return name.split(".") if len(source) > 1 else [name]

    def __str__(self) -> str:
        return f"{self.source} -> {self.target or 'dropped'}"


def _with_any_text(rule: Rule, tree: Tree) -> str | None:
    """Return the template of a rule with {...} instead of a field or *, if only that matches a leaf."""
    if rule.axes is not None or _has_text(rule.template) or any(map(rule.match, tree)):
        return None
    fields = [f"{{{item.partition('}')[0]}}}" for item in rule.source.split("{")[1:]]
    for name in (*fields, *("*" * rule.source.count("*"))[:1]):
        instead = rule.source.replace(name, "{...}", 1)
        template = parse_template(instead)
        if any(template.match(rule.name(path)) for path in tree):
            return instead
    return None


def _has_text(template: Template) -> bool:
    return template.after is not None


@dataclass(frozen=True)
class Remap:
    """A transform that renames leaves by rules. The first matching rule applies.

    Attributes:
        rules: The rules.
        sizes: Lengths of axes that neither names nor shapes determine.
        strict: Whether to reject unmatched arrays; otherwise they are left unchanged.
        location: The location of the rules, for messages.
    """

    rules: Sequence[Rule]
    sizes: Mapping[str, int] = field(default_factory=dict)
    strict: bool = False
    location: str = "the rules"

    def __call__(self, tree: Tree) -> Transformed:
        """Return the tree under its new names. The step and custom metadata are kept.

        Raises:
            MappingError: A rule matches nothing, two leaves get the same name, or no leaf is left.
            CoverageError: An array has no rule and `strict` is set, or arrays are missing, or do not have the
                shape that a rule with axes requires.
            ShapeError: The length of an axis cannot be inferred.
        """
        matches = {path: self._match_rule(path) for path in tree}
        self._check_used(tree, [match[0] for match in matches.values() if match])
        if self.strict:
            self._check_all([path for path in tree.arrays if matches[path] is None])
        dropped = [p for p in tree.arrays if (match := matches[p]) and match[0].target is None]
        moves = [*_moves_of_renames(tree, matches), *self._arrange_axes(tree, matches)]
        return Transformed(move_leaves(tree, moves), Notes(dropped=tuple(map(keystr, dropped))))

    def _match_rule(self, path: Path) -> tuple[Rule, Bindings] | None:
        """Return the rule for a leaf, and its field values."""
        matches = ((rule, rule.match(path)) for rule in self.rules)
        return next(((rule, filled) for rule, filled in matches if filled), None)

    def _check_used(self, tree: Tree, used: Sequence[Rule]) -> None:
        for rule in self.rules:
            if rule.optional or any(rule is item for item in used):
                continue
            if (instead := _with_any_text(rule, tree)) is not None:
                raise MappingError(
                    "a rule matches nothing",
                    location=f"{self.location}: {rule}",
                    expected="{...} for any text; a named field such as {layer} matches only a number",
                    hint=f'write `from = "{instead}"`, and {{...}} in `to`',
                )
            # Both ways of joining keys are listed, because joining may be the mistake.
            names = dict.fromkeys(join(path) for join in (rule.name, keystr, dotted) for path in tree)
            near = similar_names(rule.source, names, 1)
            raise MappingError(
                "a rule matches nothing, or only leaves of an earlier rule",
                location=f"{self.location}: {rule}",
                got=f"for example {near[0]}" if near else None,
                expected="names with '/' between keys" if rule.has_slash else "names with '.' between keys",
                hint="correct its `from`, or set `optional = true` in it",
            )

    def _check_all(self, left: Sequence[Path]) -> None:
        if left:
            raise CoverageError(
                f"no rule matches these arrays:{listing([keystr(path) for path in left])}",
                location=self.location,
                hint="add rules for them, with `drop = true` for arrays to leave out",
            )

    def _arrange_axes(
        self, tree: Tree, matches: Mapping[Path, tuple[Rule, Bindings] | None]
    ) -> Iterator[Move]:
        """Return the moves of arrays under rules with axes."""
        rules = [rule for rule in self.rules if rule.axes is not None]
        names: dict[str, Path] = {}
        for path, match in matches.items():
            if match and match[0].axes is not None:
                other = names.setdefault(name := match[0].name(path), path)
                if other != path:
                    raise MappingError(
                        "two arrays have the same name under a rule with axes",
                        location=f"{self.location}: {match[0]}",
                        got=f"{keystr(other)} and {keystr(path)}: {name}",
                        hint="first rename one of them with a rule without axes",
                    )
        sources = {rule: next((p for p, f in matches.items() if f and f[0] is rule), None) for rule in rules}
        used = [(rule, source) for rule, source in sources.items() if source is not None]
        if not used:
            return
        arrays = {name: self._array(tree, path) for name, path in names.items()}
        sizes = {axis: Size(length, f"{self.location}: sizes") for axis, length in self.sizes.items()}
        table = Table(tuple(rule.row for rule, _ in used), sizes, location=tree.metadata.location)
        mapped = self._map_path(table, arrays)
        # An array whose axes are unchanged remains the same array.
        same = {id(array): names[name] for name, array in arrays.items()}
        for rule, source in used:
            for name in rule.row.left.keys(mapped.sizes):
                array = mapped.arrays[name]
                target, made_by = rule.path(name, source), f"the rule for {rule.source}"
                yield Move(same.get(id(array)), target, array, made_by)

    def _array(self, tree: Tree, path: Path) -> LazyArray:
        leaf = tree[path]
        if not isinstance(leaf, LazyArray):
            raise MappingError(
                "a rule with axes matches a leaf that is not an array",
                location=self.location,
                got=keystr(path),
            )
        return leaf

    def _map_path(self, table: Table, arrays: Mapping[str, LazyArray]) -> Mapped:
        try:
            return table.to_left(arrays)
        except CoverageError as error:
            raise CoverageError(
                error.raw.message,
                location=self.location,
                hint="the axes of a rule apply to all arrays that it matches",
            ) from error


def _moves_of_renames(tree: Tree, matches: Mapping[Path, tuple[Rule, Bindings] | None]) -> Iterator[Move]:
    """Return the moves of leaves that are only renamed."""
    for path, match in matches.items():
        if match is None:
            yield Move(path, path, tree[path])
            continue
        rule, filled = match
        if rule.axes is None and rule.target_template is not None:
            yield Move(path, rule.path(rule.target_template.format(filled), path), tree[path])


_RULES_FILE_HINT = "check the path; pass a file of rules (.toml, .json), module:function or file.py:function"


def read_rules(file: FilePath, *, strict: bool = False) -> Remap:
    """Read the rules in a TOML or JSON file.

    Raises:
        StorageError: The file cannot be read.
        MappingError: The file is not text, not TOML or JSON, or does not contain rules. The message states
            which.
    """
    try:
        content = file.read_text()
    except OSError as error:
        raise system_error("cannot read", file, error, _RULES_FILE_HINT) from error
    except UnicodeDecodeError as error:
        raise MappingError("a file of rules must be text in UTF-8", location=file, got=error) from error
    try:
        document = json.loads(content) if file.suffix == ".json" else tomllib.loads(content)
    except (ValueError, RecursionError) as error:
        kind = "JSON" if file.suffix == ".json" else "TOML"
        raise MappingError(f"a file of rules must be {kind}", location=file, got=error) from error
    return parse_rules(document, str(file), strict=strict)


def parse_rules(document: object, location: str = "the rules", *, strict: bool = False) -> Remap:
    """Parse the rules of a file: a list `rules`, and `sizes` of axes that are otherwise unknown.

    Raises:
        MappingError: The file has unknown keys or wrong types, or a rule is invalid.
    """
    if not isinstance(document, dict) or "rules" not in document:
        raise MappingError(
            "the file contains no rules", location=location, expected="[[rules]] with from and to"
        )
    entries = fields({"rules": list_of(_rule), "sizes": mapping(length)})(document, f"{location}:")
    return Remap(entries["rules"], entries.get("sizes", {}), strict, location)


def renames(names: Mapping[str, str | None]) -> Remap:
    """Create rules that only rename: template -> template, or None to drop; raises the errors of `Rule`."""
    return Remap(tuple(Rule(source, target) for source, target in names.items()))


_RULE = fields({"from": text, "to": text, "axes": text, "to-axes": text, "drop": truth, "optional": truth})


def _rule(entry: object, location: str) -> Rule:
    fields_of_rule = _RULE(entry, location)
    if "from" not in fields_of_rule or fields_of_rule.get("drop", False) == ("to" in fields_of_rule):
        raise MappingError(
            "a rule needs `from`, and either `to` or `drop = true`",
            location=location,
            got=entry,
            expected="from and to, or from and drop = true",
        )
    optional = fields_of_rule.get("optional", False)
    try:
        return Rule(
            fields_of_rule["from"],
            fields_of_rule.get("to"),
            fields_of_rule.get("axes"),
            fields_of_rule.get("to-axes"),
            optional,
        )
    except MappingError as error:
        raise error.at(f"{location}: {error.location}") from error


# Templates in row notation match names and extract the numbers in their fields. For example,
# "decoder.layers_{layer}.mlp.wi_0.kernel" and "decoder.layers_3.mlp.wi_0.kernel" give layer = 3. `{...}`
# stands for any text, at most once in a template.

_ANY = "{...}"

Slot = tuple[tuple[str, ...], tuple[int, ...], tuple[str, ...]]
"""The identity of a field: its axes, their strides, and axes whose lengths are added."""


@dataclass(frozen=True, slots=True)
class Bindings:
    """The values of a template's fields in a name.

    Attributes:
        numbers: Index of each field.
        text: Text matched by `{...}`, or None.
    """

    numbers: Mapping[Slot, int]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Template:
    """A template of names.

    Attributes:
        before: Text before `{...}`, or the full template.
        after: Text after `{...}`; None if the template has no `{...}`.
    """

    before: Key
    after: Key | None = None

    @property
    def fields(self) -> tuple[Field, ...]:
        return self.before.fields + (self.after.fields if self.after else ())

    def match(self, name: str) -> Bindings | None:
        """Match `name`. Returns its field values, or None if it does not match."""
        readings = ((self._slot_values(numbers), text) for numbers, text in self._readings(name))
        return next((Bindings(numbers, text) for numbers, text in readings if numbers is not None), None)

    def _readings(self, name: str) -> Iterator[tuple[Sequence[int], str | None]]:
        """Yield possible numbers for all fields, with the text between."""
        for end, numbers in self.before.readings(name):
            if self.after is None:
                yield from [(numbers, None)] if end == len(name) else ()
                continue
            for start in range(end + 1, len(name) + 1):
                for stop, rest in self.after.readings(name, 0, start):
                    yield from [((*numbers, *rest), name[end:start])] if stop == len(name) else ()

    def _slot_values(self, numbers: Sequence[int]) -> dict[Slot, int] | None:
        """Return the numbers by slot; None if a slot has several numbers."""
        pairs = set(zip(map(slot, self.fields), numbers, strict=True))
        by_slot = dict(pairs)
        return by_slot if len(by_slot) == len(pairs) else None

    def format(self, filled: Bindings) -> str:
        """Format the name with these field values.

        Raises:
            MappingError: The template has no label for a number.
        """
        before, after = (
            key.filled(filled.numbers[slot(field)] for field in key.fields) if key else ""
            for key in (self.before, self.after)
        )
        return f"{before}{filled.text or ''}{after}"

    def __str__(self) -> str:
        return str(self.before) if self.after is None else f"{self.before}{_ANY}{self.after}"


def parse_template(text: str) -> Template:
    """Parse a template.

    Raises:
        MappingError: The row notation is invalid, or there are several `{...}`.
    """
    before, *after = text.split(_ANY)
    if len(after) > 1:
        raise MappingError(f"{_ANY} may occur in a template only once", location=text)
    return Template(parse_key(before), parse_key(after[0]) if after else None)


def slot(field: Field) -> Slot:
    """Return the identity of a field; `{layer}`, `{layer+3}` and `{layer:a,b}` have the same identity."""
    plain = len(field.axes) == 1 and field.strides in ((), (1,))
    return field.axes, () if plain else field.strides, field.counts
