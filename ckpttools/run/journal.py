"""Which tasks are done, in a file beside the data, so that the same command can go on after `kill -9`.

One line names the plan, then there is one line for each finished task. A task is entered only after its
bytes were synced, so the journal never promises more than the disk holds.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckpttools.errors import UsageError
from ckpttools.formats.placement import Range
from ckpttools.region import Shape
from ckpttools.run.staging import write_error

NAME = "journal.ckpttools"


@dataclass(frozen=True, slots=True)
class Entry:
    """A finished task.

    Attributes:
        task: its number in the plan.
        chunks: where its encoded chunks went: grid index -> bytes of a file.
        counts: what was counted while it was made, such as values that overflowed.
    """

    task: int
    chunks: Mapping[Shape, Range]
    counts: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> str:
        chunks = [[index, each.file, each.offset, each.nbytes] for index, each in self.chunks.items()]
        return json.dumps([self.task, chunks, dict(self.counts)], separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Entry:
        task, chunks, counts = json.loads(line)
        return cls(task, {tuple(index): Range(*place) for index, *place in chunks}, counts)


class Journal:
    """The journal of one plan, open and locked as long as this object is."""

    def __init__(self, directory: Path, fingerprint: str) -> None:
        """Opens or begins the journal.

        Raises:
            UsageError: the directory belongs to another plan, or another process is at work in it.
            StorageError: the file cannot be written.
        """
        self._path = directory / NAME
        try:
            self._file = self._path.open("a+")
        except OSError as error:
            raise write_error(self._path, error) from error
        self._lock()
        self.done = self._read(fingerprint)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise UsageError(
                "another process is writing this checkpoint",
                place=self._path.parent,
                hint="wait for it, or choose another destination",
            ) from None

    def _read(self, fingerprint: str) -> list[Entry]:
        self._file.seek(0)
        head, *lines = self._file.read().split("\n")
        if not head:
            self._append(fingerprint)
            return []
        if head != fingerprint:
            self._file.close()
            raise UsageError(
                f"{self._path.parent} holds the beginning of another conversion",
                got=f"plan {head[:12]}",
                wanted=f"plan {fingerprint[:12]}",
                hint="run the command that began it, delete it, or discard it with --overwrite",
            )
        # A line without its newline was being written when the process died.
        return [Entry.from_json(line) for line in lines[:-1]]

    def enter(self, entries: Iterable[Entry]) -> None:
        """Notes that the bytes of these tasks are durable."""
        self._append("\n".join(entry.to_json() for entry in entries))

    def _append(self, line: str) -> None:
        try:
            self._file.write(line + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise write_error(self._path, error) from error

    def close(self) -> None:
        """Gives up the lock."""
        self._file.close()

    def remove(self) -> None:
        """Deletes the journal: the checkpoint is complete."""
        self._path.unlink()
        self._file.close()
