"""Conversions equal the output of MaxText 0.2.5's converter, leaf by leaf, bit by bit, and round trip."""

from __future__ import annotations

import json
from functools import cache
from hashlib import sha256
from pathlib import Path

import pytest
from safetensors import deserialize
from support.golden_data import SCAN_NAMES, Leaves, all_described, arrays_by_tensorstore, leaves_by_package
from support.locations import GOLDEN_0_2_5

import ckpttools
from ckpttools import Resources, ToHuggingFace, ToMaxText, plan_to_huggingface, plan_to_maxtext

# What MaxText converted of each model; the rest it refuses.
CASES = [
    *(("qwen3.5", scan) for scan in (True, False)),
    *(("gemma3-vision", scan) for scan in (True, False)),
    *(("gemma4-vision", scan) for scan in (True, False)),
    *(("qwen3-vl", scan) for scan in (True, False)),
    ("qwen3-vl-moe", False),
    *(("qwen3-omni", scan) for scan in (True, False)),
    ("gemma4-e2b", False),
    *(("qwen3.5-fp8", scan) for scan in (True, False)),
]
EVERY_CASE = pytest.mark.parametrize(
    ("model", "scan"), CASES, ids=[f"{model}-{SCAN_NAMES[scan]}" for model, scan in CASES]
)
# Embeddings are multiplied by the root of 32, which does not come back in 16 bits.
ROUNDED = ("gemma3-vision", "gemma4-vision", "gemma4-e2b")
# Blocks of 8 x 8 in place of 128 x 128; its scales are beside its kernels.
QUANTIZED = ("qwen3.5-fp8",)
TOWERS = ("params/params/vision_encoder/", "params/params/audio_encoder/")


def hugging_face(model: str) -> Path:
    return GOLDEN_0_2_5 / model / "hf"


def golden(model: str, scan: bool) -> Leaves:
    leaves: Leaves = json.loads((GOLDEN_0_2_5 / model / f"leaves_{SCAN_NAMES[scan]}.json").read_bytes())
    return leaves


def is_text_only(model: str, scan: bool) -> bool:
    """Return whether MaxText converted only the text part, because text layers use tower outputs."""
    return not any(path.startswith(TOWERS) for path in golden(model, scan))


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Return the run directory of a model, with carried arrays that MaxText does not support."""

    @cache
    def run(model: str, scan: bool, exact: bool = False) -> Path:
        location = tmp_path_factory.mktemp(model) / "out"
        options = ToMaxText(
            scan=scan,
            text_only=is_text_only(model, scan),
            carry=True,
            exact=exact,
            quantized="keep" if model in QUANTIZED else "dequantize",
        )
        plan_to_maxtext(hugging_face(model), options, Resources(jobs=2)).run(location)
        return location

    return run


@EVERY_CASE
def test_every_leaf_equals_golden_data(converted, model, scan):
    item = converted(model, scan) / "0" / "items"
    assert leaves_by_package(ckpttools.open(item)) == golden(model, scan)
    arrays = {path: leaf for path, leaf in golden(model, scan).items() if isinstance(leaf, dict)}
    assert all_described(arrays_by_tensorstore(item)) == arrays


@EVERY_CASE
def test_every_tensor_round_trips(converted, tmp_path, model, scan):
    source = converted(model, scan, exact=model in ROUNDED)
    plan_to_huggingface(source, ToHuggingFace(), Resources(jobs=2)).run(tmp_path / "hf")
    assert tensors(tmp_path / "hf") == tensors(hugging_face(model))
    built, own = (
        json.loads((location / "config.json").read_bytes())
        for location in (tmp_path / "hf", hugging_face(model))
    )
    assert built.get("quantization_config") == own.get("quantization_config")


def tensors(directory: Path) -> Leaves:
    """Return the digests by name. The safetensors library has no float8 for numpy, so bytes are compared."""
    result = deserialize((directory / "model.safetensors").read_bytes())
    return {name: [item["dtype"], item["shape"], sha256(item["data"]).hexdigest()] for name, item in result}
