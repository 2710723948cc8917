"""What is on the disk when: seen at every write and sync that a real run asks the system for."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.internals import (
    JOURNAL,
    PLAN_MARK,
    JobInfo,
    OrbaxWriter,
    SafetensorsWriter,
    Share,
    ZarrWriter,
    Zstd,
    parse,
    plan_tree,
)
from support.stored_trees import ARRAYS, EVERYTHING

from ckpttools import Prepared, Select, Tree
from ckpttools.formats.base import Writer
from ckpttools.run import threads
from ckpttools.run.parts import execute_part
from ckpttools.stores.local.files import sync_tree
from ckpttools.stores.shares import PARTS

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="tells what a descriptor is of")

MOST = 1 << 20
NUMBERS = ARRAYS.pipe(Select(["ranks", "sharded"]))
WRITERS: dict[str, tuple[Tree, Writer]] = {
    "ocdbt": (EVERYTHING, OrbaxWriter()),
    "ocdbt-zstd": (EVERYTHING, OrbaxWriter(compression=Zstd())),
    "files": (NUMBERS, OrbaxWriter(ocdbt=False)),
    "safetensors": (NUMBERS, SafetensorsWriter()),
    "zarr3": (NUMBERS, ZarrWriter()),
}
Sync = Callable[[int], None]


def at_every_sync(patch: pytest.MonkeyPatch, built: Callable[[Sync], Sync]) -> None:
    for name in ("fsync", "fdatasync"):
        patch.setattr(os, name, built(getattr(os, name)))


def location_of(descriptor: int) -> Path:
    return Path(f"/proc/self/fd/{descriptor}").readlink()


class Durable:
    """Which bytes of which file a sync has made durable since they were written last."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._lock = threading.Lock()
        self._written: dict[Path, np.ndarray] = defaultdict(lambda: np.zeros(MOST, bool))
        self._durable: dict[Path, np.ndarray] = defaultdict(lambda: np.zeros(MOST, bool))
        pwrite = os.pwrite

        def write(descriptor: int, data: memoryview, offset: int) -> int:
            count = pwrite(descriptor, data, offset)
            with self._lock:
                self._written[location_of(descriptor)][offset : offset + count] = True
                self._durable[location_of(descriptor)][offset : offset + count] = False
            return count

        patch.setattr(os, "pwrite", write)
        at_every_sync(patch, self._noted)

    def _noted(self, sync: Sync) -> Sync:
        def noted(descriptor: int) -> None:
            with self._lock:
                written = self._written[location_of(descriptor)].copy()
            sync(descriptor)
            with self._lock:
                self._durable[location_of(descriptor)] |= written

        return noted

    def holds(self, file: Path, offset: int, nbytes: int) -> bool:
        with self._lock:
            return offset + nbytes <= MOST and bool(self._durable[file][offset : offset + nbytes].all())


def whole(conversion: Prepared, destination: Path) -> None:
    conversion.run(destination)


def alone_in_a_part(conversion: Prepared, destination: Path) -> None:
    """Does all tasks as one process of several would; nobody publishes."""
    plan, nbytes = conversion.plan, sum(task.bytes_out for task in conversion.plan.tasks)
    share, purpose = Share("0/1", 0, len(plan.tasks)), JobInfo("a plan")
    execute_part(
        plan, 0, share, parse(destination), purpose, nbytes=nbytes, overwrite=False, sources=lambda: ()
    )


@pytest.mark.parametrize("done", [whole, alone_in_a_part])
@pytest.mark.parametrize("kind", WRITERS)
def test_journal_records_only_durable_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, done: Callable[[Prepared, Path], object]
):
    """Whenever something is synced until the end, all bytes of the tasks in the journals are durable."""
    monkeypatch.setattr(threads, "_SYNC_SECONDS", 0.001)
    durable, conversion = Durable(monkeypatch), plan_tree(*WRITERS[kind])
    promised: set[int] = set()
    broken: set[int] = set()

    def look() -> None:
        for number, ranges in () if (tmp_path / "out").exists() else entered(conversion, tmp_path):
            promised.add(number)
            if not all(durable.holds(*span) for span in ranges):
                broken.add(number)

    def checked(sync: Sync) -> Sync:
        def check(descriptor: int) -> None:
            look()
            sync(descriptor)

        return check

    at_every_sync(monkeypatch, checked)
    done(conversion, tmp_path / "out")
    look()
    assert promised == set(range(len(conversion.plan.tasks)))
    assert broken == set()


