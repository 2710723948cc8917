"""Align two checkpoints under common names, regardless of format, layout and framework.

    aligned(open_tree(hugging_face), open_tree(maxtext)).pairs    # name, one array, the other

Layers are separate, and parameters lack the wrapping of Linen or NNX. If only one side is a Hugging Face
checkpoint, its arrays get MaxText's names by the mapping rows of their family. Nothing is rejected:
arrays without a counterpart are on one side only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, replace
from itertools import product
from typing import Any

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Path as TreePath
from ckpttools.array.tree import Tree, by_name, dotted, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, ConfigError, UsageError
from ckpttools.core.message_terms import option
from ckpttools.core.text import array_count, fold_lines, sample_names
from ckpttools.digest.canonical import STEP, as_stored, per_layer
from ckpttools.digest.leaves import differing_leaves
from ckpttools.digest.pairing import NamedArrays, Pairing, Remark, Side, Uncompared
from ckpttools.mapping.build import Mapped
from ckpttools.mapping.keys import parse_key
from ckpttools.mapping.sizes import Size
from ckpttools.maxtext import tied_embeddings as tying
from ckpttools.maxtext.hub_names import HubModel, as_hub_model
from ckpttools.maxtext.model_files import ModelFiles, carried_arrays
from ckpttools.maxtext.model_options import ModelOptions, rope_flags
from ckpttools.maxtext.scan_axis import scan_axis_remarks
from ckpttools.maxtext.view import view_of
from ckpttools.model_families.family import Family, Spelling
from ckpttools.model_families.registry import families, family_called, family_of
from ckpttools.roles.of_tree import Role, roles_of
from ckpttools.stores.registry import LocationLike

# Number of left-out arrays that are named: a model has one or two counters, a training state hundreds of
# moments.
_MAX_SHOWN = 4


@dataclass(frozen=True, slots=True)
class AlignOptions:
    """Options for identifying the models.

    Attributes:
        model: Family and RoPE layout, if there is no configuration or to override it.
        like: Directory of a Hugging Face model, or a `config.json`; None for the one next to the arrays.
        padding_rows: How to treat rows beyond the vocabulary; `way` of
            `ckpttools.maxtext.vocabulary.count_surplus_rows`.
        parameters: Compare only the parameters.
        lists_state: Whether training state that only one side has is listed array by array instead of as a
            group.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    like: LocationLike | None = None
    padding_rows: str | None = None
    parameters: bool = False
    lists_state: bool = False


def align(a: Tree, b: Tree, options: AlignOptions | None = None) -> Pairing[LazyArray]:
    """Return both trees under common names. Reads no arrays.

    Raises:
        UsageError: A RoPE layout is given, but no names are mapped.
        CheckpointError: A family or file in `options` does not exist.
    """
    options = options or AlignOptions()
    first, second, naming = _use_hub_names(with_keys(a), with_keys(b), options)
    maxtext: Side | None = None
    match view_of(first).is_maxtext, view_of(second).is_maxtext:
        case True, True:
            named = _with_carried(first), _with_carried(second)
        case True, False:
            maxtext, named = "A", (_with_carried(first), as_maxtext(second, options, first))
        case False, True:
            maxtext, named = "B", (as_maxtext(first, options, second), _with_carried(second))
        case _:
            named = _align_hugging_face(first, second, options)
    of_both = {"rope_layout": options.model.rope_layout, "padding_rows": options.padding_rows}
    values = [name for name, value in of_both.items() if value is not None]
    if values and maxtext is None:
        raise UsageError(
            f"{option(values[0])} requires a conversion, but both sides have the same names",
            hint="leave it out",
        )
    both = _common_arrays(*named, options, is_conversion=maxtext is not None)
    head = next((item.head for item in named if item.head is not None), None)
    unused = tuple(pattern for item in named for pattern in item.unused)
    leaves = differing_leaves(a, b, options.parameters, is_conversion=maxtext is not None)
    both = replace(both, maxtext=maxtext, head=head, naming=(*naming, *both.naming), leaves=leaves)
    configs = _files(first, options).config, _files(second, options).config
    remarks = (*both.remarks, *_config_remarks((first, second), *configs))
    both = replace(both, configs=configs, remarks=remarks).drop_unused(unused)
    return both if both.sizes else replace(both, sizes=_sizes_from_config((first, second), options))


