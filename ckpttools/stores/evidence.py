"""Record evidence that files and their copies are unchanged since an earlier copy.

Size and modification time are not evidence: other content can have both. For a local file, the inode and the
time of the last status change (ctime) are, because no call sets the ctime. In a bucket, the generation or
ETag is. Records are kept in the user's cache directory, because a copy has the same files as its source.
Without a record, content is compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ckpttools.core.errors import CheckpointError
from ckpttools.stores.base import Status
from ckpttools.stores.place import Place
from ckpttools.stores.registry import parse

# A file that was changed this shortly before it was inspected may change again within one tick of the file
# system's clock.
_RECENT_NS = 2 * 10**9


def get_evidence(place: Place, status: Status, *, is_source: bool = False) -> str:
    """Return a text that changes whenever a file's content changes; "" if the store has no such evidence.

    Args:
        place: the file.
        status: its status.
        is_source: whether other processes may be changing it.
    """
    if place.store.scheme == "file":
        return _get_local_evidence(place.key, is_source=is_source)
    is_time = not status.version or status.version.startswith("changed ")
    is_tag = place.store.scheme not in ("http", "https") or status.version.startswith('"')
    return f"{status.size} {status.version}" if is_tag and not is_time else ""


def _get_local_evidence(path: str, *, is_source: bool) -> str:
    try:
        status = Path(path).stat()
    except OSError:
        return ""
    if is_source and status.st_ctime_ns > time.time_ns() - _RECENT_NS:
        return ""
    return f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def combine_evidence(source: str, copy: str) -> str:
    """Hash the evidence of a file and of its copy to one short text; "" if one of them has none."""
    if not (source and copy):
        return ""
    return hashlib.sha256(f"{source}\n{copy}".encode()).hexdigest()[:24]


def load_evidence(source: Place, copy: Place) -> Mapping[str, str]:
    """Load the record of a directory and its copy: combined evidence by file name.

    Returns an empty mapping if there is no readable record.
    """
    try:
        record = json.loads(_record_location(source, copy).read_bytes())
    except (CheckpointError, ValueError, OSError):
        return {}
    is_valid = isinstance(record, dict) and all(isinstance(text, str) for text in record.values())
    return record if is_valid else {}


def save_evidence(source: Place, copy: Place, files: Mapping[str, str]) -> None:
    """Save the combined evidence of each file of a directory and its copy.

    Does nothing if the record cannot be written.
    """
    known = {name: text for name, text in files.items() if text}
    with suppress(CheckpointError, OSError):
        _record_location(source, copy).put(json.dumps(known).encode())


def _record_location(source: Place, copy: Place) -> Place:
    """Return the location of a record. Raises OSError if the user has no cache directory."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache"))
    with suppress(RuntimeError):  # a user without a home directory
        cache = cache.expanduser()
    if not cache.is_absolute():
        raise FileNotFoundError(cache)
    names = f"{source.resolve()}\n{copy.resolve()}".encode(errors="surrogatepass")
    return parse(cache) / "ckpttools" / "copies" / f"{hashlib.sha256(names).hexdigest()[:32]}.json"
