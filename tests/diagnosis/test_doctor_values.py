"""`doctor --values` reads all values, and never claims to have checked what it did not read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from support.command_line import ckpt, doctor
from support.internals import open_tree
from support.locations import FIXTURES, GOLDEN, ORBAX, TRAINED
from support.quantized_kinds import write

MODEL = GOLDEN / "qwen3" / "hf"
TENSORS = load_file(MODEL / "model.safetensors")
UNREAD = "values not checked (--values)"


def model_with(location: Path, **changed: np.ndarray) -> Path:
    """Write the model with other tensors in place of some."""
    shutil.copytree(MODEL, location, dirs_exist_ok=True)
    tensors = {**TENSORS, **{name: np.ascontiguousarray(array) for name, array in changed.items()}}
    save_file(tensors, location / "model.safetensors", metadata={"format": "pt"})
    return location


def findings(path: Path, **options: object) -> list[tuple[str, str]]:
    """Return the level and text of the findings about values."""
    report = doctor(path, values=True, **options)
    assert report.values_read
    return [(item.level, item.what) for item in report.findings if item.check == "values"]


@pytest.mark.parametrize(
    "path", [MODEL, TRAINED, ORBAX / "standard", FIXTURES / "torch/trainers/verl"], ids=str
)
def test_verdict_names_what_was_not_checked(path):
    unread = ckpt("doctor", path, COLUMNS="200").output
    assert unread.count(UNREAD) == 1 and "healthy" not in unread
    read = ckpt("doctor", path, "--values", COLUMNS="200").output
    assert UNREAD not in read and "values OK" in read


def test_values_of_unfinished_saves_are_reported_as_unchecked():
    output = ckpt("doctor", ORBAX / "unfinished_atomic_rename", "--values").output
    assert output.endswith("; values of unfinished saves not checked\n")


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_each_array_with_bad_values_is_named_with_its_first_index(data, tmp_path_factory):
    names = data.draw(st.lists(st.sampled_from(sorted(TENSORS)), min_size=1, max_size=5, unique=True))
    changed, expected = {}, []
    for name in sorted(names, key=list(TENSORS).index):
        array = TENSORS[name].copy()
        flat = array.reshape(-1)
        places = data.draw(st.lists(st.integers(0, flat.size - 1), min_size=1, max_size=3, unique=True))
        flat[places] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
        changed[name] = array
        index = ", ".join(map(str, np.unravel_index(min(places), array.shape)))
        expected.append(f"{name}[{index}] (first of {len(places)} ")
    path = model_with(tmp_path_factory.mktemp("bad"), **changed)
    ((level, what),) = findings(path)
    assert level == "error" and all(text in what for text in expected)
    result = ckpt("doctor", path, "--values", "--json")
    assert result.exit_code == 1 and not json.loads(result.stdout)["healthy"]


@pytest.mark.parametrize("layout", ["hf", "stacked", "unstacked"])
def test_zero_and_repeated_layers_are_found_in_every_layout(layout, tmp_path):
    zeros = "model.layers.1.self_attn.q_proj.weight"
    repeated = {name.replace(".2.", ".3."): TENSORS[name] for name in TENSORS if ".layers.2." in name}
    path = model_with(tmp_path / "hf", **{zeros: np.zeros_like(TENSORS[zeros])}, **repeated)
    if layout != "hf":
        scan = "--scan" if layout == "stacked" else "--no-scan"
        assert ckpt("convert", "hf-to-maxtext", path, tmp_path / layout, scan).exit_code == 0
        path = tmp_path / layout
    empty, twice = findings(path)
    assert empty[0] == twice[0] == "warning"
    assert empty[1].startswith("1 array with nothing but zeros")
    assert {"hf": ".1.", "stacked": "(layer 1)", "unstacked": "layers_1"}[layout] in empty[1]
    assert "layer 3 repeats layer 2 in 7 of 7 weights" in twice[1]
    assert ckpt("doctor", path, "--values").exit_code == 0


def test_zero_biases_norms_and_untrained_adapters_are_not_reported(tmp_path):
    norm = "model.layers.1.input_layernorm.weight"
    path = model_with(tmp_path / "hf", **{norm: np.zeros_like(TENSORS[norm])})
    assert findings(path) == []
    factors = {
        f"base_model.model.model.layers.0.self_attn.q_proj.lora_{name}.weight": array
        for name, array in (("A", np.ones((2, 8), "f4")), ("B", np.zeros((8, 2), "f4")))
    }
    adapter = tmp_path / "adapter"
    shutil.copytree(FIXTURES / "peft" / "plain", adapter)
    save_file(factors, adapter / "adapter_model.safetensors")
    assert findings(adapter) == []


def test_damaged_scale_is_named_with_its_index(tmp_path):
    path = write(tmp_path / "fp8", "fp8 in blocks")
    scales = {name: array for (name,), array in open_tree(path).arrays.items() if "scale" in name}
    name, stored = next(iter(scales.items()))
    (source,) = stored.sources()
    values = np.ones(stored.shape, "f4")
    values.reshape(-1)[-1] = np.nan
    with Path(source.path).open("r+b") as file:
        file.seek(stored.offset)
        file.write(values.tobytes())
    index = ", ".join(str(length - 1) for length in stored.shape)
    assert any(f"{name}[{index}]" in what for level, what in findings(path) if level == "error")


def test_values_are_read_within_the_memory_limit():
    assert ckpt("doctor", MODEL, "--values", "--memory", "4GB", "--jobs", 1).exit_code == 0
    done = ckpt("doctor", MODEL, "--values", "--memory", "1MB")
    assert done.exit_code == 4, done.output


def test_values_are_not_ok_if_their_names_exceed_the_memory_limit(tmp_path):
    save_file({f"layers.{k}.w": np.zeros(0, "f4") for k in range(20_000)}, tmp_path / "model.safetensors")
    done = ckpt("doctor", tmp_path, "--values", "--memory", "20MB")
    assert done.exit_code == 4 and "values OK" not in done.output


def test_every_step_of_a_run_is_read(tmp_path):
    run = tmp_path / "run"
    bad = TENSORS["lm_head.weight"].copy()
    bad[3, 5] = np.nan
    for step, path in enumerate((MODEL, model_with(tmp_path / "bad", **{"lm_head.weight": bad}), MODEL)):
        assert ckpt("convert", "hf-to-maxtext", path, tmp_path / f"out{step}").exit_code == 0
        shutil.copytree(tmp_path / f"out{step}" / "0", run / str(step))
    (finding,) = doctor(run, values=True).findings
    assert finding.location == f"{run}/1/items" and "logits_dense/kernel[5, 3]" in finding.what