def as_maxtext(
    tree: Tree, options: AlignOptions | None = None, other: Tree | None = None
) -> NamedArrays[LazyArray]:
    """Return the arrays of a tree by MaxText name, with separate layers.

    Trees without MaxText names keep those of their family.

    Args:
        tree: Any checkpoint.
        options: Options for identifying the model.
        other: A MaxText checkpoint of the model. Its directory may have the configuration; without one, its
            names determine the family and its shapes the sizes.

    Raises:
        CheckpointError: A path in `options` does not exist.
    """
    options, tree = options or AlignOptions(), with_keys(tree)
    if view_of(tree).is_maxtext:
        return _unwrapped_names(tree)
    files = _files(tree, options, other)
    source = UnnamedSide(tree, files, {} if other is None else _unwrapped_names(other).arrays)
    family, refusal = _family(files, options), ""
    for item in [family] if family else source.likely_families():
        try:
            return source.mapped(item, options.model)
        except ConfigError as error:
            refusal = f"; the rows of {item.name} do not fit: {error.raw.message}"
    own = _unwrapped_names(tree)
    return replace(own, naming=(*own.naming, f"names are used unchanged{refusal}"))


def with_keys(tree: Tree) -> Tree:
    """Return a tree with names split into keys again, if that makes it a MaxText tree."""
    split = None if view_of(tree).is_maxtext else tree.once(_split)
    return tree if split is None else split


def _split(tree: Tree) -> Tree | None:
    for joint in "/.":
        paths: dict[TreePath, TreePath] = {path: tuple(keystr(path).split(joint)) for path in tree}
        if len(set(paths.values())) == len(tree):
            split = Tree({paths[path]: leaf for path, leaf in tree.items()}, tree.metadata)
            if view_of(split).is_maxtext:
                return split
    return None


def plain_names(tree: Tree, other: Tree, options: AlignOptions) -> Tree:
    """Return a Hugging Face tree under its family's names, without the wrappers of trainers."""
    return _candidate_namings(tree, other, options)[-1].tree


def _use_hub_names(a: Tree, b: Tree, options: AlignOptions) -> tuple[Tree, Tree, list[Remark]]:
    """Remove wrappers of PyTorch trainers from the names of one tree if the other does not have them."""
    namings_a, namings_b = _candidate_namings(a, b, options), _candidate_namings(b, a, options)
    result = namings_a[-1], namings_b[-1]
    if not (view_of(a).is_maxtext or view_of(b).is_maxtext) and len(namings_a) * len(namings_b) > 1:
        result = max(product(namings_a, namings_b), key=_names_in_common)
    sides: tuple[Side, Side] = ("A", "B")
    remarks = [
        Remark(declared, side) for item, side in zip(result, sides, strict=True) for declared in item.remarks
    ]
    return result[0].tree, result[1].tree, remarks


def _names_in_common(sides: tuple[HubModel, HubModel]) -> int:
    one, other = ({*map(dotted, side.tree.arrays)} for side in sides)
    return len(one & other)


def _candidate_namings(tree: Tree, other: Tree, options: AlignOptions) -> list[HubModel]:
    """Return a tree under its own names, and under Hub names if PyTorch trainers name it differently."""
    if view_of(tree).is_maxtext:
        return [HubModel(tree)]
    result = as_hub_model(tree, _files(tree, options, other).config or other.metadata.config)
    return [HubModel(tree)] if result.tree is tree else [HubModel(tree), result]


def _unwrapped_names(tree: Tree) -> NamedArrays[LazyArray]:
    """Return a tree's own names, without the flavor and with separate layers; cached."""
    return tree.once(_named_arrays)


def _with_carried(tree: Tree) -> NamedArrays[LazyArray]:
    """Return a MaxText tree under its own names, including the Hugging Face arrays that it carries."""
    named = _unwrapped_names(tree)
    carried = carried_arrays(tree)
    return replace(named, arrays={**carried, **named.arrays}) if carried else named


