"""DeepSeek V4's experts: two numbers of four bits in a byte, 32 of a row under one exponent."""

from __future__ import annotations

from ckpttools.core.dtypes import DTYPES
from ckpttools.quantized.schemes.base import Module, Weight, blocked
from ckpttools.quantized.schemes.fp8 import dtype_of_scales

_BLOCK = (1, 32)


class Fp4Experts:
    """`X.weight` in int8 or uint8 beside `X.scale`, where the configuration says `expert_dtype: fp4`."""

    methods = ("fp8",)
    formats: tuple[str, ...] = ()

    def takes(self, module: Module) -> bool:
        is_packed = module.dtype.name in ("int8", "uint8") and len(module.shape) == 2
        return module.method in self.methods and module.declared.get("expert_dtype") == "fp4" and is_packed

    def read(self, module: Module) -> Weight:
        name = module.side("scale", f"{module.key}_scale", f"{module.key}_scale_inv")
        rows, columns = module.shape
        shape = (rows, 2 * columns)
        return Weight(
            name=module.name,
            codes=module.name,
            scheme="fp4 1x32",
            shape=shape,
            layout=module.shape,
            packed=2,
            numbers=DTYPES["float4_e2m1fn"].name,
            scales=(blocked(module, name, shape, _BLOCK, dtype=dtype_of_scales(module, name)),),
            of_activations=module.of_activations,
        )
