"""Variables with a separate class, such as router biases, among parameters stacked on the scan axis."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from ckpttools.array.lazy import LazyArray
from ckpttools.array.relayout import transpose_axes
from ckpttools.array.tree import Path, Tree, keystr
from ckpttools.core.errors import FormatError, listing
from ckpttools.core.message_terms import action
from ckpttools.maxtext.layers import first_axis_names, layer_key_slice, with_layer_notes
from ckpttools.maxtext.versions import COLLECTION, GLOBAL, LAYERS, LOCAL, NEWEST, VERSIONS, Version
from ckpttools.maxtext.view import MaxTextView, view_of


def is_variable(path: Path, version: Version) -> bool:
    """Return whether a version stores this parameter as a variable of its own class."""
    return any(path[-len(end) :] == end for end in version.variables)


def stacked_variables(view: MaxTextView, version: Version) -> Iterator[tuple[Path, int, int]]:
    """Yield stacked variables: path in the model, scan axis of the array, and number of axes."""
    stacked = {key: axes for key, axes in view.stacked_keys.items() if axes}
    for path, array in view.parameters.items() if stacked else ():
        location = layer_key_slice(path, stacked) if is_variable(path, version) else None
        if location is not None:
            axes = stacked[path[location]]
            yield path, min(view.scan_axis or 0, len(array.shape) - axes), axes


def with_variable_axes(tree: Tree, version: Version) -> Tree:
    """Return a tree whose variables have their layers on axis 0, as a version stores them.

    The axis is recorded, because shapes do not show it if there are as many layers as experts.
    """
    view = view_of(tree)
    moved: dict[Path, LazyArray] = {}
    for path, axis, count in stacked_variables(view, version):
        if axis:
            moved[view.homes[path]] = _with_leading_axes(view.parameters[path], axis, count)
    if not moved:
        return tree
    notes = view.notes
    result = Tree({**tree.leaves, **moved}, tree.metadata)
    return with_layer_notes(result, notes.with_first_axis(notes.first_axis | first_axis_names(moved)))


def _with_leading_axes(array: LazyArray, axis: int, count: int) -> LazyArray:
    """Move the axes from `axis` on to the front."""
    ranks = range(len(array.shape))
    own = ranks[axis : axis + count]
    order = (*own, *(rank for rank in ranks if rank not in own))
    return transpose_axes(array, order)


def first_axis_of(paths: Iterable[Path], view: MaxTextView, version: Version) -> frozenset[str]:
    """Return the names of those paths that are variables among the parameters."""
    flavor = view.flavor
    flavored = (path for path in paths if flavor.holds(path))
    return first_axis_names(path for path in flavored if is_variable(flavor.unwrapped(path), version))


def version_of_state(view: MaxTextView) -> Version:
    """Return the newest version that supports the optimizer's state, or else the newest version."""
    matching = (version for version in VERSIONS.values() if not _variable_moments(view, version))
    return next(matching, VERSIONS[NEWEST])


def refuse_moments(tree: Tree, version: Version) -> None:
    """Raise an error if the optimizer has state of parameters that become variables.

    Raises:
        FormatError: Such state exists. The message lists it.
    """
    moments = _variable_moments(view_of(tree), version)
    if moments:
        raise FormatError(
            f"the optimizer holds state of parameters that MaxText {version.name} does not train with it"
            + listing([*map(keystr, moments)]),
            location=tree.metadata.location or None,
            hint=f"first remove the optimizer state with {action('strip_optimizer')}",
        )


def _variable_moments(view: MaxTextView, version: Version) -> list[Path]:
    """Return the paths of optimizer state that belongs to variables of a version."""
    end = len(view.flavor.suffix)
    state = view.of_role("optimizer") if version.variables else ()
    return [path for path in state if is_variable(path[:-end] if end else path, version)]


def collection_moves(view: MaxTextView) -> Mapping[Path, Path]:
    """Map variables in collections of their class to paths among the parameters."""
    flavor = view.flavor
    return {
        tree_path: flavor.wrapped(inner)
        for inner, tree_path in view.homes.items()
        if flavor.name == "linen"
        and tree_path != flavor.wrapped(inner)
        and _is_in_collection(tree_path, flavor.prefix)
    }


def _is_in_collection(tree_path: Path, prefix: Path) -> bool:
    above = len(prefix) - 1
    return tree_path[:above] == prefix[:above] and str(tree_path[above]).endswith(COLLECTION)


def matching_versions(view: MaxTextView, families: Collection[str]) -> tuple[str, ...]:
    """Return the MaxText versions that have the layout of a tree, the newest first.

    Args:
        view: The view of the tree.
        families: Names of the families that the tree may belong to.
    """
    matching = (version for version in VERSIONS.values() if _matches_version(view, families, version))
    return tuple(item.name for item in matching) if view.is_maxtext else ()


def _matches_version(view: MaxTextView, families: Collection[str], version: Version) -> bool:
    by_kind = any(key[:1] == (LAYERS,) and key[-1] in (LOCAL, GLOBAL) for key in view.stacked_keys)
    by_position = any(key[:1] == (LAYERS,) and len(key) > 1 for key in view.stacked_keys) and not by_kind
    expected = {name in version.stacked_by_kind for name in families}
    if (by_kind or by_position) and expected and by_kind not in expected:
        return False
    has_collections = any(tree_path != view.flavor.wrapped(inner) for inner, tree_path in view.homes.items())
    return (version.learned_variables or not has_collections) and not any(misplaced_variables(view, version))


def misplaced_variables(view: MaxTextView, version: Version) -> Iterator[Path]:
    """Yield the model paths of variables whose layers are on another axis than in a version."""
    all_variables = (variable for other in VERSIONS.values() for variable in stacked_variables(view, other))
    for path in dict.fromkeys(path for path, axis, _ in all_variables if axis):
        tree_path = view.homes[path]
        is_first = tree_path in view.leading_layer_paths
        if tree_path == view.flavor.wrapped(path) and is_first != is_variable(path, version):
            yield path
