"""Notes in a tree's metadata on how layers are or were stacked, which the arrays do not show.

The notes are one key of the custom metadata, which MaxText and Orbax pass on unread:

    {"ckpttools": {
        "stacks": {"layers/layers_0": {"layers": [0, 6]}, "layers_remainder/layers_0": {"layers": 12}},
        "scan_axis": 1,
        "first_axis": ["params/params/decoder/moe_layers/…/gate/bias"]}}

`stacks` describes unstacked layers: the layers of each former stack, in nested lists as long as the stacked
axes. `scan_axis` is the axis on which layers were stacked; for stacked layers, it is the current axis if
shapes leave it open. `first_axis` names arrays with layers on axis 0 while other arrays have another axis.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ckpttools.array.tree import Path, Tree, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.region import Shape
from ckpttools.maxtext.layers import LayerStack

KEY = "ckpttools"
_STACKS, _AXIS, _FIRST = "stacks", "scan_axis", "first_axis"


@dataclass(frozen=True, slots=True)
class LayerNotes:
    """Notes on the layers of a tree.

    Attributes:
        stacks: The former stacks; empty if unknown.
        scan_axis: The current or former axis of the layers; None if unknown.
        first_axis: Names of arrays with layers on axis 0, with keys joined by "/".
    """

    stacks: tuple[LayerStack, ...] = ()
    scan_axis: int | None = None
    first_axis: frozenset[str] = frozenset()

    def with_first_axis(self, names: frozenset[str]) -> LayerNotes:
        """Return the notes with other names of arrays that have layers on axis 0."""
        return replace(self, first_axis=names)


def layer_notes(custom: Mapping[str, object]) -> LayerNotes:
    """Return the notes in custom metadata; empty notes if there are none."""
    note = custom.get(KEY)
    if not isinstance(note, Mapping):
        return LayerNotes()
    axis, first = note.get(_AXIS), note.get(_FIRST)
    names = [name for name in first if isinstance(name, str)] if isinstance(first, Sequence) else []
    return LayerNotes(_stacks(note.get(_STACKS)), axis if type(axis) is int else None, frozenset(names))


def with_layer_notes(tree: Tree, notes: LayerNotes) -> Tree:
    """Replace the notes of a tree."""
    own = tree.metadata.custom.get(KEY)
    kept = (
        {k: v for k, v in own.items() if k not in (_STACKS, _AXIS, _FIRST)}
        if isinstance(own, Mapping)
        else {}
    )
    stacks = {keystr(stack.key): {stack.name: _nested(stack.numbers, stack.shape)} for stack in notes.stacks}
    declared = {_STACKS: stacks, _AXIS: notes.scan_axis, _FIRST: sorted(notes.first_axis)}
    note = kept | {key: value for key, value in declared.items() if value not in (None, {}, [])}
    others = {key: value for key, value in tree.metadata.custom.items() if key != KEY}
    return tree.with_metadata(custom=others | ({KEY: note} if note else {}))


def first_axis_names(paths: Iterable[Path]) -> frozenset[str]:
    """Return the names for `LayerNotes.first_axis`."""
    return frozenset(map(keystr, paths))


def notes_match(notes: LayerNotes, layers: Mapping[str, Collection[int]]) -> bool:
    """Return whether the noted stacks consist of existing layers, and cover all but the first ones.

    Args:
        notes: Notes with stacks.
        layers: Names of layers -> their indices.
    """
    noted: dict[str, list[int]] = {}
    for stack in notes.stacks:
        noted.setdefault(stack.name, []).extend(stack.numbers)
    # Some models have single layers before the stacks.
    return noted.keys() == layers.keys() and all(
        sorted(numbers) == sorted(layers[name])[-len(numbers) :]
        and sorted(layers[name])[: -len(numbers)] == list(range(len(layers[name]) - len(numbers)))
        for name, numbers in noted.items()
    )


def _nested(numbers: Sequence[int], shape: Shape) -> Any:
    if not shape:
        return numbers[0]
    step = prod(shape[1:])
    return [_nested(numbers[k * step : (k + 1) * step], shape[1:]) for k in range(shape[0])]


def _stacks(note: object) -> tuple[LayerStack, ...]:
    if not isinstance(note, Mapping):
        return ()
    built = [_stack(str(key), item) for key, item in note.items()]
    result = tuple(item for item in built if item is not None)
    return result if len(result) == len(built) else ()


def _stack(key: str, note: object) -> LayerStack | None:
    if not isinstance(note, Mapping) or len(note) != 1:
        return None
    ((name, nested),) = note.items()
    shape = _shape(nested)
    numbers = None if shape is None else tuple(_flat_numbers(nested))
    keys: Path = tuple(key.split("/"))
    return None if shape is None or not numbers else LayerStack(keys, str(name), shape, numbers)


def _shape(nested: object) -> Shape | None:
    """Return the shape of nested lists of numbers; None if the lists are ragged."""
    if type(nested) is int:
        return () if nested >= 0 else None
    if not isinstance(nested, Sequence) or isinstance(nested, str) or not nested:
        return None
    shapes = {_shape(item) for item in nested}
    (inner,) = shapes if len(shapes) == 1 else (None,)
    return None if inner is None else (len(nested), *inner)


def _flat_numbers(nested: Any) -> Iterable[int]:
    if isinstance(nested, int):
        return [nested]
    return [number for item in nested for number in _flat_numbers(item)]
