"""Experts as transformers writes them and as they are published: the same model, whichever the files have."""

import json
import shutil

import ml_dtypes  # noqa: F401 - numpy then knows bfloat16
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.locations import GOLDEN, GOLDEN_0_2_5

import ckpttools

EXPERTS = "mlp.experts."


def turned(arrays):
    """Fused experts the other way round, as transformers has them in memory."""
    return {key: array.swapaxes(1, 2).copy() if EXPERTS in key else array for key, array in arrays.items()}


def apart(arrays):
    """An array for each expert in place of the fused."""
    result = {}
    for key, array in arrays.items():
        before, experts, name = key.partition(EXPERTS)
        if name not in ("gate_up_proj", "down_proj"):
            result[key] = array
            continue
        names = ("gate_proj", "up_proj") if name == "gate_up_proj" else ("down_proj",)
        for expert, whole in enumerate(array):
            for one, part in zip(names, whole.reshape(len(names), -1, whole.shape[-1]), strict=True):
                result[f"{before}{experts}{expert}.{one}.weight"] = part.copy()
    return result


# What is fused, of which arrays of each expert; Mixtral has other names.
FUSED = {"gate_up_proj": ("gate_proj w1", "up_proj w3"), "down_proj": ("down_proj w2",)}


def fused(arrays):
    """Two arrays for all experts of a layer, as transformers computes with them."""
    result = {key.replace("block_sparse_moe", "mlp"): array for key, array in arrays.items()}
    layers = {
        key.removesuffix("0")
        for key in (name.rsplit(".", 2)[0] for name in result)
        if key.endswith(EXPERTS + "0")
    }
    for layer in sorted(layers):
        own = {key.removeprefix(layer): result.pop(key) for key in [*result] if key.startswith(layer)}
        for name, parts in FUSED.items():
            stacks = [
                np.stack([own[key] for key in sorted(own) if key.split(".")[1] in words.split()])
                for words in parts
            ]
            result[layer + name] = np.concatenate(stacks, axis=1)
    return result


WRITTEN = {
    "qwen3-vl-moe": turned,
    "qwen3.5": apart,
    **dict.fromkeys(("deepseek3", "mixtral-8x7b", "qwen3-moe", "qwen3-next", "qwen3-omni"), fused),
}


def golden(model):
    return next(item / model / "hf" for item in (GOLDEN_0_2_5, GOLDEN) if (item / model).is_dir())


def files(directory, model, change, config=None):
    source = golden(model)
    shutil.copytree(source, directory)
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    save_file(change(load_file(source / "model.safetensors")), directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("model", WRITTEN)
def test_both_expert_layouts_convert_to_the_same_checkpoint(model, tmp_path):
    source = files(tmp_path / "hf", model, WRITTEN[model])
    ckpttools.hf_to_maxtext(source, tmp_path / "made", scan=False)
    ckpttools.hf_to_maxtext(golden(model), tmp_path / "expected", scan=False)
    assert ckpttools.hash(tmp_path / "made").digest == ckpttools.hash(tmp_path / "expected").digest
    assert ckpttools.verify(tmp_path / "expected", against=source).equal


@pytest.mark.parametrize("model", ["qwen3-vl-moe", "qwen3.5", "deepseek3", "mixtral-8x7b"])
def test_reverse_conversion_writes_the_published_files(model, tmp_path):
    source = files(tmp_path / "hf", model, WRITTEN[model])
    ckpttools.hf_to_maxtext(source, tmp_path / "made", scan=False)
    ckpttools.maxtext_to_hf(tmp_path / "made", tmp_path / "back", like=source)
    published = load_file(golden(model) / "model.safetensors")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert {key: (array.shape, array.tobytes()) for key, array in back.items()} == {
        key: (array.shape, array.tobytes()) for key, array in published.items()
    }


def test_square_experts_are_oriented_by_the_other_array(tmp_path):
    """Experts half as wide as the model: one of the two arrays has the same shape either way."""
    config = json.loads((GOLDEN_0_2_5 / "qwen3-vl-moe" / "hf" / "config.json").read_bytes())
    width = config["text_config"]["hidden_size"] // 2
    config["text_config"]["moe_intermediate_size"] = width

    def cut(arrays):
        result = {}
        for key, array in arrays.items():
            if key.endswith(EXPERTS + "gate_up_proj"):
                array = array[:, :, : 2 * width].copy()
            if key.endswith(EXPERTS + "down_proj"):
                array = array[:, :width].copy()
            result[key] = array
        return result

    digests = set()
    for name, change in (("published", cut), ("turned", lambda arrays: turned(cut(arrays)))):
        source = files(tmp_path / name, "qwen3-vl-moe", change, config)
        ckpttools.hf_to_maxtext(source, tmp_path / "made" / name, scan=False)
        digests.add(ckpttools.hash(tmp_path / "made" / name).digest)
    assert len(digests) == 1
