"""Find the layers of a MaxText decoder: single layers, or one of MaxText's stacked layouts.

    layers_{0..31}                                single layers
    layers; dense_layers, moe_layers              one stack each
    layers/layers_{0..5}, layers_remainder/…   a cycle: a stack for each position, and single remaining layers
    scanned_blocks/{local_layers,global_layer}    a cycle: local layers have axes for blocks and for positions

A `LayerStack` records which layers the arrays below a key contain, so one layout serves both directions.

Notes on how layers are stacked are one key of the custom metadata, which MaxText and Orbax pass on unread:

    {"ckpttools": {
        "stacks": {"layers/layers_0": {"layers": [0, 6]}, "layers_remainder/layers_0": {"layers": 12}},
        "scan_axis": 1,
        "first_axis": ["params/params/decoder/moe_layers/…/gate/bias"]}}

`stacks` describes unstacked layers: the layers of each former stack, in nested lists as long as the
stacked axes. `scan_axis` is the axis on which layers were stacked; for stacked layers, it is the current
axis if shapes leave it open. `first_axis` names arrays with layers on axis 0 while other arrays have
another axis.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any, Literal

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Path, Tree, dotted, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, ShapeError, listing
from ckpttools.core.message_terms import option
from ckpttools.core.region import Shape
from ckpttools.maxtext.versions import (
    BLOCKS,
    DECODER,
    FINAL_NORM,
    GLOBAL,
    LAYER,
    LAYERS,
    LOCAL,
    REMAINDER,
    SCAN_AXIS,
)
from ckpttools.quantized.scales import has_scale_word

# A layer's number in models of other frameworks: model.layers.3, transformer.h.3, encoder/block_3.
_NUMBERED = re.compile(
    r"(?P<before>(?:^|[./])(?:[A-Za-z_]*(?:layer|block)s?|h))(?P<joint>[./_])(?P<number>\d+)(?=[./]|$)"
)


@dataclass(frozen=True, slots=True)
class LayerStack:
    """A key below `decoder`, and the layers in the arrays below that key.

    Attributes:
        key: A key such as ("layers",) or ("layers", "layers_3").
        name: The name of single layers, before their index: `layers` in layers_7.
        shape: Lengths of the stacked axes, outermost first; () for a single layer.
        numbers: The layer indices, in C order over `shape`.
    """

    key: Path
    name: str
    shape: Shape
    numbers: tuple[int, ...]

    @property
    def layer_keys(self) -> tuple[Path, ...]:
        """Return the keys that these layers have below `decoder` when they are not stacked."""
        return tuple((f"{self.name}_{number}",) for number in self.numbers)


def decoder_parameters(parameters: Mapping[Path, LazyArray]) -> dict[Path, LazyArray]:
    """Return the decoder's parameters by their paths below it."""
    return {path[path.index(DECODER) + 1 :]: item for path, item in parameters.items() if DECODER in path}


def layer_key_slice(path: Path, known: Collection[Path]) -> slice | None:
    """Return the slice of a path that is the key of its layers, if it is in `known`."""
    if DECODER not in path:
        return None
    start = path.index(DECODER) + 1
    return next((slice(start, end) for end in (start + 2, start + 1) if path[start:end] in known), None)


# Layer names recur in each of their arrays, so results are cached.
@lru_cache(maxsize=1 << 14)
def split_number(key: str | int) -> tuple[str, int] | None:
    """Split `layers_12` into ("layers", 12); return None for keys without a number."""
    name, underscore, digits = str(key).rpartition("_")
    plain = digits.isdecimal() and digits.isascii() and str(int(digits)) == digits
    return (name, int(digits)) if underscore and plain else None


def split_layer_number(name: str) -> tuple[str, int] | None:
    """Return the text before the layer number in a name, and the number; None if there is none."""
    match = _NUMBERED.search(name)
    return (name[: match.start("number")], int(match["number"])) if match else None


def single_layers(decoder: Iterable[Path]) -> dict[str, list[int]]:
    """Return the sorted indices of single layers by name."""
    result: dict[str, set[int]] = {}
    for path in decoder:
        named = split_number(path[0]) if path else None
        if named and LAYERS in named[0]:
            result.setdefault(named[0], set()).add(named[1])
    return {name: sorted(numbers) for name, numbers in result.items()}


