"""Protect quantized weights from transforms that would separate them from their scales or misread them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Stack, Take, source_arrays
from ckpttools.array.tree import Path, Tree, dotted
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import FormatError, MappingError, listing
from ckpttools.core.message_terms import action, option
from ckpttools.core.notes import Notes
from ckpttools.quantized.config import scheme, stated_dtypes
from ckpttools.quantized.scales import has_scale_word, is_plain, split_name
from ckpttools.quantized.unsupported_errors import quantized_error, refuse_unknown, remedy
from ckpttools.quantized.view import quantized_view
from ckpttools.quantized.weights import QuantizedWeight, last_keys


def spare_quantized(
    tree: Tree, expected: Mapping[Path, DType], named: Collection[Path], *, force: bool
) -> tuple[dict[Path, DType], Notes]:
    """Drop casts that quantized weights do not allow, unless the user named the arrays.

    Args:
        tree: The tree before the cast.
        expected: Path -> new dtype.
        named: The subset of `expected` that the user named.
        force: Whether to cast narrow values without scales even if the configuration states another dtype.

    Returns:
        The remaining casts, and notes about them.

    Raises:
        FormatError: The cast would change a quantized weight or, by name, one of its auxiliary tensors;
            narrow values may have lost their scales; or arrays would become narrow next to quantized weights.
    """
    view, config, location = quantized_view(tree), tree.metadata.config, tree.metadata.location
    if expected and view.declared:
        _refuse_unknown(tree, expected)
    names = {dotted(path): path for path in expected} if view.candidates else {}
    hit = [item for name, item in view.weights.items() if name in names]
    if hit:
        raise quantized_error(hit, config, location, done="cast")
    unclear = [item for name, item in view.unclear.items() if name in names]
    if unclear and stated_dtypes(config) and not force:
        raise quantized_error(unclear, config, location, done="cast")
    sides = {name: item for name, item in view.members.items() if name in names and name != item.name}
    dropped = [
        f"{side}, which belongs to {item.name}" for side, item in sides.items() if names[side] in named
    ]
    if dropped:
        raise FormatError(
            "auxiliary tensors of quantized weights cannot be cast:" + listing(dropped),
            location=location or None,
            got=view.scheme or None,
            hint=f"name other arrays in {option('dtype_map')}; {option('dtype')} does not change these",
        )
    left = {names[side] for side in sides}
    _refuse_few_bits(tree, {path: dtype for path, dtype in expected.items() if path not in left})
    notes = Notes(remarks=(*_unchanged_sides(sides, view.declared), *_renamed_arrays(unclear)))
    return {path: dtype for path, dtype in expected.items() if path not in left}, notes


def _refuse_unknown(tree: Tree, expected: Collection[Path]) -> None:
    """Refuse casts of arrays in an unknown scheme: of unscaled arrays, or of the full tree."""
    known = quantized_view(tree).members
    arrays = {dotted(path): tree.arrays[path] for path in (expected if known else tree.arrays)}
    unknown = {name: item for name, item in arrays.items() if name not in known and not is_plain(item.dtype)}
    refuse_unknown(unknown if known else arrays, tree.metadata.config, tree.metadata.location, done="cast")


def _refuse_few_bits(tree: Tree, expected: Mapping[Path, DType]) -> None:
    """Refuse casts to narrow dtypes next to quantized weights.

    Readers would take the cast arrays for quantized values.
    """
    view = quantized_view(tree)
    small_dtypes = {path: dtype for path, dtype in expected.items() if dtype.is_float and not is_plain(dtype)}
    if view.weights and small_dtypes:
        lines = [
            f"{dotted(path)}: {tree.arrays[path].dtype} to {dtype}" for path, dtype in small_dtypes.items()
        ]
        raise FormatError(
            "next to quantized weights, arrays with so few bits would be mistaken for weights "
            "without scales:" + listing(lines),
            location=tree.metadata.location or None,
            got=view.scheme or next(map(str, view.weights.values())),
            hint="do not cast these arrays; or dequantize the model "
            f"({action('cast', 'SRC', 'DST', dtype='bfloat16')}), and quantize it again "
            f"({action('quantize', 'SRC', 'DST')})",
        )


def _unchanged_sides(
    sides: Mapping[str, QuantizedWeight], settings: Mapping[str, Any] | None
) -> Iterator[str]:
    if sides:
        count = f"{len(sides)} array" + "s" * (len(sides) > 1)
        keys = ", ".join(dict.fromkeys(last_keys([side]) for side in sides))
        yield f"not cast, because they belong to quantized weights: {count} ({keys})"
        if settings:
            yield f"the weights stay quantized, {scheme(settings)}: {remedy(settings)}"


def _renamed_arrays(unclear: Collection[QuantizedWeight]) -> Iterator[str]:
    if unclear:
        dtypes = ", ".join(sorted({str(item.dtype) for item in unclear}))
        yield (
            f"{dtypes} values are taken literally, because they have no scales: "
            "if scales were lost, the output is meaningless"
        )


def refuse_separation(tree: Tree, new_tree: Tree, sources: Mapping[Path, Path]) -> None:
    """Refuse a tree that separates quantized weights from their auxiliary tensors.

    Args:
        tree: The tree before the transform.
        new_tree: The tree after the transform.
        sources: Path in `new_tree` -> path in `tree`, for all arrays that have kept their dtype.

    Raises:
        MappingError: A weight or an auxiliary tensor is left out, loses the name that connects them, or is
            rearranged.
    """
    view = quantized_view(tree)
    members = {id(tree.arrays[view.paths[name]]): name for name in view.members}
    _refuse_rearranging(tree, rearranged_arrays(new_tree, members))
    if any(weight.sides for weight in view.weights.values()):
        _refuse_halves(tree, new_tree, sources)
    _refuse_rearranging(tree, recast(new_tree, members))
    _refuse_rearranging(tree, separate_members(new_tree, members, view.weights))


def _refuse_halves(tree: Tree, new_tree: Tree, sources: Mapping[Path, Path]) -> None:
    """Refuse incomplete quantized modules; arguments and errors as for `refuse_separation`."""
    view = quantized_view(tree)
    before = view.weights.values()
    targets = {dotted(source): dotted(target) for target, source in sources.items()}
    own = (tree.arrays[view.paths[name]] for name in view.weights)
    weights = {id(array): array for array in own}
    lost = [*_lost_parts(before, targets, new_tree), *_intermediate_casts(weights, new_tree)]
    left = [*_orphaned_parts(before, targets), *_separated_weights(before, targets)]
    if lost or left:
        message = (
            "quantized weights would lose their scales or other auxiliary tensors, without which their "
            "values "
            "are meaningless:"
            if lost
            else "parts of quantized modules would remain, which are meaningless without their weights:"
        )
        raise MappingError(
            message + listing([*lost, *left]),
            location=tree.metadata.location or None,
            got=view.scheme or None,
            hint="keep or leave out each module completely: its weight and all its auxiliary tensors, with "
            "names "
            "that belong together",
        )


def _refuse_rearranging(tree: Tree, lines: Iterator[str]) -> None:
    """Refuse the reported changes, because only names may differ."""
    faults = list(lines)
    if faults:
        raise MappingError(
            "arrays of quantized modules can be renamed, but not rearranged:" + listing(faults),
            location=tree.metadata.location or None,
            got=quantized_view(tree).scheme or None,
            expected="unchanged arrays, or all arrays of a module stacked in the same way on a new first "
            "axis",
            hint="do not change the axes of these arrays, or dequantize the model first",
        )


def _lost_parts(
    before: Collection[QuantizedWeight], targets: Mapping[str, str], new_tree: Tree
) -> Iterator[str]:
    """Yield a line for each weight that has lost a required array.

    Args:
        before: The weights before the transform.
        targets: Old name -> new name of each array that has kept its dtype.
        new_tree: The new tree.
    """
    view = quantized_view(new_tree)
    after, known, fewest = view.candidates, set(targets.values()), _fewest_sides(before)
    for item in before:
        target = targets.get(item.name)
        if target is None:
            continue
        sides = frozenset(after[target].sides if target in after else ())
        absent = [side for side in item.sides if side not in targets]
        # A function may have replaced the arrays.
        missing = absent if len(absent) > sum(side not in known for side in sides) else []
        missing += [side for side in item.sides if side in targets and targets[side] not in sides]
        if missing:
            yield f"{target}: without {last_keys(missing)}"
    for name, path in view.paths.items():
        array = new_tree.arrays[path]
        weight = after.get(name) or QuantizedWeight(name, array.dtype, ())
        is_matrix = len(array.shape) > 1 and not has_scale_word(name)
        expected = fewest.get(array.dtype, 0) if is_matrix else 0
        # An array that is stacked from several weights has their dtype, but maybe not a name that identifies
        # them.
        if name not in known and len(weight.sides) < (expected or (name in after)):
            yield str(weight)


def _orphaned_parts(before: Collection[QuantizedWeight], targets: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each array that is kept without any of its weights."""
    owners: defaultdict[str, list[str]] = defaultdict(list)
    for item in before:
        for side in item.sides:
            owners[side].append(item.name)
    for side, weights in owners.items():
        if side in targets and not any(weight in targets for weight in weights):
            yield f"{side}: without {last_keys(weights)}"


