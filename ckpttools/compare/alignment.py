"""Two checkpoints under one set of names, whatever their formats, layouts and frameworks.

    aligned(open_tree(hugging_face), open_tree(maxtext)).pairs    # name, one array, the other

Layers come one by one and parameters without what Linen or NNX put around them. Hugging Face arrays are
spelled as MaxText's by the rows of their family, where only one side is of Hugging Face. Nothing is refused:
what the other side has no counterpart for is in one side only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Path as TreePath
from ckpttools.array.tree import Tree, dotted, spelled
from ckpttools.core.errors import CheckpointError, ConfigError, UsageError
from ckpttools.core.text import array_count
from ckpttools.core.wording import option
from ckpttools.digest.canonical import as_stored, per_layer
from ckpttools.families.family import Family, Spelling
from ckpttools.families.registry import families, family_called, family_of
from ckpttools.mapping.keys import parse_key
from ckpttools.mapping.sizes import Size
from ckpttools.mapping.table import Mapped
from ckpttools.maxtext import tying, vocabulary
from ckpttools.maxtext.model import CONFIG, ModelOptions, overrides
from ckpttools.maxtext.model_files import ModelFiles
from ckpttools.maxtext.view import view_of
from ckpttools.roles.of_tree import Role, roles_of


@dataclass(frozen=True, slots=True)
class AlignOptions:
    """What a user may say of the models.

    Attributes:
        model: family and RoPE layout, where no configuration or another one is to be followed.
        like: directory of a Hugging Face model, or a `config.json`; None for what lies beside the arrays.
        padding_rows: what becomes of rows beyond the vocabulary, see `ckpttools.maxtext.vocabulary.counted`.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    like: str | Path | None = None
    padding_rows: str | None = None


class Pair(NamedTuple):
    """One array as both sides have it; shapes and dtypes may differ."""

    name: str
    a: LazyArray
    b: LazyArray


@dataclass(frozen=True)
class Named:
    """The arrays of one checkpoint under names that others have for them, too.

    Attributes:
        arrays: by name, keys joined by "/".
        remarks: what was done to get there, in words.
        sizes: lengths of axes such as `head_dim`, as far as a configuration told them.
    """

    arrays: Mapping[str, LazyArray]
    remarks: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Aligned:
    """Two checkpoints whose arrays have the same names where they are the same.

    Attributes:
        a, b: arrays by name.
        remarks: what was done to align them and what takes no part, in words; those on one side begin
            with "A: " or "B: ".
        sizes: as `Named.sizes`.
        converted: the side that is of Hugging Face where the other is MaxText's, "a" or "b"; None where both
            spell names alike.
    """

    a: Mapping[str, LazyArray]
    b: Mapping[str, LazyArray]
    remarks: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    converted: str | None = None

    @property
    def pairs(self) -> Iterator[Pair]:
        """What both have, in the order of A."""
        return (Pair(name, array, self.b[name]) for name, array in self.a.items() if name in self.b)

    @property
    def only_a(self) -> dict[str, LazyArray]:
        """What B has no counterpart for."""
        return {name: array for name, array in self.a.items() if name not in self.b}

    @property
    def only_b(self) -> dict[str, LazyArray]:
        """What A has no counterpart for."""
        return {name: array for name, array in self.b.items() if name not in self.a}


def aligned(a: Tree, b: Tree, options: AlignOptions | None = None) -> Aligned:
    """Both trees under one set of names. Reads no array.

    Raises:
        UsageError: a RoPE layout is told, and nothing is mapped.
        CheckpointError: what `options` name is not there.
    """
    options = options or AlignOptions()
    trees = (_with_keys(a), _with_keys(b))
    first, second = (_plain(tree) if view_of(tree).is_maxtext else None for tree in trees)
    if first is not None and second is None:
        second = as_maxtext(trees[1], options, trees[0])
    elif second is not None and first is None:
        first = as_maxtext(trees[0], options, trees[1])
    elif first is None or second is None:
        first, second = _spelled_alike(trees[0], trees[1], options)
    of_maxtext = [view_of(tree).is_maxtext for tree in trees]
    converted = None if of_maxtext[0] == of_maxtext[1] else "b" if of_maxtext[0] else "a"
    of_both = {"rope_layout": options.model.rope_layout, "padding_rows": options.padding_rows}
    said = [name for name, value in of_both.items() if value is not None]
    if said and converted is None:
        raise UsageError(
            f"{option(said[0])} is for Hugging Face against MaxText; both sides spell names alike",
            hint="leave it out",
        )
    both = replace(_with_what_both_have(first, second), converted=converted)
    return both if both.sizes else replace(both, sizes=_told_sizes(trees, options))


