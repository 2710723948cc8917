"""The protocol of quantization schemes: names and layout of the auxiliary tensors of a weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cached_property
from typing import Any, Protocol

from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.region import Shape, ceil_div, grid_shape
from ckpttools.quantized.scales import ArrayLike, last_key, scales_no_weight


class UnreadableError(Exception):
    """A weight cannot be dequantized with a scheme. The message states the reason."""


class UnsupportedError(UnreadableError):
    """A complete weight uses a variant that the scheme does not support."""


@dataclass(frozen=True)
class Module:
    """A quantized weight as a scheme sees it.

    Attributes:
        name: Name of the array of codes.
        sides: Names of the auxiliary tensors.
        arrays: All arrays of the checkpoint.
        declared: The `quantization_config`.
        shapes: Stored shapes that have been read, by array name.
    """

    name: str
    sides: tuple[str, ...]
    arrays: Mapping[str, ArrayLike]
    declared: Mapping[str, Any]
    shapes: Mapping[str, Shape] = field(default_factory=dict)

    @property
    def codes(self) -> ArrayLike:
        return self.arrays[self.name]

    @property
    def dtype(self) -> DType:
        return self.codes.dtype

    @property
    def shape(self) -> Shape:
        return self.codes.shape

    @cached_property
    def key(self) -> str:
        """Return the last key of the name."""
        return last_key(self.name)

    @property
    def method(self) -> str:
        return str(self.declared.get("quant_method", ""))

    @cached_property
    def activation_scales(self) -> tuple[str, ...]:
        """Return the auxiliary tensors that scale something other than the weight."""
        return tuple(name for name in self.sides if scales_no_weight(name))

    @cached_property
    def by_key(self) -> dict[str, str]:
        """Return all other auxiliary tensors by their last keys."""
        return {last_key(name): name for name in self.sides if name not in self.activation_scales}

    def side(self, *keys: str) -> str:
        """Return the only expected auxiliary tensor, under any of several keys.

        Raises:
            UnreadableError: The tensor is missing, or there are others.
        """
        (result,) = self.only(keys)
        return result

    def only(self, *expected: tuple[str, ...]) -> tuple[str, ...]:
        """Return the expected auxiliary tensors in order, each under any of several keys.

        Raises:
            UnreadableError: A tensor is missing, or there are others.
        """
        result = [next((key for key in keys if key in self.by_key), None) for keys in expected]
        if len(self.by_key) + len(self.activation_scales) < len(self.sides):
            raise UnreadableError(f"{self.name}: several of its auxiliary tensors have the same key")
        missing = [" or ".join(keys) for keys, key in zip(expected, result, strict=True) if key is None]
        if missing:
            raise UnreadableError(f"{self.name}: {self.dtype}, without its scale ({', '.join(missing)})")
        unexpected = [key for key in self.by_key if key not in result]
        if unexpected:
            raise UnsupportedError(f"{self.name}: with unknown auxiliary tensors: {', '.join(unexpected)}")
        return tuple(self.by_key[key] for key in result if key is not None)


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of a weight.

    Attributes:
        name: Name of the array of scales.
        dtype: Dtype of the scales; exponents may be stored as uint8.
        shape: Shape of the array, with as many axes as the weight.
        block: Shape of the region of the weight that shares a scale.
        divides: Whether numbers are divided by the scales.
    """

    name: str
    dtype: DType
    shape: Shape
    block: Shape
    divides: bool = False


@dataclass(frozen=True, slots=True)
class Weight:
    """A quantized weight as a single logical array.

    Attributes:
        name: Name of the logical array.
        codes: Name of the array of codes.
        scheme: Name and block, such as `fp8 128x128`.
        shape: Shape of the numbers, in the order of the codes.
        layout: Shape of the array of codes, with one axis for each axis of `shape`.
        packed: Numbers per code, along the last axis.
        numbers: The meaning of codes, as for `ckpttools.quantized.decoding.Decode`.
        scales: The arrays of scales; all except the first have one element.
        aside: Names of other auxiliary tensors that the scheme consumes.
        activation_scales: Names of scales that are left out because they do not apply to the weight.
        is_swapped: Whether the last two axes are swapped in the logical array.
        stored_shape: Name of the array that stores the shape, or None. Until it is read, `shape` includes all
            numbers that the codes can hold.
        zero_points: Name of the array with zero points, which are subtracted from the numbers of each scale
            and packed as eight column neighbors per word; None if there are none.
    """

    name: str
    codes: str
    scheme: str
    shape: Shape
    layout: Shape
    packed: int
    numbers: str
    scales: tuple[Scales, ...]
    aside: tuple[str, ...] = ()
    activation_scales: tuple[str, ...] = ()
    is_swapped: bool = False
    stored_shape: str | None = None
    zero_points: str | None = None

    @property
    def scale_names(self) -> str:
        """Return the names of the weight's scales, for messages."""
        return ", ".join(scale.name for scale in self.scales)

    @property
    def stored(self) -> tuple[str, ...]:
        """Return all stored arrays of the weight, including those that are left out with it."""
        scales = (scale.name for scale in self.scales)
        return (self.codes, *scales, *self.aside, *self.activation_scales)


class Scheme(Protocol):
    """A quantization scheme. `ckpttools.quantized.schemes.registry` lists all of them."""

    @property
    def methods(self) -> tuple[str, ...]:
        """Return the `quant_method` values of the scheme; empty if it needs no configuration."""

    @property
    def formats(self) -> tuple[str, ...]:
        """Return the `format` values of the scheme in compressed-tensors; empty otherwise."""

    def takes(self, module: Module) -> bool:
        """Return whether a weight uses this scheme, judged by its configuration, names and dtypes."""

    def read(self, module: Module) -> Weight:
        """Interpret a weight with this scheme.

        Raises:
            UnreadableError: The weight does not follow the scheme.
        """


