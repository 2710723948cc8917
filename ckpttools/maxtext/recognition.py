"""Recognize the model family of a tree by matching its names with the key templates of all families."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import product
from typing import Literal, NamedTuple

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Tree, dotted
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError
from ckpttools.core.message_terms import action, option, repeated_option
from ckpttools.core.text import fold_lines, matches_any, sample_names
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.mapping.coverage import Coverage
from ckpttools.mapping.keys import Field, Key, key_of
from ckpttools.mapping.row import Row
from ckpttools.mapping.values import Fill
from ckpttools.maxtext.family_layouts import layouts_of
from ckpttools.maxtext.view import MaxTextView, view_of
from ckpttools.model_families.family import Family
from ckpttools.model_families.registry import families, families_of_type

NameGroup = tuple[str, tuple[str | None, ...]]
"""The common form of names: the text with "#" for each number, and the numbers, with None for any number."""

# Placeholder for the number in a field.
_FIELD_MARK = "\0"
_NUMBER = re.compile(f"([0-9{_FIELD_MARK}]+)")
# All fields without labels match the same way; axis and offset do not matter.
_ANY_FIELD = Field(("number",))


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Maps the matching form of rows that occur together, such as a group of layers, to the original key."""

    required: Mapping[Key, Key]
    optional: Mapping[Key, Key]

    @classmethod
    def of(cls, keys: Sequence[tuple[Key, Row]]) -> RowGroup:
        rows: dict[Key, list[Row]] = {}
        templates: dict[Key, Key] = {}
        for key, row in keys:
            for form in _forms_of(key):
                rows.setdefault(form, []).append(row)
                templates.setdefault(form, key)
        always = {form for form, choices in rows.items() if _is_unconditional(choices)}
        return cls(
            {form: key for form, key in templates.items() if form in always},
            {form: key for form, key in templates.items() if form not in always},
        )

    @property
    def forms(self) -> frozenset[Key]:
        return frozenset((*self.required, *self.optional))


def _is_unconditional(rows: Sequence[Row]) -> bool:
    """Return whether any of the rows exists with all flags."""
    if not all(row.when or row.unless for row in rows):
        return True
    flags = sorted(frozenset().union(*(row.flags for row in rows)))
    settings = product((False, True), repeat=len(flags))
    combinations = ([flag for flag, is_set in zip(flags, item, strict=True) if is_set] for item in settings)
    return all(any(row.applies(setting) for row in rows) for setting in combinations)


@dataclass(frozen=True)
class FamilyKeys:
    """The key templates of a family in one kind of file.

    Attributes:
        family: The family.
        groups: The rows outside layers, followed by each group of layers.
        ignored: Patterns of names that do not need a row.
    """

    family: Family
    groups: tuple[RowGroup, ...]
    ignored: tuple[str, ...]

    @cached_property
    def by_text(self) -> dict[str, list[tuple[Key, list[str | None]]]]:
        """Return the forms by their text with "#" for numbers, each with its fixed numbers or None."""
        result: dict[str, list[tuple[Key, list[str | None]]]] = {}
        for form in dict.fromkeys(form for group in self.groups for form in group.forms):
            text, numbers = _numbers_of(form)
            result.setdefault(text, []).append((form, numbers))
        return result

    def first_numbers(self, before: str) -> list[int]:
        """Return the smallest numbers in the templates after a prefix."""
        keys = (k for group in self.groups for k in (*group.required.values(), *group.optional.values()))
        fields = (key.parts[1] for key in keys if len(key.parts) > 1 and key.parts[0] == before)
        return [field.offset for field in fields if isinstance(field, Field) and not field.labels]

    def required(self, present: frozenset[Key]) -> dict[Key, Key]:
        """Return the keys that a model with the names in `met` must have.

        If groups of layers have different names, only groups with a name in `met` are required; if there are
        none, all groups are.
        """
        first, *layers = self.groups
        own = [group.forms.difference(*(o.forms for o in layers if o is not group)) for group in layers]
        live = [group for group, forms in zip(layers, own, strict=True) if not forms or forms & present]
        return {form: key for group in (first, *(live or layers)) for form, key in group.required.items()}


