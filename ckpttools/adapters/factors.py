"""The changes of an adapter: low-rank factors and replaced arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from math import isfinite
from typing import Any, Literal

from ckpttools.adapters.config import WITH_PEFT
from ckpttools.array import read_blocks
from ckpttools.array.lazy import LazyArray
from ckpttools.array.lowrank import dora_update, low_rank
from ckpttools.array.nodes import relayout, swap_last_axes
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, UsageError, listing
from ckpttools.core.message_terms import action, option
from ckpttools.core.region import Region, Shape, split_evenly

Kind = Literal["linear", "embedding", "experts"]


@dataclass(frozen=True)
class FactorPair:
    """The low-rank change of one Hugging Face weight, in PEFT's layout.

    Attributes:
        name: The name of the weight.
        a: (rank, in); for experts (expert * rank, in), for an embedding (rank, vocab).
        b: (out, rank); for experts (out, rank * expert), for an embedding (embed, rank).
        scale: The factor of the product `b @ a`.
        kind: The kind of weight; its axes are (out, in), (vocab, embed) or (expert, …, …).
        has_inputs_first: Whether the inputs come before the outputs; None for experts, where the shapes
            decide.
        magnitude: (out,) row lengths of the changed weight (DoRA), or None.
        rank: The rank of the product; for experts, of each expert.
    """

    name: str
    a: LazyArray
    b: LazyArray
    scale: float
    rank: int
    kind: Kind = "linear"
    has_inputs_first: bool | None = False
    magnitude: LazyArray | None = None

    @property
    def parts(self) -> Iterator[tuple[str, LazyArray]]:
        """Yield the arrays with their names."""
        yield from (("A", self.a), ("B", self.b))
        if self.magnitude is not None:
            yield "magnitude", self.magnitude

    @property
    def shape(self) -> Shape | None:
        """Return the weight's shape; None for experts, whose axis order is known only from the weight."""
        outer, inner = self.b.shape[0], self.a.shape[1]
        if self.kind == "experts":
            return None
        return (inner, outer) if self.kind == "embedding" or self.has_inputs_first else (outer, inner)

    def fits(self, shape: Shape) -> bool:
        """Return whether the factors match a weight of this shape."""
        if self.kind == "experts":
            ends = (self.b.shape[0], self.a.shape[1])
            return shape in (
                (self.a.shape[0] // self.rank, *ends),
                (self.a.shape[0] // self.rank, *ends[::-1]),
            )
        return shape == self.shape

    def change(self, weight: LazyArray) -> LazyArray:
        """Return the change of a weight, float32.

        Args:
            weight: The weight; in float32 if there is a magnitude, because its values are then read.

        Raises:
            FormatError: The factors do not fit the weight.
        """
        delta = self.delta(weight.shape)
        if self.magnitude is None:
            return delta
        if self.kind != "linear" or self.has_inputs_first or self.magnitude.shape != weight.shape[:1]:
            raise FormatError(
                "a magnitude (DoRA) is supported only for weights (out, in) of linear layers",
                location=self.name,
                got=f"{list(self.magnitude.shape)} for a weight {list(weight.shape)}",
                hint=WITH_PEFT,
            )
        return dora_update(weight, delta, self.magnitude)

    def delta(self, shape: Shape) -> LazyArray:
        """Return the product of the factors for a weight of this shape, in float32.

        Raises the errors of `change`.
        """
        self.require_fit(shape)
        if self.kind == "embedding":
            return low_rank(swap_last_axes(self.a), swap_last_axes(self.b), self.scale)
        if self.kind == "linear":
            product = low_rank(self.b, self.a, self.scale)
            return swap_last_axes(product) if self.has_inputs_first else product
        experts, rank = shape[0], self.rank
        outputs, inputs = self.b.shape[0], self.a.shape[1]
        right = relayout(self.a, ((experts, rank), (inputs,)), (0, 1, 2), (1, 1, 1))
        left = relayout(self.b, ((outputs,), (rank, experts)), (2, 0, 1), (1, 1, 1))
        if not self._has_inputs_first(shape):
            return low_rank(left, right, self.scale)
        return low_rank(swap_last_axes(right), swap_last_axes(left), self.scale)

    def _has_inputs_first(self, shape: Shape) -> bool:
        """Return whether the expert weight is (expert, in, out)."""
        if self.has_inputs_first is not None:
            return self.has_inputs_first
        if shape[1] == shape[2]:
            raise FormatError(
                "the input axis of these experts is ambiguous",
                location=self.name,
                got=f"{list(shape)}",
                expected="a configuration or a gate_up_proj that shows the input axis",
            )
        return shape[1:] == (self.a.shape[1], self.b.shape[0])

    def require_fit(self, shape: Shape) -> None:
        """Raise FormatError if the factors do not match a weight of this shape."""
        if not self.fits(shape):
            raise FormatError(
                "these factors do not fit the base's weight",
                location=self.name,
                got=f"A {list(self.a.shape)} and B {list(self.b.shape)}, for a weight {list(shape)}",
                expected="A (rank, inputs) and B (outputs, rank)",
                hint="check that the adapter belongs to this model: "
                f"{action('inspect', 'ADAPTER', against='BASE')}",
            )


@dataclass(frozen=True)
class Adapter:
    """An adapter of a Hugging Face model.

    Attributes:
        location: The location of the adapter.
        factors: The factors of each changed weight.
        replaced: Arrays that replace the base's own (`modules_to_save`), by name.
        config: The content of `adapter_config.json`.
        skipped: For each stored array that PEFT ignores, the config field that leaves it out.
    """

    location: str
    factors: tuple[FactorPair, ...]
    replaced: Mapping[str, LazyArray] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)


def require_finite(adapter: Adapter) -> None:
    """Raise FormatError if a factor has NaN or infinity. Reads all factors."""
    factors = (
        (f"{factor.name}, {part}", array) for factor in adapter.factors for part, array in factor.parts
    )
    if non_finite := [name for name, array in factors if not _is_finite(array)]:
        raise FormatError(
            "these factors contain NaN or infinity, which would spread to complete rows of weights:"
            + listing(non_finite),
            location=adapter.location,
            expected="numbers",
            hint="use an earlier training step; this one has diverged",
        )


def _is_finite(array: LazyArray) -> bool:
    import numpy as np

    pieces = split_evenly(Region.whole(array.shape), read_blocks.elements(4))
    return all(bool(np.isfinite(array.read(piece).astype(np.float32)).all()) for piece in pieces)


def have_equal_bits(one: LazyArray, other: LazyArray) -> bool:
    """Return whether two arrays are equal. Reads them only if shape and dtype match."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    pieces = split_evenly(Region.whole(one.shape), read_blocks.elements(one.dtype.itemsize))
    return all(one.read(piece).tobytes() == other.read(piece).tobytes() for piece in pieces)


def finite(name: str, number: float, product: float | None = None) -> float:
    """Check a number and its product, and return the product. Raises UsageError for NaN or infinity.

    Args:
        name: The option's name.
        number: The option's value.
        product: `number` times the adapter's own value; None for `number` itself.

    Returns:
        The product.
    """
    scaled = number if product is None else product
    if not (isfinite(number) and isfinite(scaled)):
        also = ", also after multiplication by the adapter's own" if isfinite(number) else ""
        raise UsageError(f"{name} must be a finite number{also}", got=option(name, number))
    return scaled
