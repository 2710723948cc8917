"""Commands on systems without the calls that only Linux has, and the refusal of Windows."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.hf_models import write_llama
from support.mounts import on_other_system


@pytest.mark.parametrize("kind", ["kernel", "system"])
def test_commands_work_without_calls_of_linux(tmp_path, kind):
    for seed, name in enumerate(("a", "b")):
        # More than 1 MiB in each array, so that Linux writes them directly.
        write_llama(tmp_path / name, seed=seed, hidden_size=1024, intermediate_size=1024, num_hidden_layers=2)
    a, b, built, back, run, copy = (tmp_path / name for name in ("a", "b", "built", "back", "run", "copy"))
    plan = tmp_path / "plan"
    results = on_other_system(
        kind,
        ("convert", "hf-to-maxtext", a, built),
        ("convert", "hf-to-maxtext", b, built, "--overwrite"),
        ("verify", built, "--against", b),
        ("convert", "maxtext-to-hf", built, back, "--like", b),
        ("diff", b, back),
        ("average", a, b, tmp_path / "average"),
        ("convert", "to-orbax", a, run, "--as-step", 1),
        ("ls", run),
        ("doctor", run),
        ("inspect", "tree", run),
        ("copy", run, copy),
        ("verify", copy, "--against", run),
        ("prune", copy, "--keep-last", 1, "--yes"),
        ("plan", "convert", "hf-to-maxtext", a, tmp_path / "parts", "-o", plan),
        ("run", plan, "--part", "0/1"),
        ("run", plan, "--status"),
        ("run", plan, "--publish"),
    )
    assert [(code, output) for code, output in results if code] == []
    assert not any("None" in output for _, output in results)
    assert list(tmp_path.glob("*.partial")) == []


def test_windows_is_refused_with_one_sentence():
    script = "import sys; sys.platform = 'win32'; import ckpttools"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == "ImportError: ckpttools does not run on Windows; use it in WSL"
