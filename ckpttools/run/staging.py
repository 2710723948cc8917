"""The place where a checkpoint grows before it gets its name: `<destination>.partial`, on the same disk.

    DST.partial/journal.ckpttools   whose work this is and how far it has come; locked by who is at work
    DST.partial/content/            the checkpoint
    DST.partial/replaced/           what had the name before, where the file system cannot swap two names

Nothing is readable under the final name until everything is there; then one rename publishes it, or one
exchange where something is replaced. A mark in the checkpoint tells, until the end, which plan has published
it: so every state that a crash can leave is told from every other. What is replaced goes after that, then the
journal, then the mark. A directory of this name without a journal of ours is somebody else's, and left alone.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from ckpttools.errors import CheckpointError, DestinationExistsError, NoSpaceError, StorageError, UsageError
from ckpttools.formats.base import PLAN_MARK
from ckpttools.run.journal import NAME, Journal
from ckpttools.stores.files import (
    exchange,
    make_directory,
    names_in,
    remove_tree,
    sync_directory,
    sync_tree,
    write_error,
    write_synced,
)
from ckpttools.stores.local import read_whole, storage_error

SUFFIX = ".partial"
CONTENT, REPLACED = "content", "replaced"
_LONGEST_MARK = 1 << 10
_ATTEMPTS = 100


def _nothing_more(destination: Path) -> None:
    """Refuses nothing."""


@dataclass(frozen=True, slots=True)
class Staging:
    """A destination and the directory it grows in.

    Attributes:
        destination: the final name.
        overwrite: whether what has that name may be replaced.
        check_replaced: called with the destination where something is there; raises `DestinationExistsError`
            if it may not be replaced by what will be written, whatever the user says.
    """

    destination: Path
    overwrite: bool = False
    check_replaced: Callable[[Path], None] = _nothing_more

    @property
    def directory(self) -> Path:
        return self.destination.with_name(self.destination.name + SUFFIX)

    @property
    def content(self) -> Path:
        return self.directory / CONTENT

    @property
    def _replaced(self) -> Path:
        return self.directory / REPLACED

    def check(self, plan: str, nbytes: int) -> None:
        """Refuses before anything is written.

        Args:
            plan: fingerprint of what is to be done.
            nbytes: bytes that will be written.

        Raises:
            UsageError: the destination cannot be one.
            DestinationExistsError: the name is taken and may not be replaced.
            NoSpaceError: the disk has less room than needed.
        """
        check_name(self.destination)
        if not self.is_published(plan):
            self._check_taken()
            self._check_room(nbytes)

    def is_published(self, plan: str) -> bool:
        """Whether a run of this plan has published all and was interrupted before it could say so."""
        return _mark(self.destination) == plan

    def _check_taken(self) -> None:
        destination = self.destination
        if _is_free(destination):
            return
        _check_directory(destination)
        self.check_replaced(destination)
        if not self.overwrite:
            raise DestinationExistsError(
                f"{destination} exists",
                wanted="a new name, or an empty directory",
                hint="choose another destination, or allow its replacement with --overwrite",
            )

    def _check_room(self, nbytes: int) -> None:
        place = next(parent for parent in self.directory.absolute().parents if parent.exists())
        disk = shutil.disk_usage(place)
        free = disk.free + _allocated(self.content)
        # Some file systems (of the kernel, of some stores) report no size at all.
        if nbytes > free and disk.total:
            raise NoSpaceError(
                "the destination has too little room",
                place=place,
                got=f"{free} bytes free",
                wanted=f"{nbytes} bytes",
                hint="free some space or choose another disk",
            )

    @contextmanager
    def opened(self, plan: str) -> Iterator[Journal]:
        """Takes the destination for this process, from the first look at it to the end.

        Args:
            plan: fingerprint of what is to be done, which `check` has let pass.

        Returns:
            The journal, with what an earlier run of the same plan has done. Where that is published, there is
            nothing left to do but to `conclude`.

        Raises:
            LockedError: another process is writing it.
            UsageError: the beginning of another conversion is there, or a directory that is not ours.
            CheckpointError: as `check`; or the system reports an error.
        """
        journal = self._locked()
        try:
            self._recover(journal, plan)
            if not self.is_published(plan):
                self._check_taken()
                self._begin(journal, plan)
            yield journal
        finally:
            self._leave(journal)
            journal.close()

    def _locked(self) -> Journal:
        """The journal of the directory, which is made if it is not there."""
        for attempt in count():
            try:
                make_directory(self.directory)
            except OSError as error:
                raise storage_error("cannot create", error.filename or self.directory, error) from error
            with _errors_of(self.directory):
                try:
                    self._refuse_foreign()
                    return Journal(self.directory)
                except FileNotFoundError:
                    # Another process has just finished here and removed its directory: once more.
                    if attempt == _ATTEMPTS:
                        raise
        raise AssertionError

    def _refuse_foreign(self) -> None:
        """Raises UsageError if the directory holds something, and that is not ours."""
        names = names_in(self.directory)
        if self.directory.is_symlink() or (names and NAME not in names):
            raise UsageError(
                f"{self.directory} is there and was not made by ckpttools",
                wanted="that name free: a conversion grows there until it is complete",
                hint="move it away, or choose another destination",
            )

    def _recover(self, journal: Journal, plan: str) -> None:
        """Brings what an earlier run left into a state that this one can go on from."""
        with _errors_of(self.destination):
            if journal.plan is not None and self.is_published(journal.plan):
                self._remove_replaced()
                journal.begin(plan)
                return
            self._put_back()
        if journal.plan != plan and os.path.lexists(self.content) and not self.overwrite:
            raise self._anothers(journal, plan)

    def _put_back(self) -> None:
        """What was moved away to be replaced gets its name back: its successor did not get it."""
        if not os.path.lexists(self._replaced):
            return
        if not _is_free(self.destination):
            raise UsageError(
                f"{self._replaced} holds what {self.destination} was before it was to be replaced, and "
                "something else has the name now",
                hint=f"move {self._replaced} to where you want it, then run the command again",
            )
        self._replaced.rename(self.destination)
        self._sync_names()

    def _anothers(self, journal: Journal, plan: str) -> UsageError:
        if journal.plan is None:
            return UsageError(
                f"the journal in {self.directory} is damaged, so nothing tells what was done",
                wanted="the file as an interrupted conversion left it",
                hint=f"delete {self.directory}, or discard it with --overwrite",
            )
        return UsageError(
            f"{self.directory} holds the beginning of another conversion",
            got=f"plan {journal.plan[:12]}",
            wanted=f"plan {plan[:12]}",
            hint="run the command that began it, delete it, or discard it with --overwrite",
        )

    def _begin(self, journal: Journal, plan: str) -> None:
        """Makes the directory this plan's, with what was done of it or empty."""
        with _errors_of(self.directory):
            if journal.plan != plan or not self.content.is_dir():
                self._empty()
                journal.begin(plan)
                self.content.mkdir()
            self._sync_names()

    def discard(self, journal: Journal) -> None:
        """Gives up what was done.

        Raises:
            StorageError: that is not possible.
        """
        with _errors_of(self.directory):
            self._empty()
        journal.begin(journal.plan or "")

    def _empty(self) -> None:
        """Durably: a journal that is begun next must not find again what another one left."""
        remove_tree(self.content)
        sync_directory(self.directory)

    def publish(self, plan: str) -> None:
        """Gives the content its final name, in one step; what had the name before goes last.

        Raises:
            DestinationExistsError: somebody else has taken the name meanwhile.
            StorageError, NoSpaceError: the system reports an error.
        """
        with _errors_of(self.destination):
            write_synced(self.content / PLAN_MARK, plan.encode())
            sync_tree(self.content)
            self._check_taken()
            self._rename()
            self._sync_names()
            self._remove_replaced()

    def _rename(self) -> None:
        if _is_free(self.destination):
            self.content.rename(self.destination)
        elif not exchange(self.content, self.destination):
            self.destination.rename(self._replaced)
            self._sync_names()
            self.content.rename(self.destination)

    def _sync_names(self) -> None:
        sync_directory(self.directory)
        sync_directory(self.destination.absolute().parent)

    def _remove_replaced(self) -> None:
        """Removes what had the name before, once its successor has it."""
        try:
            remove_tree(self.content)
            remove_tree(self._replaced)
            sync_directory(self.directory)
        except OSError as error:
            raise StorageError(
                f"{self.destination} is complete, but what it replaced could not be removed",
                place=error.filename or self.directory,
                got=error.strerror,
                hint=f"delete {self.directory}",
            ) from error

    def conclude(self, journal: Journal) -> None:
        """Removes all that told of the work; the plan's identity leaves the checkpoint last.

        Raises:
            StorageError: that is not possible.
        """
        with _errors_of(self.directory):
            journal.remove()
            with suppress(OSError):  # somebody else has put something there
                self.directory.rmdir()
            (self.destination / PLAN_MARK).unlink(missing_ok=True)
            sync_directory(self.destination)

    def _leave(self, journal: Journal) -> None:
        """Takes the directory away where nothing was begun."""
        with suppress(OSError):
            if not journal.done and names_in(self.directory) == [NAME] and journal.remove():
                self.directory.rmdir()


