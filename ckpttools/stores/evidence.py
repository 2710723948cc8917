"""What shows that a file is still the one it was at an earlier copy, and where that is kept.

Length and time of change do not show it: both can be the same for other content. For a local file the inode
and the time of its last status change (ctime) do, since no call sets that time. In a bucket the generation or
the ETag does. Records are kept in the user's cache directory, because a copy has nothing in it that its
source lacks. Where there is no record, content is compared.
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

# A file that was changed so shortly before it was looked at may change again within the same tick of the
# clock of its file system.
_RECENT_NS = 2 * 10**9


def evidence(place: Place, found: Status, *, is_source: bool = False) -> str:
    """What a file has only as long as its content is the same; "" where nothing shows that.

    Args:
        place: of the file.
        found: its status.
        is_source: whether others may be changing it.
    """
    if place.store.scheme == "file":
        return _local_evidence(place.key, is_source=is_source)
    is_time = not found.version or found.version.startswith("changed ")
    is_tag = place.store.scheme not in ("http", "https") or found.version.startswith('"')
    return f"{found.size} {found.version}" if is_tag and not is_time else ""


def _local_evidence(path: str, *, is_source: bool) -> str:
    try:
        found = os.stat(path)  # noqa: PTH116
    except OSError:
        return ""
    if is_source and found.st_ctime_ns > time.time_ns() - _RECENT_NS:
        return ""
    return f"{found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"


def joint(source: str, copy: str) -> str:
    """One short text for the evidence of a file and of its copy; "" where one of them has none."""
    if not (source and copy):
        return ""
    return hashlib.sha256(f"{source}\n{copy}".encode()).hexdigest()[:24]


def recorded(source: Place, copy: Place) -> Mapping[str, str]:
    """What `record` has kept for a directory and its copy, by the names of files; empty where it cannot be
    read."""
    try:
        found = json.loads(_record_at(source, copy).read_bytes())
    except (CheckpointError, ValueError, OSError):
        return {}
    is_ours = isinstance(found, dict) and all(isinstance(each, str) for each in found.values())
    return found if is_ours else {}


def record(source: Place, copy: Place, files: Mapping[str, str]) -> None:
    """Keeps what `joint` gives for each file of a directory and its copy; does nothing where it cannot."""
    kept = {name: text for name, text in files.items() if text}
    with suppress(CheckpointError, OSError):
        _record_at(source, copy).put(json.dumps(kept).encode())


def _record_at(source: Place, copy: Place) -> Place:
    """Raises OSError where the user has no cache directory."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    if not Path(home).is_absolute():
        raise FileNotFoundError(home)
    names = f"{source.resolve()}\n{copy.resolve()}".encode(errors="surrogatepass")
    return parse(home) / "ckpttools" / "copies" / f"{hashlib.sha256(names).hexdigest()[:32]}.json"
