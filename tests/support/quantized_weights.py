"""Weights of every scheme that is read, each with the numbers that it stands for, worked out directly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from ckpttools import DTYPES, Tree
from ckpttools.testing.strategies import stored

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
SCALE_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Made:
    """A weight.

    Attributes:
        arrays: what is stored, by name, in numpy's and ml_dtypes' dtypes.
        config: the `quantization_config`.
        name: of the logical array.
        product: its numbers in float32, made with indices element by element.
        scheme: what it is called.
    """

    arrays: Mapping[str, np.ndarray]
    config: Mapping[str, object]
    name: str
    product: np.ndarray
    scheme: str
    also: Mapping[str, object] = field(default_factory=dict)

    @property
    def bfloat16(self) -> np.ndarray:
        return self.product.astype(ml_dtypes.bfloat16)

    @property
    def tree(self) -> Tree:
        return tree_of(self.arrays, {"quantization_config": dict(self.config)})


def tree_of(arrays: Mapping[str, np.ndarray], config: Mapping[str, object]) -> Tree:
    leaves = {}
    for name, array in arrays.items():
        dtype = DTYPES[array.dtype.name]
        leaves[(name,)] = stored(array.view(dtype.carrier), dtype)
    return Tree(leaves).with_metadata(config=dict(config))


def scaled(numbers: np.ndarray, scales: np.ndarray, block: tuple[int, ...]) -> np.ndarray:
    """float32 products: for each element the scale of its block, looked up by its index."""
    where = np.indices(numbers.shape)
    cells = tuple(axis // length for axis, length in zip(where, block, strict=True))
    return numbers.astype(np.float32) * scales[cells].astype(np.float32)


def grid(shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-n // b) for n, b in zip(shape, block, strict=True))


def _float8(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return (rng.standard_normal(shape) * 50).astype(ml_dtypes.float8_e4m3fn)


def _scales(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    drawn = rng.uniform(0.001, 0.1, shape)
    return drawn.astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))


def fp8_blocks(
    rng: np.random.Generator, shape: tuple[int, ...], block: tuple[int, int], dtype: str = "float32"
) -> Made:
    """DeepSeek V3; `dtype` of the scales, "ue8m0" for exponents in uint8 as of DeepSeek V4."""
    cell = (*(1,) * (len(shape) - 2), *block)
    codes, name = _float8(rng, shape), "m.q_proj.weight"
    config: dict[str, object] = {"quant_method": "fp8", "weight_block_size": list(block)}
    if dtype in ("ue8m0", "float8_e8m0fnu"):
        exponents = rng.integers(110, 135, grid(shape, cell)).astype(np.uint8)
        stored_scales = exponents if dtype == "ue8m0" else exponents.view(ml_dtypes.float8_e8m0fnu)
        factors, key = np.exp2(exponents.astype(np.float32) - 127), "m.q_proj.scale"
        config |= {"scale_fmt": "ue8m0"}
    else:
        factors = stored_scales = _scales(rng, grid(shape, cell), dtype)
        key = f"{name}_scale_inv"
    arrays = {name: codes, key: stored_scales}
    declared = f"fp8 {block[0]}x{block[1]}"
    return Made(arrays, config, name, scaled(codes, factors, cell), declared)


def fp8_rows(rng: np.random.Generator, shape: tuple[int, int], dtype: str = "float32") -> Made:
    """compressed-tensors `float-quantized` with a scale for each row, and one of activations."""
    name, codes = "m.q_proj.weight", _float8(rng, shape)
    scales = _scales(rng, (shape[0], 1), dtype)
    arrays = {name: codes, f"{name}_scale": scales, "m.q_proj.input_scale": np.ones((1,), np.float32)}
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
    }
    which = "per row" if shape[0] > 1 else "per tensor"
    return Made(arrays, config, name, scaled(codes, scales, (1, shape[1])), f"fp8 {which}")


def fp8_tensor(rng: np.random.Generator, shape: tuple[int, int], dtype: str = "float32") -> Made:
    name, codes = "m.q_proj.weight", _float8(rng, shape)
    scale = _scales(rng, (), dtype)
    arrays = {name: codes, f"{name}_scale": scale, "m.q_proj.input_scale": np.ones((), np.float32)}
    config = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    product = codes.astype(np.float32) * np.float32(scale)
    return Made(arrays, config, name, product, "fp8 per tensor")


def _nibbles(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of 4 bits, and the bytes that hold two of a row each, the first in the lower half."""
    nibbles = rng.integers(0, 16, shape).astype(np.uint8)
    return nibbles, nibbles[..., 0::2] | nibbles[..., 1::2] << 4