def is_staging(path: Path) -> bool:
    """Whether a directory is one in which a conversion grows, or grew until it was interrupted."""
    return path.name.endswith(SUFFIX) and (path / NAME).is_file()


def check_name(destination: Path) -> None:
    """Raises UsageError if a destination is no name that a directory can be given."""
    if not destination.name or destination.name == "..":
        raise UsageError(
            f"{str(destination)!r} cannot be a destination",
            wanted="the name of a directory to be made, such as out or /data/out",
            hint="give it a name of its own",
        )


@contextmanager
def _errors_of(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise write_error(error.filename or place, error) from error


def _check_directory(destination: Path) -> None:
    """Raises DestinationExistsError if something is there that no checkpoint can replace."""
    what = None
    if destination.is_symlink():
        what = f"is a symbolic link to {destination.readlink()}"
    elif not destination.is_dir():
        what = "is a file"
    elif os.path.ismount(destination):
        what = "is where a file system is mounted, and a mount point cannot be replaced"
    if what:
        raise DestinationExistsError(
            f"{destination} {what}",
            wanted="a new name, or an empty directory",
            hint="choose another destination",
        )


def _is_free(path: Path) -> bool:
    """Whether a directory can be renamed to this name without anything being lost."""
    if not os.path.lexists(path):
        return True
    if path.is_symlink() or not path.is_dir() or os.path.ismount(path):
        return False
    try:
        return next(path.iterdir(), None) is None
    except OSError as error:
        raise storage_error("cannot list", path, error) from error


def _mark(destination: Path) -> str | None:
    """The plan that a destination was made by and is still marked with; None if it is not marked."""
    place = destination / PLAN_MARK
    try:
        if place.is_file() and place.stat().st_size <= _LONGEST_MARK:
            return read_whole(place).decode(errors="replace")
    except (OSError, CheckpointError):
        pass
    return None


def _allocated(path: Path) -> int:
    """Bytes on disk of all files below `path` that are not shared with another checkpoint."""
    status = (file.stat() for file in path.rglob("*") if file.is_file())
    return sum(each.st_blocks * 512 for each in status if each.st_nlink == 1)