def less_padding(both: Aligned, padding_rows: str | None, memory: int) -> Aligned:
    """Rows that MaxText has beyond the vocabulary of Hugging Face's side: left out where they are zeros.

    Others are an array of their own on that side. Reads them.

    Args:
        both: the arrays that are compared.
        padding_rows: as `AlignOptions.padding_rows`.
        memory: bytes that may be resident at most.

    Raises:
        CheckpointError: they cannot be read, or the memory is too small.
    """
    if both.converted is None:
        return both
    mine, theirs = (both.b, both.a) if both.converted == "a" else (both.a, both.b)
    shapes = {name: each.shape for name, each in theirs.items()}
    less = vocabulary.less_padding(mine, shapes, padding_rows, memory)
    side = "B" if both.converted == "a" else "A"
    remarks = (*both.remarks, *(f"{side}: {text}" for text in less.remarks))
    if side == "A":
        return replace(both, a=less.arrays, remarks=remarks)
    return replace(both, b=less.arrays, remarks=remarks)


def as_maxtext(tree: Tree, options: AlignOptions | None = None, other: Tree | None = None) -> Named:
    """A tree under MaxText's names, layers one by one: a MaxText checkpoint's own, else those of a family.

    Args:
        tree: any checkpoint.
        options: what the user says of the model.
        other: a MaxText checkpoint of the model. Its directory may hold the configuration; where there is
            none, its names tell the family, and its shapes the sizes.

    Raises:
        CheckpointError: what `options` name is not there.
    """
    options, tree = options or AlignOptions(), _with_keys(tree)
    if view_of(tree).is_maxtext:
        return _plain(tree)
    arrays = {dotted(path): array for path, array in tree.arrays.items()}
    config, refusal = _configuration(tree, options, other), ""
    beside = {} if other is None else _plain(other).arrays
    for family in _candidates(config, options, arrays, beside):
        try:
            return _mapped(arrays, family, config, options, beside)
        except ConfigError as error:
            refusal = f"; the rows of {family.name} do not fit: {error.message}"
    plain = _plain(tree)
    return replace(plain, remarks=(*plain.remarks, f"names are taken as they are{refusal}"))


def _with_keys(tree: Tree) -> Tree:
    """A tree whose keys were joined to names, with keys again, where that makes a MaxText tree of it."""
    split = None if view_of(tree).is_maxtext else tree.once(_split)
    return tree if split is None else split


def _split(tree: Tree) -> Tree | None:
    for joint in "/.":
        paths: dict[TreePath, TreePath] = {path: tuple(spelled(path).split(joint)) for path in tree}
        if len(set(paths.values())) == len(tree):
            split = Tree({paths[path]: leaf for path, leaf in tree.items()}, tree.metadata)
            if view_of(split).is_maxtext:
                return split
    return None


def _plain(tree: Tree) -> Named:
    """A tree's own names, without flavour and with layers one by one."""
    return tree.once(_named)


def _named(tree: Tree) -> Named:
    remarks: list[str] = []
    view = view_of(tree)
    if view.flavour.name:
        remarks.append(f"the wrapping of parameters is left away: {view.flavour.name}")
    try:
        arrays = per_layer(tree)
    except CheckpointError as error:
        arrays = as_stored(tree)
        remarks.append(f"stacked layers are compared as they are stored: {error.message}")
    else:
        if view.is_stacked:
            remarks.append(f"stacked layers are taken apart: {len(tree.arrays)} arrays become {len(arrays)}")
    return Named(arrays, tuple(remarks))


class _Config(NamedTuple):
    """A model's configuration, and where it lies."""

    content: Mapping[str, Any]
    place: str


