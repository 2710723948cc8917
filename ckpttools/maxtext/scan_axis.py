"""Find the scan axis of parameters from names, shapes, notes and the user's options.

Shapes leave the axis open if all lengths equal the number of layers, or if a tree has few arrays of a model.
In these cases ckpttools writes a note (`ckpttools.maxtext.layers`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Tree, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError
from ckpttools.core.message_terms import option
from ckpttools.mapping.keys import Key
from ckpttools.maxtext.layers import scan_axes, with_layer_notes
from ckpttools.maxtext.versions import DECODER, SCAN_AXIS
from ckpttools.maxtext.view import MaxTextView, view_of
from ckpttools.model_families.family import Family
from ckpttools.transforms.base import Transform, Transformed


def stored_scan_axis(family: Family, arrays: Mapping[str, LazyArray], requested: int | None) -> int | None:
    """Return the scan axis; None if each layer has its own arrays."""
    stacked, single = (
        sum(key.first() in arrays for key in _maxtext_keys(family, axis)) for axis in (SCAN_AXIS, None)
    )
    if stacked <= single:
        return None
    if requested is not None:
        return requested
    result = view_of(Tree({tuple(key.split(".")): array for key, array in arrays.items()})).scan_axis
    return SCAN_AXIS if result is None else result


def _maxtext_keys(family: Family, axis: int | None) -> set[Key]:
    """Return the left keys of rows that both layouts have, with layers stacked on an axis or not."""
    of_layers = (row for group in family.layers if group.scanned for row in group.all_rows(axis))
    return {row.left.key for row in (*family.rows, *of_layers)}


def known_scan_axis(view: MaxTextView) -> int | None:
    """Return the scan axis from shapes or notes; None if no layers are stacked.

    Raises:
        FormatError: Neither shapes nor notes determine the axis.
    """
    if view.is_axis_open:
        stacks = [keystr((DECODER, *key)) for key in view.stacked_keys]
        raise FormatError(
            "array shapes do not show the axis on which layers are stacked",
            location=view.metadata.location or None,
            got=f"arrays below {stacks[0]} that may have them on axis 0 or 1",
            expected=f"the axis: {option('scan_axis', 1)} if MaxText wrote it with its own param_scan_axis",
            hint=f"set {option('scan_axis', 1)} or {option('scan_axis', 0)}",
        )
    return view.scan_axis


def with_scan_axis(tree: Tree, axis: int | None) -> Tree:
    """Add a note of the scan axis to a tree whose shapes do not show it.

    Args:
        tree: A tree with stacked layers.
        axis: The axis; None leaves the tree unchanged.
    """
    if axis is None:
        return tree
    view = view_of(tree)
    recorded = None if scan_axes(view.decoder) == (axis,) else axis
    is_noted = recorded == view.notes.scan_axis
    return tree if is_noted else with_layer_notes(tree, replace(view.notes, scan_axis=recorded))


def scan_axis_remarks(tree: Tree) -> tuple[str, ...]:
    """Return a remark if the scan axis had to be assumed."""
    view = view_of(tree)
    if not view.is_axis_open:
        return ()
    return (
        f"array shapes do not show the axis on which layers are stacked; assumed {view.scan_axis}, "
        f"MaxText's default",
    )


@dataclass(frozen=True)
class KeepScanAxis:
    """A transform that notes the scan axis if the remaining arrays no longer show it.

    Attributes:
        transform: A transform that does not change array axes.
    """

    transform: Transform

    def __call__(self, tree: Tree) -> Transformed:
        """Apply the transform, and note the scan axis if it has become ambiguous."""
        result = self.transform(tree)
        before, after = view_of(tree), view_of(result.tree)
        is_lost = after.is_axis_open and not before.is_axis_open
        return replace(result, tree=with_scan_axis(result.tree, before.scan_axis)) if is_lost else result
