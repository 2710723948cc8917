"""What becomes of output that nobody can take: the work is done, and the exit code says so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckpttools.testing.models import LlamaSizes, write_llama

SIZES = LlamaSizes(layers=1, hidden=32, mlp=64, heads=2, kv_heads=1, head_dim=16, vocab=64)


MADE = (0, ["convert", "to-zarr3", "a", "b"])
LOOKED = (0, ["verify", "b", "--against", "a"])
REFUSED = (2, ["convert", "to-zarr3", "a", "b"])
MISSING = (2, ["hash", "none"])


# What prints on a stream meets it closed, and all meet all of them closed.
@pytest.mark.parametrize(
    ("closed", "words"),
    [((1,), (MADE, LOOKED)), ((2,), (MADE, REFUSED)), ((0, 1, 2), (MADE, LOOKED, REFUSED, MISSING))],
    ids=["stdout", "stderr", "all"],
)
def test_closed_streams_do_not_change_exit_codes(tmp_path, closed, words):
    write_llama(tmp_path / "a", SIZES)
    for code, command in words:
        done = subprocess.run(
            [sys.executable, "-m", "ckpttools", *command],
            cwd=tmp_path,
            capture_output=True,
            preexec_fn=lambda: [os.close(number) for number in closed],
            check=False,
        )
        assert done.returncode == code, (command, done.stderr)
        assert b"Traceback" not in done.stderr


def test_full_stdout_is_not_reported_as_full_destination(tmp_path):
    write_llama(tmp_path / "a", SIZES)
    command = [sys.executable, "-m", "ckpttools", "convert", "to-zarr3", "a", "b"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 4 and b"at       stdout" in done.stderr
    assert (tmp_path / "b" / "zarr.json").is_file() and not (tmp_path / "b.partial").exists()
