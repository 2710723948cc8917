"""The staging directory `<destination>.partial`, in which a checkpoint is written before it gets its name.

    DST.partial/journal.ckpttools   the plan and its progress; locked by the active process
    DST.partial/content/            the checkpoint; after an exchange, the replaced one
    DST.partial/parts/              finished tasks of each of several processes (`ckpttools.stores.shares`)
    DST.partial/replaced/           the replaced checkpoint, if the file system cannot exchange two names
    DST.partial/removed/            files that are being deleted

Nothing is readable under the final name until everything is written; then one rename publishes it, or one
exchange if a checkpoint is replaced. Until it is published, a checkpoint has a mark that names its plan. So
all states after a crash can be distinguished, and unmarked files are never taken for ours. The replaced
checkpoint is deleted after the publication, then the mark, then the journal. A directory with this name but
without our journal is unowned and left unchanged.
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
    """Return the disk usage in bytes of all files below `path` that have no other hard link."""
    result = 0
    # Another process may be publishing or removing it at the same time.
    for directory, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                each = Path(directory, name).lstat()
                result += each.st_blocks * 512 * (each.st_nlink == 1)
    return result


def inventory(directory: Path) -> Iterator[str]:
    """Iterate over a line for each file below a directory: size in bytes, mtime in nanoseconds, and path.

    The mark of the plan is left out, because it is removed at the end.

    Raises:
        OSError: the system reports an error.
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
    """Compare the files of a checkpoint with its inventory; additional files are ignored.

    Args:
        directory: the checkpoint.
        lines: its inventory.
        hint: the hint of the error.

    Raises:
        DestinationExistsError: a file was changed or removed.
        OSError: the system reports an error.
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
    """The staging directory of a destination, and the moves between the two.

    Attributes:
        destination: the final location.
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
        """Return whether this plan's run was interrupted after publication, before its work was complete."""
        return read_mark(self.destination) == plan and is_staging(self.directory)

    def is_complete(self, journal: Journal, plan: str) -> bool:
        """Return whether the journal records that everything is published, even if nothing else is left."""
        may_be = journal.plan == plan and journal.publishing
        return may_be and (self.is_published(plan) or self._is_unmarked(journal))

    def _is_unmarked(self, journal: Journal) -> bool:
        """Return whether the destination has exactly the published files and only the mark is gone."""
        is_moving = any(map(os.path.lexists, (self.content, self._replaced)))
        if journal.inventory is None or is_moving or is_free(self.destination):
            return False
        try:
            check_inventory(self.destination, journal.inventory, "")
        except DestinationExistsError:
            return False
        return True

    def old(self, journal: Journal) -> Path | None:
        """Return the path of the replaced checkpoint in the directory; None if there is none."""
        if os.path.lexists(self._replaced):
            return self._replaced
        may_be_exchanged = journal.publishing or journal.plan is None
        if not may_be_exchanged or is_free(self.content):
            return None
        # New content is marked from the start.
        return self.content if read_mark(self.content) is None else None

    def finish_removing(self, journal: Journal, plan: str) -> None:
        """Finish an interrupted removal of files that are ours.

        Unmarked files belong to a checkpoint that was replaced by a published one.

        Raises:
            UsageError: the owner of the files is unknown.
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
        """Raise UsageError if the content directory is unowned."""
        is_marked = not self.content.is_symlink() and read_mark(self.content) is not None
        if not is_marked and not is_free(self.content):
            raise UsageError(
                f"{self.content} was not written by a conversion: it has no {PLAN_MARK}",
                expected="an unpublished checkpoint, which has the mark from the start",
                hint=f"move it away, or delete it; then {retry_term()}",
            )

    def settle(self, journal: Journal, plan: str) -> None:
        """Remove the replaced checkpoint if its successor is published, otherwise rename it back."""
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
        # Remove the mark of an interrupted run, so that the replaced checkpoint is not taken for new content.
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
        """Remove a directory in the staging directory if it exists: first rename it durably, then delete its
        files.
        """
        if os.path.lexists(location):
            check_no_mount(location)
            location.rename(self._removed)
            sync_directory(self.directory)
            self._empty_removed()

    def _empty_removed(self) -> None:
        """Delete the marked directory. The mark goes last, before any change of the journal: these two
        identify it.
        """
        remove_tree(self._removed, last=PLAN_MARK)
        sync_directory(self.directory)
