"""The lock of a destination: an object that its owner rewrites every few seconds.

Each write requires that the object is new or unchanged since the last write, so only one of two processes
succeeds. A lock that has not been written for a minute, by the bucket's clock, is taken over. If its content
names a process of this machine that no longer exists, it is taken over immediately.

Before it takes the lock, a process probes which conditions the bucket honors (`objects/writing.py`). If
the bucket does not honor `If-Match`, the owner reads the lock before each renewal, and a process that takes
over a dead lock first creates an object named after the lock, which only one process can create. If the
bucket does not honor `If-None-Match` either, two processes can start at the same moment: each writes the
lock, waits, and owns the lock if its content is unchanged.
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
from ckpttools.core.message_terms import retry_term
from ckpttools.stores.abilities import StoredLock
from ckpttools.stores.objects.client import IGNORED, Bucket, Version
from ckpttools.stores.objects.writing import TakenError, delete, probe_conditions, put, read, replace
from ckpttools.stores.publishing import LockedError

RENEWED_SECONDS = 10.0
EXPIRED_SECONDS = 60.0
# Fraction of the expiry time for which the owner trusts the lock, so that its requests end before a takeover.
_TRUSTED_FRACTION = 0.75
# Seconds between writing and reading a lock if the bucket does not exclude a second writer.
SETTLE_SECONDS = 3.0
PROBE = "-"
"""Suffix of the objects that are written next to locks to read the bucket's clock."""


# Maximum number of processes that can die one after another while taking over a dead lock.
_CLAIMS = 8
# States of processes that are still listed but have ended.
_ENDED_STATES = "ZX"
# The locks that this process holds; the process may still exist after it has released some.
_OWN_LOCKS: set[str] = set()


