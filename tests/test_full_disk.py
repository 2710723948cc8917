"""Disks that are full in the middle of a command: it says so, loses nothing, leaves no half, and goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from support.mounts import on_a_small_disk
from support.places import FIXTURES, HF
from support.pruned_runs import write_run

PAGE = 4096
HOSTS = FIXTURES / "hosts/replicator-data=2,fsdp=4"
# What is written, and pages with which it is begun and not ended. Stripping writes beside what it replaces.
COMMANDS: tuple[tuple[list[object], tuple[int, ...]], ...] = (
    (["assemble", HOSTS, "DISK/out"], (3,)),
    (["average", HF, HF, "DISK/out"], (90,)),
    (["shrink", HF, "DISK/out", "--layers", 2, "--compression", "zstd", "--to", "orbax", "--jobs", 1], (20,)),
    (["prune", "DISK/run", "--keep-last", 1, "--keep-every", 2, "--strip-older", "--yes"], (7, 12)),
)


def test_a_full_disk_loses_nothing_and_with_room_it_goes_on(tmp_path: Path):
    run, disk = write_run(tmp_path / "run", range(1, 6)), tmp_path / "disk"
    disk.mkdir()
    own = {name: run if name == "prune" else None for (name, *_), _ in COMMANDS}
    cases = [(own[words[0]], room, words) for words, pages in COMMANDS for room in (*pages, 1000)]
    found = on_a_small_disk(disk, *cases)
    for (_, room, words), (before, little, again) in zip(cases, found, strict=True):
        place = f"{words[0]} with {room} pages"
        if room == 1000:
            assert little["code"] == 0, place
            continue
        assert little["code"] == 4 and (
            "disk is full" in little["output"] or "too little room" in little["output"]
        )
        assert before["files"].items() <= little["files"].items(), place
        assert not any(name.startswith("out/") for name in little["files"]), place
        (whole,) = (
            each
            for (_, free, other), (_, each, _) in zip(cases, found, strict=True)
            if free == 1000 and other is words
        )
        assert again["code"] == 0 and again["files"] == whole["files"], place


def test_a_prune_frees_what_it_says_by_df(tmp_path: Path):
    """Steps 1 and 2 share all data with each other, 3 and 4, and 5 and 6; what is stripped of 4 with both."""
    run, disk = write_run(tmp_path / "run", (1, 3, 5), shape=(64, 16, 256)), tmp_path / "disk"
    disk.mkdir()
    for step in (1, 3, 5):
        linked = shutil.copytree(run / str(step), run / str(step + 1))
        for file in (linked / "items/d").iterdir():
            file.unlink()
            file.hardlink_to(run / str(step) / "items/d" / file.name)
    rules = ["prune", "DISK/run", "--keep-last", 1, "--keep-every", 4, "--yes", "--json"]
    found = on_a_small_disk(disk, *((run, 4000, [*rules, *more]) for more in ([], ["--strip-older"])))
    for before, after, _ in found:
        report = json.loads(after["output"])
        assert [each["fate"] for each in report["steps"]].count("deleted") == 4
        alone = sum(each["frees"] for each in report["steps"])
        gone = len(before["files"]) - len(after["files"])
        # Of each file df counts whole pages, the last of which is half empty on average.
        assert 0 <= before["used"] - after["used"] - report["frees"] < gone * PAGE
        assert report["frees"] > 2 << 20 > 100_000 > alone
