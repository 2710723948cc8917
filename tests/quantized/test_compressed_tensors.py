"""What compressed-tensors compresses is read as it decompresses it itself, or refused by name."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from support.command_line import ended, run
from support.locations import FIXTURES

MODELS = FIXTURES / "compressed-tensors"
READ = (
    *("int4-group", "int4-group-float16", "int4-channel", "int4-tensor", "int4-asymmetric", "int4-ragged"),
    *("fp8-channel", "fp8-tensor", "fp8-block", "nvfp4"),
)
REFUSED = {
    "int8-group": "int8; only int4 is supported for packed integers",
    "int3-group": "int3; only int4 is supported for packed integers",
    "int8-channel": "format: int-quantized, which is not supported",
    "mxfp4": "format: mxfp4-pack-quantized, which is not supported",
    "mxfp8": "format: mxfp8-quantized, which is not supported",
}


def test_every_compressed_model_is_tested():
    assert {item.name for item in MODELS.iterdir()} == {*READ, *REFUSED}


@pytest.mark.parametrize("name", READ)
def test_values_match_the_compressed_tensors_decompressor(name, tmp_path):
    model, dtype = tmp_path / "model", "float16" if "float16" in name else "bfloat16"
    model.mkdir()
    for file in ("model.safetensors", "config.json"):
        (model / file).write_bytes((MODELS / name / file).read_bytes())
    run("cast", model, tmp_path / "out", "--dtype", dtype)
    (result,) = load_file(tmp_path / "out" / "model.safetensors").values()
    (expected,) = load_file(MODELS / name / "expected.safetensors").values()
    assert result.dtype == getattr(ml_dtypes, dtype, dtype)
    assert np.array_equal(result.astype(np.float32), expected)


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_schemes_are_refused_by_name(name, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for file in ("model.safetensors", "config.json"):
        (model / file).write_bytes((MODELS / name / file).read_bytes())
    told = ended("cast", model, tmp_path / "out", "--dtype", "bfloat16", code=3).output
    assert REFUSED[name] in told
    assert "CompressedTensorsConfig(dequantize=True)" in told
    assert not (tmp_path / "out").exists()
