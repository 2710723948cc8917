"""The memory budget is a promise: measured peaks stay below projected ones, whatever the model's size."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ckpttools.testing.models import LlamaSizes, write_llama

MIB = 1 << 20

CONVERT = """
import json, sys
from ckpttools.api.prepared import Resources
from ckpttools.api.hf_to_maxtext import plan_to_maxtext
from ckpttools.maxtext.conversion_options import ToMaxText
source, destination, memory, scan = sys.argv[1:]
options, resources = ToMaxText(scan=scan == "scan"), Resources(memory=int(memory), jobs=2)
conversion = plan_to_maxtext(source, options, resources)
receipt = conversion.run(destination)
print(json.dumps({"peak": receipt.peak_bytes, "projected": conversion.plan.projected_peak,
                  "bytes": receipt.bytes_out}))
"""


def convert(source, destination, memory, scan="scan"):
    """Converts in a process of its own; returns its peak, the projected one and the bytes written."""
    command = [sys.executable, "-c", CONVERT, str(source), str(destination), str(memory), scan]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("scan", "memory", "mlp"),
    # Models of more than twice the budget, where that is not more than half a gigabyte.
    [
        ("scan", 128 * MIB, 8192),
        ("unscan", 128 * MIB, 8192),
        ("scan", 192 * MIB, 14336),
        ("unscan", 512 * MIB, 16384),
    ],
)
def test_measured_peak_is_below_the_projection(tmp_path, scan, memory, mlp):
    sizes = LlamaSizes(layers=2, hidden=2048, mlp=mlp, heads=16, kv_heads=4, head_dim=128, vocab=8192)
    write_llama(tmp_path / "hf", sizes, sparse=True)
    result = convert(tmp_path / "hf", tmp_path / "out", memory, scan)
    assert result["bytes"] > 2 * memory or memory == 512 * MIB
    assert result["peak"] <= result["projected"] <= memory


def test_leaf_larger_than_the_budget_is_converted(tmp_path):
    # Each of its matrices, those of queries and of outputs, is larger than the budget, too.
    sizes = LlamaSizes(layers=2, hidden=2304, mlp=64, heads=256, kv_heads=2, head_dim=128, vocab=1000)
    write_llama(tmp_path / "hf", sizes, sparse=True)
    leaf = 2 * 2304 * 256 * 128 * 2
    result = convert(tmp_path / "hf", tmp_path / "out", 128 * MIB)
    assert leaf == 288 * MIB
    assert result["bytes"] > 2 * leaf
    assert result["peak"] <= 128 * MIB


def test_four_times_larger_model_has_the_same_peak(tmp_path):
    peaks = []
    # Both have more to do than fits into the smallest number of full tasks.
    for layers in (5, 20):
        sizes = LlamaSizes(
            layers=layers, hidden=1024, mlp=4096, heads=16, kv_heads=4, head_dim=64, vocab=8192
        )
        write_llama(tmp_path / f"hf{layers}", sizes, sparse=True)
        peaks.append(convert(tmp_path / f"hf{layers}", tmp_path / f"out{layers}", 160 * MIB)["peak"])
    assert peaks[1] <= 1.1 * peaks[0]
