"""What is quantised in a tree, with what its configuration says of it."""

from __future__ import annotations

from collections.abc import Mapping

from ckpttools.array.tree import Path, Tree, by_name, dotted
from ckpttools.core.dataclass import dataclass
from ckpttools.quantized.config import says_quantized
from ckpttools.quantized.weights import Quantized, may_be_scaled, quantized


@dataclass(frozen=True, slots=True)
class QuantizedTree:
    """What looks quantised in a tree.

    Attributes:
        paths: of all arrays, by their dotted names.
        weights: whose numbers are to be multiplied by scales, also by some that are not there.
        unclear: numbers of few bits in a tree where nothing is a scale, and no configuration speaks of any:
            they may well be the values themselves.
    """

    paths: Mapping[str, Path]
    weights: Mapping[str, Quantized]
    unclear: Mapping[str, Quantized]

    @property
    def scaled_weights(self) -> dict[Path, Quantized]:
        """The weights by their paths."""
        return {self.paths[name]: item for name, item in self.weights.items()}


def quantized_in(tree: Tree) -> QuantizedTree:
    """What is quantised in a tree; worked out once."""
    return tree.once(_found)


def _found(tree: Tree) -> QuantizedTree:
    # A step is a whole number, and no weight.
    arrays = (
        (path, array.dtype) for path, array in tree.arrays.items() if array.shape or array.dtype.is_float
    )
    if not any(may_be_scaled(_last(path), dtype) for path, dtype in arrays):
        return QuantizedTree({}, {}, {})
    config, (paths, result) = tree.metadata.config, by_names(tree)
    if says_quantized(config) or any(item.scales for item in result.values()):
        return QuantizedTree(paths, result, {})
    return QuantizedTree(paths, {}, {name: item for name, item in result.items() if item.dtype.is_float})


def _last(path: Path) -> str:
    """The end of a path's dotted name."""
    return ".".join(map(str, path[-2:]))


def by_names(tree: Tree) -> tuple[dict[str, Path], dict[str, Quantized]]:
    """The paths of all arrays by their dotted names, and the quantised weights among them.

    Raises:
        FormatError: there are such weights, and arrays have one name.
    """
    paths = {dotted(path): path for path in tree.arrays}
    result = quantized({name: tree.arrays[path] for name, path in paths.items()}, tree.metadata.config)
    return (by_name({path: path for path in tree.arrays}) if result else paths), result
