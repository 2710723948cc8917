"""Whole numbers of four bits, eight in a word: `pack-quantized` of compressed-tensors, as of Kimi K2."""

from __future__ import annotations

from collections.abc import Sequence

from ckpttools.core.region import ceil_div
from ckpttools.quantized.decoding import OFFSET_INT4
from ckpttools.quantized.schemes.base import Module, UnreadableError, Weight, blocked, whole
from ckpttools.quantized.schemes.groups import (
    ZERO_POINT,
    group_size,
    is_shifted,
    refuse_other_bits,
    refuse_reordered,
)

_PER_WORD = 8


class PackQuantized:
    """`X.weight_packed` (out, in / 8) beside `X.weight_scale` (out, in / group) and `X.weight_shape`.

    Where it is not symmetric, `X.weight_zero_point` (out / 8, in / group) is beside it as well.
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
        name, said, *zero_points = module.only(("weight_scale",), ("weight_shape",), *shifted)
        scales = module.arrays[name]
        is_one = scales.shape in ((), (1,))
        if len(module.shape) != 2 or not (is_one or len(scales.shape) == 2) or not scales.dtype.is_float:
            raise UnreadableError(f"{module.name}: {module.shape} with scales {scales.dtype}{scales.shape}")
        rows, words = module.shape
        shape = (rows, words * _PER_WORD)
        size = shape[1] if is_one else group_size(module, shape, scales.shape[1], bits=4)
        return Weight(
            name=module.name.removesuffix("_packed"),
            codes=module.name,
            scheme="int4 per tensor" if is_one else f"int4 1x{size}",
            shape=shape,
            layout=module.shape,
            packed=_PER_WORD,
            numbers=OFFSET_INT4,
            scales=(whole(module, name, shape) if is_one else blocked(module, name, shape, (1, size)),),
            aside=(said, *zero_points),
            of_activations=module.of_activations,
            stored_shape=said,
            zero_points=_zero_points(module, zero_points),
        )


def _zero_points(module: Module, names: Sequence[str]) -> str | None:
    """The array of zero points.

    Raises:
        UnreadableError: it is not one for each scale, packed as the numbers are.
    """
    if not names:
        return None
    (name,), scales = names, module.arrays[module.by_key["weight_scale"]].shape
    array, wanted = module.arrays[name], (ceil_div(module.shape[0], _PER_WORD), *scales[1:])
    if array.dtype.name != "int32" or len(scales) != 2 or array.shape != wanted:
        raise UnreadableError(f"{name}: {array.dtype} of {list(array.shape)}, wanted int32 of {list(wanted)}")
    return name
