"""Whose a destination is: an object that its owner writes again every few seconds.

It is written on the condition that it is new, or still the one that was written last: so of two processes one
has it. Whoever finds one that has not been written for a minute, by the clock of the bucket, takes it over;
at once, if it says that a process of this machine wrote it which is not there any more.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ckpttools.core.errors import StorageError
from ckpttools.core.wording import again
from ckpttools.stores.objects.client import Bucket
from ckpttools.stores.objects.writing import TakenError, Version, delete, put, read
from ckpttools.stores.publishing import LockedError

RENEWED_SECONDS = 10.0
EXPIRED_SECONDS = 60.0
# Of these, how many its owner believes in: what is asked for then should be done when another takes over.
_BELIEVED = 0.75
PROBE = "-"
"""What follows the name of a lock in those of objects by which the bucket is asked for the time."""


# States of processes that are listed and run no more.
_ENDED = "ZX"
# Those of this process, which is not gone when one of them is given back.
_HELD: set[str] = set()


class Lock:
    """A destination that is this process's, as long as this object is in a `with` statement.

    Args:
        bucket, key: the object.
        place: the destination, for messages.
        said: what else the object says.
    """

    lapses = False
    """Whether others do without it once it has expired, and do not take it over: then it is lost."""

    def __init__(
        self, bucket: Bucket, key: str, place: str, said: Mapping[str, object] | None = None
    ) -> None:
        self._bucket, self._key, self._place, self._said = bucket, key, place, said or {}
        self._owner = {"owner": uuid.uuid4().hex, **_process()}
        self._renewed = 0.0
        self._version: Version = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._is_lost = False

    def __enter__(self) -> Lock:
        """Takes it.

        Raises:
            LockedError: another process has it.
            StorageError: the store reports an error.
        """
        asked = _now()
        # Before others can read who has it: they would take a thread of this process for gone.
        _HELD.add(self._owner["owner"])
        try:
            self._version = self._taken()
        except BaseException:
            _HELD.discard(self._owner["owner"])
            raise
        self._renewed = asked
        # None begins in a process that is ending, or where the system has no room: then `check` renews.
        with suppress(RuntimeError):
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._is_kept:
            self._thread.join()
        _HELD.discard(self._owner["owner"])
        # What stays says that this process is gone once it is.
        with suppress(StorageError):
            self.release()

    def release(self) -> None:
        """Gives it back. Raises StorageError where that fails; then it is taken over later."""
        found = read(self._bucket, self._key)
        if found and self._is_mine(found[0]):
            delete(self._bucket, [self._key])

    def check(self) -> None:
        """Raises StorageError where it may be another process's by now."""
        if not (self._is_kept or self._is_lost) and _now() - self._renewed > RENEWED_SECONDS:
            # Where that fails its age tells.
            with suppress(StorageError), self._lock:
                self._write_again()
        if self._is_lost or _now() - self._renewed > EXPIRED_SECONDS * _BELIEVED:
            seconds = EXPIRED_SECONDS * _BELIEVED
            raise StorageError(
                f"{self._place} no longer belongs to this process",
                got=f"another process took over, or nothing could be written for {seconds:.0f} s",
                wanted="one writer",
                hint=f"{again()}: it goes on from what is done",
            )

    def renew(self) -> None:
        """Writes a sign of life. Raises StorageError where that fails, or another process has taken over."""
        with self._lock:
            # Whoever took over keeps it: it is never asked for again.
            if not self._is_lost:
                self._write_again()
        self.check()

    @property
    def _is_kept(self) -> bool:
        """Whether a thread renews it."""
        return self._thread.ident is not None

    def _write_again(self) -> None:
        before = self._renewed
        self._written()
        # Also where the answer, and so perhaps what was asked, was late.
        if self.lapses and _now() - before > EXPIRED_SECONDS:
            self._is_lost = True

    def _written(self) -> None:
        asked = _now()
        if self.lapses and asked - self._renewed > EXPIRED_SECONDS:
            self._is_lost = True
            return
        try:
            self._version = put(self._bucket, self._key, self._content(), instead_of=self._version)
        except TakenError:
            # Or an answer was lost, and what is there is what this process wrote last.
            found = read(self._bucket, self._key)
            if found is None or not self._is_mine(found[0]):
                self._is_lost = True
                return
            self._version = found[1]
        self._renewed = asked

    def _keep(self) -> None:
        while not self._stop.wait(RENEWED_SECONDS):
            try:
                self.renew()
            except StorageError:
                # The next try, or whoever asks whether the lock is still held, will know.
                if self._is_lost:
                    return

    def _taken(self) -> Version:
        try:
            return put(self._bucket, self._key, self._content())
        except TakenError:
            return self._taken_over()

    def _taken_over(self) -> Version:
        found = read(self._bucket, self._key)
        if found is None:
            # It was given back just now.
            return self._put_or_refuse(None)
        content, version = found
        owner = _parsed(content)
        age = None if _is_gone(owner) else self._age()
        if age is not None and age < EXPIRED_SECONDS:
            raise LockedError(
                "another process is writing this checkpoint",
                place=self._place,
                got=_named(owner, age),
                hint=f"wait until it is done; if it is gone, run this again in {EXPIRED_SECONDS:.0f} s",
            )
        return self._put_or_refuse(version)

    def _put_or_refuse(self, instead_of: Version | None) -> Version:
        try:
            return put(self._bucket, self._key, self._content(), instead_of=instead_of)
        except TakenError:
            raise LockedError("another process is writing this checkpoint", place=self._place) from None

    def _age(self) -> float:
        """Seconds since the lock was written, by the clock of the bucket."""
        probe = f"{self._key}{PROBE}{self._owner['owner']}"
        put(self._bucket, probe, b"")
        try:
            now, then = self._bucket.head(probe), self._bucket.head(self._key)
        finally:
            delete(self._bucket, [probe])
        if now is None or then is None or now.modified is None or then.modified is None:
            return 0.0
        return max(0.0, (now.modified - then.modified) / 1e9)

    def _is_mine(self, content: bytes) -> bool:
        return _parsed(content).get("owner") == self._owner["owner"]

    def _content(self) -> bytes:
        # Another content each time, so that its ETag is another one.
        return json.dumps({**self._said, **self._owner, "written": time.time_ns()}).encode()