def entered(conversion: Prepared, directory: Path) -> Iterator[tuple[int, list[tuple[Path, int, int]]]]:
    """Each task that a journal below `directory` names, with file, offset and length of what it wrote."""
    for staging in {journal.parent for journal in directory.rglob(JOURNAL)}:
        files = [location for location in staging.rglob("content/**/*") if location.is_file()]
        if not files:  # it has its name
            continue
        journals = [staging / JOURNAL, *staging.glob(f"{PARTS}/*")]
        for line in "".join(journal.read_text() for journal in journals).split("\n")[:-1]:
            kind, content = json.loads(line.partition(" ")[2])
            if kind == "task" and content[0] >= 0:  # others are about the source or void tasks
                number, chunks, *_ = content
                ranges = [location for _, *location in chunks] or as_they_are(conversion, number)
                yield number, [(ending_in(name, files), *location) for name, *location in ranges]


def as_they_are(conversion: Prepared, number: int) -> list[tuple[str, int, int]]:
    """What a task writes whose chunks are not encoded."""
    task = conversion.plan.tasks[number]
    runs = conversion.plan.layout.placements[task.path].runs(task.region)
    return [(run.file, run.offset, run.nbytes) for run in runs]


def ending_in(name: str, files: list[Path]) -> Path:
    return next(file for file in files if file.as_posix().endswith(f"/{name}"))


@pytest.mark.parametrize("kind", WRITERS)
def test_files_are_synced_before_publication(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str):
    """Every file and directory was synced as it is now before it had its name, and the name after.

    All but the mark of the plan, which leaves last.
    """
    out, synced = tmp_path / "out", Synced(monkeypatch, tmp_path / "out")
    for overwrite in (False, True):
        synced.clear()
        plan_tree(*WRITERS[kind]).run(out, overwrite=overwrite)
        unlike = [p for p in out.rglob("*") if synced.before.get(inode(p)) != state(p)]
        assert unlike == []
        # The plan's mark leaves the checkpoint last.
        assert inode(out) in synced.before and synced.after[inode(out)] == state(out)
        assert "out" in synced.after[inode(tmp_path)]


class Synced:
    """The state of every file and directory when it was synced last.

    Attributes:
        before: inode -> state, of syncs before the inode that `out` has in the end had that name.
        after: the same of those since.
    """

    def __init__(self, patch: pytest.MonkeyPatch, out: Path) -> None:
        self._out = out
        self._syncs: list[tuple[int, int, Any]] = []
        at_every_sync(patch, self._noted)

    def clear(self) -> None:
        self._syncs.clear()

    def _noted(self, sync: Sync) -> Sync:
        def noted(descriptor: int) -> None:
            location = location_of(descriptor)
            self._syncs.append((inode(self._out), inode(location), state(location)))
            sync(descriptor)

        return noted

    @property
    def before(self) -> dict[int, Any]:
        return {file: what for name, file, what in self._syncs if name != inode(self._out)}

    @property
    def after(self) -> dict[int, Any]:
        return {file: what for name, file, what in self._syncs if name == inode(self._out)}


def inode(location: Path) -> int:
    return location.stat().st_ino if location.exists() else 0


def state(location: Path) -> Any:
    if location.is_dir():
        return sorted(item.name for item in location.iterdir() if item.name != PLAN_MARK)
    return location.read_bytes()


@pytest.mark.parametrize("failing", ["0", "70", "79"])
def test_sync_errors_of_many_files_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str):
    for number in range(80):
        (tmp_path / str(number)).touch()

    def failed(sync: Sync) -> Sync:
        def fail(descriptor: int) -> None:
            if location_of(descriptor) == tmp_path / failing:
                raise OSError(errno.EIO, "Input/output error", failing)

        return fail

    sync_tree(tmp_path)
    at_every_sync(monkeypatch, failed)
    with pytest.raises(OSError, match="Input/output error") as error:
        sync_tree(tmp_path)
    assert error.value.filename == failing
