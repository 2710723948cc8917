"""4-bit integers, eight per word: `pack-quantized` of compressed-tensors, as in Kimi K2."""

from __future__ import annotations

from collections.abc import Sequence

from ckpttools.core.region import ceil_div
from ckpttools.quantized.decoding import OFFSET_INT4
from ckpttools.quantized.schemes.base import (
    ZERO_POINT,
    Module,
    UnreadableError,
    Weight,
    block_scales,
    is_shifted,
    refuse_other_bits,
    refuse_reordered,
    rows_and_groups,
    tensor_scale,
)

_PER_WORD = 8


class PackQuantized:
    """Packed integers: `X.weight_packed` (out, in / 8) with `X.weight_scale` (out, in / group).

    The last word of a row may hold fewer than eight numbers; `X.weight_shape` has the length of a row.
    Asymmetric weights also have `X.weight_zero_point` (out / 8, in / group).
    """

    methods = ("compressed-tensors",)
    formats = ("pack-quantized",)

    def takes(self, module: Module) -> bool:
        is_words = module.key == "weight_packed" and module.dtype.name == "int32"
        return module.method in self.methods and is_words

    def read(self, module: Module) -> Weight:
        refuse_other_bits(module, 4)
        refuse_reordered(module)
        shifted = ((ZERO_POINT,),) if is_shifted(module, 4) else ()
        name, declared, *zero_points = module.only(("weight_scale",), ("weight_shape",), *shifted)
        scales = module.arrays[name]
        is_one = scales.shape in ((), (1,))
        if len(module.shape) != 2 or not (is_one or len(scales.shape) == 2) or not scales.dtype.is_float:
            raise UnreadableError(f"{module.name}: {module.shape} with scales {scales.dtype}{scales.shape}")
        widths = _widths(module, declared)
        width = size = widths[0]
        if not is_one:
            count = scales.shape[1]
            width, size = rows_and_groups(module, widths, count, bits=4, per_code=_PER_WORD)
        shape = (module.shape[0], width)
        return Weight(
            name=module.name.removesuffix("_packed"),
            codes=module.name,
            scheme="int4 per tensor" if is_one else f"int4 1x{size}",
            shape=shape,
            layout=module.shape,
            packed=_PER_WORD,
            numbers=OFFSET_INT4,
            scales=(
                tensor_scale(module, name, shape) if is_one else block_scales(module, name, shape, (1, size)),
            ),
            aside=(declared, *zero_points),
            activation_scales=module.activation_scales,
            stored_shape=declared,
            zero_points=_zero_points(module, zero_points),
        )


def _widths(module: Module, name: str) -> Sequence[int]:
    """Return the possible lengths of a row: the stored length, or all lengths that fit the words.

    Raises:
        UnreadableError: The stored shape does not match the codes.
    """
    rows, words = module.shape
    limit, declared, array = words * _PER_WORD, module.shapes.get(name), module.arrays[name]
    if array.shape != (2,) or not array.dtype.is_whole:
        raise UnreadableError(
            f"{name}: {array.dtype} of {list(array.shape)}, which is not the shape of a matrix"
        )
    if declared is None:
        return range(limit, max(limit - _PER_WORD, 0), -1) if limit else (0,)
    if declared[0] != rows or ceil_div(declared[1], _PER_WORD) != words:
        raise UnreadableError(f"{name}: {list(declared)}, but the quantized values have {[rows, limit]}")
    return declared[1:]


def _zero_points(module: Module, names: Sequence[str]) -> str | None:
    """Return the name of the array of zero points, or None.

    Raises:
        UnreadableError: The array does not have one zero point per scale, packed like the numbers.
    """
    if not names:
        return None
    (name,), scales = names, module.arrays[module.by_key["weight_scale"]].shape
    array, expected = module.arrays[name], (ceil_div(module.shape[0], _PER_WORD), *scales[1:])
    if array.dtype.name != "int32" or len(scales) != 2 or array.shape != expected:
        raise UnreadableError(
            f"{name}: {array.dtype} of {list(array.shape)}, expected int32 of {list(expected)}"
        )
    return name
