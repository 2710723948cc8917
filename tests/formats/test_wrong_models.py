"""What is no whole model, or another one than was named: said in few lines, whatever lies beside it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.command_line import hint_of, run
from support.hf_models import write_llama
from support.locations import GOLDEN
from support.trees import lazy

import ckpttools
from ckpttools import FormatError, Metadata, Tree
from ckpttools.maxtext.source_checks import refuse_maxtext

BOTH_WAYS = pytest.mark.parametrize("way", ["hf-to-maxtext", "maxtext-to-hf"])


@pytest.fixture(scope="module")
def maxtext(tmp_path_factory) -> Path:
    location = tmp_path_factory.mktemp("model")
    write_llama(location / "hf")
    run("convert", "hf-to-maxtext", location / "hf", location / "maxtext")
    return location / "maxtext"


def adapter(location: Path) -> Path:
    """As PEFT saves it, with the model's configuration beside it."""
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    factors = {name.format(n, k): np.zeros((8, 64), np.float32) for n in range(4) for k in "AB"}
    write_llama(location)
    (location / "model.safetensors").unlink()
    save_file(factors, location / "adapter_model.safetensors")
    declared = {"peft_type": "LORA", "base_model_name_or_path": "me/base"}
    (location / "adapter_config.json").write_text(json.dumps(declared))
    return location


@BOTH_WAYS
def test_peft_adapter_is_refused(tmp_path, way):
    there = adapter(tmp_path / "adapter")
    for source in (there, there / "adapter_model.safetensors"):
        told = run("convert", way, source, tmp_path / "out", code=3)
        assert "this is a LoRA adapter of me/base, not a complete model" in told
        assert "ckpt adapter merge" in told and "missing" not in told


def test_adapter_as_like_is_refused(maxtext, tmp_path):
    told = run(
        "convert", "maxtext-to-hf", maxtext, tmp_path / "out", "--like", adapter(tmp_path / "a"), code=3
    )
    assert "this is a LoRA adapter of me/base, not a complete model" in told
    assert "--like names the model that the checkpoint came from" in told


@BOTH_WAYS
@pytest.mark.parametrize("alone", [True, False])
def test_maxtext_adapters_are_refused(maxtext, tmp_path, way, alone):
    tree = ckpttools.open(maxtext)
    factors = {
        (*path[:-1], f"kernel_lora_{item}"): lazy(np.zeros((64, 4, 8), np.float32))
        for path in tree.arrays
        if "self_attention" in path and path[-1] == "kernel"
        for item in "ab"
    }
    ckpttools.save(Tree(factors if alone else {**tree, **factors}), tmp_path / "lora", "orbax")
    shutil.copytree(maxtext / "0/items/hf", tmp_path / "lora/0/items/hf")
    told = run("convert", way, tmp_path / "lora", tmp_path / "out", code=3)
    assert "8 arrays, such as" in told and "missing" not in told
    if alone:
        assert "this is a LoRA adapter, without the parameters of its model" in told
        assert "lora.lora_restore_path" in told
        return
    assert "contains LoRA adapters that are not merged" in told
    drop = ("--drop", "*lora_a*", "--drop", "*lora_b*")
    assert f"ckpt select {tmp_path}/lora/0/items DST --drop '*lora_a*' --drop '*lora_b*'" in told
    run("select", tmp_path / "lora", tmp_path / "alone", *drop)
    run("convert", "maxtext-to-hf", tmp_path / "alone", tmp_path / "hf")


@pytest.mark.parametrize("apart", [True, False])
def test_peft_training_model_is_refused(tmp_path, apart):
    """As verl saves it: `base_layer` and `lora_A.default` in one state, perhaps `lora_adapter` beside it."""
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    names = ("base_layer.weight", "lora_A.default.weight", "lora_B.default.weight")
    actor = tmp_path / "actor"
    leaves = {(f"{module}.{name}",): lazy(np.ones((2, 2), "f4")) for name in names}
    if apart:
        (actor / "lora_adapter").mkdir(parents=True)
        (actor / "lora_adapter/adapter_config.json").touch()
    with pytest.raises(FormatError) as error:
        refuse_maxtext(Tree(leaves, Metadata(location=str(actor))))
    told = hint_of(error.value)
    assert ("merge_and_unload()" in told) is not apart and "ckpt select" not in told
    assert (f"ckpt adapter merge BASE {actor}/lora_adapter DST" in told) is apart


@pytest.mark.parametrize("carried", [True, False])
def test_other_model_as_like_is_refused(maxtext, tmp_path, carried):
    shutil.copytree(maxtext, tmp_path / "maxtext")
    if not carried:
        shutil.rmtree(tmp_path / "maxtext/0/items/hf")
    like = GOLDEN / "gemma3" / "hf"
    told = run("convert", "maxtext-to-hf", tmp_path / "maxtext", tmp_path / "out", "--like", like, code=3)
    assert "the arrays do not match the model in --like" in told
    assert f"got      {like / 'config.json'}" in told
    assert "104 arrays are missing:" in told and "more lines" in told
    assert len(told.splitlines()) < 20
    assert ("leave --like out" in told) == carried
