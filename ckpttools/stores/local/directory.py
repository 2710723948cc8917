"""The staging directory `<destination>.partial`, in which a checkpoint is written before it is published.

    DST.partial/journal.ckpttools   the plan and its progress; locked by the active process
    DST.partial/content/            the checkpoint; after an exchange, the replaced one
    DST.partial/parts/              finished tasks of each of several processes (`ckpttools.stores.shares`)
    DST.partial/replaced/           the replaced checkpoint, if the file system cannot exchange two names
    DST.partial/removed/            files that are being deleted

The final name does not exist until everything is written. One rename then publishes the checkpoint, or one
exchange if it replaces another. Until it is published, a checkpoint has a mark that names its plan. All
states after a crash can therefore be distinguished, and unmarked files are never taken for ours. After
publication, the replaced checkpoint is deleted, then the mark, then the journal. A directory with this name
but without our journal is not owned by ckpttools and is left unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import DestinationExistsError, UsageError
from ckpttools.core.message_terms import retry_term
from ckpttools.stores.local.file import iso_time, storage_error
from ckpttools.stores.local.files import (
    check_no_mount,
    exchange,
    remove_tree,
    sync_directory,
)
from ckpttools.stores.local.journal import Journal
from ckpttools.stores.local.mounts import first_mount
from ckpttools.stores.local.staging_names import (
    CONTENT,
    REMOVED,
    REPLACED,
    is_staging,
    read_mark,
    remove_mark,
)
from ckpttools.stores.local.store import STORE
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import PLAN_MARK, SUFFIX


def is_free(path: Path) -> bool:
    """Return whether a directory can be renamed to this path without losing anything."""
    if not os.path.lexists(path):
        return True
    if path.is_symlink() or not path.is_dir():
        return False
    try:
        return next(path.iterdir(), None) is None and first_mount(path) is None
    except OSError as error:
        raise storage_error("cannot list", path, error) from error


def check_directory(destination: Path) -> None:
    """Raise DestinationExistsError if the destination cannot be replaced by a checkpoint."""
    what = None
    hint = "choose another destination"
    mount = first_mount(destination)
    if destination.is_symlink():
        what = f"is a symbolic link to {destination.readlink()}"
    elif not destination.is_dir():
        what = "is a file"
    elif mount == destination.resolve():
        what = "is a mount point, which cannot be replaced"
    elif mount is not None:
        what = f"contains the mount point {mount}, which would be deleted"
        hint = f"{hint}, or umount {mount}"
    if what:
        raise DestinationExistsError(
            f"{destination} {what}",
            expected="a new name, or an empty directory",
            hint=hint,
        )


def allocated(path: Path) -> int:
    """Return the disk usage of all files below `path` that have no other hard link, in bytes."""
    result = 0
    # Another process may be publishing or removing the directory at the same time.
    for directory, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                each = Path(directory, name).lstat()
                result += each.st_blocks * 512 * (each.st_nlink == 1)
    return result


def inventory(directory: Path) -> Iterator[str]:
    """Iterate over one line for each file below a directory: size in bytes, mtime in nanoseconds, and path.

    The mark of the plan is not listed, because it is removed at the end.

    Raises:
        OSError: The system reports an error.
    """
    waiting = [directory]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path))
                elif Path(entry.path) != directory / PLAN_MARK:
                    yield _line(Path(entry.path), directory)


def check_inventory(directory: Path, lines: Iterable[str], hint: str) -> None:
    """Compare the files of a checkpoint with its inventory, ignoring additional files.

    Args:
        directory: Directory of the checkpoint.
        lines: Lines of the inventory.
        hint: The hint of the error.

    Raises:
        DestinationExistsError: A file was changed or removed.
        OSError: The system reports an error.
    """
    for line in lines:
        name = line.split(" ", 2)[2]
        try:
            now = _line(directory / name, directory)
        except (FileNotFoundError, NotADirectoryError):
            now = None
        if now != line:
            raise DestinationExistsError(
                f"{directory} was changed after a conversion published it that was interrupted before "
                "it could "
                "say so",
                location=directory / name,
                got=_described(now),
                expected=_described(line),
                hint=hint,
            )


def _line(path: Path, directory: Path) -> str:
    status = path.lstat()
    return f"{status.st_size} {status.st_mtime_ns} {path.relative_to(directory).as_posix()}"


def _described(line: str | None) -> str:
    if line is None:
        return "no such file"
    size, time, _ = line.split(" ", 2)
    return f"{size} bytes, changed at {iso_time(int(time))}"


@dataclass(frozen=True, slots=True)
class StagingDirectory:
    """The staging directory of a destination, and the renames between the two.

    Attributes:
        destination: The final location.
    """

    destination: Path

    @property
    def directory(self) -> Path:
        return self.destination.with_name(self.destination.name + SUFFIX)

    @property
    def content(self) -> Path:
        return self.directory / CONTENT

    @property
    def taken(self) -> tuple[Location, Location]:
        return Location(STORE, str(self.destination)), Location(STORE, str(self.directory))

    @property
    def _replaced(self) -> Path:
        return self.directory / REPLACED

    @property
    def _removed(self) -> Path:
        return self.directory / REMOVED

    def is_published(self, plan: str) -> bool:
        """Return whether this plan's run was interrupted after publication but before its cleanup."""
        return read_mark(self.destination) == plan and is_staging(self.directory)

    def is_complete(self, journal: Journal, plan: str) -> bool:
        """Return whether the journal records a complete publication, even if nothing else remains."""
        may_be = journal.plan == plan and journal.publishing
        return may_be and (self.is_published(plan) or self._is_unmarked(journal))

    def _is_unmarked(self, journal: Journal) -> bool:
        """Return whether the destination has exactly the published files and only the mark was removed."""
        is_moving = any(map(os.path.lexists, (self.content, self._replaced)))
        if journal.inventory is None or is_moving or is_free(self.destination):
            return False
        try:
            check_inventory(self.destination, journal.inventory, "")
        except DestinationExistsError:
            return False
        return True

    def old(self, journal: Journal) -> Path | None:
        """Return the path of the replaced checkpoint in the directory, or None."""
        if os.path.lexists(self._replaced):
            return self._replaced
        may_be_exchanged = journal.publishing or journal.plan is None
        if not may_be_exchanged or is_free(self.content):
            return None
        # New content is marked from the start.
        return self.content if read_mark(self.content) is None else None

    def finish_removing(self, journal: Journal, plan: str) -> None:
        """Finish an interrupted removal of files that ckpttools owns.

        Unmarked files belong to a checkpoint that a published one has replaced.

        Raises:
            UsageError: The owner of the files is unknown.
        """
        location = self._removed
        is_known = journal.publishing or self.is_published(plan)
        is_directory = location.is_dir() and not location.is_symlink()
        if is_directory and (is_known or is_free(location) or read_mark(location) is not None):
            self._empty_removed()
        elif os.path.lexists(location):
            raise UsageError(
                f"{location} was not written by a conversion",
                got="a directory without the mark of ckpttools" if is_directory else "no directory",
                expected="no directory, or one that an interrupted conversion was deleting",
                hint=f"move it away, or delete it; then {retry_term()}",
            )

    def refuse_unmarked(self) -> None:
        """Raise UsageError if ckpttools does not own the content directory."""
        is_marked = not self.content.is_symlink() and read_mark(self.content) is not None
        if not is_marked and not is_free(self.content):
            raise UsageError(
                f"{self.content} was not written by a conversion: it has no {PLAN_MARK}",
                expected="an unpublished checkpoint, which has the mark from the start",
                hint=f"move it away, or delete it; then {retry_term()}",
            )

    def settle(self, journal: Journal, plan: str) -> None:
        """Remove the replaced checkpoint if its successor is published; otherwise restore its name."""
        old = self.old(journal)
        if old is None:
            return
        is_known = journal.publishing
        if self.is_published(plan):
            self.remove(old)
        elif is_known and is_free(self.destination):
            old.rename(self.destination)
            self.sync_names()
        else:
            raise UsageError(
                f"{old} is the checkpoint that a conversion wanted to replace, and it is unknown whether "
                f"{self.destination} is its successor",
                hint=f"delete {old}, or move it to where you want it; then {retry_term()}",
            )

    def rename(self) -> None:
        if is_free(self.destination):
            self.content.rename(self.destination)
            return
        # Remove the mark that an interrupted run left, so that the replaced checkpoint is not taken for new
        # content.
        remove_mark(self.destination)
        if not exchange(self.content, self.destination):
            self.destination.rename(self._replaced)
            self.sync_names()
            self.content.rename(self.destination)

    def rename_back(self) -> None:
        """Undo a `rename` that replaced something."""
        if os.path.lexists(self._replaced):
            self.destination.rename(self.content)
            self.sync_names()
            self._replaced.rename(self.destination)
        else:
            exchange(self.content, self.destination)

    def sync_names(self) -> None:
        sync_directory(self.directory)
        sync_directory(self.destination.absolute().parent)

    def remove(self, location: Path) -> None:
        """Remove a directory in the staging directory, if it exists: rename it durably, then delete it."""
        if os.path.lexists(location):
            check_no_mount(location)
            location.rename(self._removed)
            sync_directory(self.directory)
            self._empty_removed()

    def _empty_removed(self) -> None:
        """Delete the marked directory.

        The mark is removed last, before any change of the journal, because both identify the directory.
        """
        remove_tree(self._removed, last=PLAN_MARK)
        sync_directory(self.directory)
