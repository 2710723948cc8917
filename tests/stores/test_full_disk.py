"""Disks that are full in the middle of a command: it says so, loses nothing, leaves no half, and goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.locations import FIXTURES, HF
from support.mounts import on_a_small_disk
from support.pruned_runs import write_run

PAGE, ROOM = 4096, 1000
HOSTS = FIXTURES / "hosts/replicator-data=2,fsdp=4"
# What is written, and pages with which it is begun and not ended. Stripping writes beside what it replaces.
COMMANDS: tuple[tuple[list[object], tuple[int, ...]], ...] = (
    (["assemble", HOSTS, "DISK/out"], (3,)),
    (["average", HF, HF, "DISK/out"], (90,)),
    (["shrink", HF, "DISK/out", "--layers", 2, "--compression", "zstd", "--to", "orbax", "--jobs", 1], (20,)),
    (["prune", "DISK/run", "--keep-last", 1, "--keep-every", 2, "--strip-older", "--yes"], (7, 12)),
    (["prune", "DISK/run", "--keep-last", 1, "--yes"], (0,)),
)
CASES = [(room, words) for words, pages in COMMANDS for room in (*pages, ROOM)]


RULES = ["prune", "DISK/run", "--keep-last", 1, "--keep-every", 4, "--yes", "--json"]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """What became of all cases, of one process."""
    top = tmp_path_factory.mktemp("full")
    small, linked = write_run(top / "small/run", range(1, 6)), with_links(top / "linked/run")
    (top / "disk").mkdir()
    own = [(small if words[0] == "prune" else None, room, words) for room, words in CASES]
    freeing = [(linked, 4000, [*RULES, *more]) for more in ([], ["--strip-older"])]
    return on_a_small_disk(top / "disk", *own, *freeing)


def with_links(run: Path) -> Path:
    """Steps 1 and 2 share all data with each other, 3 and 4, and 5 and 6."""
    write_run(run, (1, 3, 5), shape=(64, 16, 256))
    for step in (1, 3, 5):
        linked = shutil.copytree(run / str(step), run / str(step + 1))
        for file in (linked / "items/d").iterdir():
            file.unlink()
            file.hardlink_to(run / str(step) / "items/d" / file.name)
    return run


def test_run_resumes_after_full_disk(result):
    ended = list(zip(CASES, result, strict=False))
    whole = {str(words): little for (room, words), (_, little, _) in ended if room == ROOM}
    assert all(item["code"] == 0 for item in whole.values())
    for (room, words), (before, little, again) in ended:
        if room == ROOM:
            continue
        location = f"{words[0]} with {room} pages"
        assert little["code"] == 4, location
        advice = "leave --strip-older out at first" if "--strip-older" in words else "takes some kB"
        assert words[0] != "prune" or advice in little["output"]
        assert "disk is full" in little["output"] or "too little space" in little["output"]
        assert before["files"].items() <= little["files"].items(), location
        assert not any(name.startswith("out/") for name in little["files"]), location
        assert again["code"] == 0 and again["files"] == whole[str(words)]["files"], location


def test_prune_frees_the_reported_bytes(result):
    """Also of files that only deleted steps share, and not of what is stripped by reference."""
    for before, after, _ in result[len(CASES) :]:
        report = json.loads(after["output"])
        assert [item["outcome"] for item in report["steps"]].count("deleted") == 4
        alone = sum(item["freed_bytes"] for item in report["steps"])
        gone = len(before["files"]) - len(after["files"])
        # Of each file df counts whole pages, the last of which is half empty on average.
        assert 0 <= before["used"] - after["used"] - report["freed_bytes"] < gone * PAGE
        assert report["freed_bytes"] > 2 << 20 > 100_000 > alone
