"""A view of a tree as a MaxText checkpoint: kind, flavor, layers and parameters, each computed once.

    view = view_of(open_tree(path))
    view.kind, view.flavor.name, view.scan_axis            "stacked-training", "linen", 1
    view.parameters["decoder", "layers", "mlp", "wi_0", "kernel"]

Everything is inferred from paths, shapes and custom metadata, without reading arrays.

    linen     params/params/decoder/layers/mlp/wi_0/kernel      also below a single `params`
    nnx       decoder/layers/mlp/wi_0/kernel/value              also below `model`
    nnx-rl    base/decoder/layers/mlp/wi_0/kernel/value         with or without `value`; others next to `base`

A flavor is a prefix and a suffix of paths, so wrapping and unwrapping are inverse operations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from operator import is_
from types import MappingProxyType
from typing import Literal

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Constant
from ckpttools.array.relayout import transpose_axes
from ckpttools.array.tree import Empty, Leaf, Metadata, Path, Tree, by_name, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES
from ckpttools.core.errors import CheckpointError
from ckpttools.maxtext.layers import (
    LayerGroup,
    LayerNotes,
    LayerStack,
    decoder_parameters,
    layer_groups,
    layer_key_slice,
    layer_notes,
    layer_stacks,
    scan_axes,
    scan_axis,
    single_layers,
    stacked_keys,
    stacked_lengths,
)
from ckpttools.maxtext.versions import (
    AUXILIARY,
    BASE,
    COLLECTION,
    MODEL,
    OPTIMIZER,
    PARAMS,
    SCAN_AXES,
    SCAN_LAYERS,
    STEP,
    VALUE,
    FlavorName,
    Kind,
)
from ckpttools.roles.names import container, wraps
from ckpttools.roles.of_tree import Role, Roles, roles

OptimizerName = Literal["adamw", "adam_pax", "sgd", "unknown"]
_ADAM = {"count", "mu", "nu"}
_SGD = {"count", "trace"}


@dataclass(frozen=True, slots=True)
class Optimizer:
    """The optimizer whose state a tree has.

    Attributes:
        name: "adamw" for optax's chain, "adam_pax" for Pax's flat state.
        moments: The paths that mirror the parameters, such as "opt_state/0/mu".
        matches_parameters: Whether all moments have the shapes of the parameters.
    """

    name: OptimizerName
    moments: tuple[str, ...] = ()
    matches_parameters: bool = True


def optimizer_of(
    state: Mapping[Path, Leaf],
    inner: Collection[Path],
    parameters: Mapping[Path, LazyArray],
    flavor: Flavor,
) -> Optimizer | None:
    """Return the optimizer of a state; None if the state is empty.

    Args:
        state: All leaves of an optimizer.
        inner: The paths of the leaves within the state.
        parameters: The model's parameters, under their paths in the model.
        flavor: The flavor of the tree.
    """
    inner = [path for path in inner if path]
    if not inner:
        return None
    # A chain has an entry for each of its parts; the first part scales gradients.
    chained = {str(path[1]) for path in inner if len(path) > 1 and str(path[0]) == "0"}
    named = {str(key) for path in inner for key in path[:2] if not str(key).isdecimal()}
    heads = _mirrored_heads(state, parameters, flavor)
    name: OptimizerName = "unknown"
    if chained >= _ADAM:
        name = "adamw"
    elif {str(path[0]) for path in inner} >= _ADAM:
        name = "adam_pax"
    elif named <= _SGD | {"step", VALUE}:
        name = "sgd"
    return Optimizer(name, tuple(heads), all(heads.values()))


def _mirrored_heads(
    state: Mapping[Path, Leaf], parameters: Mapping[Path, LazyArray], flavor: Flavor
) -> dict[str, bool]:
    """Map prefixes that mirror the parameters to whether all shapes match."""
    same: dict[str, bool] = {}
    for path, array in state.items():
        if not isinstance(array, LazyArray):
            continue
        if flavor.suffix and path[-1:] == flavor.suffix:
            path = path[: -len(flavor.suffix)]
        tail = next((k for k in range(1, len(path)) if path[k:] in parameters), None)
        if tail is not None:
            head = keystr(path[: tail - (path[tail - 1] == PARAMS)])
            same[head] = same.get(head, True) and array.shape == parameters[path[tail:]].shape
    return same


def view_of(tree: Tree) -> MaxTextView:
    """Return the view of a tree, which is cached with the tree."""
    return tree.once(_view)


def _view(tree: Tree) -> MaxTextView:
    # The view does not refer to the tree, which would otherwise keep itself alive.
    return MaxTextView(tree.leaves, MappingProxyType(tree.arrays), tree.metadata, roles(tree))


@dataclass(frozen=True, eq=False)
class MaxTextView:
    """A tree viewed as a MaxText checkpoint.

    Attributes:
        leaves, arrays, metadata: As for the tree.
        roles: The roles of the leaves.
    """

    leaves: Mapping[Path, Leaf] = field(repr=False)
    arrays: Mapping[Path, LazyArray] = field(repr=False)
    metadata: Metadata = field(repr=False)
    roles: Roles = field(repr=False)

    @cached_property
    def kind(self) -> Kind | None:
        """Return whether layers are stacked and training state exists; None if there are no layers."""
        if not (self.is_stacked or self.single_layers):
            return None
        if self.is_stacked:
            return "stacked-training" if self.optimizer else "stacked-inference"
        return "unstacked-training" if self.optimizer else "unstacked-inference"

    @cached_property
    def is_training(self) -> bool:
        """Return whether the tree has optimizer state, or an empty optimizer node.

        Plain gradient descent has an empty node, and so do trees that were saved with only their parameters.
        """
        has_location = any(any(map(container, path[:-1])) for path in self.leaves)
        return has_location or any(path in self.arrays for path in self.of_role("optimizer"))

    @property
    def is_maxtext(self) -> bool:
        """Return whether the tree has layers with MaxText's names."""
        return self.kind is not None

    @property
    def is_stacked(self) -> bool:
        """Return whether layers are stacked."""
        return bool(self.stacked_keys)

    @cached_property
    def flavor(self) -> Flavor:
        """Return how parameters are nested; `PLAIN` if no known framework wrapped them."""
        return flavor_of(self._parameter_arrays, self.roles.mirrored)

    def of_role(self, role: Role) -> Sequence[Path]:
        """Return the paths of the leaves with a role, in order."""
        return self._paths_by_role.get(role, ())

    @cached_property
    def _paths_by_role(self) -> Mapping[Role, Sequence[Path]]:
        result: dict[Role, list[Path]] = {}
        for path in self.leaves:
            result.setdefault(self.roles.of(path), []).append(path)
        return result

    @property
    def _parameter_arrays(self) -> list[Path]:
        """Return the paths of parameter arrays."""
        return [path for path in self.of_role("parameter") if path in self.arrays]

    @cached_property
    def homes(self) -> Mapping[Path, Path]:
        """Map the model paths of `parameters` to their paths in the tree."""
        return parameter_locations(self._parameter_arrays, self.flavor)

    @cached_property
    def parameters(self) -> Mapping[Path, LazyArray]:
        """Return the model's parameters by their paths without the flavor's wrapping.

        Optimizer state, step and random states are left out, and so are arrays outside the model: collections
        other than `params`, and models other than `base`. Variables that are stored with their layers on axis
        0 have them on the scan axis here.
        """
        if all(map(is_, self.homes, self.homes.values())) and len(self.homes) == len(self.arrays):
            return self.arrays
        arrays = {inner: self.arrays[tree_path] for inner, tree_path in self.homes.items()}
        recorded_axis = self.notes.first_axis
        misplaced = frozenset(
            inner
            for inner, tree_path in self.homes.items()
            if tree_path != self.flavor.wrapped(inner)
            or (recorded_axis and keystr(tree_path) in recorded_axis)
        )
        return MappingProxyType(
            arrays | dict(with_layers_on_scan_axis(arrays, misplaced, self.notes.scan_axis))
        )

    @cached_property
    def named(self) -> Mapping[str, LazyArray]:
        """Return the parameters by dotted names.

        Raises:
            FormatError: Two parameters have the same name.
        """
        return by_name(self.parameters)

    @cached_property
    def leading_layer_paths(self) -> frozenset[Path]:
        """Return the paths of parameters whose layers are on axis 0, unlike those of other parameters."""
        parameters = self.parameters
        return frozenset(
            tree_path
            for inner, tree_path in self.homes.items()
            if parameters[inner] is not self.arrays[tree_path]
        )

    @cached_property
    def notes(self) -> LayerNotes:
        """Return the notes on layers in the custom metadata."""
        return layer_notes(self.metadata.custom)

    @cached_property
    def decoder(self) -> Mapping[Path, LazyArray]:
        """Return the decoder's parameters by their paths below it."""
        return decoder_parameters(self.parameters)

    @cached_property
    def stacked_keys(self) -> Mapping[Path, int]:
        """Map keys below `decoder` that have stacks or remainders to the number of stacked axes."""
        return stacked_keys(self.decoder)

    @cached_property
    def single_layers(self) -> Mapping[str, list[int]]:
        """Return the sorted indices of single layers by name."""
        return single_layers(self.decoder)

    @cached_property
    def scan_axis(self) -> int | None:
        """Return the scan axis; None if no layers are stacked. See `is_axis_open`."""
        return scan_axis(self.decoder, self.notes.scan_axis)

    @property
    def is_axis_open(self) -> bool:
        """Return whether names, shapes and notes leave the scan axis ambiguous.

        `scan_axis` is then MaxText's default.
        """
        axes = scan_axes(self.decoder)
        return {*SCAN_AXES} <= {*axes} and self.notes.scan_axis not in axes

    @cached_property
    def stacks(self) -> tuple[LayerStack, ...]:
        """Return the layout of the layers, including single layers.

        Raises:
            FormatError: Positions of a cycle are missing.
            ShapeError: Arrays that belong together have different numbers of layers.
        """
        return layer_stacks(self.decoder, self.scan_axis or 0)

    @cached_property
    def layers(self) -> tuple[LayerGroup, ...]:
        """Return the groups of layers; empty if they are inconsistent."""
        try:
            return layer_groups(self.stacks)
        except CheckpointError:
            return ()

    @cached_property
    def optimizer(self) -> Optimizer | None:
        """Return the optimizer whose state the tree has, or None."""
        state = {path: self.leaves[path] for path in self.of_role("optimizer")}
        inner = [self.roles.below_optimizer(path) for path in state]
        return optimizer_of(state, inner, self.parameters, self.flavor)

    @property
    def contradictions(self) -> tuple[str, ...]:
        """Return the contradictions in the tree, one sentence each."""
        return tuple(self._contradictions()) if self.is_maxtext else ()

    def _contradictions(self) -> Iterator[str]:
        declared = self.metadata.custom.get(SCAN_LAYERS)
        if isinstance(declared, bool) and declared != self.is_stacked:
            are = "stacked" if self.is_stacked else "not stacked"
            yield f"custom metadata states {SCAN_LAYERS}={str(declared).lower()}, but layers are {are}"
        try:
            _ = self.stacks
        except CheckpointError as error:
            location = f" ({error.location})" if error.location else ""
            yield " ".join(error.raw.message.split()) + location