class Lock:
    """A lock that this process holds in a `with` block.

    Args:
        bucket, key: Bucket and key of the object.
        location: The destination, for messages.
        declared: Additional content of the object.
    """

    lapses = False
    """Whether an expired lock is lost even without a takeover, because other processes ignore it."""

    def __init__(
        self, bucket: Bucket, key: str, location: str, declared: Mapping[str, object] | None = None
    ) -> None:
        self._bucket, self._key, self._location, self._said = bucket, key, location, declared or {}
        self._owner = {"owner": uuid.uuid4().hex, **_process()}
        self._renewed = 0.0
        self._version: Version = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._is_lost = False

    def __enter__(self) -> Lock:
        """Take the lock.

        Raises:
            LockedError: Another process holds the lock.
            StorageError: The store reports an error.
        """
        probe_conditions(self._bucket, f"{self._key}{PROBE}")
        requested_at = _now()
        # Register the lock before others can read its owner: they would consider a thread of this process
        # dead.
        _OWN_LOCKS.add(self._owner["owner"])
        try:
            self._version = self._acquire()
        except BaseException:
            _OWN_LOCKS.discard(self._owner["owner"])
            raise
        self._renewed = requested_at
        # A process that is ending or out of memory cannot start a thread; `check` then renews the lock.
        with suppress(RuntimeError):
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._is_renewing:
            self._thread.join()
        _OWN_LOCKS.discard(self._owner["owner"])
        # If the object remains, others recognize it as dead once this process has ended.
        with suppress(StorageError):
            self.release()

    def release(self) -> None:
        """Release the lock; raises StorageError on failure, in which case it is taken over later."""
        result = read(self._bucket, self._key)
        if result and self._is_own(result[0]):
            delete(self._bucket, [self._key])

    def check(self) -> None:
        """Raise StorageError if another process may have taken over the lock."""
        if not (self._is_renewing or self._is_lost) and _now() - self._renewed > RENEWED_SECONDS:
            # If the renewal fails, the lock's age decides.
            with suppress(StorageError), self._lock:
                self._renew()
        if self._is_lost or _now() - self._renewed > EXPIRED_SECONDS * _TRUSTED_FRACTION:
            seconds = EXPIRED_SECONDS * _TRUSTED_FRACTION
            raise StorageError(
                f"{self._location} is no longer locked by this process",
                got=f"another process took over, or no write succeeded for {seconds:.0f} s",
                expected="one writer",
                hint=f"{retry_term()}: it resumes the finished work",
            )

    def renew(self) -> None:
        """Rewrite the lock; raises StorageError on failure, or if another process has taken over."""
        with self._lock:
            # A lost lock is never renewed, because it belongs to its new owner.
            if not self._is_lost:
                self._renew()
        self.check()

    @property
    def _is_renewing(self) -> bool:
        """Whether a thread renews the lock."""
        return self._thread.ident is not None

    def _renew(self) -> None:
        before = self._renewed
        self._write()
        # This includes late responses, and therefore possibly late requests.
        if self.lapses and _now() - before > EXPIRED_SECONDS:
            self._is_lost = True

    def _write(self) -> None:
        requested_at = _now()
        if self.lapses and requested_at - self._renewed > EXPIRED_SECONDS:
            self._is_lost = True
            return
        content = self._content()
        for _ in range(2):
            try:
                self._version = put(self._bucket, self._key, content, instead_of=self._version)
            except TakenError:
                # Either another process wrote the lock, or the response with the new tag was lost.
                result = read(self._bucket, self._key)
                if result is None or not self._is_own(result[0]):
                    self._is_lost = True
                    return
                self._version = result[1]
            else:
                self._renewed = requested_at
                return
        # Nothing was written. Other processes see the lock age, so it must also age here.
        raise StorageError(f"cannot renew the lock of {self._location}", got="the server refused its own tag")

    def _keep(self) -> None:
        while not self._stop.wait(RENEWED_SECONDS):
            try:
                self.renew()
            except StorageError:
                # The next attempt or the next `check` will detect this.
                if self._is_lost:
                    return

    def _acquire(self) -> Version:
        try:
            version = put(self._bucket, self._key, self._content())
        except TakenError:
            version = self._acquire_dead()
        return version if self._bucket.conditions.creates else self._wait_and_check()

    def _wait_and_check(self) -> Version:
        """Wait, and return the lock's version if no other process has overwritten it."""
        time.sleep(SETTLE_SECONDS)
        result = read(self._bucket, self._key)
        if result is None or not self._is_own(result[0]):
            raise self._locked_error(result)
        return result[1]

    def _acquire_dead(self) -> Version:
        result = read(self._bucket, self._key)
        if result is None:
            # The lock was just released.
            return self._put_or_raise(None)
        content, version = result
        owner = _parse(content)
        age = None if _is_dead(owner) else self._age()
        if age is not None and age < EXPIRED_SECONDS:
            raise self._locked_error(result, age)
        conditions = self._bucket.conditions
        if conditions.creates and conditions.replaces == IGNORED:
            return self._take_over(result)
        return self._put_or_raise(version)

    def _take_over(self, dead: tuple[bytes, Version]) -> Version:
        """Take over a dead lock in a bucket without `If-Match`; the creator of its claim gets it."""
        requested_at, owner = _now(), _parse(dead[0]).get("owner", "")
        claims = [f"{self._key}{PROBE}{owner}-{number}" for number in range(_CLAIMS)]
        # A process that created a claim may also have died.
        own_claim = next((claim for claim in claims if self._create_claim(claim)), None)
        if own_claim is None:
            raise self._locked_error(dead)
        try:
            result = read(self._bucket, self._key)
            is_dead = result is not None and result[0] == dead[0]
            if not is_dead or _now() - requested_at > EXPIRED_SECONDS * _TRUSTED_FRACTION:
                raise self._locked_error(result)
            replace(self._bucket, self._key, self._content())
            result = read(self._bucket, self._key)
            if result is None or not self._is_own(result[0]):
                raise self._locked_error(result)
            return result[1]
        finally:
            with suppress(StorageError):
                delete(self._bucket, claims[: claims.index(own_claim) + 1])

    def _create_claim(self, claim: str) -> bool:
        """Create a claim; return False if a dead process created it."""
        try:
            put(self._bucket, claim, self._content())
        except TakenError:
            if self._age(claim) < EXPIRED_SECONDS:
                raise self._locked_error(read(self._bucket, self._key)) from None
            return False
        return True

    def _put_or_raise(self, instead_of: Version | None) -> Version:
        try:
            return put(self._bucket, self._key, self._content(), instead_of=instead_of)
        except TakenError:
            raise self._locked_error(read(self._bucket, self._key)) from None

    def _locked_error(self, lock: tuple[bytes, Version] | None, age: float = 0.0) -> LockedError:
        """Return the error for a lock that another process holds, with the content that was read."""
        owner = {} if lock is None else _parse(lock[0])
        release = self._bucket.removal(self._key)
        return locked_error(self._location, StoredLock("", process_of(owner), age, True, release))

    def _age(self, key: str = "") -> float:
        """Return the age of the lock or another object in seconds, by the bucket's clock."""
        probe = f"{self._key}{PROBE}{self._owner['owner']}"
        replace(self._bucket, probe, b"")
        try:
            current, then = self._bucket.head(probe), self._bucket.head(key or self._key)
        finally:
            # An error of the read matters more than an error of the cleanup.
            with suppress(StorageError):
                delete(self._bucket, [probe])
        if current is None or then is None or current.modified is None or then.modified is None:
            return 0.0
        return max(0.0, (current.modified - then.modified) / 1e9)

    def _is_own(self, content: bytes) -> bool:
        return _parse(content).get("owner") == self._owner["owner"]

    def _content(self) -> bytes:
        # The content differs each time, so that the ETag also differs.
        return json.dumps({**self._said, **self._owner, "written": time.time_ns()}).encode()


