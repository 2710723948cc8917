"""The place where a checkpoint grows before it gets its name: `<destination>.partial`, on the same disk.

    DST.partial/journal.ckpttools   whose work this is and how far it has come; locked by the process at work
    DST.partial/content/            the checkpoint; after an exchange what had the name before
    DST.partial/parts/              what each of several processes has done (`ckpttools.stores.shares`)
    DST.partial/replaced/           what had the name before, where the file system cannot swap two names
    DST.partial/removed/            what is being deleted

Nothing is readable under the final name until everything is there; then one rename publishes it, or one
exchange where something is replaced. From its first to its last moment in our hands a checkpoint carries a
mark that names its plan: so all states that a crash can leave can be told apart, and what is not marked is
never taken for ours. What is replaced goes after that, then the mark, then the journal. A directory
of this name without a journal of ours is somebody else's, and left alone.
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
from ckpttools.stores.local.staging_names import CONTENT, REMOVED, REPLACED, is_staging, mark_of, unmark
from ckpttools.stores.local.store import STORE
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import PLAN_MARK, SUFFIX


def is_free(path: Path) -> bool:
    """Whether a directory can be renamed to this name without anything being lost."""
    if not os.path.lexists(path):
        return True
    if path.is_symlink() or not path.is_dir():
        return False
    try:
        return next(path.iterdir(), None) is None and first_mount(path) is None
    except OSError as error:
        raise storage_error("cannot list", path, error) from error


def check_directory(destination: Path) -> None:
    """Raises DestinationExistsError if something is there that no checkpoint can replace."""
    what = None
    hint = "choose another destination"
    mount = first_mount(destination)
    if destination.is_symlink():
        what = f"is a symbolic link to {destination.readlink()}"
    elif not destination.is_dir():
        what = "is a file"
    elif mount == destination.resolve():
        what = "is where a file system is mounted, and a mount point cannot be replaced"
    elif mount is not None:
        what = f"holds what is mounted at {mount}, and would be deleted with what is replaced"
        hint = f"{hint}, or umount {mount}"
    if what:
        raise DestinationExistsError(
            f"{destination} {what}",
            expected="a new name, or an empty directory",
            hint=hint,
        )


def allocated(path: Path) -> int:
    """Bytes on disk of all files below `path` that are not shared with another checkpoint."""
    result = 0
    # Another process may be giving it its name, or removing it, meanwhile.
    for directory, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                each = Path(directory, name).lstat()
                result += each.st_blocks * 512 * (each.st_nlink == 1)
    return result


def inventory(directory: Path) -> Iterator[str]:
    """A line for each file at and below a directory: its length in bytes, when it was changed in nanoseconds,
    and its name. The mark of the plan is left out: it goes when all is done.

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
    """Compares the files of a checkpoint with its inventory; what was added since does not matter.

    Args:
        directory: the checkpoint.
        lines: its inventory.
        hint: the next step where it is not what it was.

    Raises:
        DestinationExistsError: a file was changed, or is not there any more.
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
                f"{directory} was changed since a conversion put it there that was stopped before it could "
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
    """The directory that a destination grows in, and the moves between the two.

    Attributes:
        destination: the final name.
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
        """Whether a run of this plan has published all and was interrupted before it could say so."""
        return mark_of(self.destination) == plan and is_staging(self.directory)

    def is_complete(self, journal: Journal, plan: str) -> bool:
        """The same of what this plan's journal says, too; also where nothing but that is left to remove."""
        may_be = journal.plan == plan and journal.publishing
        return may_be and (self.is_published(plan) or self._is_unmarked(journal))

    def _is_unmarked(self, journal: Journal) -> bool:
        """Whether what has the name is what was published, in all its files, and only the mark is gone."""
        is_moving = any(map(os.path.lexists, (self.content, self._replaced)))
        if journal.inventory is None or is_moving or is_free(self.destination):
            return False
        try:
            check_inventory(self.destination, journal.inventory, "")
        except DestinationExistsError:
            return False
        return True

    def old(self, journal: Journal) -> Path | None:
        """What had the name before, and is in the directory now, as far as is known; None if nothing is."""
        if os.path.lexists(self._replaced):
            return self._replaced
        may_be_exchanged = journal.publishing or journal.plan is None
        if not may_be_exchanged or is_free(self.content):
            return None
        # What grows here is marked from the beginning.
        return self.content if mark_of(self.content) is None else None

    def finish_removing(self, journal: Journal, plan: str) -> None:
        """Removes what is left of what was being removed, where that is known to be ours.

        What is not marked, to its last moment, had the name before its successor was published.

        Raises:
            UsageError: it is not known.
        """
        location = self._removed
        is_known = journal.publishing or self.is_published(plan)
        is_directory = location.is_dir() and not location.is_symlink()
        if is_directory and (is_known or is_free(location) or mark_of(location) is not None):
            self._empty_removed()
        elif os.path.lexists(location):
            raise UsageError(
                f"{location} is not what a conversion left there",
                got="a directory without a mark of ours" if is_directory else "no directory",
                expected="nothing, or what a conversion was deleting when it was interrupted",
                hint=f"move it away, or delete it; then {retry_term()}",
            )

    def refuse_unmarked(self) -> None:
        """Raises UsageError if something is where the checkpoint grows that is not ours."""
        is_marked = not self.content.is_symlink() and mark_of(self.content) is not None
        if not is_marked and not is_free(self.content):
            raise UsageError(
                f"{self.content} is not what a conversion left there: it has no {PLAN_MARK}",
                expected="a checkpoint that grows, which is marked from the beginning",
                hint=f"move it away, or delete it; then {retry_term()}",
            )

    def settle(self, journal: Journal, plan: str) -> None:
        """What was to be replaced is removed if its successor has the name, else it gets the name back."""
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
                f"{old} holds what {self.destination} was before it was to be replaced, and nothing tells "
                "whether what has the name now is its successor",
                hint=f"delete {old}, or move it to where you want it; then {retry_term()}",
            )

    def rename(self) -> None:
        if is_free(self.destination):
            self.content.rename(self.destination)
            return
        # The mark of an earlier run that could not end: what is replaced must not be taken for ours.
        unmark(self.destination)
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
        """Removes a directory in here, if it is there: durably out of its place at once, then bit by bit."""
        if os.path.lexists(location):
            check_no_mount(location)
            location.rename(self._removed)
            sync_directory(self.directory)
            self._empty_removed()

    def _empty_removed(self) -> None:
        """The mark goes last, and the journal changes only after that: these two tell what this is."""
        remove_tree(self._removed, last=PLAN_MARK)
        sync_directory(self.directory)
