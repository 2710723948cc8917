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
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from ckpttools.core.errors import DestinationExistsError, NoSpaceError, StorageError, UsageError
from ckpttools.core.wording import option
from ckpttools.stores.local.another import held_by_another
from ckpttools.stores.local.file import storage_error
from ckpttools.stores.local.files import (
    check_no_mount,
    errors_of,
    exchange,
    make_directory,
    names_in,
    remove_tree,
    sync_directory,
    sync_tree,
    write_synced,
)
from ckpttools.stores.local.inventory import check_inventory, inventory
from ckpttools.stores.local.journal import Journal
from ckpttools.stores.local.marks import mark_of, unmark
from ckpttools.stores.local.mounts import first_mount
from ckpttools.stores.local.occupied import allocated, check_directory, is_free
from ckpttools.stores.local.partial import CONTENT, JOURNAL, REMOVED, REPLACED, SUFFIX, is_staging
from ckpttools.stores.local.parts import members, remove_parts
from ckpttools.stores.local.store import STORE
from ckpttools.stores.local.work import LocalWork
from ckpttools.stores.place import Place
from ckpttools.stores.publishing import PLAN_MARK, LockedError, Purpose, check_name
from ckpttools.stores.shares import named, who_does_what

_ATTEMPTS = 100


def _nothing_more() -> None:
    """Refuses nothing."""


