"""Plan how single layers are stacked: in one stack, or by position in a cycle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Path, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import FormatError, ShapeError, UsageError, listing
from ckpttools.core.message_terms import option
from ckpttools.core.region import Shape
from ckpttools.core.text import format_ranges, plural
from ckpttools.maxtext.layers import LayerStack, single_layers
from ckpttools.maxtext.versions import BLOCKS, DECODER, GLOBAL, LAYER, LAYERS, LOCAL, REMAINDER

CycleNames = Literal["layers", "layer", "local-global", "layers-local-global", "blocks-layers"]
# The contents of a layer: path below the layer -> shape and dtype.
Contents = Mapping[Path, tuple[Shape, DType]]

# Single layers do not show the names of a cycle's positions. The scalar that scales a layer's output occurs
# with only one naming; the decay of a gated delta rule occurs with several, depending on the model and the
# version of MaxText.
_INFERRED_FROM: Mapping[str, CycleNames] = {"layer_scalar": "local-global"}
_AMBIGUOUS_KEY = "A_log"
# In DeepSeek V4, layers that route by a token table are never scanned.
_UNSTACKED = "tid2eid"
# The cycle length of layers that follow single layers; in MaxText, only DeepSeek V4 has such layers.
_PAIR_LENGTH = 2


@dataclass(frozen=True, slots=True)
class Cycle:
    """A cycle of layers.

    Attributes:
        length: The number of layers in a repetition.
        names: The naming in MaxText: "layers" for layers/layers_{0..}, "layer" for layers/layer_{0..},
            "local-global" for scanned_blocks/{local_layers,global_layer}, "layers-local-global" for the same
            below layers, "blocks-layers" for scanned_blocks/layers_{0..} with single layers before the first
            complete cycle; None if unknown.
    """

    length: int
    names: CycleNames | None


def plan_stacks(
    decoder: Mapping[Path, LazyArray], cycle: int | None = None, names: CycleNames | None = None
) -> tuple[LayerStack, ...]:
    """Plan the layout in which single layers are stacked.

    Args:
        decoder: The parameters below `decoder`.
        cycle: The number of layers in a repetition; None infers it from the contents of layers, giving one
            stack if all are the same. Ignored for groups with other names than `layers`.
        names: See `Cycle.names`; None infers it.

    Raises:
        FormatError: Layer indices are missing, or the naming of the cycle is unknown.
        ShapeError: Layers that would be stacked have different contents.
        UsageError: A cycle is given for layers without one, or layers do not form complete cycles.
    """
    result = single_layers(decoder)
    if LAYERS not in result and cycle not in (None, 1):
        raise UsageError(
            "the checkpoint has no layers that could repeat",
            got=", ".join(result),
            expected=f"{LAYERS}_{{0..}}",
        )
    built: list[LayerStack] = []
    for name, numbers in result.items():
        _require_consecutive(name, numbers)
        layers = _contents(decoder, name, len(numbers))
        expected = cycle if name == LAYERS else None
        if name == LAYERS and names == "blocks-layers":
            built += _stacks_after_single_layers(layers, expected or _PAIR_LENGTH)
            continue
        length = _period(layers) if expected is None else expected
        _require_equal_layers(name, layers, length)
        if length == 1:
            built.append(LayerStack((name,), name, (len(layers),), tuple(range(len(layers)))))
        else:
            built += _cycle_stacks(name, len(layers), Cycle(length, names or _infer_names(layers)))
    return tuple(built)


def _require_consecutive(name: str, numbers: Sequence[int]) -> None:
    missing = set(range(numbers[-1] + 1)) - set(numbers)
    if missing:
        raise FormatError(
            "layer indices are missing",
            location=f"{DECODER}/{name}_{{{format_ranges(numbers)}}}",
            expected=f"also {format_ranges(missing)}",
        )


def _stacks_after_single_layers(layers: Sequence[Contents], length: int) -> list[LayerStack]:
    """Return stacks of complete cycles after as few single layers as possible."""
    location = f"{DECODER}/{LAYERS}_{{0..{len(layers) - 1}}}"
    unstacked = sum(any(_UNSTACKED in path for path in layer) for layer in layers)
    num_scanned = len(layers) - unstacked
    starts = range(max(len(layers) % length, unstacked), len(layers) - length + 1, length)
    first = next((n for n in starts if _repeats(layers[n:], length)), None)
    if first is None and num_scanned >= length:
        raise ShapeError(
            f"the last {length} layers are not a cycle that the layers before them repeat",
            location=location,
            hint=f"set {option('cycle')} to the number of layers in a cycle",
        )
    # If the contents would let a cycle start later, the layers before it are the end of another cycle.
    is_cut = first is not None and first > 0 and layers[first - 1] == layers[first - 1 + length]
    if first is None or is_cut or (unstacked and num_scanned % length):
        raise UsageError(
            f"the layers to scan do not form complete cycles of {length}",
            location=location,
            got=f"{plural(num_scanned, 'layer')}"
            + (f" after the {unstacked} that MaxText does not scan" if unstacked else ""),
            hint="keep them unstacked: MaxText runs them with scan_layers=false",
        )
    cycle = Cycle(length, "blocks-layers")
    return _block_stacks(BLOCKS, LAYERS, cycle, length, (len(layers) - first) // length, first)


def _repeats(layers: Sequence[Contents], length: int) -> bool:
    return all(a == b for a, b in zip(layers, layers[length:], strict=False))


def _contents(decoder: Mapping[Path, LazyArray], name: str, count: int) -> Sequence[Contents]:
    numbers = {f"{name}_{number}": number for number in range(count)}
    layers: list[dict[Path, tuple[Shape, DType]]] = [{} for _ in numbers]
    for path, array in decoder.items():
        if path[0] in numbers:
            layers[numbers[str(path[0])]][path[1:]] = array.shape, array.dtype
    return layers


def _period(layers: Sequence[Contents]) -> int:
    """Return the length of the cycle that repeats at least once; 1 if there is none."""
    halves = range(1, len(layers) // 2 + 1)
    return next((n for n in halves if _repeats(layers, n)), 1)


def _require_equal_layers(name: str, layers: Sequence[Contents], length: int) -> None:
    """Raise an error if layers at the same position of a cycle have different contents."""
    for number, layer in enumerate(layers):
        first = number % length
        if layer != layers[first]:
            raise ShapeError(
                f"{name}_{number} and {name}_{first} cannot be stacked, because they differ"
                + listing(_differences(layers[first], layer)),
                location=f"{DECODER}/{name}_{{0..{len(layers) - 1}}}",
                hint=f"if layers repeat in a cycle, set {option('cycle')} N",
            )


def _differences(first: Contents, other: Contents) -> list[str]:
    """Describe how two layers differ, one line per path."""
    paths = [*first, *(path for path in other if path not in first)]
    return [
        f"{keystr(path)}: {_content_text(other.get(path))} and {_content_text(first.get(path))}"
        for path in paths
        if first.get(path) != other.get(path)
    ]


def _content_text(content: tuple[Shape, DType] | None) -> str:
    return "none" if content is None else f"{content[1].name}{list(content[0])}"


def _infer_names(layers: Sequence[Contents]) -> CycleNames:
    keys = {key for layer in layers for path in layer for key in path}
    if _AMBIGUOUS_KEY in keys:
        raise FormatError(
            "single layers with linear attention do not show the names of their cycle in MaxText",
            hint=f"set {option('family', 'NAME')}, or {option('cycle_names')}: layers-local-global for "
            "Qwen3-Next since MaxText 0.2.5, layer for older ones and other models",
        )
    return next((names for key, names in _INFERRED_FROM.items() if key in keys), "layers")


def _cycle_stacks(name: str, count: int, cycle: Cycle) -> list[LayerStack]:
    """Return one stack per position, or one for all local layers, plus the remainder."""
    repeats, left = divmod(count, cycle.length)
    if left and cycle.names in ("layer", "layers-local-global"):
        raise UsageError(f"{count} layers are not complete cycles of {cycle.length}")
    top, after = (BLOCKS if cycle.names == "local-global" else name), f"{name}{REMAINDER}"
    main = _block_stacks(top, name, cycle, cycle.length, repeats, 0) if repeats else []
    return [*main, *(_block_stacks(after, name, cycle, left, None, count - left) if left else [])]


def _block_stacks(
    top: str, name: str, cycle: Cycle, span: int, repeats: int | None, start: int
) -> list[LayerStack]:
    """Return the stacks below a key."""
    outer = () if repeats is None else (repeats,)
    starts = range(start, start + (repeats or 1) * cycle.length, cycle.length)
    if cycle.names not in ("local-global", "layers-local-global"):
        word = LAYER if cycle.names == "layer" else LAYERS
        return [
            LayerStack((top, f"{word}_{k}"), name, outer, tuple(first + k for first in starts))
            for k in range(span)
        ]
    local = min(span, cycle.length - 1)
    inner = tuple(first + k for first in starts for k in range(local))
    result = [LayerStack((top, LOCAL), name, (*outer, local), inner)]
    if span == cycle.length:
        result.append(LayerStack((top, GLOBAL), name, outer, tuple(first + local for first in starts)))
    return result
