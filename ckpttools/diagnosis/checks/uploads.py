"""Report unfinished multipart uploads in a bucket. They are not visible as objects, but cost as much."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from ckpttools.core.errors import FormatError, StorageError
from ckpttools.core.text import format_age, plural
from ckpttools.diagnosis.base import INFO, WARNING, Check, Finding, Fix, finding_of, fix_command
from ckpttools.diagnosis.inventory import Inventory
from ckpttools.formats.base import ReadOptions
from ckpttools.stores.abilities import PendingUpload, SupportsUploads
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import SUFFIX

_FIX = "abort-uploads"
# Later uploads may still be running.
_QUIET_SECONDS = 3600


def _examine(inventory: Inventory) -> Iterator[Finding]:
    path = inventory.path
    store = path.store
    if not isinstance(store, SupportsUploads):
        return
    rule = store.upload_rule(path.key)
    ruled = f"this rule has the cloud abort them after a day, and replaces the bucket's rules: {rule}"
    try:
        result = _uploads(path)
    except StorageError as error:
        reason = "a process that is killed may leave some, which take up space and appear in no listing"
        finding = finding_of(error, path, INFO, reason)
        yield Finding(INFO, str(path), finding.what, reason, f"{finding.hint}; or {ruled}", command=rule)
        return
    if result:
        first = min(result, key=lambda item: item.begun)
        problem = (
            f"{plural(len(result), 'incomplete upload')}, the first started "
            f"{format_age(time.time() - first.begun)} ago, to {store.uri(first.key)}"
        )
        reason = "incomplete uploads of a killed process take up space and are not listed"
        command = fix_command(inventory, _FIX)
        do = f"run the conversion again, if it was one; or {command}; {ruled}"
        yield Finding(WARNING, str(path), problem, reason, do, _FIX, command=command)


def _uploads(path: Location) -> Sequence[PendingUpload]:
    """Return the uploads below a path, and below the state of a conversion to the path."""
    assert isinstance(path.store, SupportsUploads)
    full_key = path.key.removesuffix(SUFFIX)
    keys = (full_key, full_key + SUFFIX) if "/" in full_key else (full_key,)
    return [upload for key in keys for upload in path.store.uploads(key)]


def _abort(path: Location, read: ReadOptions) -> str:
    assert isinstance(path.store, SupportsUploads)
    result, now = _uploads(path), time.time()
    old = [item for item in result if now - item.begun >= _QUIET_SECONDS]
    if not old:
        raise FormatError(
            "these uploads may still be running",
            location=path,
            got=f"{plural(len(result), 'upload')}, the first started "
            f"{format_age(now - min((item.begun for item in result), default=now))} ago",
            expected=f"uploads that started more than {format_age(_QUIET_SECONDS)} ago",
            hint="run the conversion again, which aborts its old uploads; or wait",
        )
    path.store.abort(old)
    left = (
        f"; {plural(len(result) - len(old), 'later one')} may still be running"
        if len(old) < len(result)
        else ""
    )
    return f"{plural(len(old), 'upload')} to {path} aborted{left}"


CHECK = Check(
    "uploads",
    "incomplete uploads to a bucket",
    _examine,
    Fix(_FIX, f"abort multipart uploads that started more than {format_age(_QUIET_SECONDS)} ago", _abort),
)
