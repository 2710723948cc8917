"""`transformers_weights` in `config.json` names the weights, as for transformers 5; nothing else is read."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes  # noqa: F401  # safetensors finds bfloat16 by its name
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.command_line import ckpt, run

import ckpttools
from ckpttools import CheckpointError
from ckpttools.testing.models import LlamaSizes, write_llama

FIELD = "transformers_weights"
LLAMA = LlamaSizes(layers=1, hidden=16, mlp=16, heads=2, kv_heads=1, head_dim=8, vocab=32)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_llama(tmp_path / "m", LLAMA)
    return tmp_path / "m"


def choose(model: Path, name: object) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, FIELD: name}))


def write_other(model: Path, name: str) -> dict[str, np.ndarray]:
    """Write other values under the same names; for an index, in two shards relative to the model."""
    arrays = {key: item + 1 for key, item in load_file(model / "model.safetensors").items()}
    (model / name).parent.mkdir(exist_ok=True)
    if not name.endswith(".index.json"):
        save_file(arrays, model / name)
        return arrays
    parts = [f"part-{number}.safetensors" for number in (0, 1)]
    files = {key: parts[number % 2] for number, key in enumerate(arrays)}
    for part in parts:
        save_file({key: arrays[key] for key in arrays if files[key] == part}, model / part)
    (model / name).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return arrays


@pytest.mark.parametrize(
    "name",
    [
        "other.safetensors",
        "./sub//other.safetensors",
        "x.safetensors.index.json",
        "sub/x.safetensors.index.json",
    ],
)
def test_named_weights_file_is_read_but_not_named_in_outputs(model, tmp_path, name):
    arrays = write_other(model, name)
    choose(model, name)
    text = run("cast", model, tmp_path / "out", "--dtype", "float32")
    assert FIELD in text and "model.safetensors" in text
    written = load_file(tmp_path / "out/model.safetensors")
    assert written.keys() == arrays.keys()
    assert all(np.array_equal(written[key], arrays[key].astype(np.float32)) for key in arrays)
    assert FIELD not in json.loads((tmp_path / "out/config.json").read_text())
    run("convert", "hf-to-maxtext", model, tmp_path / "mt")
    run("convert", "maxtext-to-hf", tmp_path / "mt", tmp_path / "back")
    assert FIELD not in json.loads((tmp_path / "back/config.json").read_text())
    findings = [finding for finding in ckpttools.doctor(model).findings if FIELD in finding.what]
    assert [finding.level for finding in findings] == ["info"]


@pytest.mark.parametrize(
    "name",
    ["gone.safetensors", "", "model.bin", "../m/model.safetensors", 3, "gone.safetensors.index.json", "."],
)
def test_names_unloadable_by_transformers_are_refused(model, name):
    choose(model, name)
    with pytest.raises(CheckpointError, match=FIELD) as caught:
        ckpttools.open(model)
    assert "model.safetensors" in str(caught.value)
    result = ckpt("doctor", model)
    assert result.exit_code == 1 and FIELD in result.output
    # The file itself can be read.
    assert ckpttools.open(model / "model.safetensors").arrays


def test_null_weights_name_is_ignored(model):
    choose(model, None)
    assert ckpttools.open(model).metadata.notes.remarks == ()
