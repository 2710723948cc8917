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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from itertools import chain, combinations, groupby, zip_longest
from pathlib import Path as FilePath
from typing import NamedTuple

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Path, Tree, dotted, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import (
    CoverageError,
    MappingError,
    UsageError,
    listing,
    similar_names,
    system_error,
)
from ckpttools.core.message_terms import action, option
from ckpttools.core.notes import Notes
from ckpttools.core.text import sample_names
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
        target: Template of the new names; None drops the leaves. Its wildcards stand for the texts that those
            of `source` match, in order.
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
        """Check that both names have the same fields and wildcards if no axes are named."""
        if self.target_template is None:
            return
        old, new = self.template, self.target_template
        only_old, only_new = (_fields_missing(*pair) for pair in ((old, new), (new, old)))
        if not (only_old or only_new):
            return
        only = ((only_old, "old"), (only_new, "new"))
        raise MappingError(
            "the two names of a rule have different fields",
            location=self,
            got="; ".join(f"only in the {which} name: {', '.join(names)}" for names, which in only if names),
            expected="the same fields, and as many wildcards, in both names",
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
        if self.template.wildcards or (self.target_template and self.target_template.wildcards):
            raise MappingError("a rule cannot have both wildcards and axes", location=self)
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


def _fields_missing(template: Template, other: Template) -> list[str]:
    """Return the fields and wildcards of a template that the other one lacks."""
    known = set(map(slot, other.fields))
    missing = dict.fromkeys(item for item in map(slot, template.fields) if item not in known)
    names = [str(Field(axes, strides or (1,) * bool(counts), 0, counts)) for axes, strides, counts in missing]
    return names + list(template.wildcards[len(other.wildcards) :])


@dataclass(frozen=True)
class Remap:
    """A transform that renames leaves by rules. The first matching rule applies.

    Attributes:
        rules: The rules.
        sizes: Lengths of axes that neither names nor shapes determine.
        strict: Whether to reject unmatched arrays; otherwise they are left unchanged.
        location: The location of the rules, for messages.
        is_option: Whether the rules are values of the option `rename`, so that errors about them are errors
            of the call.
    """

    rules: Sequence[Rule]
    sizes: Mapping[str, int] = field(default_factory=dict)
    strict: bool = False
    location: str = "the rules"
    is_option: bool = False

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
            reason = _unmatched_reason(rule, tree, self.rules, "*" if self.is_option else ANY)
            hint = reason.hint
            if reason.instead is not None:
                hint = f"write {self._written(reason.instead)}"
            elif not self.is_option:
                hint = f"{hint}, or set `optional = true` in it"
            raise (UsageError if self.is_option else MappingError)(
                reason.message,
                location=self._written(rule) if self.is_option else f"{self.location}: {rule}",
                expected=reason.expected,
                got=reason.got,
                hint=hint,
            )

    def _written(self, rule: Rule) -> str:
        """Return the names of a rule as the user writes them."""
        if self.is_option:
            return option("rename", {rule.source: rule.target})
        names = {"from": rule.source, "to": rule.target}
        texts = (f"`{key} = {json.dumps(name, ensure_ascii=False)}`" for key, name in names.items() if name)
        return " and ".join(texts)

    def _check_all(self, left: Sequence[Path]) -> None:
        if left:
            raise CoverageError(
                f"no rule matches these arrays:{listing([keystr(path) for path in left])}",
                location=self.location,
                hint=f"rename them as well, or leave them out with {option('drop', 'PATTERN')}"
                if self.is_option
                else "add rules for them, with `drop = true` for arrays to leave out",
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


class _Reason(NamedTuple):
    """The reason why a rule matches nothing.

    Attributes:
        message, expected, got, hint: As for an error.
        instead: A rule that matches, or None.
    """

    message: str
    expected: str | None = None
    got: str | None = None
    hint: str = ""
    instead: Rule | None = None


_Repair = tuple[str, str | None, str]
"""The names of another rule, and the text that the first rule's names lack."""


def _unmatched_reason(rule: Rule, tree: Tree, rules: Sequence[Rule], any_text: str) -> _Reason:
    """Explain why a rule matches nothing, or only leaves of earlier rules.

    Args:
        rule: The rule.
        tree: The leaves.
        rules: All rules.
        any_text: The wildcard in rules that the user can copy.
    """
    taken = [path for path in tree if rule.match(path)]
    if taken:
        earlier = next(item for item in rules if item.match(taken[0]))
        got = f"{sample_names(map(rule.name, taken))}, taken by {earlier}"
        hint = "put it before that rule"
        return _Reason("a rule matches only names that an earlier rule already matches", None, got, hint)
    paths = _distinct_paths(tree)
    single = [*_repaired(rule, paths, any_text)]
    # Two causes are combined only if no single cause explains the mistake.
    double = (
        (other, f"{cause}; {more}")
        for item, cause in single
        for other, more in _repaired(item, paths, any_text)
    )
    for repaired, cause in chain(single, double):
        if any(map(repaired.match, paths)):
            return _Reason("a rule matches nothing", cause, instead=repaired)
    # Both ways of joining keys are listed, because joining may be the mistake.
    names = dict.fromkeys(join(path) for join in (rule.name, keystr, dotted) for path in paths)
    near = similar_names(rule.source, names, 1)
    listing_text = f"{action('inspect.names', tree.metadata.location or 'SRC')} lists the names"
    return _Reason(
        "a rule matches nothing",
        f"names with {'/' if rule.has_slash else '.'!r} between keys",
        f"for example {near[0]}" if near else None,
        f"correct the old name; {listing_text}",
    )


# Maximum number of fields that are replaced at once.
_MAX_FIELDS = 3


def _distinct_paths(tree: Tree) -> list[Path]:
    """Return two paths of each group of paths that differ only in numbers, which templates match alike."""
    groups: dict[str, list[Path]] = {}
    for path in tree:
        runs = groupby(keystr(path), str.isdigit)
        group = groups.setdefault("".join("#" if is_number else "".join(run) for is_number, run in runs), [])
        if len(group) < 2:
            group.append(path)
    return [path for group in groups.values() for path in group]


def _repaired(rule: Rule, paths: Sequence[Path], any_text: str) -> Iterator[tuple[Rule, str]]:
    """Yield rules without one likely mistake each, and the mistake."""
    repairs = chain(
        _with_longer_names(rule, any_text),
        _with_any_text(rule, any_text),
        _with_other_separator(rule),
        _with_known_words(rule, paths),
        _with_other_beginning(rule, paths, any_text),
    )
    for source, target, cause in repairs:
        try:
            yield replace(rule, source=source, target=target), cause
        except MappingError:
            continue  # For example, a rule with axes cannot have wildcards.


def _with_any_text(rule: Rule, any_text: str) -> Iterator[_Repair]:
    """Yield the rule with wildcards in place of one field, then in place of several fields."""
    fields = [*dict.fromkeys(item for item in split_template(rule.source)[1::2] if not _is_wildcard(item))]
    counts = range(1, 1 + min(len(fields), _MAX_FIELDS))
    for chosen in chain.from_iterable(combinations(fields, count) for count in counts):
        slots = {_slot_in(item) for item in chosen}
        source, order = _replace_fields(rule.source, slots, any_text)
        target, target_order = _replace_fields(rule.target or "", slots, any_text)
        if rule.target and target_order != order:
            continue  # Wildcards match in order.
        limits = (f"{item} matches only {'these words' if ':' in item else 'a number'}" for item in chosen)
        yield source, target or None, "; ".join((f"{any_text} for any text", *limits))


def _slot_in(text: str) -> Slot | None:
    """Return the identity of the field in braces; None for a wildcard or other text."""
    return slot(parse_key(text).fields[0]) if text.startswith("{") and text != ANY else None


def _replace_fields(
    name: str, slots: Collection[Slot | None], any_text: str
) -> tuple[str, list[Slot | None]]:
    """Replace fields in a template. Returns the new template, and the replaced fields in their order."""
    parts = split_template(name)
    found = [_slot_in(part) for part in parts]
    chosen = [item if item in slots else None for item in found]
    text = "".join(part if item is None else any_text for part, item in zip(parts, chosen, strict=True))
    return text, [item for item in chosen if item is not None]


def _change_text(name: str, change: Callable[[str], str]) -> str:
    """Change the text between the fields and wildcards of a template."""
    parts = split_template(name)
    return "".join(part if index % 2 else change(part) for index, part in enumerate(parts))


def _words(text: str) -> list[str]:
    """Split a text into words of letters and "_", and the text between: text, word, text, …."""
    result = [""]
    for is_word, run in groupby(text, lambda character: character == "_" or character.isalpha()):
        if is_word:
            result += ["".join(run), ""]
        else:
            result[-1] = "".join(run)
    return result


def _with_other_separator(rule: Rule) -> Iterator[_Repair]:
    if rule.has_slash:
        slashes = _change_text(rule.source, lambda text: text.replace(".", "/"))
        yield slashes, rule.target, "'/' between keys in both names, because one of them has a '/'"
        dots = _change_text(rule.source, lambda text: text.replace("/", "."))
        yield dots, rule.target, "'.' in the old name, as in the names of this checkpoint"


def _with_known_words(rule: Rule, paths: Sequence[Path]) -> Iterator[_Repair]:
    """Yield the rule with the words of the checkpoint in place of unknown words."""
    known = dict.fromkeys(word for path in paths for word in _words(keystr(path))[1::2])
    by_case = {word.casefold(): word for word in known}
    result = dict.fromkeys(word for part in split_template(rule.source)[::2] for word in _words(part)[1::2])
    instead = {
        word: by_case.get(word.casefold()) or next(iter(similar_names(word, known, 1)), "")
        for word in result
        if word not in known
    }
    if instead and all(instead.values()):

        def change(text: str) -> str:
            return "".join(instead.get(word, word) for word in _words(text))

        source = _change_text(rule.source, change)
        pairs = (f"{new!r} instead of {old!r}" for old, new in instead.items())
        is_case = all(new.casefold() == old.casefold() for old, new in instead.items())
        yield source, rule.target, "the same case as the names: " * is_case + ", ".join(pairs)


def _with_other_beginning(rule: Rule, paths: Sequence[Path], any_text: str) -> Iterator[_Repair]:
    """Yield the rule with the keys that it lacks at the beginning, or without keys that the names lack."""
    head = Template((Key(()), *rule.template.keys), ("*", *rule.template.wildcards))
    found = (head.match(rule.name(path)) for path in paths)
    texts = dict.fromkeys(filled.texts[0] for filled in found if filled)
    starts = [text for text in texts if text.endswith((".", "/"))]
    if len(starts) == 1:
        yield starts[0] + rule.source, rule.target, f"{starts[0]!r} at the beginning of the names"
    elif starts:
        start = any_text + starts[0][-1]
        target = rule.target and start + rule.target
        yield start + rule.source, target, f"complete names, which begin with, for example, {starts[0]!r}"
    first = split_template(rule.source)[0]
    for end in (index for index, sign in enumerate(first[:-1], 1) if sign in "./"):
        if not any(sign in rule.source[end:] for sign in "./"):
            continue  # The last key alone, such as `weight`, is that of other arrays.
        yield rule.source[end:], rule.target, f"names without {first[:end]!r} at the beginning"


def _with_longer_names(rule: Rule, any_text: str) -> Iterator[_Repair]:
    """Yield the rule for all names below its own ones."""
    for joint in dict.fromkeys(("/" if rule.has_slash else ".", ".")):
        end = joint + any_text
        source, target = rule.source.rstrip("./") + end, rule.target and rule.target.rstrip("./") + end
        yield source, target, "complete names; this is only the beginning of names"


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


def renames_of_option(names: Mapping[str, str], *, strict: bool = False) -> Remap:
    """Create the rules of the option `rename`: old name -> new name.

    Raises:
        UsageError: A name is invalid, or the two names of a pair have different fields.
    """
    try:
        rules = tuple(Rule(source, target) for source, target in names.items())
    except MappingError as error:
        raw = error.raw
        raise UsageError(
            raw.message, location=raw.location, got=raw.got, expected=raw.expected, hint=_PLACEHOLDERS
        ) from error
    return Remap(rules, strict=strict, location=option("rename"), is_option=True)


_PLACEHOLDERS = "`*` stands for any text, {layer} for a number; both names need the same ones, `*` in order"


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
# "decoder.layers_{layer}.mlp.wi_0.kernel" and "decoder.layers_3.mlp.wi_0.kernel" give layer = 3. `{...}` and
# `*` are wildcards for any text, and `*` also for no text.

ANY = "{...}"

Slot = tuple[tuple[str, ...], tuple[int, ...], tuple[str, ...]]
"""The identity of a field: its axes, their strides, and axes whose lengths are added."""


@dataclass(frozen=True, slots=True)
class Bindings:
    """The values of a template's fields in a name.

    Attributes:
        numbers: Index of each field.
        texts: Text that each wildcard matched.
    """

    numbers: Mapping[Slot, int]
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Template:
    """A template of names: keys with wildcards between them.

    Attributes:
        keys: The keys, at least one. The first and the last may be empty.
        wildcards: The wildcards between the keys, as written.
    """

    keys: tuple[Key, ...]
    wildcards: tuple[str, ...] = ()

    @property
    def fields(self) -> tuple[Field, ...]:
        return tuple(field for key in self.keys for field in key.fields)

    def match(self, name: str) -> Bindings | None:
        """Match `name`; wildcards match as little text as possible, the first ones first.

        Returns the field values, or None if the name does not match.
        """
        limits = [len(name) + 1] * len(self.keys)
        readings = self._readings(name, 0, 0, limits)
        filled = ((self._slot_values(numbers), texts) for numbers, texts in readings)
        return next((Bindings(numbers, texts) for numbers, texts in filled if numbers is not None), None)

    def _readings(
        self, name: str, at: int, start: int, limits: list[int]
    ) -> Iterator[tuple[tuple[int, ...], tuple[str, ...]]]:
        """Yield possible numbers and texts from key `at`, which begins at `start`, to the end of the name.

        `limits` has, for each key, the first start from which on no reading exists. This keeps the work for
        long names and several wildcards proportional to their length.
        """
        for end, numbers in self.keys[at].readings(name, 0, start):
            if at == len(self.wildcards):
                if end == len(name):
                    yield numbers, ()
                continue
            first, is_any = end + (self.wildcards[at] == ANY), False
            for following in self._starts(name, at + 1, first, limits[at + 1]):
                for more, texts in self._readings(name, at + 1, following, limits):
                    is_any = True
                    yield (*numbers, *more), (name[end:following], *texts)
            if not is_any:
                limits[at + 1] = min(limits[at + 1], first)

    def _starts(self, name: str, at: int, first: int, limit: int) -> Iterator[int]:
        """Yield the starts from `first` to `limit` at which the text before the first field of a key is."""
        parts = self.keys[at].parts
        text = parts[0] if parts and isinstance(parts[0], str) else ""
        if at == len(self.wildcards) and not self.keys[at].fields:
            first = max(first, len(name) - len(text))
        start = name.find(text, first)
        while 0 <= start < limit:
            yield start
            start = name.find(text, start + 1)

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
        keys = (key.filled(filled.numbers[slot(field)] for field in key.fields) for key in self.keys)
        return "".join(chain(*zip_longest(keys, filled.texts, fillvalue="")))

    def __str__(self) -> str:
        return "".join(chain(*zip_longest(map(str, self.keys), self.wildcards, fillvalue="")))


def parse_template(text: str) -> Template:
    """Parse a template.

    Raises:
        MappingError: The row notation is invalid.
    """
    keys, wildcards = [""], []
    for part in split_template(text):
        if _is_wildcard(part):
            wildcards.append(part)
            keys.append("")
        else:
            keys[-1] += part
    return Template(tuple(map(parse_key, keys)), tuple(wildcards))


def split_template(text: str) -> list[str]:
    """Split a template into text and fields or wildcards: text, field, text, wildcard, text."""
    parts: list[str] = []
    while text:
        start = min((at for at in (text.find("{"), text.find("*")) if at >= 0), default=len(text))
        token = text[start:]
        end = token.find("}") + 1 if token.startswith("{") else len(token) - len(token.lstrip("*"))
        end = end or len(token)
        parts += [text[:start], token[:end]] if token else [text]
        text = token[end:]
    return parts if len(parts) % 2 else [*parts, ""]


def _is_wildcard(part: str) -> bool:
    return part == ANY or part.startswith("*")


def slot(field: Field) -> Slot:
    """Return the identity of a field; `{layer}`, `{layer+3}` and `{layer:a,b}` have the same identity."""
    plain = len(field.axes) == 1 and field.strides in ((), (1,))
    return field.axes, () if plain else field.strides, field.counts
