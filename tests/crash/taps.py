"""Sees every call of this process to the file system below one directory: of `os`, and of what opens files.

The package moves its data with Python's own calls, so wrapping those is seeing all; that nothing escaped is
checked by comparing the model that the calls make with what lies on the disk (`test_crash_states`).
"""

from __future__ import annotations

import builtins
import io
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

_REAL_OPEN = io.open
# What would change files unseen; nothing here uses it today.
_UNKNOWN = (
    "sendfile",
    "copy_file_range",
    "splice",
    "mkfifo",
    "mknod",
    "lchown",
    "pwritev",
    "writev",
    "truncate",
)
_ON_DESCRIPTORS = (
    "read",
    "pread",
    "preadv",
    "write",
    "pwrite",
    "fsync",
    "fdatasync",
    "ftruncate",
    "posix_fallocate",
)


@dataclass(frozen=True, slots=True)
class Call:
    """One call.

    Attributes:
        name: of the function; "exchange" for a rename that swaps, "replace" is "rename".
        path, other: absolute; `other` is the new name of renames and links.
        handle: number of the opened file, not used twice.
        offset, size: in bytes, where the call has them.
        data: what was written.
        flags: of an open.
        time: of the last change of the file after the call, in nanoseconds; 0 where it has none.
    """

    name: str
    path: str = ""
    other: str = ""
    handle: int = 0
    offset: int = 0
    size: int = 0
    data: bytes = b""
    flags: int = 0
    time: int = 0


class Handler(Protocol):
    """Is called before each call, where it may wait or raise, and after it."""

    def before(self, call: Call) -> None: ...

    def stopped(self, call: Call) -> None:
        """Report that a handler made the call fail."""

    def after(self, call: Call) -> None: ...


