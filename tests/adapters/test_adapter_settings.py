"""Settings of an adapter that are printed, as MaxText's parsers read them."""

import json
import shutil

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file
from support.internals import dotted, next_steps
from support.locations import FIXTURES, GOLDEN, GOLDEN_0_2_5

import ckpttools

PEFT = FIXTURES / "peft"


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Return the tree of an adapter that MaxText restores."""
    path = tmp_path_factory.mktemp("converted") / "adapter"
    ckpttools.adapter_to_maxtext(PEFT / "plain", path, base=PEFT / "bases" / "llama-float32")
    return ckpttools.open(path)


def printed(tree, path, **stated):
    """Return what is printed for an adapter with this metadata."""
    ckpttools.convert(tree.with_metadata(custom={"scan_layers": True, "lora": stated}), path, format="orbax")
    return next_steps(path).uses


@pytest.mark.parametrize("alpha", [16, 16.0, 1e1, 0.5, 1e-5, 2.5e-7, 1e22, 1 / 3])
def test_printed_alpha_survives_yaml(converted, tmp_path, alpha):
    (line,) = printed(converted, tmp_path / "a", lora_rank=2, lora_alpha=alpha)
    (declared,) = (item.partition("=")[2] for item in line.split() if item.startswith("lora.lora_alpha="))
    assert yaml.safe_load(declared) == float(declared) == alpha


@pytest.mark.parametrize(
    ("stated", "phrase"),
    [
        ({"lora_rank": 2}, "does not state alpha: add lora.lora_alpha=ALPHA"),
        ({"lora_rank": 2, "lora_alpha": None}, "does not state alpha"),
        ({}, "does not state alpha"),
        ({"lora_rank": 2, "lora_alpha": 0.0}, "alpha is 0"),
        ({"lora_rank": 2, "lora_alpha": -16.0}, "alpha is -16.0, and MaxText refuses a negative alpha"),
    ],
)
def test_alpha_that_maxtext_cannot_apply_is_reported(converted, tmp_path, stated, phrase):
    line, note = printed(converted, tmp_path / "a", **stated)
    assert "lora.lora_rank=2" in line and "lora_alpha=-" not in line
    assert phrase in note


@pytest.mark.parametrize(
    ("model", "is_nested"), [("qwen3-next", True), ("gemma4-moe", True), ("qwen3", False)]
)
@pytest.mark.parametrize("scan", [True, False])
def test_nested_scans_get_a_note(tmp_path, model, is_nested, scan):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    folder = next(item for item in (GOLDEN_0_2_5, GOLDEN) if (item / model).is_dir()) / model / "hf"
    weights = {dotted(path): array for path, array in ckpttools.open(folder).arrays.items()}
    name = next(weight for weight in weights if weight.endswith("self_attn.q_proj.weight"))
    rows, columns = weights[name].shape
    key = f"base_model.model.{name.removesuffix('.weight')}"
    factors = {f"{key}.lora_A.weight": np.ones((2, columns)), f"{key}.lora_B.weight": np.ones((rows, 2))}
    built = {name: item.astype(np.float32) for name, item in factors.items()}
    save_file(built, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    planned = ckpttools.adapter_to_maxtext.plan(adapter, tmp_path / "mt", base=folder, scan=scan)
    remarks = " ".join(planned.plan.notes.remarks)
    assert ("scanned within a scan" in remarks) == (is_nested and scan)


@pytest.mark.parametrize("is_partial", [True, False])
def test_modules_without_factors_are_noted(tmp_path, is_partial):
    adapter = shutil.copytree(PEFT / "plain", tmp_path / "adapter")
    file = next(adapter.glob("*.safetensors"))
    tensors = load_file(file)
    if is_partial:
        lacking = sorted({name.rpartition(".lora_")[0] for name in tensors})[0]
        tensors = {name: item for name, item in tensors.items() if not name.startswith(f"{lacking}.lora_")}
    save_file(tensors, file, {"format": "pt"})
    base = PEFT / "bases" / "llama-float32"
    planned = ckpttools.adapter_to_maxtext.plan(adapter, tmp_path / "out", base=base)
    remarks = " ".join(planned.plan.notes.remarks)
    assert ("1 module without factors" in remarks) == is_partial
    assert "pass lora.lora_rank and lora.lora_alpha as well" in remarks
