"""Quantised weights keep their scales: what transforms may not part, and may not take for plain numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from ckpttools.errors import MappingError, listing
from ckpttools.ir.quantized import (
    Quantized,
    last_keys,
    may_be_scaled,
    quantized,
    quantized_error,
    says_quantized,
    scheme,
)
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
    return paths, quantized({name: tree.arrays[path].dtype for name, path in paths.items()})


def refuse_casts(tree: Tree, wanted: Collection[Path]) -> None:
    """Refuses to cast numbers that are to be multiplied by scales, and scales that are exponents or packed.

    Args:
        tree: before the cast.
        wanted: arrays that are to get another dtype.

    Raises:
        FormatError: there are such.
    """
    weights = scaled_weights(tree)
    cast = {dotted(path): tree.arrays[path].dtype for path in wanted}
    hit = [
        each
        for path, each in weights.items()
        if path in wanted or any(scale in cast and not cast[scale].is_float for scale in each.scales)
    ]
    if hit:
        raise quantized_error(hit, says_quantized(tree.metadata.config), tree.metadata.place, done="cast")


def refuse_parting(tree: Tree, made: Tree, sources: Mapping[Path, Path]) -> None:
    """Refuses a tree in which weights have lost their scales.

    Args:
        tree: before.
        made: after.
        sources: path in `made` -> path in `tree`, for all leaves that are still what they were.

    Raises:
        MappingError: a scale is left out, or no longer has a name by which it is known as the weight's.
    """
    before = scaled_weights(tree)
    if not any(each.scales for each in before.values()):
        return
    targets = {dotted(source): dotted(target) for target, source in sources.items()}
    lost = list(_lost(before.values(), targets, _quantized(made)[1]))
    if lost:
        said = says_quantized(tree.metadata.config)
        raise MappingError(
            "quantised weights would lose their scales, without which their numbers mean nothing:"
            + listing(lost),
            place=tree.metadata.place or None,
            got=scheme(said) or None,
            hint="keep each weight and its scales together, under names that belong together",
        )


def _lost(
    before: Iterable[Quantized], targets: Mapping[str, str], after: Mapping[str, Quantized]
) -> Iterator[str]:
    """A line for each weight that has not all of its scales any more.

    Args:
        before: the weights.
        targets: old name -> new name of what is still what it was.
        after: the weights of the new tree, by name.
    """
    for each in before:
        target = targets.get(each.name)
        if target is None:
            continue
        scales = after[target].scales if target in after else ()
        missing = [scale for scale in each.scales if targets.get(scale) not in scales]
        # What a function put in their places has other names.
        if missing and len(scales) < len(each.scales):
            yield f"{target}: without {last_keys(missing)}"
    known = set(targets.values())
    yield from (str(each) for name, each in after.items() if not each.scales and name not in known)
