"""Which write conditions a bucket honors: tried with a scratch object, once in each process.

Servers and the proxies before them differ. Some ignore `If-None-Match`, so two processes can create one
object. Ceph 16 answers 412 to an `If-Match` with the object's own tag unless the quotes around the tag are
left out.
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
from ckpttools.stores.objects.writing import delete, put_if, read


def honored(bucket: Bucket, key: str) -> Conditions:
    """Return the conditions that a bucket honors, which the first call in a process finds out.

    Args:
        bucket: The bucket.
        key: Start of the key of the scratch object, which is deleted afterwards.

    Raises:
        StorageError: The bucket cannot be written.
    """
    if not bucket.is_probed:
        bucket.conditions = _probe(bucket, f"{key}{uuid.uuid4().hex}")
        bucket.is_probed = True
    return bucket.conditions


def _probe(bucket: Bucket, scratch: str) -> Conditions:
    try:
        found = _find(bucket, scratch)
    except BaseException as error:
        if _is_deleted(bucket, scratch) or not isinstance(error, StorageError):
            raise
        left = f"{bucket.uri(scratch)} may be left: {bucket.removal(scratch)}"
        raise error.at(hint=f"{error.hint}; {left}" if error.hint else left) from error
    # Where it cannot be deleted now, it goes with the other traces of the work.
    _is_deleted(bucket, scratch)
    return found


def _find(bucket: Bucket, scratch: str) -> Conditions:
    creates, version = _creates(bucket, scratch)
    for spelling in (QUOTED, UNQUOTED):
        is_honored, version = _replaces(bucket, scratch, version, spelling)
        if is_honored:
            return Conditions(creates, spelling)
    return Conditions(creates, IGNORED)


def _is_deleted(bucket: Bucket, key: str) -> bool:
    try:
        delete(bucket, [key])
    except StorageError:
        return False
    return True


def _creates(bucket: Bucket, key: str) -> tuple[bool, Version]:
    """Whether a second creation is refused, and the version of the object then."""
    first = _attempt(bucket, key, b"created", "create")
    if first is None and (found := read(bucket, key)):
        # The answer was lost, so the request was repeated.
        first = found[1]
    if first is None:
        return False, put_if(bucket, key, b"written", "overwrite")
    second = _attempt(bucket, key, b"created again", "create")
    return second is None, second or first


def _replaces(bucket: Bucket, key: str, version: Version, spelling: str) -> tuple[bool, Version]:
    """Whether a replacement succeeds with the right tag and is refused with a wrong one; the version then."""
    expected, content = Conditions(True, spelling).expected(version), f"replaced, {spelling}".encode()
    right = _attempt(bucket, key, content, expected)
    if right is None:
        found = read(bucket, key)
        if found is None or found[0] != content:
            return False, version
        right = found[1]
    wrong = _attempt(bucket, key, b"replaced by mistake", expected)
    return wrong is None, wrong or right


def _attempt(bucket: Bucket, key: str, content: bytes, mode: Any) -> Version | None:
    """Write the scratch object; None if the bucket refuses the condition or does not know it."""
    try:
        return put_if(bucket, key, content, mode)
    except (ObjectChangedError, FileNotFoundError):
        return None
    except StorageError as error:
        if not is_unsupported(error):
            raise
        return None
