"""A family that the user names takes precedence, unless it would silently change values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.command_line import ended, run, succeed
from support.golden_data import leaves_by_package
from support.hf_models import write_llama

import ckpttools


@pytest.fixture
def llama(tmp_path) -> Path:
    """Its rotary pairs are interleaved, unlike Mistral's."""
    write_llama(tmp_path / "hf", rope_scaling={"rope_type": "llama3", "factor": 8.0})
    return tmp_path / "hf"


def refused(*words: object) -> str:
    told = run(*words, code=3)
    assert "the rows of this family would give the arrays other values" in told
    assert 'expected model_type "llama" (family llama), whose rows match these arrays as well' in told
    return told


@pytest.mark.parametrize("name", ["gemma", "mistral"])
def test_wrong_family_is_refused_converting_to_maxtext(llama, tmp_path, name):
    """All names and shapes fit; Gemma's embeddings are scaled and its norms are offsets."""
    told = refused("convert", "hf-to-maxtext", llama, tmp_path / "out", "--family", name)
    assert f"--family {name}" in told
    assert not (tmp_path / "out").exists()
    run("convert", "hf-to-maxtext", llama, tmp_path / "right")
    run("verify", tmp_path / "right", "--against", llama, "--family", name, code=1)


def test_wrong_family_is_refused_converting_to_hf(llama, tmp_path):
    run("convert", "hf-to-maxtext", llama, tmp_path / "out")
    refused("convert", "maxtext-to-hf", tmp_path / "out", tmp_path / "back", "--family", "mistral")
    refused(
        "convert", "maxtext-to-hf", tmp_path / "out", tmp_path / "back", "--family=mistral", "--like", llama
    )


def test_named_family_file_overrides_config(llama, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(succeed("families", "show", "gemma", "--toml").output)
    run("convert", "hf-to-maxtext", llama, tmp_path / "out", "--family", file)


def with_type(model: Path, name: str) -> None:
    config = json.loads((model / "config.json").read_bytes())
    (model / "config.json").write_text(json.dumps({**config, "model_type": name}))


@pytest.mark.parametrize("name", ["qwen2", "my_llama", "llama"])
def test_mismatched_model_type_is_refused(llama, tmp_path, name):
    """Qwen2 has biases, the second type is unknown, and the third matches."""
    run("convert", "hf-to-maxtext", llama, tmp_path / "right")
    with_type(llama, name)
    run("convert", "hf-to-maxtext", llama, tmp_path / "out", "--family", "llama")
    built, expected = (leaves_by_package(ckpttools.open(tmp_path / item)) for item in ("out", "right"))
    assert built == expected


def test_hint_does_not_choose_among_several_families(llama, tmp_path):
    with_type(llama, "mistrall")
    told = ended("convert", "hf-to-maxtext", llama, tmp_path / "out", code=3).output
    assert "names of gemma, llama, mistral" in told
    assert not any(f"--family {item}" in told for item in ("gemma", "llama", "mistral"))
