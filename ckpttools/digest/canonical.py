"""Common names for equal checkpoints: without the wrapping of a flavor, and with separate layers.

Equal arrays get equal names in scanned and unscanned MaxText checkpoints, of Linen and of NNX.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from ckpttools.array.lazy import LazyArray
from ckpttools.array.patterns import matches
from ckpttools.array.tree import Tree, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, ShapeError, UsageError
from ckpttools.core.message_terms import action
from ckpttools.core.text import sort_naturally
from ckpttools.digest.leaves import LeafKinds, nodes_of, texts_of
from ckpttools.maxtext.layers import LayerStack
from ckpttools.maxtext.stacked_layers import unstack_layers
from ckpttools.maxtext.versions import CARRIED_PREFIX
from ckpttools.maxtext.view import view_of
from ckpttools.roles.of_tree import Typed, roles_of

# Name of the step counter that a conversion to MaxText adds.
STEP = "step"

Naming = Callable[[Tree], Mapping[str, LazyArray]]
"""Names the arrays of a tree. Arrays that two trees have in common get the same names, shapes and dtypes."""


def parameters_among(arrays: Mapping[str, Typed]) -> frozenset[str]:
    """Return the names of the parameters, inferred from all arrays together.

    Arrays that a MaxText checkpoint carries for the reverse conversion are not its parameters.
    """
    known = roles_of({(name,): item for name, item in arrays.items()})
    return frozenset(
        name for name in arrays if known.of((name,)) == "parameter" and not name.startswith(CARRIED_PREFIX)
    )


def per_layer(tree: Tree) -> dict[str, LazyArray]:
    """Return all arrays, with the layers of a decoder separated.

    Optimizer state that mirrors the parameters is separated, too; other state is unchanged.

    Returns:
        Arrays by keys joined with "/", with parameters outside the flavor's wrapping.

    Raises:
        ShapeError, FormatError: The layers do not belong together, or two arrays would get the same name.
    """
    try:
        return as_stored(_unstack(tree))
    except (FormatError, ShapeError) as error:
        raise error.at(
            hint=f"{action('hash', per_layer=False)} hashes stacked layers in their stored form"
        ) from error


def drop_step(arrays: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    """Return arrays under MaxText's names without the step that a conversion adds.

    The step of a training state is kept.
    """
    known = roles_of({(name,): array for name, array in arrays.items()})
    is_training = any(known.of((name,)) == "optimizer" for name in arrays)
    return {name: array for name, array in arrays.items() if is_training or name != STEP}


def with_carried(tree: Tree, layers: bool) -> dict[str, LazyArray]:
    """Return all arrays by stored name, including those that MaxText carries only for the reverse conversion.

    Args:
        tree: Any checkpoint.
        layers: Whether to split stacked layers, as in `per_layer`.
    """
    from ckpttools.maxtext.model_files import carried_stored_arrays

    return {**carried_stored_arrays(tree), **(per_layer if layers else as_stored)(tree)}


def as_stored(tree: Tree) -> dict[str, LazyArray]:
    """Return all arrays under their stored names; otherwise like `per_layer`."""
    known = {tree_path: inner for inner, tree_path in view_of(tree).homes.items()}
    result: dict[str, LazyArray] = {}
    for path, array in tree.arrays.items():
        name = keystr(known.get(path, path))
        if name in result:
            raise FormatError("two arrays would get one name", location=name)
        result[name] = array
    return result


def _unstack(tree: Tree) -> Tree:
    view = view_of(tree)
    if not view.is_stacked:
        return tree
    # If there are fewer layers than a cycle has, no layers are stacked and there is no scan axis.
    axis = view.scan_axis or 0
    try:
        return unstack_layers(tree, view.stacks, axis)
    except ShapeError:
        return _unstack_parameters(tree, view.stacks, axis)


def _unstack_parameters(tree: Tree, stacks: tuple[LayerStack, ...], axis: int) -> Tree:
    state = {path: tree[path] for path in view_of(tree).of_role("optimizer")}
    rest = Tree({path: leaf for path, leaf in tree.items() if path not in state}, tree.metadata)
    return Tree({**unstack_layers(rest, stacks, axis), **state}, tree.metadata)


@dataclass(frozen=True, slots=True)
class Selection:
    """The selected arrays of a tree, and their names.

    Attributes:
        pattern: Shell pattern of names.
        layers: Whether to split stacked layers.
        parameters: Whether to select only parameters, without optimizer state, step and random states.
        naming: Names the arrays; None for `per_layer` or `as_stored`, depending on `layers`.
    """

    pattern: str = "*"
    layers: bool = True
    parameters: bool = False
    naming: Naming | None = None

    def arrays(self, tree: Tree) -> dict[str, LazyArray]:
        """Return the selected arrays, in the order of their names.

        Raises:
            UsageError: No array is selected.
            FormatError: The tree has no arrays.
            CheckpointError: The error of `naming`.
        """
        naming = self.naming or (per_layer if self.layers else as_stored)
        return self.chosen(naming(tree), tree.metadata.location)

    def chosen(self, named: Mapping[str, LazyArray], location: str) -> dict[str, LazyArray]:
        """Select arrays from already named ones, in the order of their names.

        Raises:
            UsageError: No array is selected.
            FormatError: The tree has no arrays.
        """
        names = self.names(named)
        selected = {name: named[name] for name in sort_naturally(named) if name in names}
        if not selected:
            raise (UsageError if named else FormatError)(
                "no array is selected",
                location=location or None,
                got=f"{len(named)} arrays",
                expected=f"{'parameters' if self.parameters else 'names'} that match {self.pattern!r}",
                hint=f"{action('hash')} prints the names",
            )
        return selected

    def texts(self, tree: Tree) -> dict[str, str]:
        """Return the selected string leaves by name; none if only parameters are selected.

        Raises:
            FormatError: Two strings have the same name.
        """
        return {} if self.parameters else self._matching(texts_of(tree))

    def nodes(self, tree: Tree) -> LeafKinds | None:
        """Return the selected empty nodes and kinds of arrays; None if only parameters are selected.

        Raises:
            FormatError: Two leaves have the same name.
        """
        result = None if self.parameters else nodes_of(tree)
        return None if result is None else replace(result, kinds=self._matching(result.kinds))

    def _matching(self, leaves: Mapping[str, str]) -> dict[str, str]:
        is_all = self.pattern == "*"
        return {name: leaf for name, leaf in leaves.items() if is_all or matches(name, self.pattern)}

    def names(self, named: Mapping[str, Typed]) -> Collection[str]:
        """Return the names of the selected arrays."""
        among = parameters_among(named) if self.parameters else named
        return among if self.pattern == "*" else {name for name in among if matches(name, self.pattern)}

    def nbytes(self, tree: Tree) -> int:
        """Return the total size of the selected arrays in bytes; raises the errors of `arrays`."""
        return sum(array.nbytes for array in self.arrays(tree).values())
