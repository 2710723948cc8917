"""Mount points and file system types."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path

# One line per visible mount; the fifth field is the mount point (proc(5)).
_TABLE = "/proc/self/mountinfo"
LOCAL_CTIME_TYPES = frozenset(("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "jfs"))
"""File systems that set the ctime themselves, and whose images tools cannot build with a chosen ctime.

On squashfs, ISO 9660 and EROFS, the ctime is part of the image, and on FUSE, SMB and exFAT it can be
anything. On tmpfs, writes through a mapping do not change it. An overlay does not show which file systems are
below it.
"""
_DEVICE, _ROOT, _LOCATION = 2, 3, 4
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_ESCAPED = re.compile(rb"\\([0-7]{3})")


def first_mount(path: Path) -> Path | None:
    """Return the first mount point at or below a path, including bind mounts; None if there is none.

    Args:
        path: A path, which need not exist; if the last component is a link, it is not followed.
    """
    location = Path(os.path.realpath(path.absolute().parent), path.name)
    return min(
        (mount for mount in _mounts(location) if mount == location or location in mount.parents), default=None
    )


def file_system_type(path: str, device: int) -> str:
    """Return the type of the file system that contains a file, such as "ext4"; "" if unknown.

    Args:
        path: Path of the file; links are followed.
        device: The file's `st_dev`.
    """
    # Models with 100,000 files are common, and a file system is rarely mounted within the same second.
    by_device, by_path = _file_systems(int(time.monotonic()))
    result = by_device.get(f"{os.major(device)}:{os.minor(device)}")
    if result is not None:
        return result
    # Files on btrfs and overlayfs have other device numbers than their mounts.
    real = Path(os.path.realpath(path))
    return next((by_path[str(parent)] for parent in (real, *real.parents) if str(parent) in by_path), "")


@lru_cache(maxsize=1)
def _file_systems(moment: int) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Return the types of all mounted file systems, by device number and by path."""
    by_device, by_path = dict[str, str](), dict[str, str]()
    for words in _mount_lines() or ():
        kind = os.fsdecode(words[words.index(b"-") + 1])
        by_device[os.fsdecode(words[_DEVICE])] = kind
        by_path[os.fsdecode(_unescaped(words[_LOCATION]))] = kind
    return by_device, by_path


@cache
def boot_id() -> str:
    """Return a text that identifies this boot of this host; "" if unknown."""
    with suppress(OSError):
        return Path(_BOOT_ID).read_text().strip()
    return ""


def _mounts(location: Path) -> Iterator[Path]:
    """Yield all mount points; without a mount table, the paths at or below a location on another device."""
    lines = _mount_lines()
    if lines is None:
        below = (Path(top, name) for top, inner, files in os.walk(location) for name in (*inner, *files))
        yield from (item for item in (location, *below) if os.path.ismount(item))
        return
    yield from (_path(words[_LOCATION]) for words in lines)


def _mount_lines() -> list[list[bytes]] | None:
    """Return the fields of each line of the mount table; None if the system does not provide it."""
    try:
        table = Path(_TABLE).read_bytes()
    except OSError:
        return None
    return [line.split(b" ") for line in table.splitlines()]


def path_in_file_system(path: Path) -> tuple[str, Path] | None:
    """Return the device of a path, and the path relative to the root of its file system.

    Both are the same for all mounts of a directory on this machine.

    Args:
        path: An absolute path without links; it need not exist.

    Returns:
        The device and path; None if the system does not list its mounts.
    """
    # If several mounts have one path, only the last is visible.
    mounts = {_unescaped(words[_LOCATION]): words for words in _mount_lines() or ()}
    for location in (path, *path.parents):
        if (words := mounts.get(os.fsencode(location))) is not None:
            return words[_DEVICE].decode(), _path(words[_ROOT]) / path.relative_to(location)
    return None


def _path(text: bytes) -> Path:
    return Path(os.fsdecode(_unescaped(text)))


def _unescaped(text: bytes) -> bytes:
    return _ESCAPED.sub(lambda match: bytes((int(match[1], 8),)), text)