def family_keys(family: Family, view: MaxTextView) -> tuple[FamilyKeys, ...]:
    """Return the family's key templates in all layouts of such a tree."""
    return _known_keys(family, view.is_maxtext, (view.scan_axis or 0) if view.is_stacked else None)


def hub_keys(family: Family) -> tuple[FamilyKeys, ...]:
    """Return the family's key templates for Hugging Face names, one for each spelling."""
    return _known_keys(family, False, None)


# Building the templates of all families takes 40 ms, so they are cached, because each checkpoint is compared
# with all of them.
@lru_cache(maxsize=256)
def _known_keys(family: Family, is_maxtext: bool, scan_axis: int | None) -> tuple[FamilyKeys, ...]:
    return tuple(_keys_of(family, is_maxtext, scan_axis))


def _keys_of(family: Family, is_maxtext: bool, scan_axis: int | None) -> Iterator[FamilyKeys]:
    if is_maxtext:
        for layout in [family] if scan_axis is None else layouts_of(family):
            groups = _row_groups(layout, scan_axis)
            yield FamilyKeys(
                family, tuple(RowGroup.of([(a.left.key, b) for a, b in rows]) for rows in groups), ()
            )
        return
    groups = _row_groups(family, scan_axis)
    # A pattern with a number ignores only some layers, which the configuration identifies.
    ignored = tuple(item for item in (*family.dropped, *family.unplaced_keys) if "{" not in item)
    for spelling in family.spellings:
        keys = (
            [(spelling.key(a.right.key), b) for a, b in rows if not isinstance(a.op, Fill)] for rows in groups
        )
        yield FamilyKeys(family, tuple(map(RowGroup.of, keys)), ignored)


def _row_groups(family: Family, scan_axis: int | None) -> list[list[tuple[Row, Row]]]:
    """Return the rows outside layers, then those of each group of layers, with and without a prefix."""
    # A row in a group also has the group's flags, but only its own flags matter here. Layers of an incomplete
    # cycle have the same names as those of complete cycles.
    known = [layer for layer in family.layers if layer.scanned]
    layers = [list(zip(item.all_rows(scan_axis), item.rows, strict=True)) for item in known]
    return [[(row, row) for row in family.rows], *layers]


def _forms_of(key: Key) -> Iterator[Key]:
    """Yield the matching forms of a key: one form, or one for each label."""
    choices: list[Sequence[str | Field]]
    choices = [(part,) if isinstance(part, str) else part.labels or (_ANY_FIELD,) for part in key.parts]
    return (key_of(parts) for parts in product(*choices))


def _numbers_of(form: Key) -> tuple[str, list[str | None]]:
    """Return the text of a form with "#" for each number, and its fixed numbers or None."""
    text, numbers = _split_numbers(
        "".join(_FIELD_MARK if isinstance(part, Field) else part for part in form.parts)
    )
    return text, [None if _FIELD_MARK in number else number for number in numbers]


def _split_numbers(name: str) -> tuple[str, list[str]]:
    """Return a name with "#" for each number, and the numbers."""
    pieces = _NUMBER.split(name)
    return "#".join(pieces[::2]), pieces[1::2]


def mask_numbers(name: str) -> str:
    """Return a name with "#" for each number."""
    return _split_numbers(name)[0]


def group_names(names: Iterable[str], keys: Iterable[FamilyKeys]) -> dict[NameGroup, list[str]]:
    """Group names by common form, keeping only numbers that occur in a template."""
    fixed: dict[str, set[int]] = {}
    for text, forms in (item for key in keys for item in key.by_text.items()):
        locations = (k for _, numbers in forms for k, number in enumerate(numbers) if number is not None)
        fixed.setdefault(text, set()).update(locations)
    result: dict[NameGroup, list[str]] = {}
    for name in names:
        text, kept_numbers = _split_numbers(name)
        as_they_are = fixed.get(text)
        common: tuple[str | None, ...] = (None,) * len(kept_numbers)
        if as_they_are:
            common = tuple(number if k in as_they_are else None for k, number in enumerate(kept_numbers))
        result.setdefault((text, common), []).append(name)
    return result