def stored_lock(bucket: Bucket, key: str, now: float | None = None) -> StoredLock | None:
    """Return the details of a lock; None if it does not exist.

    Args:
        bucket, key: Bucket and key of the lock.
        now: Time of the bucket's clock in seconds since 1970; None uses the clock of this machine.

    Raises:
        StorageError: The store reports an error.
    """
    result, status = read(bucket, key), bucket.head(key)
    if result is None or status is None:
        return None
    owner = _parse(result[0])
    age = max(0.0, (time.time() if now is None else now) - (status.modified or 0) / 1e9)
    location, release = bucket.uri(key), bucket.removal(key)
    return StoredLock(location, process_of(owner), age, is_live(owner, age), release)


def read_lock(bucket: Bucket, key: str) -> Mapping[str, str]:
    """Return the content of a lock, or an empty mapping; same errors as `stored_lock`."""
    result = read(bucket, key)
    return _parse(result[0]) if result else {}


def locked_error(location: str, lock: StoredLock) -> LockedError:
    """Return the error for a destination whose lock another process holds."""
    return LockedError(
        "another process is writing this checkpoint",
        location=location,
        got=str(lock),
        hint=f"wait until it is done; if it has ended, run this again in {EXPIRED_SECONDS:.0f} s, or "
        f"release its lock: {lock.release}",
    )


def process_of(owner: Mapping[str, object]) -> str:
    """Describe the process that wrote a lock."""
    return f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"


def is_live(owner: Mapping[str, object], age: float) -> bool:
    """Return whether the process that wrote a lock `age` seconds ago may still exist."""
    return age < EXPIRED_SECONDS and not _is_dead({name: str(value) for name, value in owner.items()})


def _now() -> float:
    """Return a time in seconds that also counts while the machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _process() -> dict[str, str]:
    """Return the identity of this process, valid on this and other machines."""
    pid = os.getpid()
    where = {"host": socket.gethostname(), "boot": _boot(), "space": _space()}
    return {**where, "pid": str(pid), "began": _start_ticks(pid)}


def _space() -> str:
    """Return the ID of the PID namespace, because each container has its own."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _start_ticks(pid: int) -> str:
    """Return the start time of a process in system ticks; "" if it has ended or cannot be inspected."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # A killed process is listed until its parent waits for it, which may never happen in a container.
        return "" if state in _ENDED_STATES else fields[18]
    except (OSError, IndexError, ValueError):
        return ""


def _is_dead(owner: dict[str, str]) -> bool:
    """Return whether an owner is a process of this machine that no longer exists."""
    process = _process()
    is_here = bool(process["boot"]) and all(
        owner.get(name) == process[name] for name in ("host", "boot", "space")
    )
    pid = owner.get("pid", "")
    if not is_here or not pid.isdigit():
        return False
    is_other = _start_ticks(int(pid)) != owner.get("began")
    return is_other or (pid == process["pid"] and owner.get("owner") not in _OWN_LOCKS)


def _parse(content: bytes) -> dict[str, str]:
    try:
        result = json.loads(content)
    except ValueError:
        return {}
    return {str(k): str(v) for k, v in result.items()} if isinstance(result, dict) else {}
