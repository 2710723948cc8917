"""Move every array of a tree to another layout of its layers.

Other leaves of a layer move with its parameters: optimizer moments on the same axis, and everything else,
such as random states, on axis 0, as in MaxText.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import field, replace

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import stack, take
from ckpttools.array.tree import Leaf, Path, Tree, collision, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, ShapeError, listing
from ckpttools.core.message_terms import action
from ckpttools.core.region import Shape
from ckpttools.core.text import sample_names
from ckpttools.maxtext.layers import LayerStack, is_scale_of_layer, layer_key_slice
from ckpttools.maxtext.versions import DECODER, STATE_AXIS
from ckpttools.maxtext.view import MaxTextView, view_of


def unstack_layers(tree: Tree, stacks: Sequence[LayerStack], axis: int) -> Tree:
    """Return the tree with single layers.

    Args:
        tree: A tree with the layout `stacks`.
        stacks: The layout of the tree; see `ckpttools.maxtext.layers.layer_stacks`.
        axis: The axis on which parameters are stacked.

    Raises:
        ShapeError: An array that belongs to the layers has another number of layers than the parameters.
        FormatError: Two arrays would get the same path.
    """
    by_key, axis_of = {item.key: item for item in stacks}, _axes(view_of(tree), axis)
    result: dict[Path, Leaf] = {}
    origins: dict[Path, Path] = {}
    for path, leaf in tree.items():
        location = layer_key_slice(path, by_key)
        stack = by_key[path[location]] if location else _NO_STACK
        on = STATE_AXIS if _is_scale_of_layer(path, leaf, stack.shape) else axis_of(path)
        parts = _unstack_leaf(path, location, stack, leaf, on) if location else {path: leaf}
        if duplicates := parts.keys() & result.keys():
            raise collision(min(duplicates))
        result |= parts
        origins |= dict.fromkeys(parts, path)
    return _with_metadata(tree, result, origins)


def stack_layers(
    tree: Tree, stacks: Sequence[LayerStack], axis: int, first_axis: Collection[str] = ()
) -> Tree:
    """Return the tree with its layers stacked; the inverse of `unstack_layers` with the same arguments.

    Leaves that only some layers have are not moved if they belong to neither parameters nor optimizer: a
    random state that all layers share is stored only with the first layer.

    Args:
        tree: A tree with single layers.
        stacks: The layout of the result.
        axis: The axis on which parameters are stacked.
        first_axis: Names of stacked arrays, with keys joined by "/", that have their layers on axis 0
            regardless of `axis`.

    Raises:
        FormatError: Layers hold different parameters or moments, or two arrays would get the same path.
        ShapeError: The arrays of a stack have different shapes or dtypes.
    """
    spots = {key: (item, spot) for item in stacks for spot, key in enumerate(item.layer_keys)}
    view = view_of(tree)
    axis_of, known = _axes(view, axis), view.roles
    gathered: dict[Path, _StackLeaves] = {}
    for path, leaf in tree.items():
        location = layer_key_slice(path, spots)
        layers, spot = spots[path[location]] if location else (_NO_STACK, 0)
        target = _replace_key(path, location, layers.key) if location else path
        first = (bool(first_axis) and keystr(target) in first_axis) or _is_scale_of_layer(path, leaf, ())
        into = gathered.setdefault(target, _StackLeaves(layers, STATE_AXIS if first else axis_of(path)))
        if spot in into.leaves:
            raise collision(target)
        into.leaves[spot], into.paths[spot] = leaf, path
    result: dict[Path, Leaf] = {}
    origins: dict[Path, Path] = {}
    for target, item in gathered.items():
        if item.missing and all(known.of(path) == "other" for path in item.paths.values()):
            result |= {path: item.leaves[spot] for spot, path in item.paths.items()}
            origins |= {path: path for path in item.paths.values()}
        else:
            result[target] = _stack_leaves(target, item)
            origins[target] = next(iter(item.paths.values()))
    return _with_metadata(tree, result, origins)


def stacked_paths(tree: Tree, stacks: Sequence[LayerStack]) -> set[Path]:
    """Return the paths that `stack_layers` builds from several layers."""
    spots = {key: item for item in stacks if item.shape for key in item.layer_keys}
    locations = ((path, layer_key_slice(path, spots)) for path in tree)
    return {
        _replace_key(path, location, spots[path[location]].key) for path, location in locations if location
    }


def _is_scale_of_layer(path: Path, leaf: Leaf, stacked: Shape) -> bool:
    return isinstance(leaf, LazyArray) and is_scale_of_layer(path, leaf.shape, stacked)


@dataclass(frozen=True, slots=True)
class _StackLeaves:
    """The leaves that form a stack, by position, and their stacking axis."""

    layers: LayerStack
    axis: int
    leaves: dict[int, Leaf] = field(default_factory=dict)
    paths: dict[int, Path] = field(default_factory=dict)

    @property
    def missing(self) -> list[Path]:
        """Return the keys of the layers that lack this leaf."""
        spots = range(len(self.layers.numbers))
        return [self.layers.layer_keys[spot] for spot in spots if spot not in self.leaves]


_NO_STACK = LayerStack((), "", (), (0,))


def _replace_key(path: Path, location: slice, key: Path) -> Path:
    """Replace the layer key in a path."""
    return (*path[: location.start], *key, *path[location.stop :])


def _axes(view: MaxTextView, axis: int) -> Callable[[Path], int]:
    """Return a function from a path to its stacking axis."""
    # These parameters are outside the model, or the view has moved their layers from axis 0.
    axes = {
        tree_path
        for inner, tree_path in view.homes.items()
        if tree_path == view.flavor.wrapped(inner) and tree_path not in view.leading_layer_paths
    }

    def axis_of(path: Path) -> int:
        return axis if path in axes or view.roles.of(path) == "optimizer" else STATE_AXIS

    return axis_of


def _unstack_leaf(path: Path, location: slice, layers: LayerStack, leaf: Leaf, axis: int) -> dict[Path, Leaf]:
    """Split a stacked leaf into one leaf per layer; leaves without data are repeated."""
    paths = [_replace_key(path, location, key) for key in layers.layer_keys]
    if not isinstance(leaf, LazyArray):
        return dict.fromkeys(paths, leaf)
    axes = range(axis, axis + len(layers.shape))
    if leaf.shape[axes.start : axes.stop] != layers.shape:
        raise ShapeError(
            f"this array does not have the number of layers of its parameters on axis {axis}",
            location=keystr(path),
            got=list(leaf.shape),
            expected=f"{' and '.join(map(str, layers.shape))} on {' and '.join(f'axis {a}' for a in axes)}",
        )
    parts = [leaf]
    for length in layers.shape:
        parts = [take(part, axis, index) for part in parts for index in range(length)]
    return dict(zip(paths, parts, strict=True))


def _stack_leaves(path: Path, gathered: _StackLeaves) -> Leaf:
    """Stack the leaves of several layers into one."""
    if gathered.missing:
        raise FormatError(
            "some of the layers to stack lack this array" + listing([*map(keystr, gathered.missing)]),
            location=keystr(path),
        )
    parts, axis = [gathered.leaves[spot] for spot in sorted(gathered.leaves)], gathered.axis
    if not gathered.layers.shape:
        return parts[0]
    arrays = [part for part in parts if isinstance(part, LazyArray)]
    if len(arrays) != len(parts):
        if all(part == parts[0] for part in parts):
            return parts[0]
        raise FormatError("some of the layers to stack have no data here", location=keystr(path))
    kinds: dict[str, list[str]] = {}
    for spot, array in zip(sorted(gathered.leaves), arrays, strict=True):
        kinds.setdefault(f"{array.dtype.name}{list(array.shape)}", []).append(keystr(gathered.paths[spot]))
    if len(kinds) != 1 or len(arrays[0].shape) < axis:
        lines = [f"{kind}: {sample_names(names)}" for kind, names in sorted(kinds.items())]
        raise ShapeError(
            "the arrays of these layers cannot be stacked" + listing(lines),
            location=keystr(path),
            expected=f"one shape of at least {axis} axes, one dtype",
        )
    return _nest_parts(arrays, gathered.layers.shape, axis)


def _nest_parts(parts: list[LazyArray], shape: Shape, axis: int) -> LazyArray:
    """Stack parts in C order over `shape`, starting at `axis`."""
    for length in reversed(shape):
        parts = [stack(parts[k : k + length], axis) for k in range(0, len(parts), length)]
    return parts[0]


def _with_metadata(tree: Tree, leaves: Mapping[Path, Leaf], origins: Mapping[Path, Path]) -> Tree:
    """Return the new leaves with the metadata of their sources."""
    source = tree.metadata
    impls = {path: source.key_impls[old] for path, old in origins.items() if old in source.key_impls}
    scalars = frozenset(path for path, old in origins.items() if path == old and path in source.scalars)
    return Tree(leaves, replace(source, key_impls=impls, scalars=scalars))


def check_moments(tree: Tree) -> None:
    """Check that the optimizer leaves of layers have the shapes of their parameters.

    Raises:
        ShapeError: An optimizer leaf of a layer has a different shape from its parameter.
    """
    mismatched = list(_mismatched_moments(tree))
    if mismatched:
        raise ShapeError(
            "parts of the optimizer state do not mirror the parameters, so their layers are unknown"
            + listing(mismatched),
            location=tree.metadata.location or None,
            hint=f"first remove the optimizer state with {action('strip_optimizer')}",
        )


def _mismatched_moments(tree: Tree) -> Iterator[str]:
    view = view_of(tree)
    shapes = {(DECODER, *path): item.shape for path, item in view.decoder.items()}
    for path, array in tree.arrays.items():
        if view.roles.of(path) == "optimizer" and DECODER in path:
            suffix = view.flavor.suffix
            inner = path[: -len(suffix)] if path[-1:] == suffix else path
            expected = shapes.get(inner[inner.index(DECODER) :])
            if array.shape != expected:
                mismatch = "no such parameter" if expected is None else f"the parameter is {list(expected)}"
                yield f"{keystr(path)} {list(array.shape)}: {mismatch}"