def _separated_weights(before: Collection[QuantizedWeight], targets: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each weight that is left out while other weights with the same scales are kept."""
    sharing: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for item in before:
        for scale in item.scales:
            sharing[split_name(item.name)[0], scale].append(item.name)
    for (_, scale), weights in sharing.items():
        missing = [name for name in weights if name not in targets]
        if scale in targets and 0 < len(missing) < len(weights):
            yield f"{scale}: without {last_keys(missing)}"


def _intermediate_casts(weights: Mapping[int, LazyArray], new_tree: Tree) -> Iterator[str]:
    """Yield a line for each array that is cast from a weight's unscaled values.

    Args:
        weights: Identity -> weight.
        new_tree: The new tree.
    """
    for path, array in new_tree.arrays.items():
        pending = [array]
        while pending:
            current = pending.pop()
            pending += source_arrays(current)
            if id(current) in weights and current.dtype != array.dtype:
                yield f"{dotted(path)}: cast from {current.dtype} to {array.dtype}"
                break


def _fewest_sides(weights: Collection[QuantizedWeight]) -> dict[DType, int]:
    """Return the minimum number of auxiliary arrays of weights with each dtype."""
    fewest: dict[DType, int] = {}
    for weight in weights:
        fewest[weight.dtype] = min(len(weight.sides), fewest.get(weight.dtype, len(weight.sides)))
    return fewest


# Check whether parts of quantized modules keep their order. Values are packed and scaled in groups along
# axes, so another order of elements changes their meaning. Stacking complete modules along a new first axis,
# such as experts, keeps the order, and so does taking a slice of such a stack.


@dataclass(frozen=True, slots=True)
class _Origin:
    """The sources of an array.

    Attributes:
        how: Stacks, and indices in stacks, around the members; equal for all arrays of modules that are
            treated the same way.
        members: Names of parts of quantized modules, in order.
    """

    how: tuple[object, ...]
    members: tuple[str, ...]


def rearranged_arrays(new_tree: Tree, members: Mapping[int, str]) -> Iterator[str]:
    """Yield a line for each array in which a part of a quantized module has another order.

    Args:
        new_tree: The new tree.
        members: Identity -> name of each part of a quantized module in the old tree.
    """
    for name, array, member in _rebuilt_arrays(new_tree, members):
        if member.dtype == array.dtype:
            yield f"{name}: {members[id(member)]} in another order"


def recast(new_tree: Tree, members: Mapping[int, str]) -> Iterator[str]:
    """Yield a line for each array in which a part of a quantized module has another dtype."""
    for name, array, member in _rebuilt_arrays(new_tree, members):
        if member.dtype != array.dtype:
            yield f"{name}: cast from {member.dtype} to {array.dtype}"


def _rebuilt_arrays(new_tree: Tree, members: Mapping[int, str]) -> Iterator[tuple[str, LazyArray, LazyArray]]:
    """Yield arrays that are built from parts other than by stacking, each with one of its parts."""
    for path, array in new_tree.arrays.items():
        if id(array) not in members and not _origin(array, members):
            member = next(_members(array, members), None)
            if member is not None:
                yield dotted(path), array, member


def _members(array: LazyArray, members: Mapping[int, str]) -> Iterator[LazyArray]:
    pending = [array]
    while pending:
        current = pending.pop()
        if id(current) in members:
            yield current
        else:
            pending += source_arrays(current)


def separate_members(
    new_tree: Tree, members: Mapping[int, str], before: Mapping[str, QuantizedWeight]
) -> Iterator[str]:
    """Yield a line for each array whose quantized module has parts that are treated differently.

    Args:
        new_tree, members: As for `rearranged_arrays`.
        before: The quantized weights of the old tree.
    """
    origins: dict[str, _Origin] = {}
    for path, array in new_tree.arrays.items():
        origin = None if id(array) in members else _origin(array, members)
        if origin:
            origins[dotted(path)] = origin
    if not origins:
        return
    after = quantized_view(new_tree).candidates
    owned: set[str] = set()
    for name, origin in origins.items():
        weights = [before[member] for member in origin.members if member in before]
        if len(weights) < len(origin.members):
            continue
        near = [item for item in (after[name].sides if name in after else ()) if item in origins]
        sides = {side: origins[side] for side in near if origins[side].how == origin.how}
        own = {side for side, item in sides.items() if _are_of(item.members, weights)}
        owned |= {name, *own}
        owners = {sides[side].members for side in own}
        missing = [
            side
            for at, item in enumerate(weights)
            for side in item.sides
            if not any(members[at] == side for members in owners)
        ]
        if missing:
            yield f"{name}: without {last_keys(missing)} in the same order"
    yield from (f"{name}: without its weight in the same order" for name in origins if name not in owned)


def _are_of(members: Sequence[str], weights: Sequence[QuantizedWeight]) -> bool:
    return all(member in item.sides for member, item in zip(members, weights, strict=True))


def _origin(array: LazyArray, members: Mapping[int, str]) -> _Origin | None:
    """Return the sources of an array; None unless it only stacks along first axes."""
    if id(array) in members:
        return _Origin(("whole",), (members[id(array)],))
    if isinstance(array, Stack) and array.axis == 0:
        parts = [_origin(part, members) for part in array.parts]
        origins = [part for part in parts if part is not None]
        if len(origins) < len(parts):
            return None
        return _Origin(
            ("stack", *(item.how for item in origins)), tuple(n for item in origins for n in item.members)
        )
    if isinstance(array, Take) and array.axis == 0:
        origin = _origin(array.source, members)
        operation = ("take", array.index, array.source.shape[0])
        return origin and _Origin((*operation, origin.how), origin.members)
    return None
