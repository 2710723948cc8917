"""The bytes of a large file on their way to the hub's storage while they are made: nothing of it is kept."""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckpttools.core.errors import CheckpointError, SourceChangedError, StorageError
from ckpttools.core.message_terms import again
from ckpttools.stores.web.attempts import tried
from ckpttools.stores.web.client import FAILURES, failure_words

if TYPE_CHECKING:
    from ckpttools.stores.web.hub_repository import Blob, CommitTarget, Repository

PIECE_BYTES = 1 << 20
WAITING = 4
# Seconds.
_PATIENCE = 2.0


class _GivenUpError(Exception):
    """What raises in the thread that sends, so that the connection is closed in the middle of the body."""


class HubStream:
    """A large file that is sent from its first byte to its last, part by part.

    What goes wrong is kept until `ended` is called; what is written meanwhile goes nowhere. The last piece is
    held back until the digest of all is known to be right: storage never gets other bytes under its name.
    """

    def __init__(self, repository: Repository, path: str, blob: Blob, target: CommitTarget) -> None:
        """
        Args:
            repository, path: what it will be.
            blob: what it has to be.
            target: where it goes.
        """
        self._repository, self._path, self._blob, self._target = repository, path, blob, target
        self._hasher = hashlib.sha256()
        self._parts = iter(target.parts)
        self._left = 0
        self._part: _UploadPart | None = None
        self._tags: list[str] = []
        self._held = b""
        self._error: Exception | None = None

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def write(self, data: memoryview) -> None:
        """Sends what comes next, or keeps why that is not possible."""
        for start in range(0, len(data), PIECE_BYTES):
            if self._error is not None:
                return
            piece = bytes(data[start : start + PIECE_BYTES])
            self._hasher.update(piece)
            held, self._held = self._held, piece
            self._kept(held)

    def ended(self) -> Exception | None:
        """Waits until storage has it; returns why it does not, None if all is well."""
        if self._error is None and self._hasher.hexdigest() != self._blob.sha256:
            self._error = SourceChangedError(
                f"{self._path}: its content was another when it was made for the second time",
                got=f"SHA-256 {self._hasher.hexdigest()}",
                expected=f"SHA-256 {self._blob.sha256}",
                hint=f"wait until nothing writes to the source, then {again()}",
            )
        self._kept(self._held)
        if self._error is None:
            try:
                self._repository.complete(self._path, self._blob, self._target, self._tags)
            except CheckpointError as error:
                self._error = error
        self.give_up()
        return self._error

    def give_up(self) -> None:
        """Leaves what is under way; nothing of it remains."""
        if self._part is not None:
            self._part.give_up()
            self._part = None

    def _kept(self, piece: bytes) -> None:
        if self._error is not None:
            return
        try:
            self._send(piece)
        except (*FAILURES, CheckpointError) as error:
            self._error = error

    def _send(self, piece: bytes) -> None:
        while piece:
            if self._part is None:
                url, self._left = next(self._parts)
                self._part = _UploadPart(self._repository, url, self._target, self._left)
            now, piece = piece[: self._left], piece[self._left :]
            self._part.write(now)
            self._left -= len(now)
            if not self._left:
                part, self._part = self._part, None
                self._tags.append(self._repository.checked(self._path, part.answer()))

    def failure(self, attempts: int) -> CheckpointError:
        """Describe the failure after a number of attempts."""
        if isinstance(self._error, CheckpointError):
            self._error.got = f"{self._error.got or ''}{tried(attempts)}" or None
            return self._error
        assert self._error is not None
        location = f"{self._repository.location}/{self._path}"
        return StorageError(
            f"cannot upload {location}",
            got=failure_words(self._error, self._repository.client.patience) + tried(attempts),
            hint=f"check the network, then {again()}: what was uploaded is not sent again",
        )


class _UploadPart:
    """One request; another thread sends what is handed over here."""

    def __init__(self, repository: Repository, url: str, target: CommitTarget, nbytes: int) -> None:
        self._pieces: queue.Queue[bytes | None] = queue.Queue(WAITING)
        self._done = threading.Event()
        self._answer: object = None
        self._thread = threading.Thread(
            target=self._run,
            args=(repository, url, {**target.headers, "Content-Length": str(nbytes)}, nbytes),
        )
        self._thread.daemon = True
        self._thread.start()

    def write(self, piece: bytes) -> None:
        """Hands over what comes next; raises what has gone wrong with what came before."""
        while True:
            try:
                self._pieces.put(piece, timeout=0.1)
                return
            except queue.Full:
                if self._done.is_set():
                    self.answer()

    def answer(self) -> object:
        """The answer, when there is one; raises why there is none."""
        self._thread.join()
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer

    def give_up(self) -> None:
        """Has the connection closed; where it takes nothing, not even that, nobody waits for it."""
        until = time.monotonic() + _PATIENCE
        while not self._done.is_set() and time.monotonic() < until:
            try:
                self._pieces.put(None, timeout=0.1)
                break
            except queue.Full:
                continue
        self._thread.join(_PATIENCE)

    def _run(self, repository: Repository, url: str, headers: dict[str, str], nbytes: int) -> None:
        try:
            self._answer = repository.client.send(url, headers, self._body(nbytes))
        except BaseException as error:
            self._answer = error
        self._done.set()

    def _body(self, nbytes: int) -> Iterator[bytes]:
        while nbytes:
            piece = self._pieces.get()
            if piece is None:
                raise _GivenUpError
            nbytes -= len(piece)
            yield piece
