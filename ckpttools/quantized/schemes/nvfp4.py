"""NVFP4: two numbers of four bits in a byte, 16 under one float8 scale, and one float32 scale for all."""

from __future__ import annotations

from ckpttools.core.dtypes import DTYPES
from ckpttools.core.region import Shape
from ckpttools.quantized.schemes.base import Module, Scales, UnreadableError, Weight, blocked, whole

_BLOCK = (1, 16)


class Nvfp4:
    """Of compressed-tensors `X.weight_packed` with a global scale that divides; of ModelOpt `X.weight` with
    one that multiplies.
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
            scales=(_of_groups(module, name, shape), whole(module, over, shape, divides=is_divided)),
            of_activations=module.of_activations,
        )


def _of_groups(module: Module, name: str, shape: Shape) -> Scales:
    if module.arrays[name].dtype.name != "float8_e4m3fn":
        raise UnreadableError(f"{name}: {module.arrays[name].dtype}, expected float8_e4m3fn")
    return blocked(module, name, shape, _BLOCK)
