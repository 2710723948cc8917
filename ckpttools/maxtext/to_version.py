"""Convert a checkpoint to the layout of another MaxText version without reading values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckpttools.array.tree import Path, Tree, keystr, refuse_collisions
from ckpttools.core.argument_checks import validate_fields
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, ShapeError, UsageError
from ckpttools.core.message_terms import action, option, option_names
from ckpttools.core.notes import Notes
from ckpttools.core.text import array_count
from ckpttools.maxtext.layers import first_axis_names, split_number, with_layer_notes
from ckpttools.maxtext.native_fp8 import scale_pairs
from ckpttools.maxtext.scan_axis import known_scan_axis
from ckpttools.maxtext.stacking import StackAsModel, StackLayers, UnstackLayers
from ckpttools.maxtext.variables import collection_moves, is_variable, misplaced_variables, refuse_moments
from ckpttools.maxtext.versions import (
    AUXILIARY,
    GLOBAL,
    LAYER,
    LAYERS,
    LOCAL,
    NEWEST,
    VERSIONS,
    Version,
    version_called,
)
from ckpttools.maxtext.view import view_of
from ckpttools.transforms.base import Transform, Transformed


@validate_fields
@dataclass(frozen=True, slots=True)
class ForVersion:
    """A transform to the layout of a MaxText version, including state that mirrors parameters.

    Variables in separate collections are moved to the parameters, where every loader looks for them. In
    training states, variables that the version does not train as parameters go to `nnx_aux`, and the others
    to the parameters. Layers stay stacked or unstacked, on their current axis.

    Attributes:
        maxtext: The name of the version in `ckpttools.maxtext.versions.VERSIONS`.
        family: The family of the model, or a file that describes one; None infers it.
    """

    maxtext: str = NEWEST
    family: str | None = None

    def __call__(self, tree: Tree) -> Transformed:
        """Return the tree in the version's layout.

        Raises:
            FormatError: The tree is not a MaxText checkpoint, the layout of its layers is unknown, an
                optimizer has state that the version does not support, or the version does not support
                quantized weights.
            UsageError: The tree already has the version's layout.
            UnknownNameError: The version or the family does not exist.
        """
        version = version_called(self.maxtext)
        if not view_of(tree).is_maxtext:
            raise FormatError(
                "this is not a MaxText checkpoint",
                location=tree.metadata.location or None,
                expected="its layers",
            )
        if scale_pairs(view_of(tree).named) and not version.has_fp8:
            raise FormatError(
                f"MaxText {version.name} has no quantized weights",
                location=tree.metadata.location or None,
                got="FP8 with scales",
                hint="dequantize the checkpoint first: "
                + action("cast", tree.metadata.location or "SRC", "DST", dtype="bfloat16"),
            )
        result, trained = _with_trained_variables(_with_collected_variables(tree), version)
        if view_of(result).is_stacked:
            result = self._restack(result, version)
        result = _with_untrained_variables(result, version)
        if result.keys() == tree.keys() and result.arrays == tree.arrays:
            raise UsageError(
                f"this checkpoint already has the layout of MaxText {version.name}",
                location=tree.metadata.location or None,
                hint="there is nothing to do",
            )
        return Transformed(result, Notes(remarks=tuple(_missing_moments_remarks(trained, version))))

    def _restack(self, tree: Tree, version: Version) -> Tree:
        view = view_of(tree)
        axis = _axis(tree)
        single = UnstackLayers(axis)(tree).tree
        restack: Transform = StackLayers(axis, maxtext=version.name)
        if any(map(_is_version_specific, view.stacked_keys)):
            restack = StackAsModel(axis, family=self.family, maxtext=version.name)
        try:
            stacked = restack(single).tree
        except (FormatError, ShapeError, UsageError) as error:
            if "cycle" not in option_names(error.raw.hint or ""):
                raise
            # The user cannot choose the stacking here, only the family of the model.
            hint = f"set {option('family', 'NAME')} (see {action('families')})"
            raise error.at(hint=hint) from error
        is_moved = {stack.key for stack in view.stacks} != {stack.key for stack in view_of(stacked).stacks}
        if not is_moved and not any(misplaced_variables(view, version)):
            return tree
        refuse_moments(tree, version)
        return stacked


def _axis(tree: Tree) -> int:
    """Return the scan axis; raises the errors of `known_scan_axis`."""
    try:
        return known_scan_axis(view_of(tree)) or 0
    except FormatError as error:
        unstack_action = action("unstack", "SRC", "DST", scan_axis="N")
        raise error.at(
            hint=f"unstack them first with {unstack_action}, which records the axis for {action('stack')}"
        ) from error


def _is_version_specific(key: Path) -> bool:
    """Return whether versions may stack these layers differently, judged by the name below `layers`."""
    named = split_number(key[1]) if len(key) > 1 else None
    is_position = named is not None and named[0] == LAYER
    return key[0] == LAYERS and (is_position or key[1:] in ((LOCAL,), (GLOBAL,)))


def _with_collected_variables(tree: Tree) -> Tree:
    """Return a tree with the variables of collections among the parameters.

    Raises:
        FormatError: Two arrays would have the same path.
    """
    view = view_of(tree)
    moved = collection_moves(view)
    if not moved:
        return tree
    paths = {path: moved.get(path, path) for path in tree}
    refuse_collisions(paths.values())
    first = first_axis_names(moved[path] for path in view.leading_layer_paths if path in moved)
    result = Tree({paths[path]: leaf for path, leaf in tree.items()}, tree.metadata)
    return with_layer_notes(result, replace(view.notes, first_axis=view.notes.first_axis | first))


def _with_trained_variables(tree: Tree, version: Version) -> tuple[Tree, list[Path]]:
    """Move variables in `nnx_aux` that a version trains to the parameters.

    Raises:
        FormatError: Two arrays would have the same path.
    """
    view = view_of(tree)
    known = {
        inner: tree_path
        for inner, tree_path in view.homes.items()
        if tree_path[:2] == AUXILIARY
        and any(is_variable(inner, item) for item in VERSIONS.values())
        and not is_variable(inner, version)
    }
    if not known:
        return tree, []
    moved = {tree_path: view.flavor.wrapped(inner) for inner, tree_path in known.items()}
    refuse_collisions([*tree, *moved.values()])
    on_axis = {tree_path: view.parameters[inner] for inner, tree_path in known.items()}
    leaves = {moved.get(path, path): on_axis.get(path, leaf) for path, leaf in tree.items()}
    return Tree(leaves, tree.metadata), list(moved.values())


def _with_untrained_variables(tree: Tree, version: Version) -> Tree:
    """Move variables that a version does not train to `nnx_aux` in a training state.

    Raises:
        FormatError: An optimizer has state of such variables, or two arrays would have the same path.
    """
    view = view_of(tree)
    moved = {
        tree_path: (*AUXILIARY, *inner)
        for inner, tree_path in view.homes.items()
        if view.optimizer and tree_path == view.flavor.wrapped(inner) and is_variable(inner, version)
    }
    if not moved:
        return tree
    refuse_moments(tree, version)
    refuse_collisions([*tree, *moved.values()])
    result = Tree({moved.get(path, path): leaf for path, leaf in tree.items()}, tree.metadata)
    # All arrays there have their layers on axis 0.
    return with_layer_notes(
        result, view.notes.with_first_axis(view.notes.first_axis - first_axis_names(moved))
    )


def _missing_moments_remarks(trained: list[Path], version: Version) -> Iterator[str]:
    if trained:
        yield (
            f"the optimizer has no state for {array_count(trained)} that MaxText {version.name} trains as "
            f"parameters, such as {keystr(trained[0])}: it can load the parameters, but not resume training"
        )