def stacked_keys(decoder: Iterable[Path]) -> dict[Path, int]:
    """Map the keys below `decoder` that have stacks or remainders to the number of stacked axes."""
    below: dict[str, set[str]] = {}
    for path in decoder:
        top = str(path[0]) if path else ""
        if (LAYERS in top or top == BLOCKS) and split_number(top) is None:
            below.setdefault(top, set()).add(str(path[1]) if len(path) > 1 else "")
    return {key: axes for top, keys in below.items() for key, axes in _keys_in(top, keys).items()}


def _keys_in(top: str, keys: set[str]) -> dict[Path, int]:
    outer = 0 if top.endswith(REMAINDER) else 1
    if keys <= {LOCAL, GLOBAL}:
        return {(top, key): outer + (key == LOCAL) for key in sorted(keys, reverse=True)}
    if all(_is_position(key) for key in keys):
        return {(top, key): outer for key in sorted(keys, key=_position)}
    return {(top,): outer}


def _is_position(key: str) -> bool:
    named = split_number(key)
    return named is not None and named[0] in (LAYER, LAYERS)


def _position(key: str | int) -> int:
    named = split_number(key)
    return named[1] if named else 0


def scan_axes(decoder: Mapping[Path, LazyArray]) -> tuple[int, ...]:
    """Return the possible scan axes: those on which most arrays of a stack agree about the length.

    A stacked norm, which has the axis of the final norm and one more, breaks ties. Several axes remain if all
    lengths equal the number of layers, or if there are few arrays; none remain if no layers are stacked.
    """
    stacked = {key: axes for key, axes in stacked_keys(decoder).items() if axes}
    below = {key: [a.shape for path, a in decoder.items() if path[: len(key)] == key] for key in stacked}
    rank = max((len(shape) for shapes in below.values() for shape in shapes), default=0)
    votes = {axis: _count_votes(below, stacked, axis) for axis in range(rank)}
    best = [axis for axis in votes if votes[axis] == max(votes.values()) > 0]
    final = next((a.shape for path, a in decoder.items() if path[:1] == (FINAL_NORM,)), None)
    norms = {shape for shapes in below.values() for shape in shapes if len(shape) == 2}
    inferred = [axis for axis in best if any(final == shape[:axis] + shape[axis + 1 :] for shape in norms)]
    return tuple(inferred or best)


def scan_axis(decoder: Mapping[Path, LazyArray], recorded_axis: int | None = None) -> int | None:
    """Return the scan axis; None if no layers are stacked.

    Args:
        decoder: The parameters below `decoder`.
        recorded_axis: The recorded axis, used if names and shapes leave several axes; None prefers axis 1.
    """
    axes = scan_axes(decoder)
    if recorded_axis in axes:
        return recorded_axis
    return SCAN_AXIS if SCAN_AXIS in axes else min(axes, default=None)


def _count_votes(below: Mapping[Path, list[Shape]], stacked: Mapping[Path, int], axis: int) -> int:
    """Count arrays that agree with their stack on lengths, and stacks that agree with their cycle."""
    common = {key: _most_common_lengths(shapes, axis, stacked[key]) for key, shapes in below.items()}
    repeats: dict[str, Counter[Shape]] = {}
    for key, (lengths, _) in common.items():
        if not str(key[0]).endswith(REMAINDER):
            repeats.setdefault(str(key[0]), Counter())[lengths[:1]] += 1
    return sum(count for _, count in common.values()) + sum(
        max(repeat.values()) for repeat in repeats.values()
    )


def _most_common_lengths(shapes: list[Shape], axis: int, axes: int) -> tuple[Shape, int]:
    """Return the most common lengths of the axes from `axis` on, and how many arrays have them."""
    lengths = Counter(shape[axis : axis + axes] for shape in shapes if len(shape) >= axis + axes)
    return lengths.most_common(1)[0] if lengths else ((), 0)


def stacked_lengths(decoder: Mapping[Path, LazyArray], key: Path, axis: int, axes: int) -> Shape:
    """Return the lengths of the stacked axes that most arrays below `key` have."""
    shapes = [array.shape for path, array in decoder.items() if path[: len(key)] == key]
    return _most_common_lengths(shapes, axis, axes)[0]


