"""The place where a checkpoint grows before it gets its name: `<destination>.partial`, on the same disk.

Nothing is readable under the final name until everything is there; then one rename publishes it.
"""

from __future__ import annotations

import errno
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ckpttools.errors import CheckpointError, DestinationExistsError, NoSpaceError
from ckpttools.stores.local import storage_error

SUFFIX = ".partial"
# A file's own sync waits for the disk; beyond so many files one sync of all file systems comes first,
# which is quicker but silent about errors. Each file's own then only asks for them.
MOST_SINGLE_SYNCS = 64
_SYNCS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Staging:
    """A destination and the directory it grows in.

    Attributes:
        destination: the final name.
        overwrite: whether what has that name may be replaced.
    """

    destination: Path
    overwrite: bool = False

    @property
    def directory(self) -> Path:
        return self.destination.with_name(self.destination.name + SUFFIX)

    def check(self, nbytes: int) -> None:
        """Refuses before anything is written.

        Args:
            nbytes: bytes that will be written.

        Raises:
            DestinationExistsError: the name is taken and may not be replaced.
            NoSpaceError: the disk has less room than needed.
        """
        if self.destination.exists() and not self.overwrite and not _is_empty(self.destination):
            raise DestinationExistsError(
                f"{self.destination} exists",
                wanted="a new name, or an empty directory",
                hint="choose another destination, or allow its replacement with --overwrite",
            )
        place = next(parent for parent in self.directory.absolute().parents if parent.exists())
        disk = shutil.disk_usage(place)
        free = disk.free + _allocated(self.directory)
        # Some file systems (of the kernel, of some stores) report no size at all.
        if nbytes > free and disk.total:
            raise NoSpaceError(
                "the destination has too little room",
                place=place,
                got=f"{free} bytes free",
                wanted=f"{nbytes} bytes",
                hint="free some space or choose another disk",
            )

    def create(self) -> None:
        """Makes the directory and its parents, if they are not there.

        Raises:
            StorageError: that is not possible.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error("cannot create", self.directory, error) from error

    def discard(self) -> None:
        """Removes what an earlier run left in the directory."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def publish(self) -> None:
        """Gives the directory its final name, in one step; what had the name before goes last."""
        replaced = self.destination.with_name(self.destination.name + ".replaced")
        try:
            _sync_tree(self.directory)
            if self.destination.exists() and not _is_empty(self.destination):
                self.destination.rename(replaced)
            self.directory.rename(self.destination)
            _sync_directory(self.destination.parent)
        except OSError as error:
            raise write_error(self.destination, error) from error
        shutil.rmtree(replaced, ignore_errors=True)


def write_error(path: Path | str, error: OSError) -> CheckpointError:
    """An error of a write in our words; a full disk is one of its own."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpaceError(
            "the disk is full",
            place=path,
            got=error.strerror,
            hint="free some space and run the same command again: it goes on where it stopped",
        )
    return storage_error("cannot write", path, error)


def _is_empty(path: Path) -> bool:
    return path.is_dir() and next(path.iterdir(), None) is None


def _allocated(path: Path) -> int:
    """Bytes on disk of all files below `path` that are not shared with another checkpoint."""
    status = (file.stat() for file in path.rglob("*") if file.is_file())
    return sum(each.st_blocks * 512 for each in status if each.st_nlink == 1)


def _sync_tree(path: Path) -> None:
    """Makes every file and directory below `path` durable."""
    places = [*path.rglob("*"), path]
    if len(places) > MOST_SINGLE_SYNCS:
        os.sync()
    # Each waits for the disk's journal, and those that wait together are served together.
    with ThreadPoolExecutor(_SYNCS_AT_ONCE) as pool:
        for _ in pool.map(_sync_place, places):
            pass


def _sync_place(place: Path) -> None:
    if place.is_dir():
        _sync_directory(place)
    else:
        with place.open("rb") as file:
            os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