NameSide = Literal["maxtext", "huggingface"]
# Class names of transformers' text generation models and of their backbones.
_LANGUAGE_MODELS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
_MAX_PREFIXES = 8
_BODY, _LAYER = "model.", re.compile(r"\.\d+\.")
HEAD_NAME = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class FamilyGuess:
    """How well the names of a tree match a family.

    Attributes:
        name: The name of the family.
        side: The kind of names that were compared.
        matches_model_type: Whether the configuration's `model_type` belongs to the family.
        num_matched, num_expected: The number of existing required names, and the number of all required
            names; layers count once.
        missing: The missing required names, as key templates.
        unmatched: The names without a template in the family, grouped by form.
        num_unmatched: The number of arrays with such names.
    """

    name: str
    side: NameSide
    matches_model_type: bool
    num_matched: int
    num_expected: int
    missing: tuple[str, ...]
    unmatched: tuple[str, ...]
    num_unmatched: int


def guess_families(tree: Tree, among: Iterable[Family] | None = None) -> tuple[FamilyGuess, ...]:
    """Return the best matching families; none if less than half of the names match.

    The configuration takes precedence: families that it does not name are compared only if the named ones do
    not match.

    Args:
        tree: Any checkpoint. MaxText trees are compared with MaxText names, others with Hugging Face names.
        among: The candidate families; None for all.
    """
    if among is None:
        named = families_of_type((tree.metadata.config or {}).get("model_type"))
        return guess_families(tree, named) or guess_families(tree, families().values())
    fits = [fit for fit in family_fits(tree, among) if fit.is_likely]
    best = min((fit.penalty for fit in fits), default=None)
    result = {fit.keys.family.name: fit for fit in fits if fit.penalty == best}
    side: NameSide = "maxtext" if view_of(tree).is_maxtext else "huggingface"
    return tuple(fit.guess(side) for fit in result.values())


def families_with_names_of(tree: Tree) -> list[str]:
    """Return the names of the families that match the tree's names exactly."""
    result = guess_families(tree)
    return [item.name for item in result if item.num_matched == item.num_expected and not item.num_unmatched]


class UnownedArrays(NamedTuple):
    """The arrays of a Hugging Face model that do not belong to its declared family.

    Attributes:
        family: The name of the family.
        names: The names of the arrays; empty if all arrays belong to the family.
        prefixes: Prefixes, such as "policy", without which the names belong to the family.
    """

    family: str
    names: tuple[str, ...]
    prefixes: tuple[str, ...] = ()


def find_unowned_arrays(tree: Tree) -> UnownedArrays | None:
    """Return the arrays of a Hugging Face model that no row of its family describes.

    Returns None if the configuration does not identify a family, or if custom code defines the model
    (`auto_map`). Names may lack the leading `model.`, as in embedding models. If `architectures` does not
    name a language model, arrays outside layers belong to its different head.
    """
    config = tree.metadata.config or {}
    known = _families_of(config)
    if not known:
        return None
    names = _unowned_names(tree, known)
    if names and not _unowned_names(_rename(tree, _BODY.__add__), known):
        names = ()
    if not _is_language_model(config):
        names = tuple(name for name in names if _LAYER.search(name))
    prefixes = tuple(
        prefix for prefix in _prefixes(names) if not _unowned_names(_subtree(tree, prefix), known)
    )
    return UnownedArrays(known[0].name, names, prefixes)


