"""Writing to a bucket: small objects in one request, on a condition; large ones in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Self

from ckpttools.core.errors import CheckpointError, DestinationExistsError, StorageError
from ckpttools.core.message_terms import retry_term
from ckpttools.core.region import ceil_div
from ckpttools.stores.objects.client import IGNORED, Bucket, ObjectChangedError, Version

PART_BYTES = 8 << 20
PARTS_UNDER_WAY = 3
# A name without a hyphen, which Azure does not take, or an underscore, which proxies drop.
MARK = "ckpttoolsplan"
"""Attribute of objects that a conversion writes: the fingerprint of its plan."""
_MOST_PARTS = 9_000  # 10,000 is what S3 takes
_DOING = "cannot write"


class TakenError(Exception):
    """An object is there already, or is not the one that was meant."""


def put(
    bucket: Bucket, key: str, content: bytes, *, instead_of: Version | None = None, plan: str = ""
) -> Version:
    """Writes an object that is new, or takes the place of one that is known.

    Args:
        bucket, key, content: the object.
        instead_of: what it replaces; None where nothing may be there.
        plan: the mark that it gets; "" for none.

    Returns:
        What it is now.

    Raises:
        TakenError: another object is there; not if it has the same content.
        StorageError: it cannot be written.
    """
    conditions = bucket.conditions
    is_honored = conditions.creates if instead_of is None else conditions.replaces != IGNORED
    mode: Any = "create" if instead_of is None else conditions.expected(instead_of)
    try:
        if not is_honored:
            _compare(bucket, key, instead_of)
            mode = "overwrite"
        return put_if(bucket, key, content, mode, plan)
    except (ObjectChangedError, FileNotFoundError):
        # A request that was answered, and whose answer was lost, was made again.
        result = read(bucket, key)
        if result is None or result[0] != content:
            raise TakenError(key) from None
        return result[1]


def _compare(bucket: Bucket, key: str, expected: Version | None) -> None:
    """Raise ObjectChangedError if an object differs, for requests that cannot have such a condition."""
    result = bucket.head(key)
    tag = None if expected is None else expected.get("e_tag", "").strip('"')
    if (None if result is None else result.version) != tag:
        raise ObjectChangedError


def put_if(bucket: Bucket, key: str, content: bytes, mode: Any, plan: str = "") -> Version:
    """Write an object in one request.

    Args:
        bucket, key, content: The object.
        mode: "create", "overwrite", or the version that it replaces.
        plan: The mark that it gets; "" for none.

    Returns:
        Its version.

    Raises:
        ObjectChangedError: The condition does not hold.
        StorageError: It cannot be written.
    """
    import obstore

    attributes: Any = {MARK: plan} if plan else None
    done = bucket.ask(
        _DOING,
        key,
        lambda client: obstore.put(
            client, key, content, mode=mode, attributes=attributes, use_multipart=False
        ),
    )
    return _version(done)


def put_again(bucket: Bucket, key: str, content: bytes, plan: str) -> Version:
    """Writes an object where nothing is yet but what an earlier run of the plan put.

    Returns:
        Its version.

    Raises:
        DestinationExistsError: something else is there.
        StorageError: it cannot be written.
    """
    try:
        return put(bucket, key, content, plan=plan)
    except TakenError:
        result = read(bucket, key)
    try:
        if result is None or mark(bucket, key) != plan:
            raise TakenError(key)
        # Such as one that tells when it was made.
        return put(bucket, key, content, instead_of=result[1], plan=plan)
    except TakenError:
        raise taken_error(bucket, key) from None


def replace(bucket: Bucket, key: str, content: bytes) -> None:
    """Writes an object, whatever is there. Raises StorageError where that fails."""
    put_if(bucket, key, content, "overwrite")


def read(bucket: Bucket, key: str) -> tuple[bytes, Version] | None:
    """A small object and what it is; None if there is none. Raises StorageError where there is no answer."""
    import obstore

    def question(client: Any) -> tuple[bytes, Version]:
        answer = obstore.get(client, key)
        return bytes(answer.bytes()), _version(answer.meta)

    try:
        return bucket.ask("cannot read", key, question)
    except FileNotFoundError:
        return None


def mark(bucket: Bucket, key: str, *, is_brief: bool = False) -> str | None:
    """The plan by which an object was written; None if it has none, or is not there. Errors as `read`.

    Args:
        bucket, key: the object.
        is_brief: as of `Bucket.ask`, by whose connection a deletion goes that comes next.
    """
    import obstore

    try:
        attributes = bucket.ask(
            "cannot look at",
            key,
            lambda client: obstore.get(client, key, options={"head": True}).attributes,
            is_brief=is_brief,
        )
    except FileNotFoundError:
        return None
    result = {str(name).lower(): value for name, value in attributes.items()}.get(MARK)
    return None if result is None else str(result)


def delete(bucket: Bucket, keys: Iterable[str]) -> None:
    """Deletes objects, also such as are not there. Raises StorageError where that fails."""
    import obstore

    for key in keys:
        try:
            bucket.ask(_DOING, key, partial(obstore.delete, paths=key), is_brief=True)
        except FileNotFoundError:
            continue


def copy(bucket: Bucket, old: str, new: str) -> None:
    """Gives the bytes of an object another key, too; they stay where they are, in the cloud.

    Raises:
        FileNotFoundError: there is none.
        StorageError: it cannot be copied, for example because it is too large for one request.
    """
    import obstore

    bucket.ask(_DOING, new, lambda client: obstore.copy(client, old, new))


class Upload:
    """An object that is written from its first byte to its last, and is there once it is complete.

    One that is short is put in one request, on the condition that nothing is there but what the same plan put
    there. Used in a `with` statement: of what an exception ends nothing remains.
    """

    def __init__(self, bucket: Bucket, key: str, size: int, plan: str) -> None:
        """Begins one.

        Args:
            bucket, key: where.
            size: bytes that it will have at least: what is missing in the end is filled with zeros.
            plan: the mark that it gets; "" where whatever is there may be replaced.

        `on_complete` is called with the size and the version of the complete object; the version is "" if it
        is unknown.
        """
        self._bucket, self._key, self._size, self._plan = bucket, key, size, plan
        self.position = 0
        self._start = bytearray()
        self._part_bytes = max(PART_BYTES, ceil_div(size, _MOST_PARTS))
        self._writer: Any = None
        self._is_complete = False
        self.on_complete: Callable[[int, str], object] = lambda size, version: None

    def write(self, data: memoryview) -> None:
        """Writes what comes next.

        Raises:
            StorageError: it cannot be written.
            DestinationExistsError: somebody else has written the object.
        """
        for start in range(0, len(data), PART_BYTES):
            # obstore keeps what it is given until it is sent, and this memory gets other content before.
            self._write(bytes(data[start : start + PART_BYTES]))
        self.position += len(data)

    def fill(self, until: int) -> None:
        """Writes zeros up to an offset; errors as `write`."""
        while self.position < until:
            self.write(memoryview(bytes(min(PART_BYTES, until - self.position))))

    def _write(self, part: bytes) -> None:
        if self._writer is None and len(self._start) + len(part) <= PART_BYTES:
            self._start += part
            return
        if self._writer is None:
            self._begin()
            start, self._start = self._start, bytearray()
            self._ask(lambda: self._writer.write(start))
        self._ask(lambda: self._writer.write(part))

    def _begin(self) -> None:
        """Begins to write in parts, for which the clouds know no conditions."""
        import obstore

        self._check_free()
        self._writer = self._bucket.ask(
            _DOING,
            self._key,
            lambda client: obstore.open_writer(
                client,
                self._key,
                attributes={MARK: self._plan} if self._plan else None,
                buffer_size=self._part_bytes,
                max_concurrency=PARTS_UNDER_WAY,
            ),
            requests=0,
        )
        self._ask(self._writer.__enter__)

    def _check_free(self) -> None:
        """Raises DestinationExistsError if something is there that this plan has not put there."""
        if self._plan and self._bucket.head(self._key) and mark(self._bucket, self._key) != self._plan:
            raise taken_error(self._bucket, self._key)

    def complete(self) -> None:
        """Ends it before the `with` statement does; errors as `write`."""
        self.fill(self._size)
        if self._writer is not None:
            # Minutes may have passed since it was begun.
            try:
                self._check_free()
            except CheckpointError as error:
                self._abort(error)
                raise
            # With those that begin it and put its parts together.
            requests = ceil_div(self.position, self._part_bytes) + 2
            try:
                self._ask(lambda: self._writer.__exit__(None, None, None), requests)
            except StorageError:
                if not self._is_there_after_all():
                    raise
            result = self._bucket.head(self._key) if self._plan else None
            version = "" if result is None else result.version
        elif self._plan:
            done = put_again(self._bucket, self._key, bytes(self._start), self._plan)
            version = done.get("e_tag", "").strip('"')
        else:
            replace(self._bucket, self._key, bytes(self._start))
            version = ""
        self._start, self._is_complete = bytearray(), True
        self.on_complete(self.position, version)

    def _is_there_after_all(self) -> bool:
        """Whether only the response was lost. False if that is unknown."""
        with suppress(StorageError):
            return self._is_there()
        return False

    def _is_there(self) -> bool:
        """Whether all of it is there."""
        result = self._bucket.head(self._key) if self._plan else None
        is_whole = result is not None and result.size == self.position
        return is_whole and mark(self._bucket, self._key) == self._plan

    def _ask(self, do: Callable[[], object], requests: int = 0) -> None:
        try:
            self._bucket.ask(_DOING, self._key, lambda client: do(), requests=requests)
        except (FileNotFoundError, ObjectChangedError) as error:
            raise StorageError(
                f"{_DOING} {self._bucket.uri(self._key)}",
                got="its upload was ended elsewhere",
                hint=f"{retry_term()}: it goes on from what is done",
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_complete:
            return
        if kind is None:
            self.complete()
        elif error is not None:
            self._abort(error)

    def _abort(self, error: BaseException) -> None:
        """Give up the upload because of an error, which counts more than one of giving up."""
        if self._writer is None:
            return
        with suppress(StorageError):
            self._ask(lambda: self._writer.__exit__(type(error), error, error.__traceback__))


def taken_error(bucket: Bucket, key: str) -> DestinationExistsError:
    """The error of an object that somebody else has written."""
    return DestinationExistsError(
        f"{bucket.uri(key)} was written by somebody else meanwhile",
        expected="a destination that nothing else is written to",
        hint=f"delete it, or choose another destination; then {retry_term()}",
    )


def _version(result: Any) -> Version:
    return {name: result[name] for name in ("e_tag", "version") if result.get(name)}
