"""One set of names for equal checkpoints: without a flavour's wrapping, layers one by one.

Scanned and unscanned MaxText checkpoints, Linen's and NNX's, get the same names for the same arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from ckpttools.array.lazy import LazyArray
from ckpttools.array.patterns import matches
from ckpttools.array.tree import Text, Tree, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, ShapeError, UsageError
from ckpttools.core.message_terms import action
from ckpttools.core.text import sort_naturally
from ckpttools.digest.leaves import LeafKinds, nodes_of
from ckpttools.maxtext.layers import LayerStack
from ckpttools.maxtext.layout import CARRIED_PREFIX
from ckpttools.maxtext.stacked_layers import unstack_layers
from ckpttools.maxtext.view import view_of
from ckpttools.roles.of_tree import Typed, roles_of

# The counter that a conversion to MaxText writes.
STEP = "step"

Naming = Callable[[Tree], Mapping[str, LazyArray]]
"""Names the arrays of a tree. Arrays that trees have in common get the same names, shapes and dtypes."""


def parameters_among(arrays: Mapping[str, Typed]) -> frozenset[str]:
    """Return the names of the parameters, inferred from all arrays together.

    Arrays that a MaxText checkpoint carries for the reverse conversion are not its parameters.
    """
    known = roles_of({(name,): item for name, item in arrays.items()})
    return frozenset(
        name for name in arrays if known.of((name,)) == "parameter" and not name.startswith(CARRIED_PREFIX)
    )


def per_layer(tree: Tree) -> dict[str, LazyArray]:
    """Return all arrays, with a decoder's layers one by one.

    Optimizer state that mirrors the parameters is split, too; other state is unchanged.

    Returns:
        Arrays by keys joined with "/"; parameters without the flavor's wrapping.

    Raises:
        ShapeError, FormatError: the layers do not belong together, or two arrays would get one name.
    """
    try:
        return as_stored(_unstacked(tree))
    except (FormatError, ShapeError) as error:
        raise error.at(
            hint=f"{action('hash', per_layer=False)} hashes stacked layers in their stored form"
        ) from error


def without_step(arrays: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    """Return arrays in MaxText's names without the step that a conversion writes; a training's step stays."""
    known = roles_of({(name,): array for name, array in arrays.items()})
    is_training = any(known.of((name,)) == "optimizer" for name in arrays)
    return {name: array for name, array in arrays.items() if is_training or name != STEP}


def with_carried(tree: Tree, layers: bool) -> dict[str, LazyArray]:
    """Return all arrays by stored name, with those that MaxText carries only for the reverse conversion.

    Args:
        tree: Any checkpoint.
        layers: whether to split stacked layers, as `per_layer` does.
    """
    from ckpttools.maxtext.model_files import carried_as_stored

    return {**carried_as_stored(tree), **(per_layer if layers else as_stored)(tree)}


def as_stored(tree: Tree) -> dict[str, LazyArray]:
    """Return all arrays unchanged; otherwise like `per_layer`."""
    known = {home: inner for inner, home in view_of(tree).homes.items()}
    built: dict[str, LazyArray] = {}
    for path, array in tree.arrays.items():
        name = keystr(known.get(path, path))
        if name in built:
            raise FormatError("two arrays would get one name", location=name)
        built[name] = array
    return built


def _unstacked(tree: Tree) -> Tree:
    view = view_of(tree)
    if not view.is_stacked:
        return tree
    # Of fewer layers than a cycle has none is on any axis.
    axis = view.scan_axis or 0
    try:
        return unstack_layers(tree, view.stacks, axis)
    except ShapeError:
        return _unstacked_but_the_optimizer(tree, view.stacks, axis)


def _unstacked_but_the_optimizer(tree: Tree, stacks: tuple[LayerStack, ...], axis: int) -> Tree:
    state = {path: tree[path] for path in view_of(tree).of_role("optimizer")}
    rest = Tree({path: leaf for path, leaf in tree.items() if path not in state}, tree.metadata)
    return Tree({**unstack_layers(rest, stacks, axis), **state}, tree.metadata)


@dataclass(frozen=True, slots=True)
class Selection:
    """The arrays of a tree to use, and their names.

    Attributes:
        pattern: shell pattern of names.
        layers: whether to split stacked layers.
        parameters: these alone, without optimizer state, step and random states.
        naming: names the arrays; None for `per_layer` or `as_stored`, depending on `layers`.
    """

    pattern: str = "*"
    layers: bool = True
    parameters: bool = False
    naming: Naming | None = None

    def arrays(self, tree: Tree) -> dict[str, LazyArray]:
        """Return the arrays by name, in the order of names.

        Raises:
            UsageError: no array is selected.
            FormatError: the tree has no arrays.
            CheckpointError: as `naming`.
        """
        naming = self.naming or (per_layer if self.layers else as_stored)
        return self.chosen(naming(tree), tree.metadata.location)

    def chosen(self, named: Mapping[str, LazyArray], location: str) -> dict[str, LazyArray]:
        """Return the selected ones of named arrays, in the order of names.

        Raises:
            UsageError: no array is selected.
            FormatError: the tree has no arrays.
        """
        meant = self.names(named)
        chosen = {name: named[name] for name in sort_naturally(named) if name in meant}
        if not chosen:
            raise (UsageError if named else FormatError)(
                "no array is selected",
                location=location or None,
                got=f"{len(named)} arrays",
                expected=f"{'parameters' if self.parameters else 'names'} that match {self.pattern!r}",
                hint=f"names are those that {action('hash')} prints",
            )
        return chosen

    def texts(self, tree: Tree) -> dict[str, str]:
        """Return the selected leaves that are strings, by name; none if only parameters are selected."""
        texts = {keystr(path): leaf.value for path, leaf in tree.items() if isinstance(leaf, Text)}
        return {
            name: text
            for name, text in texts.items()
            if not self.parameters and (self.pattern == "*" or matches(name, self.pattern))
        }

    def nodes(self, tree: Tree) -> LeafKinds | None:
        """Return empty nodes and kinds of arrays, if all of a tree is selected under its own names."""
        return None if self.parameters or self.pattern != "*" else nodes_of(tree)

    def names(self, named: Mapping[str, Typed]) -> Collection[str]:
        """Return the names of the selected arrays."""
        among = parameters_among(named) if self.parameters else named
        return among if self.pattern == "*" else {name for name in among if matches(name, self.pattern)}

    def nbytes(self, tree: Tree) -> int:
        """Return bytes of these arrays; errors as `arrays`."""
        return sum(array.nbytes for array in self.arrays(tree).values())
