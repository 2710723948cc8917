"""The library of checks over one model directory, alone and as doctor and writing commands call it."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckpttools
from ckpttools.checks.base import LEVELS, ModelDirectory
from ckpttools.checks.registry import checks, findings
from ckpttools.core.errors import FormatError

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "a" * 64 + "\nsize 17477929\n"
SIDECARS = ("tokenizer.json", "tokenizer.model", "generation_config.json", "vocab.json", "merges.txt")
SIZES = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "head_dim": 4,
    "vocab_size": 16,
} | SIZES


def arrays_of(layers=2, head=True):
    shapes = {"model.embed_tokens": (16, 8), "model.norm": (8,)} | ({"lm_head": (16, 8)} if head else {})
    for layer in range(layers):
        parts = {
            "self_attn.q_proj": (8, 8),
            "self_attn.k_proj": (4, 8),
            "self_attn.v_proj": (4, 8),
            "self_attn.o_proj": (8, 8),
            "mlp.gate_proj": (12, 8),
            "mlp.up_proj": (12, 8),
            "mlp.down_proj": (8, 12),
            "input_layernorm": (8,),
            "post_attention_layernorm": (8,),
        }
        shapes |= {f"model.layers.{layer}.{part}": shape for part, shape in parts.items()}
    random = np.random.default_rng(0)
    return {f"{key}.weight": random.standard_normal(shape, np.float32) for key, shape in shapes.items()}


def save_model(path, arrays=None, layers=2, **changes):
    """A Llama of random numbers, with these fields of its configuration changed."""
    path.mkdir(parents=True)
    config = LLAMA | {"num_hidden_layers": layers} | changes
    (path / "config.json").write_text(json.dumps(config))
    save_file(arrays_of(layers) if arrays is None else arrays, path / "model.safetensors")
    return path


def reported(path, check):
    """What doctor reports by this check: level and text."""
    return [(each.level, each.what) for each in ckpttools.doctor(path).findings if each.check == check]


def test_checks_have_names_and_summaries():
    assert [each.name for each in checks()] == sorted({each.name for each in checks()})
    assert all(each.summary and each.name == each.name.lower() for each in checks())


def test_sound_model_has_no_findings(tmp_path):
    assert [each.what for each in ckpttools.doctor(save_model(tmp_path / "m")).findings] == []


def test_findings_of_bytes_in_memory():
    found = [*findings(ModelDirectory("m", {"tokenizer.json": POINTER.encode()}))]
    assert [(each.check, each.level, each.location) for each in found] == [
        ("sidecar-files", "error", "m/tokenizer.json")
    ]
    assert found[0].level in LEVELS


@pytest.mark.parametrize("name", SIDECARS)
def test_lfs_pointer_is_reported_and_never_written(tmp_path, name):
    model = save_model(tmp_path / "m")
    (model / name).write_text(POINTER)
    assert [level for level, _ in reported(model, "sidecar-files")] == ["error"]
    for write in (ckpttools.hf_to_maxtext, ckpttools.convert):
        with pytest.raises(FormatError, match=f"{name} is a Git LFS pointer"):
            write(model, tmp_path / "out")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["", "version 1", "see https://git-lfs.github.com", "{}"])
def test_small_sidecar_is_not_a_pointer(tmp_path, text):
    model = save_model(tmp_path / "m")
    (model / "merges.txt").write_text(text)
    assert reported(model, "sidecar-files") == []
