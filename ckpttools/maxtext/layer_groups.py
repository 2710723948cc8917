"""The layers of a MaxText decoder in few words, for people to read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from ckpttools.core.dataclass import dataclass
from ckpttools.maxtext.layers import LayerStack
from ckpttools.maxtext.layout import BLOCKS, DECODER, GLOBAL, LAYERS, LOCAL, REMAINDER

LayerLayout = Literal["unstacked", "stacked", "cycle", "blocks"]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that belong together, for people to read.

    Attributes:
        path: where they are: "decoder/layers".
        length: number of layers, counted as they are one by one.
        layout: how they lie; "cycle" has a stack for each position of a cycle, "blocks" has positions of one
            kind stacked on an axis of their own.
        cycle: layers in one repetition.
        remainder: layers after the last whole repetition, which lie apart.
    """

    path: str
    length: int
    layout: LayerLayout
    cycle: int = 1
    remainder: int = 0


def layer_groups(stacks: Iterable[LayerStack]) -> tuple[LayerGroup, ...]:
    """A layout in few words: a remainder belongs to the group before it."""
    by_top: dict[str, list[LayerStack]] = {}
    for stack in stacks:
        single = not stack.shape and len(stack.key) == 1
        by_top.setdefault(stack.name if single else str(stack.key[0]).removesuffix(REMAINDER), []).append(
            stack
        )
    # What is left over of `scanned_blocks` lies in `layers_remainder`.
    if BLOCKS in by_top and all(str(item.key[0]).endswith(REMAINDER) for item in by_top.get(LAYERS, [])):
        by_top[BLOCKS] += by_top.pop(LAYERS, [])
    return tuple(_group(top, below) for top, below in by_top.items())


def _group(top: str, stacks: list[LayerStack]) -> LayerGroup:
    length = sum(len(stack.numbers) for stack in stacks)
    path = f"{DECODER}/{top}"
    main = [stack for stack in stacks if stack.shape and not str(stack.key[0]).endswith(REMAINDER)]
    left = length - sum(len(item.numbers) for item in main)
    if not main:
        apart = any(len(stack.key) > 1 for stack in stacks)
        return LayerGroup(
            path, length, "cycle" if apart else "unstacked", length if apart else 1, left * apart
        )
    if main[0].key == (top,):
        return LayerGroup(path, length, "stacked")
    cycle = (length - left) // main[0].shape[0]
    layout: LayerLayout = "blocks" if main[0].key[1] in (LOCAL, GLOBAL) else "cycle"
    return LayerGroup(path, length, layout, cycle, left)