def owned_name_test(config: Mapping[str, object]) -> Callable[[str], bool] | None:
    """Return a test for names that the configuration's family has or knows to be unsupported.

    Returns None if the configuration does not identify a family, or if the model has arrays without a row: a
    head other than a language model's, or arrays of custom code.
    """
    known, view = _families_of(config), view_of(Tree({}))
    if not known or not _is_language_model(config):
        return None
    forms = [keys for family in known for keys in family_keys(family, view)]
    texts = {text for keys in forms for text in keys.by_text}
    unplaced_keys = {item for keys in forms for item in keys.ignored if item not in keys.family.dropped}
    return lambda name: mask_numbers(name) in texts or matches_any(name, unplaced_keys)


def backbone_hint(
    config: Mapping[str, object] | None, coverage: Coverage, *, is_without_prefix: bool
) -> str | None:
    """Return a hint for a model that lacks only the output head of a language model.

    Args:
        config: The model's configuration.
        coverage: The arrays that do not match.
        is_without_prefix: Whether the names lack the prefix of a language model.

    Returns:
        The hint; None if there are other defects, or if configuration and names belong to a language model,
        which may have.
    lost its head.
    """
    if coverage.misshapen or any(not name.endswith(HEAD_NAME) for name in coverage.missing):
        return None
    is_of_backbone = is_without_prefix or not _is_language_model(config or {})
    if not coverage.missing or not is_of_backbone or any(map(_LAYER.search, coverage.extra)):
        return None
    source = "convert the causal language model from which it was made"
    embedding = f"use the embedding as the output head with {option('tied', 'drop')}"
    if coverage.extra:
        drop = repeated_option("drop", coverage.extra)
        return (
            f"this model does not have a language model's head ({sample_names(coverage.extra)}), so "
            "MaxText cannot "
            f"hold its head; {source}, or leave the head out and {embedding}: {drop}"
        )
    return (
        "this is a backbone without an output head, as AutoModel saves it: it computes embeddings, but "
        f"MaxText runs language models; {source}, or {embedding}"
    )


def is_known(model_type: str) -> bool:
    """Return whether any family has this `model_type`."""
    return bool(families_of_type(model_type))


def _families_of(config: Mapping[str, object]) -> list[Family]:
    """Return the families of a configuration; empty if custom code defines the model."""
    return [] if config.get("auto_map") else [*families_of_type(config.get("model_type"))]


def _is_language_model(config: Mapping[str, object]) -> bool:
    result = config.get("architectures")
    return not (isinstance(result, list) and result) or any(
        str(item).endswith(_LANGUAGE_MODELS) for item in result
    )


def prefix_hint(prefixes: Sequence[str], tree: Tree) -> str:
    """Return the hint for a model whose names have one of several prefixes."""
    location = tree.metadata.location or "SRC"
    commands = (
        action("select", location, "MODEL", prefix=prefix, format="safetensors") for prefix in prefixes
    )
    return f"{' or '.join(commands)} extracts the model with its own names"


def _unowned_names(tree: Tree, families: Sequence[Family]) -> tuple[str, ...]:
    """Return the names that no row of the families describes."""
    best = min(family_fits(tree, families), key=lambda fit: fit.penalty)
    if not best.matched:
        return tuple(view_of(tree).named)
    return tuple(name for group in best.others.values() for name in group)


def _prefixes(names: Sequence[str]) -> list[str]:
    """Return the leading prefixes of names, with one or two keys."""
    keys = [name.split(".") for name in names]
    result = dict.fromkeys(".".join(key[:count]) for count in (1, 2) for key in keys if len(key) > count)
    return list(result)[:_MAX_PREFIXES]


def _subtree(tree: Tree, prefix: str) -> Tree:
    below = f"{prefix}."
    leaves = {path: leaf for path, leaf in tree.items() if dotted(path).startswith(below)}
    return _rename(Tree(leaves, tree.metadata), lambda name: name.removeprefix(below))


def _rename(tree: Tree, name: Callable[[str], str]) -> Tree:
    return Tree({(name(dotted(path)),): leaf for path, leaf in tree.items()}, tree.metadata)