class Taps:
    """All wrappers of a process. They serialize calls, so that their order is known."""

    def __init__(self, root: str, handlers: Sequence[Handler], exchanges: bool = True) -> None:
        """Args:
        root: Directory below which calls are intercepted.
        handlers: Handlers, in order.
        exchanges: Whether the system supports `RENAME_EXCHANGE`.
        """
        self._exchanges = exchanges
        self._root = os.path.realpath(root)
        self._handlers = handlers
        self._handles: dict[int, int] = {}
        self._lock = threading.RLock()
        self._count = 0
        self._os = {name: getattr(os, name) for name in dir(os)}

    def install(self) -> None:
        """Install the wrappers permanently."""
        os.open, os.close, os.sync = self._open, self._close, self._sync
        _File.closing = staticmethod(self._forget)
        os.rename = os.replace = self._two_names("rename")
        os.link, os.symlink = self._two_names("link"), self._symlink
        os.mkdir, os.rmdir = self._one_name("mkdir"), self._one_name("rmdir")
        os.unlink = os.remove = self._one_name("unlink")
        for name in _ON_DESCRIPTORS:
            setattr(os, name, self._on_descriptor(name))
        for name in _UNKNOWN:
            setattr(os, name, self._unknown(name))
        # `shutil` asks these sets, and functions, whether it may use descriptors.
        for known in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            known.update(getattr(os, item.__name__) for item in list(known) if hasattr(os, item.__name__))
        io.open = builtins.open = self._open_file
        self._wrap_exchange()

    def _wrap_exchange(self) -> None:
        """Wrap the only function that calls the system without Python, under every name by which it is
        imported.
        """
        try:
            from ckpttools.stores.local import files
        except ImportError:
            return
        real = files.exchange

        def exchange(first: Any, second: Any) -> bool:
            call = Call("exchange", path=self._absolute(first), other=self._absolute(second))
            built = real if self._exchanges else lambda first, second: False
            return self._made(call, lambda: built(first, second), lambda call, went: call if went else None)

        for module in list(sys.modules.values()):
            if module.__name__.startswith("ckpttools.") and getattr(module, "exchange", None) is real:
                module.exchange = exchange

    def _absolute(self, path: Any, directory: int | None = None) -> str:
        text = os.fsdecode(path)
        below = Path.cwd() if directory is None else Path(f"/proc/self/fd/{directory}").readlink()
        return os.path.normpath(os.path.join(below, text))  # noqa: PTH118

    def _inside(self, path: str) -> bool:
        return path == self._root or path.startswith(self._root + "/")

    def _made(
        self,
        call: Call,
        make: Callable[[], Any],
        done: Callable[[Call, Any], Call | None] = lambda call, result: call,
    ) -> Any:
        """Make a call while notifying all handlers.

        Args:
            call: Description of the call before it is made.
            make: Makes the call.
            done: Completes the description with the result; None if the call did nothing.
        """
        if not (call.handle or self._inside(call.path) or self._inside(call.other) or call.name == "sync"):
            return make()
        with self._lock:
            self._before(call)
            result = make()
            complete = done(call, result)
            if complete is not None:
                for handler in self._handlers:
                    handler.after(complete)
            return result

    def _before(self, call: Call) -> None:
        try:
            for handler in self._handlers:
                handler.before(call)
        except OSError:
            for handler in self._handlers:
                handler.stopped(call)
            raise

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        absolute = self._absolute(path, dir_fd)

        def done(call: Call, descriptor: int) -> Call:
            self._count += 1
            self._handles[descriptor] = self._count
            return replace(call, handle=self._count, time=os.fstat(descriptor).st_mtime_ns)

        call = Call("open", path=absolute, flags=flags)
        return self._made(call, lambda: self._os["open"](path, flags, mode, dir_fd=dir_fd), done)

    def _close(self, descriptor: int) -> None:
        self._forget(descriptor)
        self._os["close"](descriptor)

    def _forget(self, descriptor: int) -> None:
        self._handles.pop(descriptor, None)

    def _sync(self) -> None:
        self._made(Call("sync"), self._os["sync"])

    def _one_name(self, name: str) -> Callable[..., None]:
        def wrapper(path: Any, *args: Any, dir_fd: int | None = None) -> None:
            call = Call(name, path=self._absolute(path, dir_fd))
            self._made(call, lambda: self._os[name](path, *args, dir_fd=dir_fd))

        wrapper.__name__ = name
        return wrapper

    def _two_names(self, name: str) -> Callable[..., None]:
        def wrapper(
            src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None, **more: Any
        ) -> None:
            call = Call(name, path=self._absolute(src, src_dir_fd), other=self._absolute(dst, dst_dir_fd))
            real = self._os[name]
            self._made(call, lambda: real(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, **more))

        wrapper.__name__ = name
        return wrapper

    def _symlink(self, src: Any, dst: Any, *args: Any, dir_fd: int | None = None) -> None:
        call = Call("symlink", path=self._absolute(dst, dir_fd), data=os.fsencode(src))
        self._made(call, lambda: self._os["symlink"](src, dst, *args, dir_fd=dir_fd))

    def _on_descriptor(self, name: str) -> Callable[..., Any]:
        real = self._os[name]

        def wrapper(descriptor: Any, *args: Any) -> Any:
            number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
            handle = self._handles.get(number)
            if handle is None:
                return real(descriptor, *args)
            call = replace(self._described(name, number, args), handle=handle)
            done = partial(_done, descriptor=number)
            return self._made(call, lambda: real(descriptor, *args), done)

        wrapper.__name__ = name
        return wrapper

    def _described(self, name: str, descriptor: int, args: tuple[Any, ...]) -> Call:
        if name == "write":
            return Call(name, offset=self._position(descriptor), data=bytes(args[0]))
        if name == "pwrite":
            return Call(name, offset=args[1], data=bytes(args[0]))
        if name == "ftruncate":
            return Call(name, size=args[0])
        if name == "posix_fallocate":
            return Call(name, offset=args[0], size=args[1])
        return Call(name)

    def _position(self, descriptor: int) -> int:
        import fcntl

        appending = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND
        return os.fstat(descriptor).st_size if appending else os.lseek(descriptor, 0, os.SEEK_CUR)

    def _unknown(self, name: str) -> Callable[..., Any]:
        def wrapper(*args: Any, **more: Any) -> Any:
            raise AssertionError(f"os.{name} is not seen by tests/crash/taps.py: describe it there")

        return wrapper

    def _open_file(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        if isinstance(file, int) or not self._inside(self._absolute(file)):
            return _REAL_OPEN(file, mode, buffering, encoding, errors, newline, closefd, opener)
        raw = _File(file, mode.replace("b", "").replace("t", ""), opener=os.open)
        if buffering == 0:
            return raw
        kind = io.BufferedRandom if raw.readable() and raw.writable() else None
        kind = kind or (io.BufferedReader if raw.readable() else io.BufferedWriter)
        buffered = kind(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)


def _done(call: Call, result: Any, descriptor: int) -> Call:
    """Complete the description of a finished call."""
    data = call.data[:result] if call.name in ("write", "pwrite") else call.data
    return replace(call, data=data, time=os.fstat(descriptor).st_mtime_ns)


class _File(io.FileIO):
    """A file whose reads and writes use `os`, where they are intercepted.

    Attributes:
        closing: Is called with a descriptor before it is closed.
    """

    closing: ClassVar[Callable[[int], None]]

    def write(self, data: Any) -> int:
        return os.write(self.fileno(), data)

    def readinto(self, buffer: Any) -> int:
        return os.preadv(self.fileno(), [buffer], self._moved(len(memoryview(buffer).cast("B"))))

    def _moved(self, limit: int) -> int:
        """Return the position, and advance it by the number of readable bytes."""
        at = self.tell()
        self.seek(at + max(0, min(limit, os.fstat(self.fileno()).st_size - at)))
        return at

    def read(self, size: int | None = -1) -> bytes:
        return self.readall() if size is None or size < 0 else super().read(size)

    def readall(self) -> bytes:
        parts = iter(lambda: os.read(self.fileno(), 1 << 20), b"")
        return b"".join(parts)

    def truncate(self, size: int | None = None) -> int:
        size = self.tell() if size is None else size
        os.ftruncate(self.fileno(), size)
        return size

    def close(self) -> None:
        if not self.closed:
            # `FileIO` closes without `os.close`; before that, since the next file gets the same number.
            _File.closing(self.fileno())
            super().close()