def _named_arrays(tree: Tree) -> NamedArrays[LazyArray]:
    view, remarks, naming = view_of(tree), list[str](), list[str]()
    if view.flavor.name:
        naming.append(f"the name prefix of {view.flavor.name} is ignored")
    try:
        arrays = per_layer(tree)
    except CheckpointError as error:
        arrays = as_stored(tree)
        remarks.append(f"stacked layers are compared in their stored form: {error.raw.message}")
    else:
        if view.is_stacked:
            naming.append(
                f"stacked layers are compared one by one: {len(tree.arrays)} arrays become {len(arrays)}"
            )
            remarks += scan_axis_remarks(tree)
    return NamedArrays(arrays, tuple(remarks), tuple(naming))


def _files(tree: Tree, options: AlignOptions, other: Tree | None = None) -> ModelFiles:
    """Return the configuration that the user set, the one next to the arrays, or that of the other side."""
    if options.like is None and tree.metadata.config is not None:
        return ModelFiles(tree.metadata.config)
    files = ModelFiles.of(tree if other is None else other, options.like)
    return ModelFiles() if files.config is None else files


def _family(files: ModelFiles, options: AlignOptions) -> Family | None:
    """Return the family that the user or the configuration names; None if neither names a known family."""
    if options.model.family is not None:
        return family_called(options.model.family)
    try:
        return None if files.config is None else family_of(files.config, files.location)
    except CheckpointError:
        # The arrays may have the names of a known family.
        return None


def _models(trees: tuple[Tree, Tree], options: AlignOptions) -> Iterator[tuple[Family, ModelFiles]]:
    """Yield the families of the trees, as named by the user or a configuration."""
    for files in (_files(tree, options) for tree in trees):
        family = _family(files, options)
        if family is not None:
            yield family, files


def _align_hugging_face(
    a: Tree, b: Tree, options: AlignOptions
) -> tuple[NamedArrays[LazyArray], NamedArrays[LazyArray]]:
    """Align two trees without MaxText names: by equal names, or by two namings of one family."""
    first, second = _unwrapped_names(a), _unwrapped_names(b)
    if first.arrays.keys() == second.arrays.keys():
        return first, second
    for family in [family for family, _ in _models((a, b), options)] or families().values():
        spelling_a, spelling_b = (family.spelling_of(item.arrays) for item in (first, second))
        anchor = family.rows[0].right.key
        if (
            spelling_a != spelling_b
            and str(spelling_a.key(anchor)) in first.arrays
            and str(spelling_b.key(anchor)) in second.arrays
        ):
            return _strip_prefixes(first, spelling_a), _strip_prefixes(second, spelling_b)
    return first, second


def _config_remarks(
    trees: tuple[Tree, Tree], a: Mapping[str, Any] | None, b: Mapping[str, Any] | None
) -> Iterator[Remark]:
    """Yield the fields in which two configurations describe different computations."""
    has_configs = a is not None and b is not None and a != b
    firsts = [dotted(next(iter(tree.arrays), ())) for tree in trees]
    if not has_configs and not all("lora_" in name or name.startswith("base_model.") for name in firsts):
        return
    from ckpttools.maxtext.config_differences import differing_adapter_fields, differing_fields

    fields = {
        "config.json": differing_fields(a or {}, b or {}) if has_configs else [],
        "adapter_config.json": differing_adapter_fields(*trees),
    }
    for file, names in fields.items():
        if names:
            yield Remark(f"not compared: {file}, which differs in {sample_names(names)}")


def _sizes_from_config(trees: tuple[Tree, Tree], options: AlignOptions) -> dict[str, int]:
    """Return the lengths of a model's axes from its configuration alone, for use when no names are mapped."""
    for family, files in _models(trees, options):
        if files.config is not None:
            try:
                table = family.table(files.config, files.location)
            except CheckpointError:
                # Sizes only improve explanations, so those of the other side suffice.
                continue
            return {axis: size.length for axis, size in table.sizes.items()}
    return {}


def _strip_prefixes(named: NamedArrays[LazyArray], spelling: Spelling) -> NamedArrays[LazyArray]:
    """Return names without the prefixes of one spelling, if they stay distinct."""
    if not spelling.prefixes:
        return named
    arrays = {spelling.plain(name): array for name, array in named.arrays.items()}
    if len(arrays) != len(named.arrays):
        return named
    naming = (*named.naming, f"names are in the {spelling.name} spelling")
    return replace(named, arrays=arrays, naming=naming)


