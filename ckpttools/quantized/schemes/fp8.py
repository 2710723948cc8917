"""Float8 with a scale per block, row or matrix: DeepSeek, Kimi, Qwen, Llama FP8 and ModelOpt."""

from __future__ import annotations

from math import prod

from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.quantized.schemes.base import (
    Module,
    Scales,
    UnreadableError,
    Weight,
    block_scales,
    tensor_scale,
    weight_groups,
)

_FIELD, _DEFAULT_BLOCK = "weight_block_size", (128, 128)
# The model's fused experts are multiplied from the left, and therefore have a scale for each column.
_FUSED_METHOD = "fbgemm_fp8"
_EXPONENTS = DTYPES["float8_e8m0fnu"]
Block = tuple[int, int]


class Fp8:
    """FP8: float8 `X.weight` with `X.weight_scale_inv`, `X.weight_scale` or, in DeepSeek V4, `X.scale`.

    Despite its name, `weight_scale_inv` is also a multiplier.
    """

    methods = ("fp8", "compressed-tensors", "modelopt", "fbgemm_fp8")
    formats = ("float-quantized", "naive-quantized")

    def takes(self, module: Module) -> bool:
        return module.method in self.methods and module.dtype.is_float and module.dtype.bits == 8

    def read(self, module: Module) -> Weight:
        declared_format = module.declared.get("fmt")
        if isinstance(declared_format, str) and declared_format not in module.dtype.name:
            raise UnreadableError(
                f"{module.name}: {module.dtype}, but the configuration has {declared_format}"
            )
        name = module.side(f"{module.key}_scale_inv", f"{module.key}_scale", "scale")
        scale, declared = _scale(module, name)
        return Weight(
            name=module.name,
            codes=module.name,
            scheme=f"fp8 {declared}",
            shape=module.shape,
            layout=module.shape,
            packed=1,
            numbers=module.dtype.name,
            scales=(scale,),
            activation_scales=module.activation_scales,
        )


def dtype_of_scales(module: Module, name: str) -> DType:
    """Return the dtype of scales; 8-bit integers are exponents if the configuration declares that.

    Raises:
        UnreadableError: Scales cannot have this dtype.
    """
    dtype = module.arrays[name].dtype
    if dtype.name == "uint8" and module.declared.get("scale_fmt") == "ue8m0":
        return _EXPONENTS
    if not dtype.is_float:
        raise UnreadableError(f"{name}: {dtype} is not a dtype of scales")
    return dtype


def _scale(module: Module, name: str) -> tuple[Scales, str]:
    """Return the scales, with a description of their blocks."""
    shape, given, dtype = module.shape, module.arrays[name].shape, dtype_of_scales(module, name)
    is_of_rows = given in ((*shape[:-1], 1), shape[:-1])
    block = _block(module, is_coarse=is_of_rows or prod(given) == 1)
    if module.method == _FUSED_METHOD and len(shape) == 3:
        return _column_scale(module, name, dtype), "per column"
    is_of_experts = len(shape) > 2 and given in (shape[:1], (shape[0], 1, 1))
    if block is None and module.method == "fp8" and _FIELD not in module.declared:
        block = None if prod(given) == 1 or is_of_rows or is_of_experts else _DEFAULT_BLOCK
    if block is not None:
        return block_scales(module, name, shape, block, dtype=dtype), "x".join(map(str, block))
    if is_of_rows and prod(given) > 1:
        return Scales(name, dtype, (*shape[:-1], 1), (*(1,) * (len(shape) - 1), shape[-1])), "per row"
    if is_of_experts and prod(given) > 1:
        return Scales(name, dtype, (shape[0], 1, 1), (1, *shape[1:])), "per expert"
    return tensor_scale(module, name, shape, dtype=dtype), "per tensor"


def _column_scale(module: Module, name: str, dtype: DType) -> Scales:
    """Return the scales of Llama 4's experts (expert, in, out).

    The scales are (expert, 1, out) for `gate_up_proj` and (expert, out, 1) for `down_proj`, which is the same
    in memory.

    Raises:
        UnreadableError: The scales have another shape.
    """
    (experts, inside, out), array = module.shape, module.arrays[name]
    if array.shape not in ((experts, 1, out), (experts, out, 1)):
        raise UnreadableError(
            f"{name}: {list(array.shape)} scales, but {module.name} of {list(module.shape)} has one for "
            f"each expert and column: {[experts, 1, out]} or {[experts, out, 1]}"
        )
    return Scales(name, dtype, (experts, 1, out), (1, inside, 1))


def _block(module: Module, *, is_coarse: bool) -> Block | None:
    """Return the block in the configuration, or None.

    Args:
        module: The module of the weight.
        is_coarse: Whether scales may also cover rows or the full weight; compressed-tensors may declare this
            for one group of modules, and blocks for another.

    Raises:
        UnreadableError: The configured block is invalid.
    """
    declared = module.declared.get(_FIELD)
    if module.method == "compressed-tensors":
        groups = [group for group in weight_groups(module) if group.get("num_bits", 8) == 8]
        blocks = [group["block_structure"] for group in groups if group.get("block_structure")]
        declared = blocks[0] if blocks and not (is_coarse and len(blocks) < len(groups)) else None
        if declared and any(block != declared for block in blocks):
            raise UnreadableError(f"{module.name}: the configuration has blocks of several sizes")
    match declared:
        case None:
            return None
        # JSON's true is an integer in Python.
        case [int(rows), int(columns)] if rows > 0 and columns > 0 and bool not in map(type, declared):
            return rows, columns
    raise UnreadableError(f"{module.name}: {declared!r} in the configuration is not a block")
