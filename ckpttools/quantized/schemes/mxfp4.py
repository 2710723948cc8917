"""MXFP4 as gpt-oss stores its experts: two numbers of four bits in a byte, 32 under one exponent."""

from __future__ import annotations

from ckpttools.core.dtypes import DTYPES
from ckpttools.quantized.schemes.base import Module, UnreadableError, Weight, blocked

_BLOCKS, _SCALES = "_blocks", "_scales"
# Bytes of a group of 32.
_GROUP_BYTES = 16


class Mxfp4:
    """`X_blocks` (expert, out, group, 16) beside `X_scales` (expert, out, group), both uint8.

    The logical array is `X` (expert, in, out), as transformers computes with it.
    """

    methods = ("mxfp4",)
    formats: tuple[str, ...] = ()

    def takes(self, module: Module) -> bool:
        return module.method in self.methods and module.key.endswith(_BLOCKS)

    def read(self, module: Module) -> Weight:
        name = module.side(module.key.removesuffix(_BLOCKS) + _SCALES)
        if module.dtype.name != "uint8" or len(module.shape) < 3 or module.shape[-1] != _GROUP_BYTES:
            raise UnreadableError(
                f"{module.name}: {module.dtype} of {module.shape}, expected bytes in groups of {_GROUP_BYTES}"
            )
        if module.arrays[name].dtype.name not in ("uint8", "float8_e8m0fnu"):
            raise UnreadableError(f"{name}: {module.arrays[name].dtype}, expected exponents in uint8")
        *rows, groups, inside = module.shape
        shape = (*rows, groups * inside * 2)
        return Weight(
            name=module.name.removesuffix(_BLOCKS),
            codes=module.name,
            scheme="mxfp4",
            shape=shape,
            layout=(*rows, groups * inside),
            packed=2,
            numbers=DTYPES["float4_e2m1fn"].name,
            scales=(blocked(module, name, shape, (1, 32), dtype=DTYPES["float8_e8m0fnu"]),),
            of_activations=module.of_activations,
            is_swapped=True,
        )
