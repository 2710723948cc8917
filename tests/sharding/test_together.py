"""`--distributed`: the processes of a job of jax.distributed share one conversion, or fail together."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.command_line import ckpt, run
from support.locations import GOLDEN, TESTS
from support.measured import RUN
from support.object_stores import files_in

SHARDED = GOLDEN / "llama3.1" / "hf_sharded"
STAMPED = re.compile(r"(^|/)_CHECKPOINT_METADATA$")


# The last process is stopped for a while when all is done.
LATE = """
import os, subprocess, sys
from ckpttools.cli.main import main
from ckpttools.sharding import distributed_job
LEFT = distributed_job.leave_job
def late(job):
    if job.number == job.count - 1:
        subprocess.run(["sh", "-c", f"kill -STOP {os.getpid()}; sleep 12; kill -CONT {os.getpid()}"])
    LEFT(job)
distributed_job.leave_job = late
main(sys.argv[1:])
"""


def job(words, count=2, dying=None, started_as=("-m", "ckpttools")):
    """Starts all processes of a job; how they end, and what each says."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    together = ["--distributed", "--coordinator", address, "--no-progress"]
    started = []
    for number in range(count):
        script = ["-m", "support.dying_part_script", "2"] if number == dying else started_as
        command = [
            sys.executable,
            *script,
            *map(str, words),
            *together,
            "--process",
            f"{number}/{count}",
        ]
        started.append(
            subprocess.Popen(
                command,
                cwd=TESTS,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
            )
        )
    declared = [item.communicate(timeout=120)[0] for item in started]
    return [item.returncode for item in started], declared


def unstamped(location):
    """Its files, but for one in which Orbax has the time."""
    return {name: item for name, item in files_in(location).items() if not STAMPED.search(name)}


# Four take about 40 CPU seconds.
MANY = pytest.mark.skipif("CKPTTOOLS_PROCESSES" not in os.environ, reason="CKPTTOOLS_PROCESSES=all")


@pytest.mark.parametrize(("count", "later"), [(2, 2), pytest.param(4, 3, marks=MANY)])
def test_job_ends_with_a_killed_process_and_resumes(tmp_path, count, later):
    words = ["convert", "hf-to-maxtext", SHARDED, tmp_path / "out", "--jobs", "1"]
    codes, declared = job(words, count, dying=count - 1)
    assert codes == [*[5] * (count - 1), -9], (codes, declared)
    assert f"process {count - 1} of {count} is gone" in declared[0], declared[0]
    assert not (tmp_path / "out").exists()

    codes, declared = job(words, later, started_as=("-c", LATE) if later > 2 else ("-m", "ckpttools"))
    assert codes == [0] * later, declared
    assert "13 arrays" in declared[0] and f"part 1/{later}" in declared[1], declared
    assert any("done before" in item for item in declared), declared
    run("convert", "hf-to-maxtext", SHARDED, tmp_path / "alone")
    assert unstamped(tmp_path / "alone") == unstamped(tmp_path / "out")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["alone", "out"]


def test_several_processes_reshard_to_the_bytes_of_one(tmp_path):
    source = GOLDEN / "llama3.1" / "maxtext_scanned"
    aimed = ("--mesh", "fsdp=4,tensor=2", "--subchunks", "4KiB")
    codes, declared = job(["reshard", source, tmp_path / "out", *aimed])
    assert codes == [0, 0], declared
    assert all(re.search(r"part ./2 of .*: [1-9]\d* tasks", item) for item in declared), declared
    (closing,) = (line for line in declared[0].splitlines() if line.startswith(f"{tmp_path / 'out'}: "))
    assert "done before" not in closing and "/s)" in closing, "of the whole job"
    run("reshard", source, tmp_path / "alone", *aimed)
    assert unstamped(tmp_path / "alone") == unstamped(tmp_path / "out")


def test_distributed_option_requires_a_job(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    result = ckpt("cast", SHARDED, tmp_path / "out", "--dtype", "float16", "--distributed")
    assert result.exit_code == 2 and "is not part of a jax.distributed job" in result.output, result.output


@pytest.mark.parametrize(("number", "count"), [("0", "0"), ("5", "2"), ("-1", "2"), ("", "two")])
def test_invalid_process_numbers_are_refused(tmp_path, monkeypatch, number, count):
    """At once: nobody is waited for."""
    declared = {
        "JOB_ID": "5",
        "STEP_NODELIST": "localhost",
        "NTASKS": count,
        "PROCID": number,
        "LOCALID": "0",
    }
    for name, value in declared.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    result = ckpt("cast", SHARDED, tmp_path / "out", "--dtype", "float16", "--distributed")
    assert result.exit_code == 2, result.output
    assert f"SLURM_PROCID={number}, SLURM_NTASKS={count}" in result.output, result.output


def test_dry_run_needs_no_job(tmp_path):
    words = ("--dtype", "float16", "--dry-run", "--distributed")
    result = ckpt("cast", SHARDED, tmp_path / "out", *words)
    assert result.exit_code == 0 and "Dry run" in result.output


def test_jax_memory_is_within_the_limit(tmp_path):
    """What process 0 cannot plan within it ends all of them."""
    arrays = {f"layers.{k}.weight": np.ones((8192, 4096), np.float16) for k in range(2)}
    save_file(arrays, tmp_path / "model.safetensors")
    words = ["cast", tmp_path / "model.safetensors", tmp_path / "out", "--dtype", "float32"]
    codes, declared = job([*words, "--memory", "300MiB"], started_as=("-c", RUN))
    assert codes == [0, 0], declared
    peaks = [int(re.search(r"^peak (\d+)$", item, re.MULTILINE)[1]) >> 20 for item in declared]
    assert max(peaks) <= 300, (peaks, declared)

    codes, declared = job([*words, "--memory", "200MiB", "--overwrite"])
    assert codes == [4, 5] and "--memory 200MiB" in declared[0], (codes, declared)
    assert "process 0 of 2 ended the job" in declared[1], declared
