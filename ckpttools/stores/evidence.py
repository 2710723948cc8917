"""Record evidence that files and their copies have not changed since an earlier copy.

Size and modification time are not evidence, because other content can have both. Evidence for a local file is
the inode with the time of the last status change (ctime), on file systems whose ctime no call can set. In a
bucket, the generation or ETag is evidence, and on the Hub the digest. Records are kept in the user's cache
directory, because a copy has the same files as its source. Without a record, contents are compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ckpttools.core.errors import CheckpointError
from ckpttools.stores.base import Status
from ckpttools.stores.local.mounts import LOCAL_CTIME_TYPES, file_system_type
from ckpttools.stores.location import Location
from ckpttools.stores.registry import parse

# A file that changed this recently before it was inspected may change again within one tick of the file
# system's clock.
_RECENT_NS = 2 * 10**9
# Stores whose versions depend on content or are never reused. Web servers derive ETags from size and time.
_VERSIONED_SCHEMES = ("s3", "gs", "az", "hf")
# Flags of sync_file_range(2): wait before, write, wait after.
_WRITE_AND_WAIT = 7


class Stamp(NamedTuple):
    """The identity, size and times of a file, or its version in a store.

    Attributes:
        text: A text that changes if another file gets the name or a call changes the file; "" if unknown.
        is_evidence: Whether the text also changes whenever the content changes.
    """

    text: str = ""
    is_evidence: bool = False

    @property
    def evidence(self) -> str:
        """The text if it is evidence of the content, otherwise ""."""
        return self.text if self.is_evidence else ""


def get_stamp(location: Location, status: Status, *, is_source: bool = False) -> Stamp:
    """Return the stamp of a file.

    Args:
        location: The location of the file.
        status: The status of the file.
        is_source: Whether other processes may be changing the file.
    """
    if location.store.scheme == "file":
        return _get_local_stamp(location.key, is_source=is_source)
    is_content = status.version != "" and not status.version.startswith(("changed ", "W/"))
    is_evidence = is_content and location.store.scheme in _VERSIONED_SCHEMES
    return Stamp(f"{status.size} {status.version}", is_evidence)


def get_stamp_text(location: Location) -> str:
    """Return the current stamp text of a local file with one system call; "" for other files."""
    if location.store.scheme == "file":
        with suppress(OSError):
            return _format_stamp(Path(location.key).stat())
    return ""


def _get_local_stamp(path: str, *, is_source: bool) -> Stamp:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return Stamp()
    try:
        status = os.fstat(descriptor)
        is_recent = is_source and status.st_ctime_ns > time.time_ns() - _RECENT_NS
        if is_recent or not _has_own_ctime(path, descriptor) or not _flush_mapped_pages(descriptor):
            return Stamp(_format_stamp(status))
        return Stamp(_format_stamp(os.fstat(descriptor)), is_evidence=True)
    except OSError:
        return Stamp()
    finally:
        os.close(descriptor)


def _format_stamp(status: os.stat_result) -> str:
    return f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def _has_own_ctime(path: str, descriptor: int) -> bool:
    """Return whether a file's ctime is set by this system at each change, and cannot be set by programs.

    A file system that is mounted read-only can be an image, whose creator may have chosen the times.
    """
    is_read_only = os.fstatvfs(descriptor).f_flag & os.ST_RDONLY
    return not is_read_only and file_system_type(path, os.fstat(descriptor).st_dev) in LOCAL_CTIME_TYPES


def _flush_mapped_pages(descriptor: int) -> bool:
    """Write a file's dirty mapped pages, because only the first write to a clean page changes the ctime.

    Unlike fsync(2), this does not flush the disk's cache, and takes 2 microseconds for a clean file.

    Returns:
        Whether the pages were written.
    """
    import ctypes

    call = _c_function("sync_file_range")
    start = end = ctypes.c_int64(0)
    return call is not None and call(descriptor, start, end, _WRITE_AND_WAIT) == 0


@cache
def _c_function(name: str) -> Callable[..., int] | None:
    """Return a function of the C library on Linux; None if it does not exist."""
    import ctypes

    if sys.platform != "linux":
        return None
    try:
        function: Callable[..., int] = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
    return function


def combine_evidence(source: str, copy: str) -> str:
    """Hash the evidence of a file and its copy to a short text; "" if either has no evidence."""
    if not (source and copy):
        return ""
    return hashlib.sha256(f"{source}\n{copy}".encode()).hexdigest()[:24]


def load_evidence(source: Location, copy: Location) -> Mapping[str, str]:
    """Load the record of a directory and its copy: combined evidence by file name.

    Returns an empty mapping if there is no readable record.
    """
    try:
        record = json.loads(_record_location(source, copy).read_bytes())
    except (CheckpointError, ValueError, OSError):
        return {}
    is_valid = isinstance(record, dict) and all(isinstance(text, str) for text in record.values())
    return record if is_valid else {}


def save_evidence(source: Location, copy: Location, files: Mapping[str, str]) -> None:
    """Save the combined evidence of each file of a directory and its copy.

    Does nothing if the record cannot be written.
    """
    known = {name: text for name, text in files.items() if text}
    with suppress(CheckpointError, OSError):
        _record_location(source, copy).put(json.dumps(known).encode())


def _record_location(source: Location, copy: Location) -> Location:
    """Return the location of a record; raises OSError if the user has no cache directory."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache"))
    with suppress(RuntimeError):  # The user has no home directory.
        cache = cache.expanduser()
    if not cache.is_absolute():
        raise FileNotFoundError(cache)
    names = f"{source.resolve()}\n{copy.resolve()}".encode(errors="surrogatepass")
    return parse(cache) / "ckpttools" / "copies" / f"{hashlib.sha256(names).hexdigest()[:32]}.json"
