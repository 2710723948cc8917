"""Checkpoints of each quantization scheme, and the arrays that each scheme stores."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from ckpttools import DTYPES, Tree
from ckpttools.testing.strategies import noise, stored

Arrays = dict[str, tuple[str, tuple[int, ...]]]
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8}
# What each scheme stores in the module of a linear layer of 16 x 16, and what config.json says of it.
KINDS: dict[str, tuple[dict[str, object], Arrays]] = {
    "gptq": (
        GPTQ,
        {
            "qweight": ("int32", (2, 16)),
            "qzeros": ("int32", (2, 2)),
            "scales": ("float16", (2, 16)),
            "g_idx": ("int32", (16,)),
        },
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 8},
        {"qweight": ("int32", (16, 2)), "qzeros": ("int32", (2, 2)), "scales": ("float16", (2, 16))},
    ),
    "nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {
            "weight": ("uint8", (128, 1)),
            "weight.absmax": ("uint8", (4,)),
            "weight.quant_map": ("float32", (16,)),
            "weight.nested_absmax": ("float32", (1,)),
            "weight.nested_quant_map": ("float32", (256,)),
            "weight.quant_state.bitsandbytes__nf4": ("uint8", (80,)),
        },
    ),
    "int8": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {"weight": ("int8", (16, 16)), "SCB": ("float32", (16,)), "weight_format": ("uint8", (1,))},
    ),
    "pack-quantized": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        {
            "weight_packed": ("int32", (16, 2)),
            "weight_scale": ("bfloat16", (16, 2)),
            "weight_shape": ("int64", (2,)),
            "weight_zero_point": ("int32", (2, 2)),
            "weight_g_idx": ("int32", (16,)),
            "input_scale": ("float32", (1,)),
        },
    ),
    "mxfp4": (
        {"quant_method": "mxfp4"},
        {
            "up_blocks": ("uint8", (2, 16, 1, 16)),
            "up_scales": ("uint8", (2, 16, 1)),
            "down_blocks": ("uint8", (2, 16, 1, 16)),
            "down_scales": ("uint8", (2, 16, 1)),
        },
    ),
    "fp8 in blocks": (
        {"quant_method": "fp8", "weight_block_size": [8, 8]},
        {"weight": ("float8_e4m3fn", (16, 16)), "weight_scale_inv": ("float32", (2, 2))},
    ),
    "static fp8": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        {
            "weight": ("float8_e4m3fn", (16, 16)),
            "weight_scale": ("float32", ()),
            "input_scale": ("float32", ()),
            "activation_scale": ("float32", ()),
            "k_scale": ("float32", ()),
            "v_scale": ("float32", ()),
        },
    ),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {
            "weight": ("uint8", (16, 8)),
            "weight_quantizer._scale": ("float8_e4m3fn", (16, 1)),
            "weight_quantizer._double_scale": ("float32", ()),
            "weight_quantizer._amax": ("float32", ()),
            "input_quantizer._amax": ("float32", ()),
        },
    ),
    "torchao": (
        {"quant_method": "torchao"},
        {
            "_weight_qdata": ("int8", (16, 16)),
            "_weight_scale": ("bfloat16", (16, 2)),
            "_weight_zero_point": ("bfloat16", (16, 2)),
        },
    ),
    "hqq": (
        {"quant_method": "hqq"},
        {
            "W_q": ("uint8", (16, 8)),
            "scale": ("float16", (32, 1)),
            "zero": ("float16", (32, 1)),
            "meta": ("uint8", (40,)),
            "nbits": ("int32", (1,)),
        },
    ),
    "mlx": (
        {"quant_method": "mlx", "bits": 4, "group_size": 8},
        {"weight": ("uint32", (16, 2)), "scales": ("float16", (16, 2)), "biases": ("float16", (16, 2))},
    ),
    "aqlm": (
        {"quant_method": "aqlm"},
        {
            "codes": ("int8", (16, 2, 1)),
            "codebooks": ("float16", (1, 256, 1, 8)),
            "scales": ("float16", (16, 1, 1, 1)),
        },
    ),
    "quip": (
        {"quant_method": "quip"},
        {"Qidxs": ("int64", (16, 2)), "SU": ("float16", (16,)), "SV": ("float16", (16,))},
    ),
    "quanto": (
        {"quant_method": "quanto"},
        {
            "weight._data._data": ("uint8", (8, 16)),
            "weight._scale": ("float16", (32, 1)),
            "weight._shift": ("float16", (32, 1)),
            "input_scale": ("float16", ()),
            "output_scale": ("float16", ()),
        },
    ),
    "spqr": (
        {"quant_method": "spqr"},
        {"dense_weights": ("int64", (64,)), "row_offsets": ("int32", (17,)), "col_vals": ("int32", (30,))},
    ),
    "vptq": (
        {"quant_method": "vptq"},
        {
            "indices": ("int32", (1, 16, 2)),
            "res_indices": ("int32", (1, 16, 2)),
            "centroids.weight": ("float16", (1, 128)),
            "res_centroids.weight": ("float16", (1, 128)),
            "perm": ("int64", (16,)),
            "weight_scale": ("float16", (16,)),
            "weight_bias": ("float16", (16,)),
        },
    ),
}
# The structure alone does not say that these are quantized.
SAID_ONLY = {"quip", "spqr", "vptq"}
MODULES = ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "model.layers.1.self_attn.o_proj")
PLAIN: Arrays = {
    "model.embed_tokens.weight": ("bfloat16", (8, 16)),
    "model.layers.0.norm.weight": ("bfloat16", (16,)),
    "model.layers.0.mlp.gate.weight": ("bfloat16", (4, 16)),
    "model.layers.0.mlp.gate.bias": ("float32", (4,)),
    "model.layers.0.mlp.up_proj.bias": ("bfloat16", (16,)),
    "model.layers.1.self_attn.o_proj.bias": ("bfloat16", (16,)),
    "lm_head.weight": ("bfloat16", (8, 16)),
}


def parts_of(kind: str, module: str) -> list[set[str]]:
    """The names that belong together in a module."""
    names = [f"{module}.{key}" for key in KINDS[kind][1]]
    if kind != "mxfp4":
        return [set(names)]
    return [{f"{module}.{word}_{item}" for item in ("blocks", "scales")} for word in ("up", "down")]


def described(kind: str) -> Arrays:
    inside = {f"{module}.{key}": item for module in MODULES for key, item in KINDS[kind][1].items()}
    return {**PLAIN, **inside}


def tree_of_kind(kind: str, *, declared: bool = True) -> Tree:
    leaves = {
        (name,): stored(noise(shape, DTYPES[dtype]), DTYPES[dtype])
        for name, (dtype, shape) in described(kind).items()
    }
    config = {"dtype": "bfloat16"} | ({"quantization_config": KINDS[kind][0]} if declared else {})
    return Tree(leaves).with_metadata(config=config)


def write(directory: Path, kind: str, *, declared: bool = True) -> Path:
    """A checkpoint of this kind, as others write it."""
    rng = np.random.default_rng(len(kind))
    arrays = {}
    for name, (dtype, shape) in described(kind).items():
        to = np.dtype(getattr(ml_dtypes, dtype, dtype))
        drawn = rng.standard_normal(shape) if DTYPES[dtype].is_float else rng.integers(0, 100, shape)
        arrays[name] = np.asarray(drawn).astype(to)
    directory.mkdir()
    save_file(arrays, directory / "model.safetensors", {"format": "pt"})
    config = {"torch_dtype": "bfloat16"} | ({"quantization_config": KINDS[kind][0]} if declared else {})
    (directory / "config.json").write_text(json.dumps(config))
    return directory
