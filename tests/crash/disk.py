"""What a disk may hold after a crash, given the calls that were made before it.

The model is the weakest that POSIX allows and file systems keep to in part, much as that of ALICE ("All File
Systems Are Not Created Equal", OSDI 2014), and weaker than any journalling file system of Linux:

- Each write (each page of a long one), each change of a file's size and each allocation reaches the disk on
  its own, in any order, until `fsync` or `fdatasync` of that file, or `sync`. What is missing reads as zeros.
- Entries of one directory reach the disk in the order in which they were made; a crash cuts that order
  anywhere. Entries of different directories have no order. `fsync` of a directory makes its entries so far
  durable, not its own entry in its parent; `fsync` of a file does not make any entry durable.
- After an `fsync` of a file that failed, nothing of it that was not durable is made so by a later one: the
  system may take pages for clean that it could not write (fsync(2)). Such bytes may have reached the disk.
- A rename is one step, also between directories, also one that exchanges two names: both directories have all
  of it or nothing.

A process that is killed loses nothing: that is the state in which all calls so far were carried out.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from crash.taps import Call

_PAGE = 4096
_MAX_PAGES = 4
_ROOT = 0

Node: TypeAlias = int
Content: TypeAlias = "Stored | Path | str | None"
State: TypeAlias = dict[str, Content]
"""All below the root: what a file holds, the file that it is, the target of a link, None for a directory."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Content of a file, and its modification time in nanoseconds."""

    data: bytes
    time: int


@dataclass(frozen=True, slots=True)
class Names:
    """Directory entries that change atomically: (directory, name, new target)."""

    changes: tuple[tuple[Node, str, Node | None], ...]

    @property
    def directories(self) -> set[Node]:
        return {directory for directory, _, _ in self.changes}


