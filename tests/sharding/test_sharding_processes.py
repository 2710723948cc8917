"""Several processes of a `jax.distributed` job load together: what each reads, and that bits are kept."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest
from support.locations import TESTS
from support.sharded_processes import checkpoint

import ckpttools


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        return listening.getsockname()[1]


# Four take 14 CPU seconds more.
MANY = pytest.mark.skipif("CKPTTOOLS_PROCESSES" not in os.environ, reason="CKPTTOOLS_PROCESSES=all")


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=MANY)])
def job(request, tmp_path_factory):
    """What each process of a job found."""
    directory = tmp_path_factory.mktemp("job")
    ckpttools.save(checkpoint(), directory / "columns", "safetensors")
    port = str(free_port())
    command = [sys.executable, "-m", "support.sharded_processes"]
    running = [
        subprocess.Popen(
            [*command, str(number), str(request.param), port, str(directory)],
            cwd=TESTS,
            stdout=subprocess.DEVNULL,
            stderr=(directory / f"{number}.err").open("wb"),
        )
        for number in range(request.param)
    ]
    ended = [item.wait(timeout=180) for item in running]
    declared = [(directory / f"{number}.err").read_text()[-2000:] for number in range(request.param)]
    assert ended == [0] * request.param, declared
    result = [json.loads((directory / f"{number}.json").read_bytes()) for number in range(request.param)]
    for item in result:
        assert "error" not in item, item["error"]
    return result


def test_bytes_read_match_plan(job):
    for result in job:
        for name in ("direct", "exchange", "replicated", "broadcast"):
            assert result[name]["read"] == result[name]["planned"], name


def test_columns_are_read_as_rows_unless_processes_exchange(job):
    direct, exchange = (sum(result[name]["read"] for result in job) for name in ("direct", "exchange"))
    needed = sum(result["direct"]["needed"] for result in job)
    assert direct > 1.5 * needed
    assert direct == sum(result["exchange"]["alone"] for result in job)
    assert exchange <= 1.3 * needed
    ways = job[0]["exchange"]["ways"]
    assert {ways[f"{name}/columns"] for name in ("bfloat16", "float32", "float8_e4m3fn", "bool", "nans")} == {
        "exchange"
    }
    assert all(result["exchange"]["ways"] == ways for result in job)


def test_replicated_data_is_read_by_each_process_or_broadcast(job):
    total = job[0]["total"]
    assert all(result["replicated"]["read"] == total for result in job)
    once = sum(result["broadcast"]["read"] for result in job)
    assert total <= once < 1.7 * total
    assert job[0]["broadcast"]["ways"]["float32/columns"] == "broadcast"
    assert job[1]["broadcast"]["read"] < job[0]["broadcast"]["read"]


def test_process_0_reports_progress_of_all_processes(job):
    for name in ("direct", "exchange", "replicated", "broadcast"):
        text, declared, count = job[0][name]["said"][-1]
        assert text.startswith(f"<JobProgress of {len(job)} processes: ") and 1 <= declared <= count == len(
            job
        )
        assert all(result[name]["said"] == [] for result in job[1:])


def test_failure_in_one_process_is_raised_in_all(job):
    for number, result in enumerate(job):
        failed, differed = result["refused"]
        assert "the disk is gone" in failed, "nobody waits for who cannot read"
        assert ("another process could not do its part" in failed) == (number != 1)
        assert "do not have the same plan of the load" in differed