@dataclass(frozen=True, slots=True)
class LocalStaging:
    """A destination and the directory it grows in.

    Attributes:
        destination: the final name.
        overwrite: whether what has that name may be replaced.
        check_replaced: called where something is there; raises `DestinationExistsError` if it may not be
            replaced by what will be written, whatever the user says.
    """

    destination: Path
    overwrite: bool = False
    check_replaced: Callable[[], None] = _nothing_more

    @property
    def directory(self) -> Path:
        return self.destination.with_name(self.destination.name + SUFFIX)

    @property
    def content(self) -> Path:
        return self.directory / CONTENT

    @property
    def taken(self) -> tuple[Place, Place]:
        return Place(STORE, str(self.destination)), Place(STORE, str(self.directory))

    @property
    def _replaced(self) -> Path:
        return self.directory / REPLACED

    @property
    def _removed(self) -> Path:
        return self.directory / REMOVED

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
        check_name(self.taken[0])
        if not self.is_published(plan):
            self._check_taken()
            self._check_room(nbytes)

    def is_published(self, plan: str) -> bool:
        """Whether a run of this plan has published all and was interrupted before it could say so."""
        return mark_of(self.destination) == plan and is_staging(self.directory)

    def is_complete(self, journal: Journal, plan: str) -> bool:
        """The same of what this plan's journal says, too."""
        return journal.plan == plan and journal.publishing and self.is_published(plan)

    def _check_taken(self) -> None:
        destination = self.destination
        if is_free(destination):
            return
        check_directory(destination)
        self.check_replaced()
        if not self.overwrite:
            raise DestinationExistsError(
                f"{destination} exists",
                wanted="a new name, or an empty directory",
                hint=f"choose another destination, or allow its replacement with {option('overwrite', True)}",
            )

    def _check_room(self, nbytes: int) -> None:
        place = next(parent for parent in self.directory.absolute().parents if parent.exists())
        disk = shutil.disk_usage(place)
        free = disk.free + allocated(self.content)
        # Some file systems (of the kernel, of some stores) report no size at all.
        if nbytes > free and disk.total:
            raise NoSpaceError(
                "the destination has too little room",
                place=place,
                got=f"{free:,} bytes free",
                wanted=f"{nbytes:,} bytes",
                hint="free some space or choose another disk",
            )

    @contextmanager
    def opened(self, purpose: Purpose, nbytes: int = 0) -> Iterator[LocalWork]:
        """Takes the destination for this process, from the first look at it to the end; see `publishing`."""
        journal = self._locked()
        try:
            self._recover(journal, purpose, nbytes)
            if not self.is_complete(journal, purpose.plan):
                self._check_taken()
                self._begin(journal, purpose)
            yield LocalWork(self, journal, purpose.plan)
        finally:
            self._leave(journal)
            journal.close()

    def _locked(self) -> Journal:
        """The journal of the directory, which is made if it is not there."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                make_directory(self.directory)
            except OSError as error:
                raise storage_error("cannot create", error.filename or self.directory, error) from error
            with errors_of(self.directory):
                self._refuse_foreign()
                # Another process may just have finished here and removed its directory: once more.
                with suppress(FileNotFoundError) if attempt < _ATTEMPTS else nullcontext():
                    return self._locked_alone()
        raise AssertionError("the last attempt returns or raises")

    def _locked_alone(self) -> Journal:
        try:
            return Journal(self.directory)
        except LockedError as error:
            begun = self.looked_at()
            at_work = named(members(self.directory, begun.plan)) if begun and begun.plan else ""
            if not at_work:
                raise
            raise LockedError(
                "other processes are writing this checkpoint, each a part of it",
                place=self.directory,
                got=at_work,
                hint=f"wait until they are done: {who_does_what()} tells of them",
            ) from error

    def looked_at(self) -> Journal | None:
        """The journal as it is now; None if there is none."""
        try:
            found = Journal(self.directory, "looking")
        except (FileNotFoundError, NotADirectoryError):
            return None
        found.close()
        return found

    def _refuse_foreign(self) -> None:
        """Raises UsageError if the directory holds something, and that is not ours or lies elsewhere."""
        try:
            names = names_in(self.directory)
        except FileNotFoundError:
            return
        if self.directory.is_symlink() or (names and JOURNAL not in names):
            raise UsageError(
                f"{self.directory} is there and has no journal of ckpttools in it",
                wanted="that name free: a conversion grows there until it is complete",
                hint="move it away, or choose another destination",
            )
        mount = first_mount(self.directory)
        if mount is not None:
            raise UsageError(
                f"something is mounted at or in {self.directory}",
                place=mount,
                wanted="a directory of one file system: all of it gets another name, or is deleted",
                hint=f"umount {mount}, then run the command again",
            )

    def _recover(self, journal: Journal, purpose: Purpose, nbytes: int) -> None:
        """Brings what an earlier run left into a state that this one can go on from."""
        with errors_of(self.destination):
            if self.is_published(journal.plan or purpose.plan):
                # Who gave it the name was stopped before this, or it failed.
                self._sync_names()
            self._finish_removing(journal, journal.plan or purpose.plan)
            is_changed = self.is_complete(journal, purpose.plan) and self._is_changed(journal)
            self._settle(journal, journal.plan or purpose.plan)
            if is_changed:
                self._check_room(nbytes)
                unmark(self.destination)
            self._refuse_unmarked()
        is_anothers = journal.plan != purpose.plan and os.path.lexists(self.content)
        if is_anothers and not self.overwrite:
            raise held_by_another(self.directory, journal.purpose, purpose)

    def _finish_removing(self, journal: Journal, plan: str) -> None:
        """Removes what is left of what was being removed, where that is known to be ours.

        What is not marked, to its last moment, had the name before its successor was published.

        Raises:
            UsageError: it is not known.
        """
        place = self._removed
        is_known = journal.publishing or self.is_published(plan)
        is_directory = place.is_dir() and not place.is_symlink()
        if is_directory and (is_known or is_free(place) or mark_of(place) is not None):
            self._empty_removed()
        elif os.path.lexists(place):
            raise UsageError(
                f"{place} is not what a conversion left there",
                got="a directory without a mark of ours" if is_directory else "no directory",
                wanted="nothing, or what a conversion was deleting when it was interrupted",
                hint="move it away, or delete it; then run the command again",
            )

    def _refuse_unmarked(self) -> None:
        """Raises UsageError if something is where the checkpoint grows that is not ours."""
        is_marked = not self.content.is_symlink() and mark_of(self.content) is not None
        if not is_marked and not is_free(self.content):
            raise UsageError(
                f"{self.content} is not what a conversion left there: it has no {PLAN_MARK}",
                wanted="a checkpoint that grows, which is marked from the beginning",
                hint="move it away, or delete it; then run the command again",
            )

    def _is_changed(self, journal: Journal) -> bool:
        """Whether what was published is not what it was then, and may be replaced.

        Raises:
            DestinationExistsError: it may not.
        """
        old = self._old(journal)
        rest = "" if old is None else f" ({old} is what {self.destination} was before)"
        mark = self.destination / PLAN_MARK
        keep = f"to keep it as it is, delete {mark} and {self.directory}{rest}"
        hint = f"{keep}; to make it again, use {option('overwrite', True)}"
        try:
            if journal.inventory is None:
                raise DestinationExistsError(
                    f"the journal in {self.directory} is damaged, so nothing tells whether "
                    f"{self.destination} is still what a stopped conversion put there",
                    hint=hint,
                )
            check_inventory(self.destination, journal.inventory, hint)
        except DestinationExistsError:
            if not self.overwrite:
                raise
            return True
        return False

    def _settle(self, journal: Journal, plan: str) -> None:
        """What was to be replaced is removed if its successor has the name, else it gets the name back."""
        old = self._old(journal)
        if old is None:
            return
        is_known = journal.publishing
        if self.is_published(plan):
            self._remove(old)
        elif is_known and is_free(self.destination):
            old.rename(self.destination)
            self._sync_names()
        else:
            raise UsageError(
                f"{old} holds what {self.destination} was before it was to be replaced, and nothing tells "
                "whether what has the name now is its successor",
                hint=f"delete {old}, or move it to where you want it; then run the command again",
            )

    def _old(self, journal: Journal) -> Path | None:
        """What had the name before, and is in the directory now, as far as is known; None if nothing is."""
        if os.path.lexists(self._replaced):
            return self._replaced
        may_be_exchanged = journal.publishing or journal.plan is None
        if not may_be_exchanged or is_free(self.content):
            return None
        # What grows here is marked from the beginning.
        return self.content if mark_of(self.content) is None else None

    def _begin(self, journal: Journal, purpose: Purpose) -> None:
        """Makes the directory this plan's, with what was done of it or empty."""
        plan = purpose.plan
        with errors_of(self.directory):
            if journal.plan != plan or mark_of(self.content) != plan:
                if journal.purpose is not None:
                    # What is there may be large, and others wait for this plan.
                    journal.note_preparing(plan)
                # First: no record may outlive what it tells of.
                remove_parts(self.directory)
                self._remove(self.content)
                journal.begin(purpose)
                self.content.mkdir()
                write_synced(self.content / PLAN_MARK, plan.encode())
                sync_directory(self.content)
            elif journal.preparing:
                journal.note_preparing("")
            self._sync_names()

    def discard(self, journal: Journal) -> None:
        """Gives up what was done.

        Raises:
            StorageError: that is not possible.
        """
        with errors_of(self.directory):
            remove_parts(self.directory)
            self._remove(self.content)
        if journal.purpose is not None:
            journal.begin(journal.purpose)

    def publish(self, journal: Journal) -> None:
        """Gives the content its final name, in one step; what had the name before goes last.

        Raises:
            DestinationExistsError: somebody else has taken the name meanwhile.
            StorageError, NoSpaceError: the system reports an error.
        """
        with errors_of(self.destination):
            sync_tree(self.content)
            self._check_taken()
            journal.note_publishing(inventory(self.content))
            self._rename()
            self._sync_names()
        old = self._old(journal)
        if old is not None:
            try:
                self._remove(old)
            except OSError as error:
                raise StorageError(
                    f"{self.destination} is complete, but what it replaced could not be removed",
                    place=error.filename or self.directory,
                    got=error.strerror,
                    hint=f"delete {self.directory}",
                ) from error

    def _rename(self) -> None:
        if is_free(self.destination):
            self.content.rename(self.destination)
            return
        # The mark of an earlier run that could not end: what is replaced must not be taken for ours.
        unmark(self.destination)
        if not exchange(self.content, self.destination):
            self.destination.rename(self._replaced)
            self._sync_names()
            self.content.rename(self.destination)

    def _sync_names(self) -> None:
        sync_directory(self.directory)
        sync_directory(self.destination.absolute().parent)

    def _remove(self, place: Path) -> None:
        """Removes a directory in here, if it is there: durably out of its place at once, then bit by bit."""
        if os.path.lexists(place):
            check_no_mount(place)
            place.rename(self._removed)
            sync_directory(self.directory)
            self._empty_removed()

    def _empty_removed(self) -> None:
        """The mark goes last, and the journal changes only after that: these two tell what this is."""
        remove_tree(self._removed, last=PLAN_MARK)
        sync_directory(self.directory)

    def conclude(self, journal: Journal) -> None:
        """Removes all traces of the work.

        Raises:
            StorageError: that is not possible.
        """
        with errors_of(self.directory):
            remove_parts(self.directory)
            unmark(self.destination)
            journal.remove()
            with suppress(OSError):  # somebody else has put something there
                self.directory.rmdir()

    def _leave(self, journal: Journal) -> None:
        """Takes the directory away where there is nothing in it to go on with."""
        with suppress(OSError, StorageError):
            is_needed = journal.plan is not None and self.is_published(journal.plan)
            if not is_needed and names_in(self.directory) == [JOURNAL] and journal.remove():
                self.directory.rmdir()
