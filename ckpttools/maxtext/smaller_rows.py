"""Where the arrays of a model go in a smaller one, and which part of them: by the rows of its family."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import field
from functools import cached_property
from itertools import chain
from math import prod

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import window
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CoverageError, UsageError
from ckpttools.mapping.axes import Side
from ckpttools.mapping.keys import Coordinates, Field
from ckpttools.mapping.row import Row
from ckpttools.mapping.sizes import lengths_of
from ckpttools.mapping.table import Table
from ckpttools.maxtext.layout import DECODER
from ckpttools.transforms.tables import is_table

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class SmallerRows:
    """Rows of a model before and after, and which layers stay.

    Attributes:
        before, after: the rows with the sizes of the larger and of the smaller model, layers one by one.
        layers: number of each layer that stays -> its new number.
        is_left: whether names are MaxText's.
    """

    before: Table
    after: Table
    layers: Mapping[int, int]
    is_left: bool
    _known: dict[str, list[Row]] = field(default_factory=dict)

    @cached_property
    def _lengths(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        return lengths_of(self.before.sizes), lengths_of(self.after.sizes)

    def of(self, name: str, array: LazyArray) -> tuple[str | None, LazyArray] | None:
        """An array's new name and what is left of it, no name where it goes; None where no row is about it.

        Raises:
            UsageError: its layer is of another kind than the one in its place; or it is a table of experts,
                of which some go.
            CoverageError: it cannot be cut along an axis of which less is left.
        """
        # A large model has 100,000 names, which differ in numbers only from few others.
        known = self._known.setdefault(_NUMBER.sub("#", name), [])
        for row in chain(known, filter(self.before.has, self.before.rows)):
            index = self._side(row).key.match(name, self._lengths[0])
            if index is not None:
                if not any(row is each for each in known):
                    known.append(row)
                new = self._renamed(row, index)
                return (None, array) if new is None else (new, self._part(name, row, array))
        return None

    def _side(self, row: Row) -> Side:
        return row.left if self.is_left else row.right

    def _renamed(self, row: Row, index: Coordinates) -> str | None:
        """The name in the smaller model; None where it has no such array."""
        before, after = self._lengths
        place = _layer_field(row)
        if place is None:
            return self._side(row).key.format(index, before)
        number = self.layers.get(place.number(index, before) + place.offset)
        others = {axis: at for axis, at in index.items() if axis not in place.axes}
        if number is None or any(at >= after.get(axis, at + 1) for axis, at in others.items()):
            return None
        for each in self._alike(row):
            new = _layer_field(each) or place
            for found in new.indices(number - new.offset, after):
                return self._side(each).key.format({**others, **found}, after)
        raise UsageError(
            "this layer is of a kind that the smaller model does not have there",
            got=str(row.right.key),
            wanted=f"a layer of its kind in the place of layer {number}",
            hint="keep the first layers, or others whose kinds come in the same order",
        )

    def _alike(self, row: Row) -> Iterator[Row]:
        """The row itself, and those of other groups of layers that are about the same array."""
        yield row
        parts = row.right.key.parts
        for each in filter(self.after.has, self.after.rows):
            others = each.right.key.parts
            if each is not row and _layer_field(each) and (others[:1], others[2:]) == (parts[:1], parts[2:]):
                yield each

    def _part(self, name: str, row: Row, array: LazyArray) -> LazyArray:
        """The first elements along axes of which the smaller model has fewer."""
        before, after = self._lengths
        side = self._side(row)
        changed = {axis for axis in side.array_axes if before.get(axis) != after.get(axis)}
        if is_table(tuple(row.left.key.first().split("."))) and before.get("expert") != after.get("expert"):
            raise UsageError(f"{name} holds numbers of experts, some of which would be gone")
        if not changed:
            return array
        shape = list(array.shape)
        for at, group in enumerate(side.groups):
            if changed.isdisjoint(group):
                continue
            if len(shape) != len(side.groups) or side.join or not changed.isdisjoint(group[1:]):
                raise CoverageError(
                    f"{name} cannot be cut along {', '.join(sorted(changed))}",
                    got=f"{list(array.shape)} for {side}",
                    hint="state of optimizers that is factored has axes of its own: ckpt strip-optimizer",
                )
            shape[at] = after[group[0]] * prod(before[axis] for axis in group[1:])
        return window(array, (0,) * len(shape), tuple(shape))


def _layer_field(row: Row) -> Field | None:
    """Where a Hugging Face key has the number of a decoder's layer; None for rows of other arrays."""
    fields = row.right.key.fields
    is_layer = str(row.left.key).startswith(f"{DECODER}.") and fields
    return fields[0] if is_layer and set(fields[0].axes) <= set(row.left.key.axes) else None
