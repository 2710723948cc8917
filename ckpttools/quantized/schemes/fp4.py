"""Schemes for 4-bit floating-point weights: MXFP4, NVFP4 and the experts of DeepSeek V4."""

from __future__ import annotations

from ckpttools.core.dtypes import DTYPES
from ckpttools.core.region import Shape
from ckpttools.quantized.schemes.base import (
    Module,
    Scales,
    UnreadableError,
    Weight,
    block_scales,
    tensor_scale,
)
from ckpttools.quantized.schemes.fp8 import dtype_of_scales

_BLOCKS, _SCALES = "_blocks", "_scales"
# Number of bytes in a group of 32.
_GROUP_BYTES = 16


class Mxfp4:
    """MXFP4: `X_blocks` (expert, out, group, 16) with `X_scales` (expert, out, group), both uint8.

    The logical array is `X` (expert, in, out), as in transformers.
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
            scales=(block_scales(module, name, shape, (1, 32), dtype=DTYPES["float8_e8m0fnu"]),),
            activation_scales=module.activation_scales,
            is_swapped=True,
        )


_BLOCK = (1, 16)


class Nvfp4:
    """NVFP4, with a global scale.

    The global scale of compressed-tensors' `X.weight_packed` is a divisor, and that of ModelOpt's `X.weight`
    is a multiplier.
    """

    methods = ("compressed-tensors", "modelopt")
    formats = ("nvfp4-pack-quantized",)

    def takes(self, module: Module) -> bool:
        if module.dtype.name != "uint8" or len(module.shape) != 2:
            return False
        by = module.method, module.key
        has_global = {"weight_global_scale", "weight_scale_2"} & module.by_key.keys()
        return bool(has_global) and by in (("compressed-tensors", "weight_packed"), ("modelopt", "weight"))

    def read(self, module: Module) -> Weight:
        is_divided = module.key == "weight_packed"
        for_all = "weight_global_scale" if is_divided else "weight_scale_2"
        name, over = module.only(("weight_scale",), (for_all,))
        rows, columns = module.shape
        shape = (rows, 2 * columns)
        return Weight(
            name=module.name.removesuffix("_packed"),
            codes=module.name,
            scheme="nvfp4 1x16",
            shape=shape,
            layout=module.shape,
            packed=2,
            numbers=DTYPES["float4_e2m1fn"].name,
            scales=(_group_scale(module, name, shape), tensor_scale(module, over, shape, divides=is_divided)),
            activation_scales=module.activation_scales,
        )


def _group_scale(module: Module, name: str, shape: Shape) -> Scales:
    if module.arrays[name].dtype.name != "float8_e4m3fn":
        raise UnreadableError(f"{name}: {module.arrays[name].dtype}, expected float8_e4m3fn")
    return block_scales(module, name, shape, _BLOCK)


_EXPERT_BLOCK = (1, 32)


class Fp4Experts:
    """DeepSeek V4's experts: int8 or uint8 `X.weight` with `X.scale`.

    The configuration has `expert_dtype: fp4`.
    """

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
            scales=(block_scales(module, name, shape, _EXPERT_BLOCK, dtype=dtype_of_scales(module, name)),),
            activation_scales=module.activation_scales,
        )
