"""Models whose layers have several dtypes: nothing is rounded unasked, there or back."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.command_line import run
from support.hf_models import write_llama

WIDE = ("layers.1.self_attn.q_proj", "layers.2.input_layernorm")


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    """One of bfloat16 but for a scaled array of one layer, and a norm of another."""
    location = tmp_path_factory.mktemp("mixed") / "hf"
    tensors = write_llama(location, tie_word_embeddings=True)
    tensors |= {
        name: np.random.default_rng(1).standard_normal(item.shape, np.float32)
        for name, item in tensors.items()
        if any(word in name for word in WIDE)
    }
    save_file(tensors, location / "model.safetensors", {"format": "pt"})
    return location


def test_remap_round_trip_restores_the_tree(hf, tmp_path):
    run("convert", "hf-to-maxtext", hf, tmp_path / "maxtext", "--no-scan")
    run("convert", "maxtext-to-hf", tmp_path / "maxtext", tmp_path / "back")
    built, expected = (load_file(item / "model.safetensors") for item in (tmp_path / "back", hf))
    assert {name: (item.dtype, item.tobytes()) for name, item in built.items()} == {
        name: (item.dtype, item.tobytes()) for name, item in expected.items()
    }


def test_exactness_is_judged_by_every_layer(tmp_path):
    tensors = write_llama(tmp_path / "hf", head_dim=8)
    name = "model.layers.1.self_attn.q_proj.weight"
    save_file({**tensors, name: tensors[name].astype(np.float32)}, tmp_path / "hf" / "model.safetensors")
    told = run("convert", "hf-to-maxtext", tmp_path / "hf", tmp_path / "m", "--no-scan", "--exact", code=2)
    assert "got      float32, times 0.353553" in told
    told = run("convert", "hf-to-maxtext", tmp_path / "hf", tmp_path / "m", "--no-scan")
    assert "rounded to float32" in told and "rounded to bfloat16" in told


def test_stacked_layers_need_one_dtype(hf, tmp_path):
    told = run("convert", "hf-to-maxtext", hf, tmp_path / "none", code=3)
    assert "at       decoder.layers.pre_self_attention_layer_norm.scale" in told
    assert "hint     if only dtypes differ, cast them with --dtype" in told
    told = run("convert", "hf-to-maxtext", hf, tmp_path / "maxtext", "--dtype", "bfloat16")
    assert "6 arrays differ in dtype from other layers, and are widened" in told
    run("convert", "maxtext-to-hf", tmp_path / "maxtext", tmp_path / "back")
    built, expected = (load_file(item / "model.safetensors") for item in (tmp_path / "back", hf))
    assert all(
        built[name].tobytes() == item.astype(ml_dtypes.bfloat16).tobytes() for name, item in expected.items()
    )