def family_fits(tree: Tree, families: Iterable[Family]) -> list[FamilyFit]:
    """Return how well each family matches, in each of its spellings."""
    view = view_of(tree)
    keys = [key for family in families for key in family_keys(family, view)]
    # If two arrays have the same name, either one is sufficient, because their values are not used.
    arrays = {dotted(path): array for path, array in view.parameters.items()}
    names = group_names(arrays, keys)
    config = tree.metadata.config or {}
    return [
        FamilyFit.of(key, True, names, _left_out_names(key, config, arrays))
        if config.get("model_type") in key.family.model_types
        else FamilyFit.of(key, False, names)
        for key in keys
    ]


def _left_out_names(
    keys: FamilyKeys, config: Mapping[str, object], arrays: Mapping[str, LazyArray]
) -> frozenset[str]:
    """Return the names that MaxText does not support, if the configuration identifies them."""
    try:
        return frozenset(keys.family.table(config, CONFIG).unmatched_right(arrays))
    except CheckpointError:
        return frozenset()


@dataclass(frozen=True)
class FamilyFit:
    """The comparison of a family, in one spelling, with the names of a tree.

    Attributes:
        keys: The templates of the family.
        named: Whether the configuration names the family.
        required: The templates that a model of the family must have.
        met: The templates that match a name.
        others: Names without a template, grouped by common form.
        num_alike: The number of such groups among the tree's names.
    """

    keys: FamilyKeys
    named: bool
    required: Mapping[Key, Key]
    met: frozenset[Key]
    others: Mapping[NameGroup, list[str]]
    num_alike: int

    @classmethod
    def of(
        cls,
        keys: FamilyKeys,
        named: bool,
        names: Mapping[NameGroup, list[str]],
        left_out: frozenset[str] = frozenset(),
    ) -> FamilyFit:
        forms = keys.by_text
        hits = {
            group: [
                form
                for form, fixed in forms.get(group[0], ())
                if _numbers_match(group[1], fixed) and _has_match(result, form)
            ]
            for group, result in names.items()
        }
        present = frozenset(template for result in hits.values() for template in result)
        unmet = {group: names[group] for group, result in hits.items() if not result}
        expected = unmet
        if left_out:
            expected = {
                group: [item for item in result if item not in left_out] for group, result in unmet.items()
            }
        others = {
            group: result
            for group, result in expected.items()
            if result and not matches_any(result[0], keys.ignored)
        }
        return cls(keys, named, keys.required(present), present, others, len(names))

    @property
    def matched(self) -> int:
        return len(self.met & self.required.keys())

    @property
    def missing(self) -> tuple[str, ...]:
        """Return the key templates of missing required names."""
        return tuple(str(key) for form, key in self.required.items() if form not in self.met)

    @property
    def is_likely(self) -> bool:
        """Return whether half of the required names exist, and half of the existing names are expected."""
        return 2 * self.matched >= len(self.required) > 0 and 2 * len(self.others) <= self.num_alike

    @property
    def penalty(self) -> tuple[bool, int, int]:
        """Return the sort key of a match, which is lower for better matches."""
        absent = sum(len(group.forms - self.met) for group in self.keys.groups)
        return not self.named, len(self.required) - self.matched + len(self.others), absent

    def guess(self, side: NameSide) -> FamilyGuess:
        others = [name for names in self.others.values() for name in names]
        return FamilyGuess(
            name=self.keys.family.name,
            side=side,
            matches_model_type=self.named,
            num_matched=self.matched,
            num_expected=len(self.required),
            missing=self.missing,
            unmatched=tuple(fold_lines(others)),
            num_unmatched=len(others),
        )


def _numbers_match(numbers: Sequence[str | None], fixed: Sequence[str | None]) -> bool:
    """Return whether numbers match those of a template, in which None matches any number."""
    return all(one is None or one == other for one, other in zip(fixed, numbers, strict=True))


def _has_match(names: Iterable[str], template: Key) -> bool:
    """Return whether any of the names matches a template."""
    return any(template.numbers(name) is not None for name in names)