def fp4_experts(rng: np.random.Generator, rows: int, groups: int) -> Made:
    """An expert of DeepSeek V4."""
    nibbles, packed = _nibbles(rng, (rows, groups * 32))
    exponents = rng.integers(100, 140, (rows, groups)).astype(np.uint8)
    name = "layers.0.ffn.experts.1.w1.weight"
    config = {
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
        "weight_block_size": [128, 128],
    }
    arrays = {name: packed.view(np.int8), "layers.0.ffn.experts.1.w1.scale": exponents}
    factors = np.exp2(exponents.astype(np.float32) - 127)
    return Made(arrays, config, name, scaled(E2M1[nibbles], factors, (1, 32)), "fp4 1x32")


def mxfp4(rng: np.random.Generator, experts: int, rows: int, groups: int) -> Made:
    """Experts of gpt-oss."""
    nibbles, packed = _nibbles(rng, (experts, rows, groups * 32))
    exponents = rng.integers(0, 253, (experts, rows, groups)).astype(np.uint8)
    name = "model.layers.0.mlp.experts.down_proj"
    arrays = {
        f"{name}_blocks": packed.reshape(experts, rows, groups, 16),
        f"{name}_scales": exponents,
        f"{name}_bias": np.ones((experts, rows), ml_dtypes.bfloat16),
    }
    factors = np.exp2(exponents.astype(np.float64) - 127)
    where = np.repeat(factors, 32, -1)
    product = (E2M1[nibbles].astype(np.float64) * where).astype(np.float32)
    return Made(arrays, {"quant_method": "mxfp4"}, name, product.transpose(0, 2, 1), "mxfp4")


def int4(
    rng: np.random.Generator, rows: int, words: int, group: int, *, shifted: bool = False, cut: int = 0
) -> Made:
    """compressed-tensors `pack-quantized`, as Kimi K2 Thinking has its experts; or with zero points.

    Of the last words of rows `cut` numbers are none of theirs.
    """
    shape = (rows, words * 8 - cut)
    nibbles = rng.integers(0, 16, (rows, words * 8)).astype(np.uint32)
    packed = np.zeros((rows, words), np.uint32)
    for location in range(8):
        packed |= nibbles[:, location::8] << (4 * location)
    nibbles = nibbles[:, : shape[1]]
    scales = _scales(rng, grid(shape, (1, group)), "bfloat16")
    name = "m.experts.0.up_proj.weight"
    arrays = {
        f"{name}_packed": packed.view(np.int32),
        f"{name}_scale": scales,
        f"{name}_shape": np.array(shape, np.int64),
    }
    zeros = rng.integers(0, 16, scales.shape) if shifted else np.full(scales.shape, 8)
    if shifted:
        of_words = np.zeros((-(-rows // 8), scales.shape[1]), np.uint32)
        for row, item in enumerate(zeros.astype(np.uint32)):
            of_words[row // 8] |= item << np.uint32(4 * (row % 8))
        arrays[f"{name}_zero_point"] = of_words.view(np.int32)
    weights = {"num_bits": 4, "type": "int", "group_size": group, "strategy": "group"}
    weights |= {"symmetric": not shifted}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": weights}},
    }
    of_each = np.repeat(zeros, group, 1)[:, : shape[1]].astype(np.float32)
    product = scaled(nibbles.astype(np.float32) - of_each, scales, (1, group))
    return Made(arrays, config, name, product, f"int4 1x{group}")


def nvfp4(rng: np.random.Generator, rows: int, groups: int, *, divides: bool) -> Made:
    """Of compressed-tensors, whose global scale divides, or of ModelOpt, whose second scale multiplies."""
    nibbles, packed = _nibbles(rng, (rows, groups * 16))
    scales = rng.uniform(1, 400, (rows, groups)).astype(ml_dtypes.float8_e4m3fn)
    whole = np.float32(rng.uniform(100, 5000))
    name = "m.up_proj.weight"
    if divides:
        factors = scales.astype(np.float32) / whole
        arrays = {f"{name}_packed": packed, f"{name}_scale": scales}
        arrays |= {f"{name}_global_scale": whole.reshape(1), "m.up_proj.input_global_scale": whole.reshape(1)}
        config: dict[str, object] = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    else:
        factors = scales.astype(np.float32) * (1 / whole)
        arrays = {name: packed, f"{name}_scale": scales, f"{name}_scale_2": np.asarray(1 / whole)}
        arrays |= {"m.up_proj.input_scale": whole.reshape(())}
        config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    return Made(arrays, config, name, scaled(E2M1[nibbles], factors, (1, 16)), "nvfp4 1x16")