def _common_arrays(
    first: NamedArrays[LazyArray],
    second: NamedArrays[LazyArray],
    options: AlignOptions,
    *,
    is_conversion: bool,
) -> Pairing[LazyArray]:
    """Pair the arrays of both sides, without training state that only one side has.

    With `options.lists_state`, it counts as a difference instead, except the step of a conversion.
    """
    a, b = dict(first.arrays), with_joints_of(second.arrays, first.arrays)
    remarks = [Remark(text, "A") for text in first.remarks] + [Remark(text, "B") for text in second.remarks]
    naming = [Remark(text, "A") for text in first.naming] + [Remark(text, "B") for text in second.naming]
    result: Pairing[LazyArray] = Pairing(a, b, tuple(remarks), tuple(naming), {**second.sizes, **first.sizes})
    roles_a, roles_b = _roles(a), _roles(b)
    training = ["optimizer" in item.values() for item in (roles_a, roles_b)]
    if not any("parameter" in item.values() for item in (roles_a, roles_b)):
        return result
    uncompared: list[Uncompared] = []
    sides: tuple[tuple[Side, dict[str, LazyArray], set[str], dict[str, Role]], ...]
    sides = ("A", a, {*b}, roles_a), ("B", b, {*a}, roles_b)
    for side, arrays, others, role in sides:
        if is_conversion and STEP not in others:
            # A conversion to MaxText writes a step, which Hugging Face models do not have.
            arrays.pop(STEP, None)
        if options.parameters:
            state, reason = [name for name in arrays if role[name] != "parameter"], ""
        elif any(training) and not all(training):
            state = [name for name in arrays if role[name] != "parameter"]
            reason = "as only one of them is a training checkpoint"
        else:
            # A trainer or a format may store steps and random states elsewhere.
            state = [name for name in arrays if role[name] == "other" and name not in others]
            reason = "as the other side has no such state"
        if options.lists_state and not options.parameters:
            continue
        if state and reason:
            uncompared.append(
                Uncompared(Remark(f"left out, {reason}: {_format_names(state)}", side), tuple(state))
            )
        for name in state:
            del arrays[name]
    return replace(result, uncompared=tuple(uncompared))


def _format_names(names: list[str]) -> str:
    """Return the number of arrays and the first names, or the name of a single array."""
    folds = fold_lines(names)
    visible = folds[:_MAX_SHOWN] + ([f"{len(folds) - _MAX_SHOWN} more"] if len(folds) > _MAX_SHOWN else [])
    return names[0] if len(names) == 1 else f"{array_count(names)} ({', '.join(visible)})"


def _roles(arrays: Arrays) -> dict[str, Role]:
    known = roles_of({(name,): array for name, array in arrays.items()})
    return {name: known.of((name,)) for name in arrays}


Arrays = Mapping[str, LazyArray]


