"""Writes to a bucket: small objects in one conditional request, large objects in parts.

Servers and proxies differ. Some ignore `If-None-Match`, so that two processes can create the same object.
Ceph 16 responds with 412 to an `If-Match` with the object's own tag unless the tag is unquoted.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Self

from ckpttools.core.errors import CheckpointError, DestinationExistsError, StorageError
from ckpttools.core.message_terms import retry_term
from ckpttools.core.region import ceil_div
from ckpttools.stores.objects.client import (
    IGNORED,
    QUOTED,
    UNQUOTED,
    Bucket,
    Conditions,
    ObjectChangedError,
    Version,
)
from ckpttools.stores.objects.errors import is_unsupported

PART_BYTES = 8 << 20
MAX_CONCURRENT_PARTS = 3
# Azure does not accept hyphens, and proxies drop names with underscores.
MARK = "ckpttoolsplan"
"""Attribute of objects that a conversion writes, with the fingerprint of its plan."""
_MAX_PARTS = 9_000  # S3 accepts 10,000 parts.
_WRITE_FAILURE = "cannot write"


class TakenError(Exception):
    """An object already exists, or is not the expected one."""


def put(
    bucket: Bucket, key: str, content: bytes, *, instead_of: Version | None = None, plan: str = ""
) -> Version:
    """Write an object that is new or replaces a known version.

    Args:
        bucket, key, content: The object to write.
        instead_of: The version to replace; None if the object must not exist.
        plan: The plan with which the object is marked; "" for no mark.

    Returns:
        The new version of the object.

    Raises:
        TakenError: An object with other content exists.
        StorageError: The object cannot be written.
    """
    conditions = bucket.conditions
    is_honored = conditions.creates if instead_of is None else conditions.replaces != IGNORED
    mode: Any = "create" if instead_of is None else conditions.expected(instead_of)
    try:
        if not is_honored:
            _compare(bucket, key, instead_of)
            mode = "overwrite"
        return put_conditionally(bucket, key, content, mode, plan)
    except (ObjectChangedError, FileNotFoundError):
        # The request succeeded, but its response was lost and it was repeated.
        result = read(bucket, key)
        if result is None or result[0] != content:
            raise TakenError(key) from None
        return result[1]


def _compare(bucket: Bucket, key: str, expected: Version | None) -> None:
    """Raise ObjectChangedError if an object differs, for buckets without conditional writes."""
    result = bucket.head(key)
    tag = None if expected is None else expected.get("e_tag", "").strip('"')
    if (None if result is None else result.version) != tag:
        raise ObjectChangedError


def put_conditionally(bucket: Bucket, key: str, content: bytes, mode: Any, plan: str = "") -> Version:
    """Write an object in one request.

    Args:
        bucket, key, content: The object to write.
        mode: "create", "overwrite", or the version to replace.
        plan: The plan with which the object is marked; "" for no mark.

    Returns:
        The new version of the object.

    Raises:
        ObjectChangedError: The condition is not met.
        StorageError: The object cannot be written.
    """
    import obstore

    attributes: Any = {MARK: plan} if plan else None
    done = bucket.ask(
        _WRITE_FAILURE,
        key,
        lambda client: obstore.put(
            client, key, content, mode=mode, attributes=attributes, use_multipart=False
        ),
    )
    return _version(done)


def put_or_replace_own(bucket: Bucket, key: str, content: bytes, plan: str) -> Version:
    """Write an object that does not exist or that an earlier run of the plan wrote.

    Returns:
        The new version of the object.

    Raises:
        DestinationExistsError: Another object exists.
        StorageError: The object cannot be written.
    """
    try:
        return put(bucket, key, content, plan=plan)
    except TakenError:
        result = read(bucket, key)
    try:
        if result is None or mark(bucket, key) != plan:
            raise TakenError(key)
        # The content may contain a creation time.
        return put(bucket, key, content, instead_of=result[1], plan=plan)
    except TakenError:
        raise conflict_error(bucket, key) from None


def replace(bucket: Bucket, key: str, content: bytes) -> None:
    """Write an object unconditionally; raises StorageError on failure."""
    put_conditionally(bucket, key, content, "overwrite")


def read(bucket: Bucket, key: str) -> tuple[bytes, Version] | None:
    """Read a small object and its version; None if it does not exist. Raises StorageError without a
    response.
    """
    import obstore

    def question(client: Any) -> tuple[bytes, Version]:
        answer = obstore.get(client, key)
        return bytes(answer.bytes()), _version(answer.meta)

    try:
        return bucket.ask("cannot read", key, question)
    except FileNotFoundError:
        return None


def mark(bucket: Bucket, key: str, *, is_brief: bool = False) -> str | None:
    """Return the plan with which an object is marked, or None; same errors as `read`.

    Args:
        bucket, key: Bucket and key of the object.
        is_brief: As for `Bucket.ask`. The deletion that follows uses the same connection.
    """
    import obstore

    try:
        attributes = bucket.ask(
            "cannot inspect",
            key,
            lambda client: obstore.get(client, key, options={"head": True}).attributes,
            is_brief=is_brief,
        )
    except FileNotFoundError:
        return None
    result = {str(name).lower(): value for name, value in attributes.items()}.get(MARK)
    return None if result is None else str(result)


def delete(bucket: Bucket, keys: Iterable[str]) -> None:
    """Delete objects if they exist; raises StorageError on failure."""
    import obstore

    for key in keys:
        try:
            bucket.ask(_WRITE_FAILURE, key, partial(obstore.delete, paths=key), is_brief=True)
        except FileNotFoundError:
            continue
        except ObjectChangedError as error:
            raise StorageError(
                f"cannot delete {bucket.uri(key)}",
                got=str(error.__cause__).partition("\n")[0],
                expected="no condition, as this deletion has none",
                hint="look for the condition in the rules of the server or of a proxy before it",
            ) from error


def copy(bucket: Bucket, old: str, new: str) -> None:
    """Copy an object inside the cloud.

    Raises:
        FileNotFoundError: The object does not exist.
        StorageError: The object cannot be copied, for example because it is too large for one request.
    """
    import obstore

    bucket.ask(_WRITE_FAILURE, new, lambda client: obstore.copy(client, old, new))


class Upload:
    """An object that is written sequentially and exists once it is complete.

    A short object is written in one request, on the condition that no object of another plan exists. Use an
    upload in a `with` statement, so that nothing remains after an exception.
    """

    def __init__(self, bucket: Bucket, key: str, size: int, plan: str) -> None:
        """Prepare the upload.

        Args:
            bucket, key: Bucket and key of the object.
            size: Minimum size in bytes; missing bytes are filled with zeros.
            plan: The plan with which the object is marked; "" replaces any existing object.

        `on_complete` is called with the size and version of the complete object; the version is "" if
        unknown.
        """
        self._bucket, self._key, self._size, self._plan = bucket, key, size, plan
        self.position = 0
        self._start = bytearray()
        self._part_bytes = max(PART_BYTES, ceil_div(size, _MAX_PARTS))
        self._writer: Any = None
        self._is_complete = False
        self.on_complete: Callable[[int, str], object] = lambda size, version: None

    def write(self, data: memoryview) -> None:
        """Write the next bytes.

        Raises:
            StorageError: The bytes cannot be written.
            DestinationExistsError: Another process has written the object.
        """
        for start in range(0, len(data), PART_BYTES):
            # obstore keeps a reference until the data is sent, but the caller reuses this memory.
            self._write(bytes(data[start : start + PART_BYTES]))
        self.position += len(data)

    def fill(self, until: int) -> None:
        """Write zeros up to an offset; same errors as `write`."""
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
        """Start a multipart upload, which clouds do not support conditions for."""
        import obstore

        self._check_free()
        self._writer = self._bucket.ask(
            _WRITE_FAILURE,
            self._key,
            lambda client: obstore.open_writer(
                client,
                self._key,
                attributes={MARK: self._plan} if self._plan else None,
                buffer_size=self._part_bytes,
                max_concurrency=MAX_CONCURRENT_PARTS,
            ),
            requests=0,
        )
        self._ask(self._writer.__enter__)

    def _check_free(self) -> None:
        """Raise DestinationExistsError if an object of another plan exists."""
        if self._plan and self._bucket.head(self._key) and mark(self._bucket, self._key) != self._plan:
            raise conflict_error(self._bucket, self._key)

    def complete(self) -> None:
        """Complete the upload before the end of the `with` statement; same errors as `write`."""
        self.fill(self._size)
        if self._writer is not None:
            # The upload may have taken minutes.
            try:
                self._check_free()
            except CheckpointError as error:
                self._abort(error)
                raise
            # This includes the requests that start and complete the upload.
            requests = ceil_div(self.position, self._part_bytes) + 2
            try:
                self._ask(lambda: self._writer.__exit__(None, None, None), requests)
            except StorageError:
                if not self._is_complete_after_all():
                    raise
            result = self._bucket.head(self._key) if self._plan else None
            version = "" if result is None else result.version
        elif self._plan:
            done = put_or_replace_own(self._bucket, self._key, bytes(self._start), self._plan)
            version = done.get("e_tag", "").strip('"')
        else:
            replace(self._bucket, self._key, bytes(self._start))
            version = ""
        self._start, self._is_complete = bytearray(), True
        self.on_complete(self.position, version)

    def _is_complete_after_all(self) -> bool:
        """Return whether only the response was lost; False if unknown."""
        with suppress(StorageError):
            return self._is_complete_object()
        return False

    def _is_complete_object(self) -> bool:
        """Return whether the complete object exists."""
        result = self._bucket.head(self._key) if self._plan else None
        is_whole = result is not None and result.size == self.position
        return is_whole and mark(self._bucket, self._key) == self._plan

    def _ask(self, do: Callable[[], object], requests: int = 0) -> None:
        try:
            self._bucket.ask(_WRITE_FAILURE, self._key, lambda client: do(), requests=requests)
        except (FileNotFoundError, ObjectChangedError) as error:
            raise StorageError(
                f"{_WRITE_FAILURE} {self._bucket.uri(self._key)}",
                got="its upload was ended by another process",
                hint=f"{retry_term()}: it resumes the finished work",
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
        """Abort the upload after an error, which takes precedence over errors of the abort."""
        if self._writer is None:
            return
        with suppress(StorageError):
            self._ask(lambda: self._writer.__exit__(type(error), error, error.__traceback__))


def conflict_error(bucket: Bucket, key: str) -> DestinationExistsError:
    """Return the error for an object that another process wrote."""
    return DestinationExistsError(
        f"{bucket.uri(key)} was written by another process in the meantime",
        expected="a destination without other writers",
        hint=f"delete it, or choose another destination; then {retry_term()}",
    )


def _version(response: Any) -> Version:
    return {name: response[name] for name in ("e_tag", "version") if response.get(name)}


def probe_conditions(bucket: Bucket, key: str) -> Conditions:
    """Return the conditions that a bucket honors; the first call in a process probes them.

    Args:
        bucket: The bucket.
        key: Key prefix of the scratch object, which is deleted afterward.

    Raises:
        StorageError: The bucket is not writable.
    """
    if not bucket.is_probed:
        bucket.conditions = _probe(bucket, f"{key}{uuid.uuid4().hex}")
        bucket.is_probed = True
    return bucket.conditions


def _probe(bucket: Bucket, scratch: str) -> Conditions:
    try:
        conditions = _test_conditions(bucket, scratch)
    except BaseException as error:
        if _try_delete(bucket, scratch) or not isinstance(error, StorageError):
            raise
        left = f"{bucket.uri(scratch)} may remain: {bucket.removal(scratch)}"
        raise error.at(hint=f"{error.raw.hint}; {left}" if error.raw.hint else left) from error
    _try_delete(bucket, scratch)  # `finalize` deletes the object if this fails.
    return conditions


def _test_conditions(bucket: Bucket, scratch: str) -> Conditions:
    creates, version = _creates(bucket, scratch)
    for spelling in (QUOTED, UNQUOTED):
        is_honored, version = _replaces(bucket, scratch, version, spelling)
        if is_honored:
            return Conditions(creates, spelling)
    return Conditions(creates, IGNORED)


def _try_delete(bucket: Bucket, key: str) -> bool:
    """Try to delete an object; return whether that succeeded."""
    try:
        delete(bucket, [key])
    except StorageError:
        return False
    return True


def _creates(bucket: Bucket, key: str) -> tuple[bool, Version]:
    """Return whether a second creation is refused, and the object's version afterward."""
    first = _attempt(bucket, key, b"created", "create")
    if first is None and (result := read(bucket, key)):
        # The response was lost, so the request was repeated.
        first = result[1]
    if first is None:
        return False, put_conditionally(bucket, key, b"written", "overwrite")
    second = _attempt(bucket, key, b"created again", "create")
    return second is None, second or first


def _replaces(bucket: Bucket, key: str, version: Version, spelling: str) -> tuple[bool, Version]:
    """Return whether a replacement requires the right tag, and the object's version afterward."""
    expected, content = Conditions(True, spelling).expected(version), f"replaced, {spelling}".encode()
    right = _attempt(bucket, key, content, expected)
    if right is None:
        result = read(bucket, key)
        if result is None or result[0] != content:
            return False, version
        right = result[1]
    replaced = _attempt(bucket, key, b"replaced by mistake", expected)
    return replaced is None, replaced or right


def _attempt(bucket: Bucket, key: str, content: bytes, mode: Any) -> Version | None:
    """Write the scratch object; return None if the bucket refuses or does not know the condition."""
    try:
        return put_conditionally(bucket, key, content, mode)
    except (ObjectChangedError, FileNotFoundError):
        return None
    except StorageError as error:
        if not is_unsupported(error):
            raise
        return None
