"""Writing to a bucket: small objects in one request, on a condition; large ones in parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

from ckpttools.core.region import ceil_div
from ckpttools.stores.objects.client import Bucket, ObjectChangedError

PART_BYTES = 8 << 20
PARTS_UNDER_WAY = 3
MARK = "ckpttools-plan"
"""Attribute of objects that a conversion writes: the fingerprint of its plan."""
_MOST_PARTS = 9_000  # 10,000 is what S3 takes
_DOING = "cannot write"
Version = Mapping[str, str]
"""What tells two contents of an object apart: ETag and, where there are such, generation."""


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
    import obstore

    how: Any = {
        "mode": "create" if instead_of is None else dict(instead_of),
        "attributes": {MARK: plan} if plan else None,
        "use_multipart": False,
    }
    try:
        done = bucket.ask(_DOING, key, lambda client: obstore.put(client, key, content, **how))
    except (ObjectChangedError, FileNotFoundError):
        # A request that was answered, and whose answer was lost, was made again.
        found = read(bucket, key)
        if found is None or found[0] != content:
            raise TakenError(key) from None
        return found[1]
    return _version(done)


def replace(bucket: Bucket, key: str, content: bytes) -> None:
    """Writes an object, whatever is there. Raises StorageError where that fails."""
    import obstore

    bucket.ask(_DOING, key, lambda client: obstore.put(client, key, content, use_multipart=False))


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


def mark(bucket: Bucket, key: str) -> str | None:
    """The plan by which an object was written; None if it has none, or is not there. Errors as `read`."""
    import obstore

    try:
        attributes = bucket.ask(
            "cannot look at", key, lambda client: obstore.get(client, key, options={"head": True}).attributes
        )
    except FileNotFoundError:
        return None
    found = {str(name).lower(): value for name, value in attributes.items()}.get(MARK)
    return None if found is None else str(found)


def delete(bucket: Bucket, keys: Iterable[str]) -> None:
    """Deletes objects, also such as are not there. Raises StorageError where that fails."""
    import obstore

    for key in keys:
        try:
            bucket.ask(_DOING, key, partial(obstore.delete, paths=key))
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

    Used in a `with` statement: what is left by an exception is given up, and nothing of it remains.
    """

    def __init__(self, bucket: Bucket, key: str, size: int, plan: str) -> None:
        """Begins one.

        Args:
            bucket, key: where.
            size: bytes that it will have at least: what is missing in the end is filled with zeros.
            plan: the mark that it gets.

        Raises:
            StorageError: it cannot be begun.
        """
        import obstore

        self._bucket, self._key, self._size = bucket, key, size
        self.position = 0
        self._part_bytes = max(PART_BYTES, ceil_div(size, _MOST_PARTS))
        self._writer: Any = bucket.ask(
            _DOING,
            key,
            lambda client: obstore.open_writer(
                client,
                key,
                attributes={MARK: plan},
                buffer_size=self._part_bytes,
                max_concurrency=PARTS_UNDER_WAY,
            ),
            requests=0,
        )
        self._writer.__enter__()

    def write(self, data: memoryview) -> None:
        """Writes what comes next. Raises StorageError where that fails."""
        for start in range(0, len(data), PART_BYTES):
            # obstore keeps what it is given until it is sent, and this memory gets other content before.
            part = bytes(data[start : start + PART_BYTES])
            self._bucket.ask(_DOING, self._key, partial(self._write_part, part), requests=0)
        self.position += len(data)

    def _write_part(self, part: bytes, client: object) -> None:
        self._writer.write(part)

    def fill(self, until: int) -> None:
        """Writes zeros up to an offset; errors as `write`."""
        while self.position < until:
            self.write(memoryview(bytes(min(PART_BYTES, until - self.position))))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.fill(self._size)
            parts = ceil_div(self.position, self._part_bytes)
            # Of several, which are begun and put together by a request, too.
            requests = parts + 2 if parts > 1 else 1
            self._bucket.ask(
                _DOING,
                self._key,
                lambda client: self._writer.__exit__(None, None, None),
                requests=requests,
            )
        else:
            self._writer.__exit__(kind, error, trace)


def _version(found: Any) -> Version:
    return {name: found[name] for name in ("e_tag", "version") if found.get(name)}