@dataclass(frozen=True)
class UnnamedSide:
    """A side that does not have MaxText names yet.

    Attributes:
        tree: A Hugging Face checkpoint.
        files: The model's files, with its configuration if there is one.
        beside: Arrays of a MaxText checkpoint of the model, by name; empty if there is none.
    """

    tree: Tree
    files: ModelFiles
    beside: Arrays

    @property
    def arrays(self) -> dict[str, LazyArray]:
        return by_name(self.tree.arrays)

    def likely_families(self) -> list[Family]:
        """Return the families whose rows produce most of the other side's names, for any configured sizes."""
        counts = {family.name: self._common_names(family) for family in families().values()}
        limit = max(counts.values(), default=0)
        return [families()[name] for name, count in counts.items() if count == limit > 0]

    def _common_names(self, family: Family) -> int:
        try:
            result = replace(self, files=ModelFiles())._map(family, ModelOptions()).arrays.keys()
        except CheckpointError:
            # Rows whose sizes contradict the arrays produce no names.
            return 0
        names = {with_slashes(key) for key in result}
        return len(names & self.beside.keys()) if self.beside else len(names)

    def mapped(self, family: Family, model: ModelOptions) -> NamedArrays[LazyArray]:
        """Return the arrays under MaxText's names by a family's rows.

        Arrays without a row keep their own names.

        Raises:
            ConfigError: The configuration contradicts itself.
        """
        mapped = self._map(family, model)
        result = {with_slashes(key): array for key, array in mapped.arrays.items()}
        naming = [f"names are mapped to MaxText's by the rows of family {family.name}"]
        if self.files.config is None:
            naming.append(
                "without a config.json, names identify the family and RoPE is assumed to be in halves; "
                f"{option('like')}, {option('family')} and {option('rope_layout')} override this"
            )
        # Arrays without a MaxText counterpart or without a row.
        unplaced = (*mapped.unused, *mapped.dropped)
        if unplaced:
            naming.append(f"compared under their own names, as MaxText lacks them: {array_count(unplaced)}")
        left = {name: self.arrays[name] for name in unplaced if name not in result}
        return NamedArrays(
            {**result, **left},
            naming=tuple(naming),
            sizes=mapped.sizes,
            head=tying.LEFT_HEAD,
            unused=family.unused,
        )

    def _map(self, family: Family, model: ModelOptions) -> Mapped:
        arrays, config = self.arrays, self.files.config
        spelling = family.spelling_of(arrays)
        head = tying.right_head(family, spelling)
        # An existing output head is compared regardless of the configuration.
        tied = tying.tied_flags("keep", head.head if head else None, arrays)
        flags = {**rope_flags(family, model), **tied}
        towers = family.towers_in(name.replace("/", ".") for name in self.beside)
        without = [tower for tower in family.towers if self.beside and tower not in towers]
        table = family.table(config, self.files.location, spelling=spelling, overrides=flags, without=without)
        if config is None:
            table = replace(table, sizes={**layers_of(family, spelling, arrays), **table.sizes})
        dotted_arrays = {name.replace("/", "."): array for name, array in self.beside.items()}
        result = table.to_left_partly(arrays, dotted_arrays)

        def exactly() -> Arrays:
            return table.to_left_partly(arrays, dotted_arrays, exact=True).arrays

        return replace(result, arrays=as_wide_as(dotted_arrays, result.arrays, exactly))


def layers_of(family: Family, spelling: Spelling, arrays: Arrays) -> dict[str, Size]:
    """Return the number of layers, from the highest number in names."""
    starts = {str(spelling.key(parse_key(group.right)).parts[0]) for group in family.text_layers}
    rests = (name.removeprefix(start) for start in starts for name in arrays if name.startswith(start))
    numbers = [int(rest.partition(".")[0]) for rest in rests if rest.partition(".")[0].isdecimal()]
    return {"layers": Size(max(numbers) + 1, "names of layers")} if numbers else {}


def with_slashes(key: str) -> str:
    return key.replace(".", "/")


def with_joints_of(arrays: Arrays, names: Arrays) -> dict[str, LazyArray]:
    """Rename arrays whose names differ from those in `names` only in the separator of keys."""
    known = {name.replace("/", "."): name for name in names}
    result = {name if name in names else known.get(name.replace("/", "."), name): name for name in arrays}
    if len(result) != len(arrays):
        return dict(arrays)
    return {new: arrays[old] for new, old in result.items()}


def as_wide_as(
    other: Mapping[str, LazyArray],
    arrays: Mapping[str, LazyArray],
    exactly: Callable[[], Mapping[str, LazyArray]],
) -> Mapping[str, LazyArray]:
    """Return the arrays of a conversion, without rounding those that are stored with 32 bits instead of 16.

    All arrays are unrounded if the conversion would cast them, because casting rounds first.

    Args:
        other: The stored arrays.
        arrays: Arrays of a conversion that may round, under the same names.
        exactly: Returns the arrays of a conversion without rounding.
    """
    short = [name for name, array in arrays.items() if _has_bits(array, 16)]
    wide = {name for name in short if name in other and _has_bits(other[name], 32)}
    if not wide or all(name in wide for name in short if name in other):
        return arrays
    exact = exactly()
    return {name: exact[name] if name in wide else array for name, array in arrays.items()}


def _has_bits(array: LazyArray, bits: int) -> bool:
    return array.dtype.is_float and array.dtype.bits == bits