# Parameters of a model anywhere in a tree: path in the model -> path in the tree.
#
# Variables that the model learns in another way are in `nnx_aux` or in a collection of their class. They are
# parameters under their paths in the model, and always have their layers on axis 0.


def parameter_locations(parameters: Collection[Path], flavor: Flavor) -> dict[Path, Path]:
    """Map the model path of each array to its path in the tree.

    Args:
        parameters: Paths of all leaves of a tree with this role.
        flavor: The flavor of the tree.
    """
    if flavor.name is None:
        result = {path: path for path in parameters}
    else:
        result = {flavor.unwrapped(path): path for path in parameters if flavor.holds(path)}
    for path in parameters:
        inner = None if flavor.name and flavor.holds(path) else _variable_path(path, flavor)
        if inner is not None and result.get(inner, path) == path:
            result.pop(path, None)
            result[inner] = path
    return result


def _variable_path(path: Path, flavor: Flavor) -> Path | None:
    """Return the model path of a variable outside the parameters; None for other paths."""
    core = path[:-1] if path[-1:] == NNX.suffix else path
    if path[:2] == AUXILIARY:
        return core[2:] or None
    above = len(flavor.prefix) - 1
    collection = str(path[above]) if 0 <= above < len(path) - 1 else ""
    if flavor.prefix[above:] == (PARAMS,) and path[:above] == flavor.prefix[:above] != ():
        return core[above + 1 :] if collection.endswith(COLLECTION) else None
    return None