def layer_stacks(decoder: Mapping[Path, LazyArray], axis: int) -> tuple[LayerStack, ...]:
    """Return the layout of a decoder whose layers are stacked on `axis`, including single layers.

    Raises:
        FormatError: Positions of a cycle are missing.
        ShapeError: Arrays that belong together have different numbers of layers on `axis`.
    """
    keys = stacked_keys(decoder)
    unstacked = [
        LayerStack((f"{name}_{number}",), name, (), (number,))
        for name, numbers in single_layers(decoder).items()
        for number in numbers
    ]
    shapes = {key: _stacked_shape(decoder, key, axis, axes) for key, axes in keys.items()}
    # Layers before a cycle and the remainder after it share one numbering.
    starts: Counter[str] = Counter(single.name for single in unstacked)
    result: list[LayerStack] = []
    for top in sorted(dict.fromkeys(str(key[0]) for key in keys), key=lambda top: top.endswith(REMAINDER)):
        stack_shapes = {key: shape for key, shape in shapes.items() if key[0] == top}
        name = LAYERS if top == BLOCKS else top.removesuffix(REMAINDER)
        result += _numbered_stacks(top, name, stack_shapes, starts[name])
        starts[name] += sum(prod(shape) for shape in stack_shapes.values())
    return (*unstacked, *result)


def _stacked_shape(decoder: Mapping[Path, LazyArray], key: Path, axis: int, axes: int) -> Shape:
    """Return the lengths of the stacked axes, checking that all arrays below `key` agree."""
    if not axes:
        return ()
    shapes = {path: array.shape for path, array in decoder.items() if path[: len(key)] == key}
    expected, _ = _most_common_lengths(list(shapes.values()), axis, axes)
    mismatched = {
        path: shape
        for path, shape in shapes.items()
        if shape[axis : axis + axes] != expected and not is_scale_of_layer(path, shape, expected)
    }
    if mismatched or not expected:
        lines = [f"{keystr((DECODER, *path))} {list(shape)}" for path, shape in mismatched.items()]
        on = f"axis {axis}" if axes == 1 else f"axes {axis} and {axis + 1}"
        raise ShapeError(
            f"arrays that are stacked together have different numbers of layers on {on}" + listing(lines),
            location=keystr((DECODER, *key)),
            expected=" and ".join(map(str, expected)) or f"at least {axis + axes} axes",
            hint=_axis_hint(decoder, axis),
        )
    return expected


def is_scale_of_layer(path: Path, shape: Shape, stacked: Shape) -> bool:
    """Return whether an array is one weight scale per layer, which MaxText stacks on axis 0.

    The `scale` of a norm has an additional axis.

    Args:
        path: The path of the array.
        shape: The shape of the array.
        stacked: Lengths of the stacked axes; () for a single layer.
    """
    return shape == stacked and has_scale_word(dotted(path))


def _axis_hint(decoder: Mapping[Path, LazyArray], axis: int) -> str | None:
    inferred = scan_axis(decoder)
    if inferred in (None, axis):
        return None
    return f"they fit together on axis {inferred}: set {option('scan_axis', inferred)}"


def _numbered_stacks(top: str, name: str, shapes: Mapping[Path, Shape], start: int) -> list[LayerStack]:
    """Return the stacks below a key: a single stack, a cycle, or local and global layers."""
    if (top,) in shapes:
        (shape,) = shapes.values()
        return [LayerStack((top,), name, shape, tuple(range(start, start + prod(shape))))]
    repeats = {shape[: 0 if top.endswith(REMAINDER) else 1] for shape in shapes.values()}
    if len(repeats) != 1:
        lines = [f"{keystr((DECODER, *key))}: {shape[0]} layers" for key, shape in shapes.items()]
        raise ShapeError(
            "the positions of a cycle have different numbers of layers" + listing(lines), location=top
        )
    (repeat,) = repeats
    if {key[1] for key in shapes} <= {LOCAL, GLOBAL}:
        spans = [(key, prod(shape[len(repeat) :])) for key, shape in shapes.items()]
    else:
        _require_all_positions(top, [_position(key[1]) for key in shapes])
        spans = [(key, 1) for key in shapes]
    cycle, result, first = sum(span for _, span in spans), [], start
    for key, span in spans:
        numbers = (first + block * cycle + k for block in range(prod(repeat)) for k in range(span))
        result.append(LayerStack(key, name, shapes[key], tuple(numbers)))
        first += span
    return result


