"""Probe which write conditions a bucket honors, with a scratch object, once per process.

Servers and proxies differ. Some ignore `If-None-Match`, so that two processes can create the same object.
Ceph 16 responds with 412 to an `If-Match` with the object's own tag unless the tag is unquoted.
"""

from __future__ import annotations

import uuid
from typing import Any

from ckpttools.core.errors import StorageError
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
from ckpttools.stores.objects.writing import delete, put_conditionally, read


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
    wrong = _attempt(bucket, key, b"replaced by mistake", expected)
    return wrong is None, wrong or right


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