@dataclass(frozen=True, slots=True)
class Bytes:
    """A write to a file, or a change of its size.

    Attributes:
        node: The file.
        offset, data: Position and content of the write.
        size: New size of the file: exact if `cut`, otherwise the minimum.
        time: Modification time, in nanoseconds.
    """

    node: Node
    time: int
    offset: int = 0
    data: bytes = b""
    size: int = 0
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment between two calls: the steps issued so far, and those that must be durable."""

    calls: int
    steps: int
    durable: frozenset[int]
    waits: bool
    """Whether the next call makes something durable, or there is none."""


class Disk:
    """A model of a directory tree and of the calls that change it."""

    def __init__(self, root: Path, fixed: Sequence[str]) -> None:
        """Args:
        root: Directory whose present content is durable.
        fixed: Names in it below which nothing may change.
        """
        self._root = Path(os.path.realpath(root))
        self._names: dict[Node, dict[str, Node]] = {_ROOT: {}}
        self._data: dict[Node, Content] = {}
        self._count = _ROOT
        self._scan(self._root, _ROOT, False, fixed)
        self._first = {node: dict(names) for node, names in self._names.items()}
        self.steps: list[Names | Bytes] = []
        self._last: dict[Node, int] = {}
        self._before: dict[int, set[int]] = {}
        self._opened: dict[int, Node] = {}
        self._durable: set[int] = set()
        self._dropped: set[int] = set()

    def _scan(self, path: Path, directory: Node, below_fixed: bool, fixed: Sequence[str]) -> None:
        for entry in os.scandir(path):
            node = self._new(entry.is_dir(follow_symlinks=False))
            self._names[directory][entry.name] = node
            still = below_fixed or entry.name in fixed
            if entry.is_symlink():
                self._data[node] = str(Path(entry.path).readlink())
            elif entry.is_dir():
                self._scan(Path(entry.path), node, still, () if directory == _ROOT else fixed)
            else:
                self._data[node] = Path(entry.path) if still else _stored(Path(entry.path))

    def _new(self, directory: bool) -> Node:
        self._count += 1
        if directory:
            self._names[self._count] = {}
        else:
            self._data[self._count] = Stored(b"", 0)
        return self._count

    def apply(self, calls: Sequence[Call]) -> list[Moment]:
        """Apply calls to the model, and return the moments before, between and after them."""
        moments: list[Moment] = []
        for number, call in enumerate(calls):
            moments.append(self._moment(number, call.name in _SYNCS))
            getattr(self, f"_{call.name}")(call)
        return [*moments, self._moment(len(calls), True)]

    def _moment(self, calls: int, waits: bool) -> Moment:
        return Moment(calls, len(self.steps), frozenset(self._durable), waits)

    # -- what each call does

    def _open(self, call: Call) -> None:
        directory, name = self._location(call.path) if call.path != str(self._root) else (_ROOT, "")
        node = self._names[directory].get(name) if name else _ROOT
        if call.flags & os.O_TMPFILE == os.O_TMPFILE or (node is None and call.flags & os.O_CREAT):
            node = self._new(False)
            self._data[node] = Stored(b"", call.time)
            if call.flags & os.O_TMPFILE != os.O_TMPFILE:
                self._entries((directory, name, node))
        assert node is not None, call
        self._opened[call.handle] = node
        if call.flags & os.O_TRUNC:
            self._bytes(call, cut=True)

    def _mkdir(self, call: Call) -> None:
        self._entries((*self._location(call.path), self._new(True)))

    def _symlink(self, call: Call) -> None:
        node = self._new(False)
        self._data[node] = os.fsdecode(call.data)
        self._entries((*self._location(call.path), node))

    def _unlink(self, call: Call) -> None:
        self._entries((*self._location(call.path), None))

    _rmdir = _unlink

    def _link(self, call: Call) -> None:
        self._entries((*self._location(call.other), self._at(call.path)))

    def _rename(self, call: Call) -> None:
        self._entries((*self._location(call.path), None), (*self._location(call.other), self._at(call.path)))

    def _exchange(self, call: Call) -> None:
        first, second = self._at(call.path), self._at(call.other)
        self._entries((*self._location(call.path), second), (*self._location(call.other), first))

    def _write(self, call: Call) -> None:
        pieces = max(1, min(_MAX_PAGES, -(-len(call.data) // _PAGE)))
        length = -(-len(call.data) // pieces)
        length = max(1, -(-length // _PAGE) * _PAGE)
        for start in range(0, len(call.data), length):
            self._bytes(call, offset=call.offset + start, data=call.data[start : start + length])

    _pwrite = _write

    def _ftruncate(self, call: Call) -> None:
        self._bytes(call, size=call.size, cut=True)

    def _posix_fallocate(self, call: Call) -> None:
        self._bytes(call, size=call.offset + call.size)

    def _fsync(self, call: Call) -> None:
        node = self._opened[call.handle]
        mine = {number for number, step in enumerate(self.steps) if _touches(step, node)}
        self._durable |= self.with_earlier(mine) - self._dropped

    _fdatasync = _fsync

    def _failed_sync(self, call: Call) -> None:
        node = self._opened[call.handle]
        mine = {
            number for number, step in enumerate(self.steps) if isinstance(step, Bytes) and step.node == node
        }
        self._dropped |= mine - self._durable

    def _sync(self, call: Call) -> None:
        self._durable |= set(range(len(self.steps))) - self._dropped

    def _nothing(self, call: Call) -> None:
        pass

    _read = _pread = _preadv = _nothing

    # -- how

    def _entries(self, *changes: tuple[Node, str, Node | None]) -> None:
        step = Names(changes)
        number = len(self.steps)
        self._before[number] = {
            self._last[directory] for directory in step.directories if directory in self._last
        }
        self._last |= dict.fromkeys(step.directories, number)
        self.steps.append(step)
        _enter(self._names, step)

    def _bytes(
        self, call: Call, *, offset: int = 0, data: bytes = b"", size: int = 0, cut: bool = False
    ) -> None:
        node = self._opened[call.handle]
        if isinstance(self._data[node], Path):
            raise AssertionError(f"{call.name} into {self._data[node]}, which is only read")
        self.steps.append(Bytes(node, call.time, offset, data, size, cut))

    def _location(self, path: str) -> tuple[Node, str]:
        head, _, name = path.rpartition("/")
        return self._at(head), name

    def _at(self, path: str) -> Node:
        """Return the node that has a name at present."""
        node = _ROOT
        for name in Path(path).relative_to(self._root).parts:
            node = self._names[node][name]
        return node

    # -- what may be left

    def with_earlier(self, steps: Iterable[int]) -> set[int]:
        """Return steps together with the steps that they require."""
        result: set[int] = set()
        waiting = list(steps)
        while waiting:
            number = waiting.pop()
            if number not in result:
                result.add(number)
                waiting.extend(self._before.get(number, ()))
        return result

    def without_later(self, steps: Iterable[int], gone: int) -> set[int]:
        """Return steps without one of them and without those that require it."""
        lost = {gone}
        for number in sorted(steps):
            if self._before.get(number, set()) & lost:
                lost.add(number)
        return set(steps) - lost

    def state(self, steps: Iterable[int]) -> State:
        """Return the content of the disk if these steps reached it."""
        names = {node: dict(entries) for node, entries in self._first.items()}
        data: dict[Node, bytearray] = {}
        times: dict[Node, int] = {}
        for number in sorted(steps):
            step = self.steps[number]
            if isinstance(step, Names):
                _enter(names, step)
            else:
                _put(data.setdefault(step.node, bytearray(self._original(step.node))), step)
                times[step.node] = step.time
        changed = {node: Stored(bytes(data[node]), time) for node, time in times.items()}
        return dict(self._walk(names, changed, _ROOT, ""))

    def _original(self, node: Node) -> bytes:
        content = self._data[node]
        assert isinstance(content, Stored)
        return content.data

    def _walk(
        self, names: Mapping[Node, Mapping[str, Node]], changed: Mapping[Node, Stored], node: Node, path: str
    ) -> Iterator[tuple[str, Content]]:
        for name, below in sorted(names.get(node, {}).items()):
            location = f"{path}{name}"
            if below in self._names:
                yield location, None
                yield from self._walk(names, changed, below, f"{location}/")
            else:
                yield location, changed.get(below, self._data[below])


_SYNCS = ("fsync", "fdatasync", "sync")


def _stored(path: Path) -> Stored:
    return Stored(path.read_bytes(), path.stat().st_mtime_ns)


def _touches(step: Names | Bytes, node: Node) -> bool:
    return node in step.directories if isinstance(step, Names) else step.node == node


def _enter(names: dict[Node, dict[str, Node]], step: Names) -> None:
    for directory, name, node in step.changes:
        entries = names.setdefault(directory, {})
        entries.pop(name, None)
        if node is not None:
            entries[name] = node


def _put(content: bytearray, step: Bytes) -> None:
    end = max(step.size, step.offset + len(step.data) if step.data else 0)
    content.extend(bytes(max(0, end - len(content))))
    content[step.offset : step.offset + len(step.data)] = step.data
    if step.cut:
        del content[step.size :]


def lay_out(state: State, root: Path, location: str) -> None:
    """Create the part of a state below `root / place`, replacing the present content."""
    shutil.rmtree(root / location, ignore_errors=True)
    for path, content in state.items():
        if path != location and not path.startswith(f"{location}/"):
            continue
        target = root / path
        if content is None:
            target.mkdir()
        elif isinstance(content, Path):
            os.link(content, target)
        elif isinstance(content, str):
            target.symlink_to(content)
        else:
            target.write_bytes(content.data)
            os.utime(target, ns=(content.time, content.time))