def with_layers_on_scan_axis(
    arrays: Mapping[Path, LazyArray], misplaced: Collection[Path], recorded_axis: int | None = None
) -> Iterator[tuple[Path, LazyArray]]:
    """Yield the arrays with layers on axis 0, with their layers moved to the scan axis.

    Args:
        arrays: All arrays of the model.
        misplaced: Paths of arrays that are known to have layers on axis 0; for others, the number of layers
            decides.
        recorded_axis: The recorded scan axis; see `ckpttools.maxtext.layers.scan_axis`.
    """
    decoder = decoder_parameters({path: item for path, item in arrays.items() if path not in misplaced})
    axis = scan_axis(decoder, recorded_axis)
    if not axis:
        return
    stacks = {
        key: (n, stacked_lengths(decoder, key, axis, n)) for key, n in stacked_keys(decoder).items() if n
    }
    for path, array in arrays.items():
        location = layer_key_slice(path, stacks)
        n, lengths = stacks[path[location]] if location else (0, ())
        first = array.shape[:n] == lengths != ()
        if first and (path in misplaced or array.shape[axis : axis + n] != lengths):
            yield path, _with_leading_axes_at(array, n, axis)


def _with_leading_axes_at(array: LazyArray, count: int, axis: int) -> LazyArray:
    """Move the first axes of an array to `axis`, or to the end."""
    rest = list(range(count, len(array.shape)))
    order = (*rest[:axis], *range(count), *rest[axis:])
    return transpose_axes(array, order)