def _configuration(tree: Tree, options: AlignOptions, other: Tree | None) -> _Config | None:
    """What the user names, what lies beside the arrays, or what the other side carries along."""
    if options.like is None and tree.metadata.config is not None:
        return _Config(tree.metadata.config, CONFIG)
    files = ModelFiles.of(tree if other is None else other, options.like)
    return None if files.config is None else _Config(files.config, files.place)


def _candidates(
    config: _Config | None,
    options: AlignOptions,
    arrays: Mapping[str, LazyArray],
    beside: Mapping[str, LazyArray],
) -> list[Family]:
    """The family that the user or the configuration names; else those that make the other side's names."""
    if options.model.family is not None:
        return [family_called(options.model.family)]
    if config is not None:
        try:
            return [family_of(config.content, config.place)]
        except CheckpointError:
            config = None
    made = {each.name: _common_names(each, arrays, beside) for each in families().values()}
    best = max(made.values(), default=0)
    return [families()[name] for name, count in made.items() if count == best > 0]


def _common_names(family: Family, arrays: Mapping[str, LazyArray], beside: Mapping[str, LazyArray]) -> int:
    """How many arrays get names that the other side has, where no configuration tells sizes."""
    try:
        mapped = _partly(arrays, family, None, AlignOptions(), beside)
    except CheckpointError:
        return 0
    made = {_with_slashes(key) for key in mapped.arrays}
    return len(made & beside.keys()) if beside else len(made)


def _partly(
    arrays: Mapping[str, LazyArray],
    family: Family,
    config: _Config | None,
    options: AlignOptions,
    beside: Mapping[str, LazyArray],
) -> Mapped:
    spelling = family.spelling_of(arrays)
    head = tying.right_head(family, spelling)
    # An output head that is there is compared, whatever the configuration says of it.
    tied = tying.overrides("keep", head.head if head else None, arrays)
    content, place = config or (None, CONFIG)
    flags = {**overrides(family, options.model), **tied}
    table = family.table(content, place, spelling=spelling, overrides=flags)
    if config is None:
        table = replace(table, sizes={**_layers(family, spelling, arrays), **table.sizes})
    return table.to_left_partly(arrays, {name.replace("/", "."): each for name, each in beside.items()})


def _layers(family: Family, spelling: Spelling, arrays: Mapping[str, object]) -> dict[str, Size]:
    """How many layers there are, told by the highest number in names."""
    starts = {str(spelling.key(parse_key(group.right)).parts[0]) for group in family.layers}
    rests = (name.removeprefix(start) for start in starts for name in arrays if name.startswith(start))
    numbers = [int(rest.partition(".")[0]) for rest in rests if rest.partition(".")[0].isdecimal()]
    return {"layers": Size(max(numbers) + 1, "names of layers")} if numbers else {}


def _mapped(
    arrays: Mapping[str, LazyArray],
    family: Family,
    config: _Config | None,
    options: AlignOptions,
    beside: Mapping[str, LazyArray],
) -> Named:
    """Hugging Face arrays in MaxText's spelling; those that no row takes keep their names."""
    mapped = _partly(arrays, family, config, options, beside)
    made = {_with_slashes(key): array for key, array in mapped.arrays.items()}
    remarks = [f"names are mapped to MaxText's by the rows of family {family.name}"]
    if config is None:
        remarks.append(
            "there is no config.json: names tell the family, and RoPE is taken to be in halves; "
            f"{option('like')}, {option('family')} and {option('rope_layout')} say otherwise"
        )
    if mapped.dropped:
        remarks.append(f"left out, as family {family.name} has no row for it: {array_count(mapped.dropped)}")
    if mapped.unused:
        remarks.append(f"no part of the model, so under its own name: {array_count(mapped.unused)}")
    left = {name: arrays[name] for name in mapped.unused if name not in made}
    return Named({**made, **left}, tuple(remarks), mapped.sizes)


def _with_slashes(key: str) -> str:
    return key.replace(".", "/")