def writer_of(bucket: Bucket, key: str, now: float | None = None) -> str:
    """Who has a lock, in words; "" if nobody has.

    Args:
        bucket, key: the lock.
        now: by the clock of the bucket, in seconds since 1970; None to believe that of this machine.

    Raises:
        StorageError: the store reports an error.
    """
    found, status = read(bucket, key), bucket.head(key)
    if found is None or status is None:
        return ""
    now = time.time() if now is None else now
    owner, age = _parsed(found[0]), now - (status.modified or 0) / 1e9
    return "" if _is_gone(owner) or age > EXPIRED_SECONDS else _named(owner, age)


def said_by(bucket: Bucket, key: str) -> Mapping[str, str]:
    """What a lock says, whoever has it; nothing where nobody has. Raises StorageError as `writer_of`."""
    found = read(bucket, key)
    return _parsed(found[0]) if found else {}


def _named(owner: dict[str, str], age: float) -> str:
    return f"{process_of(owner)}, last seen {max(0.0, age):.0f} s ago"


def process_of(owner: Mapping[str, object]) -> str:
    """The process that wrote a lock, in words."""
    return f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"


def is_live(owner: Mapping[str, object], age: float) -> bool:
    """Whether the process that wrote a lock, so many seconds ago, may still be there."""
    return age < EXPIRED_SECONDS and not _is_gone({name: str(value) for name, value in owner.items()})


def _now() -> float:
    """Seconds, those in which the machine was suspended as well."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _process() -> dict[str, str]:
    """What tells this process from others, on this machine and elsewhere."""
    pid = os.getpid()
    where = {"host": socket.gethostname(), "boot": _boot(), "space": _space()}
    return {**where, "pid": str(pid), "began": _began(pid)}


def _space() -> str:
    """Within what numbers of processes mean something: a container has its own."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _began(pid: int) -> str:
    """When a process began, in the system's ticks; "" if it is not there any more, or cannot be looked at."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # One that was killed is listed until its parent asks how it ended, which in a container may be never.
        return "" if state in _ENDED else fields[18]
    except (OSError, IndexError, ValueError):
        return ""


def _is_gone(owner: dict[str, str]) -> bool:
    """Whether it is known that an owner is not there any more: one of this machine."""
    here = _process()
    is_here = bool(here["boot"]) and all(owner.get(name) == here[name] for name in ("host", "boot", "space"))
    pid = owner.get("pid", "")
    if not is_here or not pid.isdigit():
        return False
    is_other = _began(int(pid)) != owner.get("began")
    return is_other or (pid == here["pid"] and owner.get("owner") not in _HELD)


def _parsed(content: bytes) -> dict[str, str]:
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}
