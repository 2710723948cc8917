"""Quantised weights keep their scales: what transforms may not part, and may not take for plain numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from ckpttools.dtypes import DType
from ckpttools.errors import MappingError, listing
from ckpttools.ir.array import LazyArray
from ckpttools.ir.nodes import inner
from ckpttools.ir.quantized import (
    Quantized,
    last_keys,
    may_be_scaled,
    quantized,
    quantized_error,
    says_quantized,
    scheme,
)
from ckpttools.ir.scales import is_plain, scales_word
from ckpttools.ir.tree import Path, Tree, dotted


def scaled_weights(tree: Tree) -> dict[Path, Quantized]:
    """The weights whose numbers are to be multiplied by scales, also by some that are not there.

    A tree in which no weight has a scale, and whose configuration speaks of none, has no such weights:
    numbers in float8 may well be the values themselves.
    """
    # A step is a whole number, and no weight.
    arrays = ((path, array.dtype) for path, array in tree.arrays.items() if array.shape)
    if not any(may_be_scaled(_last(path), dtype) for path, dtype in arrays):
        return {}
    paths, found = _quantized(tree)
    if not says_quantized(tree.metadata.config) and not any(each.scales for each in found.values()):
        return {}
    return {paths[name]: each for name, each in found.items()}


def _last(path: Path) -> str:
    """The end of a path's dotted name."""
    return ".".join(map(str, path[-2:]))


def _quantized(tree: Tree) -> tuple[dict[str, Path], dict[str, Quantized]]:
    """The paths of all arrays by their dotted names, and the quantised weights among them."""
    paths = {dotted(path): path for path in tree.arrays}
    return paths, quantized({name: tree.arrays[path] for name, path in paths.items()})


def refuse_casts(tree: Tree, wanted: Mapping[Path, DType]) -> None:
    """Refuses to cast numbers that are to be multiplied by scales, and scales from or to less than 16 bits.

    Args:
        tree: before the cast.
        wanted: the other dtypes that arrays are to get.

    Raises:
        FormatError: there are such.
    """
    weights = scaled_weights(tree)
    narrow = {dotted(path) for path, to in wanted.items() if not _stay_plain(tree.arrays[path].dtype, to)}
    hit = [each for path, each in weights.items() if path in wanted or not narrow.isdisjoint(each.scales)]
    if hit:
        raise quantized_error(hit, says_quantized(tree.metadata.config), tree.metadata.place, done="cast")


def _stay_plain(*dtypes: DType) -> bool:
    return all(map(is_plain, dtypes))


def refuse_parting(tree: Tree, made: Tree, sources: Mapping[Path, Path]) -> None:
    """Refuses a tree in which weights have lost their scales.

    Args:
        tree: before.
        made: after.
        sources: path in `made` -> path in `tree`, for all arrays that have kept their dtype.

    Raises:
        MappingError: a scale is left out, or no longer has a name by which it is known as the weight's.
    """
    before = scaled_weights(tree)
    if not any(each.scales for each in before.values()):
        return
    targets = {dotted(source): dotted(target) for target, source in sources.items()}
    weights = {id(tree.arrays[path]): tree.arrays[path] for path in before}
    lost = [*_lost(before.values(), targets, made), *_cast_on_the_way(weights, made)]
    if lost:
        said = says_quantized(tree.metadata.config)
        raise MappingError(
            "quantised weights would lose their scales, without which their numbers mean nothing:"
            + listing(lost),
            place=tree.metadata.place or None,
            got=scheme(said) or None,
            hint="keep each weight and its scales together, under names that belong together",
        )


def _lost(before: Collection[Quantized], targets: Mapping[str, str], made: Tree) -> Iterator[str]:
    """A line for each weight that has not all of its scales any more.

    Args:
        before: the weights.
        targets: old name -> new name of what has kept its dtype.
        made: the new tree.
    """
    paths, after = _quantized(made)
    known, fewest = set(targets.values()), _fewest_scales(before)
    for each in before:
        target = targets.get(each.name)
        if target is None:
            continue
        scales = after[target].scales if target in after else ()
        gone = [scale for scale in each.scales if scale not in targets]
        # A function may have put others in their places.
        missing = gone if len(gone) > sum(scale not in known for scale in scales) else []
        missing += [scale for scale in each.scales if scale in targets and targets[scale] not in scales]
        if missing:
            yield f"{target}: without {last_keys(missing)}"
    for name, path in paths.items():
        array = made.arrays[path]
        weight = after.get(name) or Quantized(name, array.dtype, ())
        is_matrix = len(array.shape) > 1 and not scales_word(name)
        wanted = fewest.get(array.dtype, 0) if is_matrix else 0
        # What several weights became has their dtype, and a name that may tell nothing.
        if name not in known and len(weight.scales) < (wanted or (name in after)):
            yield str(weight)


def _cast_on_the_way(weights: Mapping[int, LazyArray], made: Tree) -> Iterator[str]:
    """A line for each array that is made of a weight's bare numbers in another dtype.

    Args:
        weights: by their identity.
        made: the new tree.
    """
    for path, array in made.arrays.items():
        rest = [array]
        while rest:
            each = rest.pop()
            rest += inner(each)
            if id(each) in weights and each.dtype != array.dtype:
                yield f"{dotted(path)}: cast from {each.dtype} to {array.dtype}"
                break


def _fewest_scales(weights: Collection[Quantized]) -> dict[DType, int]:
    """How many scales weights of a dtype have at least."""
    fewest: dict[DType, int] = {}
    for each in weights:
        fewest[each.dtype] = min(len(each.scales), fewest.get(each.dtype, len(each.scales)))
    return fewest