def _spelled_alike(a: Tree, b: Tree, options: AlignOptions) -> tuple[Named, Named]:
    """Two trees neither of which is MaxText's: by equal names, or as one family spells them in files."""
    first, second = _plain(a), _plain(b)
    if first.arrays.keys() == second.arrays.keys():
        return first, second
    for family in [model.family for model in _models((a, b), options)] or families().values():
        spellings = [family.spelling_of(each.arrays) for each in (first, second)]
        if spellings[0] != spellings[1]:
            anchors = [str(s.key(family.rows[0].right.key)) for s in spellings]
            if anchors[0] in first.arrays and anchors[1] in second.arrays:
                return _respelled(first, spellings[0]), _respelled(second, spellings[1])
    return first, second


def _told_sizes(trees: tuple[Tree, Tree], options: AlignOptions) -> dict[str, int]:
    """Lengths of a model's axes by its configuration alone, as where no names are mapped."""
    for model in _models(trees, options):
        if model.config is not None:
            try:
                table = model.family.table(*model.config)
            except CheckpointError:
                continue
            return {axis: size.length for axis, size in table.sizes.items()}
    return {}


class _Model(NamedTuple):
    """A family, and the configuration of one model of it."""

    family: Family
    config: _Config | None


def _models(trees: tuple[Tree, Tree], options: AlignOptions) -> list[_Model]:
    """What the user or a configuration says that the trees are."""
    named = None if options.model.family is None else family_called(options.model.family)
    models: list[_Model] = []
    for config in (_configuration(tree, options, None) for tree in trees):
        if named is not None:
            models.append(_Model(named, config))
        elif config is not None:
            try:
                models.append(_Model(family_of(*config), config))
            except CheckpointError:
                continue
    return models


def _respelled(named: Named, spelling: Spelling) -> Named:
    """Names without the prefixes of one spelling."""
    if not spelling.prefixes:
        return named
    arrays = {_plain_name(name, spelling): array for name, array in named.arrays.items()}
    if len(arrays) != len(named.arrays):
        return named
    return replace(
        named, arrays=arrays, remarks=(*named.remarks, f"names are in the {spelling.name} spelling")
    )


def _plain_name(name: str, spelling: Spelling) -> str:
    for ours, theirs in spelling.prefixes.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _with_what_both_have(first: Named, second: Named) -> Aligned:
    """Both sides; optimizer, step and random states only where both are checkpoints of a training."""
    a, b = dict(first.arrays), _renamed(second.arrays, first.arrays)
    remarks = [f"{side}: {text}" for side, each in (("A", first), ("B", second)) for text in each.remarks]
    roles = [_roles(a), _roles(b)]
    training = all("optimizer" in each.values() for each in roles)
    if not any("parameter" in each.values() for each in roles):
        return Aligned(a, b, tuple(remarks))
    for side, arrays, others, role in (("A", a, {*b}, roles[0]), ("B", b, {*a}, roles[1])):
        if training:
            # Random states are where a trainer happens to keep them.
            state = [name for name in arrays if role[name] == "other" and name not in others]
            why = "as the other side has no such random state"
        else:
            state = [name for name in arrays if role[name] != "parameter"]
            one = any("optimizer" in each.values() for each in roles)
            why = f"as {'only one of them' if one else 'neither'} is a training checkpoint"
        if state:
            what = "the step" if state == ["step"] else f"{array_count(state)} beside the parameters"
            remarks.append(f"{side}: left out, {why}: {what}")
        for name in state:
            del arrays[name]
    return Aligned(a, b, tuple(remarks), {**second.sizes, **first.sizes})


def _roles(arrays: Mapping[str, LazyArray]) -> dict[str, Role]:
    known = roles_of({(name,): array for name, array in arrays.items()})
    return {name: known.of((name,)) for name in arrays}


def _renamed(arrays: Mapping[str, LazyArray], names: Mapping[str, object]) -> dict[str, LazyArray]:
    """`arrays` under those of `names` that differ in nothing but the joint of their keys."""
    joined: Callable[[str], str] = lambda name: name.replace("/", ".")  # noqa: E731
    known = {joined(name): name for name in names}
    made = {name if name in names else known.get(joined(name), name): name for name in arrays}
    if len(made) != len(arrays):
        return dict(arrays)
    return {new: arrays[old] for new, old in made.items()}