def block_scales(
    module: Module, name: str, shape: Shape, block: Shape, *, dtype: DType | None = None
) -> Scales:
    """Return the block scales of a weight.

    Args:
        module: The module of the weight.
        name: Name of the array of scales.
        shape: Shape of the weight's numbers.
        block: Shape of a block on the last axes; other axes have a scale for each coordinate.
        dtype: Dtype of the scales; None uses that of the array.

    Raises:
        UnreadableError: The array does not have one element per block.
    """
    array = module.arrays[name]
    if len(shape) < len(block):
        raise UnreadableError(f"{name}: {_times(array.shape)} scales, but {module.name} is not a matrix")
    cell = (*(1,) * (len(shape) - len(block)), *block)
    expected = grid_shape(shape, cell)
    if array.shape != expected:
        text = " x ".join(map(str, block))
        raise UnreadableError(
            f"{name}: {_times(array.shape)} scales, but {module.name} of {_times(shape)} in blocks of "
            f"{text} has {_times(expected)}"
        )
    return Scales(name, dtype or array.dtype, array.shape, cell)


def tensor_scale(
    module: Module, name: str, shape: Shape, *, divides: bool = False, dtype: DType | None = None
) -> Scales:
    """Return the scale of a weight that has only one.

    Args:
        module: The module of the weight.
        name: Name of the array with the scale.
        shape: Shape of the weight's numbers.
        divides: Whether numbers are divided by the scale.
        dtype: Dtype of the scale; None uses that of the array.

    Raises:
        UnreadableError: The array has several elements, or has integers.
    """
    array = module.arrays[name]
    if any(length != 1 for length in array.shape):
        raise UnreadableError(f"{name}: {_times(array.shape)} scales, but {module.name} has one")
    dtype = dtype or array.dtype
    if not dtype.is_float:
        raise UnreadableError(f"{name}: {dtype} is not a dtype of scales")
    return Scales(name, dtype, (1,) * len(shape), shape, divides)


def _times(shape: Shape) -> str:
    return " x ".join(map(str, shape)) or "1"


ZERO_POINT = "weight_zero_point"
# Orders in which the columns of a group are not adjacent; `weight_g_idx` lists the columns.
_REORDERING_SETTINGS = ("group", "dynamic")


def weight_groups(module: Module) -> list[Mapping[str, Any]]:
    """Return the weight settings with one mapping per group."""
    groups = module.declared.get("config_groups")
    result = groups.values() if isinstance(groups, Mapping) else ()
    weights = (item.get("weights") for item in result if isinstance(item, Mapping))
    return [weight for weight in weights if isinstance(weight, Mapping)]


def rows_and_groups(
    module: Module, widths: Sequence[int], count: int, *, bits: int, per_code: int
) -> tuple[int, int]:
    """Return the length of a row, and the size of its groups.

    Args:
        module: The module of the weight.
        widths: Possible lengths of a row, the most likely first.
        count: Number of scales in a row.
        bits: Number of bits in a number.
        per_code: Numbers per code; the last code of a row may be partly empty.

    Raises:
        UnreadableError: The configuration has no matching group size, or several.
    """
    groups = weight_groups(module)
    values = [
        group for group in groups if group.get("num_bits") == bits and group.get("type", "int") == "int"
    ]
    for width in widths:
        matching = [size for size in _sizes(values, width) if ceil_div(width, size) == count]
        if width % per_code:
            # Groups of such rows are complete, which distinguishes a damaged length from a correct one.
            matching = [size for size in matching if width % size == 0]
        if len(matching) == 1:
            return width, matching[0]
        if matching:
            break
    known = ", ".join(map(str, sorted(_sizes(values, widths[0])))) or "nothing"
    raise UnreadableError(
        f"{module.name}: rows of {widths[0]} have {count} scales, but the configuration has groups of {known}"
    )


def _sizes(groups: list[Mapping[str, Any]], width: int) -> set[int]:
    values = [group.get("group_size") for group in groups]
    return {size if isinstance(size, int) and size > 0 else width for size in values}


def refuse_other_bits(module: Module, bits: int) -> None:
    """Raise UnsupportedError unless a group in the configuration has integers with this number of bits."""
    declared = {(group.get("type", "int"), group.get("num_bits")) for group in weight_groups(module)}
    if declared and ("int", bits) not in declared:
        named = ", ".join(sorted(f"{kind}{size}" for kind, size in declared))
        raise UnsupportedError(f"{module.name}: {named}; only int{bits} is supported for packed integers")


def refuse_reordered(module: Module) -> None:
    """Raise UnsupportedError if the columns of a group are not adjacent."""
    declared = {
        group["actorder"] for group in weight_groups(module) if group.get("actorder") in _REORDERING_SETTINGS
    }
    reordering = ["weight_g_idx"] if "weight_g_idx" in module.by_key else []
    reordering += (
        [] if reordering else [f"a configuration with actorder: {item}" for item in sorted(declared)]
    )
    if reordering:
        raise UnsupportedError(
            f"{module.name}: with {', '.join(reordering)}; only groups in order are supported"
        )


def is_shifted(module: Module, bits: int) -> bool:
    """Return whether groups with this number of bits have zero points.

    Raises:
        UnsupportedError: There are zero points, but no group in the configuration declares them.
    """
    values = [
        group.get("symmetric") is False for group in weight_groups(module) if group.get("num_bits") == bits
    ]
    is_there = ZERO_POINT in module.by_key
    if is_there and not any(values):
        raise UnsupportedError(
            f"{module.name}: with {ZERO_POINT}, but the configuration has symmetric groups"
        )
    return is_there or (bool(values) and all(values))
