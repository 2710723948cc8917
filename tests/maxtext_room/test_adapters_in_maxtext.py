"""MaxText computes with converted and with merged adapters what PEFT does; where it is installed."""

from __future__ import annotations

import os
import shlex
import subprocess

import numpy as np
import pytest
from oracle import environments
from oracle.settings import COMPUTED
from safetensors.numpy import load_file
from support.internals import next_steps
from support.locations import FIXTURES, TESTS

import ckpttools

PYTHON = environments.present(environments.MAXTEXT)
PEFT = FIXTURES / "peft"
BASE = PEFT / "bases" / "llama-float32"
MODULES = "decoder/.*(self_attention/(query|key|value|out)|mlp/(wi_0|wi_1|wo))"
SCRIPT = TESTS / "support" / "lora_in_maxtext_script.py"


def logits(checkpoint, out, restore="", run="", more=()):
    """Those of the tokens 0 to 7, as MaxText computes them."""
    told = ckpttools.maxtext_config(checkpoint).arguments()
    words = [*told, *(f"{name}={value}" for name, value in COMPUTED.items()), *more]
    words += [f"base_output_directory={out.parent}"]
    ended = subprocess.run(
        [PYTHON, SCRIPT, restore, run, out, *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "DECOUPLE_GCLOUD": "TRUE", "PYTHONPATH": ""},
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return np.load(out)[0]


def restored_logits(base, adapter, out):
    """Logits of a base with an adapter, by the settings that ckpt prints and no others."""
    (printed,) = next_steps(adapter).uses
    return logits(base, out, str(adapter / "0" / "items"), more=shlex.split(printed))


@pytest.mark.skipif(PYTHON is None, reason=f"no environment with MaxText: {environments.MAXTEXT}")
@pytest.mark.parametrize(("case", "scan"), [("patterns", True), ("plain", False)])
def test_maxtext_adapter_outputs_match_peft(tmp_path, case, scan):
    ckpttools.hf_to_maxtext(BASE, tmp_path / "base", scan=scan)
    ckpttools.merge_adapter(tmp_path / "base", tmp_path / "merged", adapter=PEFT / case)
    ckpttools.adapter_to_maxtext(PEFT / case, tmp_path / "adapter", base=tmp_path / "base")
    expected = load_file(PEFT / "merged" / f"{case}.safetensors")["logits"][0]
    merged = logits(tmp_path / "merged", tmp_path / "merged.npy")
    assert np.max(np.abs(merged - expected)) < 1e-6 * np.max(np.abs(expected)) + 1e-6
    restored = restored_logits(tmp_path / "base", tmp_path / "adapter", tmp_path / "restored.npy")
    assert np.max(np.abs(restored - expected)) < 1e-6 * np.max(np.abs(expected)) + 1e-6


@pytest.mark.skipif(PYTHON is None, reason=f"no environment with MaxText: {environments.MAXTEXT}")
def test_maxtext_matches_merge_with_negative_scale(tmp_path):
    ckpttools.hf_to_maxtext(BASE, tmp_path / "base")
    ckpttools.merge_adapter(tmp_path / "base", tmp_path / "merged", adapter=PEFT / "plain", scale=-0.37)
    ckpttools.adapter_to_maxtext(PEFT / "plain", tmp_path / "adapter", base=tmp_path / "base", scale=-0.37)
    expected = logits(tmp_path / "merged", tmp_path / "merged.npy")
    restored = restored_logits(tmp_path / "base", tmp_path / "adapter", tmp_path / "restored.npy")
    assert np.max(np.abs(restored - expected)) < 1e-6 * np.max(np.abs(expected)) + 1e-6


@pytest.mark.skipif(PYTHON is None, reason=f"no environment with MaxText: {environments.MAXTEXT}")
@pytest.mark.parametrize("scan", [True, False])
def test_qwix_factors_are_read(tmp_path, scan):
    """What MaxText computes with them, and what with a base that they are merged into."""
    ckpttools.hf_to_maxtext(BASE, tmp_path / "base", scan=scan)
    run = str(tmp_path / "run")
    # As many as there are layers.
    more = (
        "lora.enable_lora=true",
        f"lora.lora_module_path={MODULES}",
        "lora.lora_rank=2",
        "lora.lora_alpha=6",
    )
    expected = logits(tmp_path / "base", tmp_path / "own.npy", run=run, more=more)
    ckpttools.merge_adapter(tmp_path / "base", tmp_path / "merged", adapter=run, alpha=6)
    ckpttools.adapter_to_peft(run, tmp_path / "peft", base=BASE, alpha=6)
    ckpttools.adapter_to_maxtext(tmp_path / "peft", tmp_path / "again", base=tmp_path / "base")
    ckpttools.merge_adapter(tmp_path / "base", tmp_path / "twice", adapter=tmp_path / "again")
    for name in ("merged", "twice"):
        built = logits(tmp_path / name, tmp_path / f"{name}.npy")
        assert np.max(np.abs(built - expected)) < 1e-5 * np.max(np.abs(expected))
