"""Weights that compressed-tensors packs here and now, against what its own decompressors make of them.

Needs the extra `transformers`, which the suite does without.
"""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from support.internals import quantized_view
from support.quantized_weights import tree_of

import ckpttools
from ckpttools import DTYPES

WHY = "the extra `transformers` is not installed"
torch = pytest.importorskip("torch", reason=WHY)
quantization = pytest.importorskip("compressed_tensors.quantization", reason=WHY)
compressors = pytest.importorskip("compressed_tensors.compressors", reason=WHY)

# Not a multiple of the eight zero points of a word.
ROWS, NAME = 29, "m.up_proj"
# Format -> what is said of the weights, and columns.
INT4 = {"num_bits": 4, "type": "int", "symmetric": True}
SHIFTED = INT4 | {"symmetric": False}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
CASES = {
    "int4 in groups": ("pack-quantized", INT4 | {"strategy": "group", "group_size": 32}, 96),
    "int4 by rows": ("pack-quantized", INT4 | {"strategy": "channel"}, 96),
    "asymmetric int4 in groups": ("pack-quantized", SHIFTED | {"strategy": "group", "group_size": 32}, 96),
    "asymmetric int4 by rows": ("pack-quantized", SHIFTED | {"strategy": "channel"}, 96),
    "int4 by rows that end within a word": ("pack-quantized", INT4 | {"strategy": "channel"}, 93),
    "asymmetric int4 in groups that do": (
        "pack-quantized",
        SHIFTED | {"strategy": "group", "group_size": 12},
        60,
    ),
    "int4 in groups of less than a word": (
        "pack-quantized",
        INT4 | {"strategy": "group", "group_size": 3},
        93,
    ),
    "fp8 by rows": ("float-quantized", FP8 | {"strategy": "channel"}, 96),
    "fp8 as a whole": ("float-quantized", FP8 | {"strategy": "tensor"}, 96),
    "fp8 in blocks": ("float-quantized", FP8 | {"strategy": "block", "block_structure": [16, 32]}, 96),
}


def scales_of(declared: dict[str, object], columns: int) -> tuple[int, int]:
    rows, across = declared.get("block_structure", (1, declared.get("group_size", columns)))
    return (1, 1) if declared["strategy"] == "tensor" else (-(-ROWS // rows), columns // across)


def packed(form: str, declared: dict[str, object], weight: torch.Tensor, **more: torch.Tensor):
    """What is stored of a weight, and the weight that comes of it there."""
    scheme = quantization.QuantizationScheme(
        targets=["Linear"], weights=quantization.QuantizationArgs(**declared)
    )
    compressor = compressors.BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress({"weight": weight, **more}, scheme)
    return stored, compressor.decompress(stored, scheme)["weight"]


def carried(tensor: torch.Tensor) -> np.ndarray:
    """The same bits as an array."""
    name = str(tensor.dtype).removeprefix("torch.")
    plain = tensor.detach().contiguous()
    if hasattr(ml_dtypes, name):
        width = {1: torch.uint8, 2: torch.uint16}[plain.itemsize]
        return plain.view(width).numpy().view(getattr(ml_dtypes, name))
    return plain.numpy()


def read(form: str, declared: dict[str, object], stored: dict[str, torch.Tensor], dtype: str) -> np.ndarray:
    arrays = {f"{NAME}.{key}": carried(tensor) for key, tensor in stored.items()}
    groups = {"group_0": {"targets": ["Linear"], "weights": declared}}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
    tree = quantized_view(tree_of(arrays, {"quantization_config": config})).dequantized(DTYPES[dtype]).tree
    return tree.arrays[(f"{NAME}.weight",)].read()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("case", CASES)
def test_dequantized_bits_match(case, dtype):
    form, declared, columns = CASES[case]
    drawn = torch.Generator().manual_seed(len(case))
    to = getattr(torch, dtype)
    weight = (torch.randn(ROWS, columns, generator=drawn) * 0.05).to(to)
    grid = scales_of(declared, columns)
    scale = (torch.rand(grid, generator=drawn) * 0.01 + 0.001).to(to)
    more = (
        {}
        if declared["symmetric"]
        else {"weight_zero_point": torch.randint(-8, 8, grid, generator=drawn).to(torch.int8)}
    )
    stored, expected = packed(form, declared, weight, weight_scale=scale, **more)
    built = read(form, declared, stored, dtype)
    assert expected.dtype == to and built.shape == tuple(expected.shape)
    assert built.tobytes() == carried(expected).tobytes()


@pytest.mark.parametrize("whole", [3171.0, 4096.0, 0.37])
def test_nvfp4_values_match(whole):
    declared = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "symmetric": True,
    }
    drawn = torch.Generator().manual_seed(0)
    weight = (torch.randn(ROWS, 96, generator=drawn) * 0.05).to(torch.bfloat16)
    scale = (torch.rand(ROWS, 6, generator=drawn) * 400 + 1).to(torch.float8_e4m3fn).to(torch.bfloat16)
    form, more = "nvfp4-pack-quantized", {"weight_scale": scale, "weight_global_scale": torch.tensor([whole])}
    stored, expected = packed(form, declared, weight, **more)
    assert stored["weight_scale"].dtype == torch.float8_e4m3fn and expected.dtype == torch.bfloat16
    assert read(form, declared, stored, "bfloat16").tobytes() == carried(expected).tobytes()


# Which of the eight numbers of a word lies where, as AutoAWQ packs columns.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def _awq_columns(words: np.ndarray) -> np.ndarray:
    apart = [(words >> np.uint32(4 * location)) & np.uint32(15) for location in AWQ_ORDER]
    return np.stack(apart, -1).reshape(len(words), -1).astype(np.float32)


def test_converted_awq_has_same_values(tmp_path):
    convert = pytest.importorskip("compressed_tensors.entrypoints.convert", reason=WHY)
    rng, declared = np.random.default_rng(0), {"quant_method": "awq", "bits": 4, "group_size": 16}
    declared |= {"version": "gemm", "zero_point": True}
    codes, zeros = (rng.integers(0, 2**32, (rows, 4)).astype(np.uint32) for rows in (64, 4))
    scales = rng.uniform(0.01, 1, (4, 32)).astype(np.float16)
    module = "model.layers.0.mlp.up_proj"
    arrays = {f"{module}.qweight": codes.view(np.int32), f"{module}.qzeros": zeros.view(np.int32)}
    (tmp_path / "awq").mkdir()
    save_file({**arrays, f"{module}.scales": scales}, tmp_path / "awq" / "model.safetensors")
    config = {"model_type": "llama", "quantization_config": declared}
    (tmp_path / "awq" / "config.json").write_text(json.dumps(config))
    convert.convert_checkpoint(
        tmp_path / "awq",
        tmp_path / "made",
        convert.AutoAWQConverter.from_autoawq_config(declared),
        max_workers=1,
    )
    built = ckpttools.open(tmp_path / "made").pipe(ckpttools.CastTo("float32"))[f"{module}.weight"].read()
    expected = (_awq_columns(codes) - np.repeat(_awq_columns(zeros), 16, 0)) * np.repeat(scales, 16, 0)
    assert built.tobytes() == expected.T.astype(np.float32).tobytes()