@dataclass(frozen=True, slots=True)
class Flavor:
    """The keys before and after every parameter's path.

    Attributes:
        name: The name of the flavor; None if parameters are not wrapped.
        prefix: The keys before the model's own keys.
        suffix: The keys after the model's own keys.
    """

    name: FlavorName | None = None
    prefix: Path = ()
    suffix: Path = ()

    def wrapped(self, path: Path) -> Path:
        """Return the path of a parameter in a tree of this flavor."""
        return (*self.prefix, *path, *self.suffix)

    def holds(self, path: Path) -> bool:
        """Return whether this flavor wraps a path."""
        start, end = len(self.prefix), len(path) - len(self.suffix)
        # A wrapped path must have keys of its own; only an unwrapped path may be empty.
        return path[:start] == self.prefix and path[end:] == self.suffix and end >= start + bool(self.name)

    def unwrapped(self, path: Path) -> Path:
        """Invert `wrapped` for a path that this flavor `holds`."""
        return path[len(self.prefix) : len(path) - len(self.suffix)]


PLAIN = Flavor()
LINEN = Flavor("linen", (PARAMS, PARAMS))
NNX = Flavor("nnx", (), (VALUE,))


def flavor_of(paths: list[Path], mirrored: Path | None) -> Flavor:
    """Return the flavor of parameters; `PLAIN` if no known framework wrapped them.

    Args:
        paths: The paths of all parameters.
        mirrored: The prefix of the parameters that an optimizer mirrors, which decides if several sets are
            wrapped the same way.
    """
    for linen in (LINEN, Flavor("linen", (PARAMS,))):
        if any(map(linen.holds, paths)):
            return linen
    if based := [path for path in paths if path[:1] == (BASE,) and len(path) > 1]:
        return Flavor("nnx-rl", (BASE,), _suffix(based))
    model = Flavor("nnx", (MODEL,), NNX.suffix)
    result = next((item for item in (model, NNX) if paths and all(map(item.holds, paths))), PLAIN)
    key = mirrored[0] if mirrored else paths[0][0] if paths and paths[0] else ""
    is_nested = mirrored or (wraps(key) and all(path[:1] == (key,) for path in paths))
    return _nested_flavor(paths, key, result) if is_nested and result != model else result


def _nested_flavor(paths: list[Path], key: str | int, otherwise: Flavor) -> Flavor:
    """Return the flavor below a key, or `otherwise` if it has none."""
    below = [path for path in paths if str(path[0]) == str(key) and len(path) > 1]
    inner = flavor_of([path[1:] for path in below], None) if below else PLAIN
    return Flavor(inner.name, (*below[0][:1], *inner.prefix), inner.suffix) if inner.name else otherwise


def _suffix(paths: Iterable[Path]) -> Path:
    return NNX.suffix if all(path[1:] and path[-1:] == NNX.suffix for path in paths) else ()


def linen_state(parameters: Mapping[Path, LazyArray], step: int, custom: Mapping[str, object]) -> Tree:
    """Return parameters as the tree that MaxText's converter writes: with a step, without optimizer state."""
    leaves: dict[Path, Leaf] = {
        STEP: Constant((), DTYPES["int64"], step.to_bytes(8, "little", signed=True)),
        **{LINEN.wrapped(path): array for path, array in parameters.items()},
        OPTIMIZER: Empty("Dict"),
    }
    return Tree(leaves, Metadata(step=step, custom=custom, scalars=frozenset({STEP})))