def _require_all_positions(top: str, positions: list[int]) -> None:
    missing = sorted(set(range(max(positions) + 1)) - set(positions))
    if missing:
        raise FormatError(
            "positions of a cycle are missing",
            location=keystr((DECODER, top)),
            got=positions,
            expected=f"also {', '.join(map(str, missing))}",
        )


LayerLayout = Literal["unstacked", "stacked", "cycle", "blocks"]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """A group of layers in a summary.

    Attributes:
        path: The location of the layers, such as "decoder/layers".
        length: The number of single layers that the group represents.
        layout: How layers are arranged; "cycle" has a stack for each position of a cycle, and "blocks" stacks
            positions of one kind on an extra axis.
        cycle: The number of layers in a repetition.
        remainder: The number of layers after the last complete repetition, which are stored separately.
    """

    path: str
    length: int
    layout: LayerLayout
    cycle: int = 1
    remainder: int = 0


def layer_groups(stacks: Iterable[LayerStack]) -> tuple[LayerGroup, ...]:
    """Summarize a layout; a remainder belongs to the group before it."""
    by_top: dict[str, list[LayerStack]] = {}
    for stack in stacks:
        single = not stack.shape and len(stack.key) == 1
        by_top.setdefault(stack.name if single else str(stack.key[0]).removesuffix(REMAINDER), []).append(
            stack
        )
    # The remainder of `scanned_blocks` is stored in `layers_remainder`.
    if BLOCKS in by_top and all(str(item.key[0]).endswith(REMAINDER) for item in by_top.get(LAYERS, [])):
        by_top[BLOCKS] += by_top.pop(LAYERS, [])
    return tuple(_layer_group(top, below) for top, below in by_top.items())


def _layer_group(top: str, stacks: list[LayerStack]) -> LayerGroup:
    length = sum(len(stack.numbers) for stack in stacks)
    path = f"{DECODER}/{top}"
    main = [stack for stack in stacks if stack.shape and not str(stack.key[0]).endswith(REMAINDER)]
    left = length - sum(len(item.numbers) for item in main)
    if not main:
        has_nested_stacks = any(len(stack.key) > 1 for stack in stacks)
        return LayerGroup(
            path,
            length,
            "cycle" if has_nested_stacks else "unstacked",
            length if has_nested_stacks else 1,
            left * has_nested_stacks,
        )
    if main[0].key == (top,):
        return LayerGroup(path, length, "stacked")
    cycle = (length - left) // main[0].shape[0]
    layout: LayerLayout = "blocks" if main[0].key[1] in (LOCAL, GLOBAL) else "cycle"
    return LayerGroup(path, length, layout, cycle, left)


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
    other_notes = (
        {k: v for k, v in own.items() if k not in (_STACKS, _AXIS, _FIRST)}
        if isinstance(own, Mapping)
        else {}
    )
    stacks = {keystr(stack.key): {stack.name: _nested(stack.numbers, stack.shape)} for stack in notes.stacks}
    declared = {_STACKS: stacks, _AXIS: notes.scan_axis, _FIRST: sorted(notes.first_axis)}
    note = other_notes | {key: value for key, value in declared.items() if value not in (None, {}, [])}
    others = {key: value for key, value in tree.metadata.custom.items() if key != KEY}
    return tree.with_metadata(custom=others | ({KEY: note} if note else {}))


def first_axis_names(paths: Iterable[Path]) -> frozenset[str]:
    """Return the names for `LayerNotes.first_axis`."""
    return frozenset(map(keystr, paths))


def notes_match(notes: LayerNotes, layers: Mapping[str, Collection[int]]) -> bool:
    """Return whether the recorded stacks consist of existing layers, and cover all but the first ones.

    Args:
        notes: Notes with stacks.
        layers: Names of layers -> their indices.
    """
    recorded: dict[str, list[int]] = {}
    for stack in notes.stacks:
        recorded.setdefault(stack.name, []).extend(stack.numbers)
    # Some models have single layers before the stacks.
    return recorded.keys() == layers.keys() and all(
        sorted(numbers) == sorted(layers[name])[-len(numbers) :]
        and sorted(layers[name])[: -len(numbers)] == list(range(len(layers[name]) - len(numbers)))
        for name, numbers in recorded.items()
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
    numbers = None if shape is None else tuple(_flatten(nested))
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


def _flatten(nested: Any) -> Iterable[int]:
    if isinstance(nested, int):
        return [nested]
    return [number for item in nested for number in _flatten(item)]
