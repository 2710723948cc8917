"""Lock, check and publish a local destination; see `ckpttools.stores.local.directory`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain
from pathlib import Path
from shlex import quote

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import DestinationExistsError, NoSpaceError, StorageError, UsageError
from ckpttools.core.message_terms import option, retry_term
from ckpttools.stores.local.data_files import LocalDataFiles, StagingFiles
from ckpttools.stores.local.directory import (
    StagingDirectory,
    check_directory,
    check_inventory,
    disk_usage,
    inventory,
    is_free,
)
from ckpttools.stores.local.file import storage_error
from ckpttools.stores.local.files import (
    check_can_rename,
    errors_of,
    make_directory,
    names_in,
    sync_directory,
    sync_tree,
    write_synced,
)
from ckpttools.stores.local.journal import JOURNAL, Journal, is_journal, read_mark, remove_mark
from ckpttools.stores.local.mounts import first_mount
from ckpttools.stores.local.parts import members, remove_parts
from ckpttools.stores.local.store import STORE
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import PLAN_MARK, JobInfo, LockedError, Record, check_name
from ckpttools.stores.shares import active_members, in_use_error, members_command


@dataclass(frozen=True, slots=True)
class LocalWork:
    """A staging directory that this process has locked; see `publishing.Work`.

    Attributes:
        staging: The staging directory.
        journal: The open and locked journal.
        plan: Fingerprint of the plan.
        files: The files that are written in the directory; None if everything is already published.
    """

    staging: LocalStaging
    journal: Journal
    plan: str
    files: StagingFiles | None

    @property
    def content(self) -> Location:
        store = STORE if self.files is None else self.files.store
        return Location(store, str(self.staging.content))

    @property
    def is_complete(self) -> bool:
        return self.staging.is_complete(self.journal, self.plan)

    @property
    def records(self) -> Sequence[Record]:
        with errors_of(self.staging.directory):
            parts = members(self.staging.directory, self.plan)
        return [*self.journal.records, *(record for part in parts for record in part.records)]

    def keep_files(self, names: Iterable[str], series: Iterable[str] = ()) -> None:
        if self.files is not None:
            self.files.written.keep(names, series)

    def data_files(self, sizes: Mapping[str, int], heads: Mapping[str, bytes]) -> LocalDataFiles:
        written_files = None if self.files is None else self.files.written
        return LocalDataFiles(self.staging.content, sizes, heads, written_files=written_files)

    def files_of_fork(self, sizes: Mapping[str, int]) -> LocalDataFiles:
        return LocalDataFiles(self.staging.content, sizes, {})

    def record(self, records: Iterable[Record]) -> None:
        self.journal.record(records)

    def discard(self) -> None:
        self.staging.discard(self.journal)

    def publish(self) -> None:
        self.publish_checked(lambda: None)

    def publish_checked(self, check: Callable[[], None]) -> None:
        self.staging.publish(self.journal, self.files, check)

    def finalize(self) -> None:
        self.staging.finalize(self.journal)


_ATTEMPTS = 100
_PROBE = "probe"


def _nothing_more() -> None:
    """Accept any existing destination."""


@dataclass(frozen=True, slots=True)
class LocalStaging(StagingDirectory):
    """A destination and its staging directory; see `ckpttools.stores.publishing.Staging`.

    Attributes:
        overwrite: Whether an existing destination may be replaced.
        check_replaced: Called if the destination exists. Raises `DestinationExistsError` if the new
            checkpoint must not replace it.
    """

    overwrite: bool = False
    check_replaced: Callable[[], None] = _nothing_more

    def check(self, plan: str, nbytes: int) -> None:
        """Check the destination before anything is written.

        Args:
            plan: Fingerprint of the plan.
            nbytes: Number of bytes that will be written.

        Raises:
            UsageError: The path cannot be a destination.
            DestinationExistsError: The destination exists and may not be replaced.
            NoSpaceError: The disk has too little free space.
        """
        check_name(self.taken[0])
        if not (self.is_published(plan) or self._is_concluding(plan)):
            self._check_occupied()
            self._check_room(nbytes)

    def _is_concluding(self, plan: str) -> bool:
        """Return whether a run of this plan was interrupted during its cleanup."""
        with errors_of(self.directory):
            journal = None if is_free(self.destination) else self.looked_at()
            return journal is not None and self.is_complete(journal, plan)

    def _check_occupied(self) -> None:
        destination = self.destination
        if is_free(destination):
            return
        check_directory(destination)
        self.check_replaced()
        if not self.overwrite:
            raise DestinationExistsError(
                f"{destination} exists",
                expected="a new name, or an empty directory",
                hint=f"choose another destination, or allow its replacement with {option('overwrite', True)}",
            )

    def _check_can_replace(self) -> None:
        """Raise StorageError if the existing checkpoint cannot be renamed, before anything is written."""
        if is_free(self.destination):
            return
        with errors_of(self.destination):
            try:
                check_can_rename(self.destination, self.directory / _PROBE)
            except StorageError as error:
                raise error.at(
                    hint="choose another destination, or delete the old checkpoint first: "
                    f"rm -r {quote(str(self.destination))}"
                ) from error

    def _check_room(self, nbytes: int) -> None:
        location = next(parent for parent in self.directory.absolute().parents if parent.exists())
        disk = shutil.disk_usage(location)
        free = disk.free + disk_usage(self.content)
        # Some file systems do not report their size.
        if nbytes > free and disk.total:
            raise NoSpaceError(
                "the destination has too little space",
                location=location,
                got=f"{free:,} bytes free",
                expected=f"{nbytes:,} bytes",
                hint="free some space or choose another disk",
            )

    @contextmanager
    def opened(self, purpose: JobInfo, nbytes: int = 0) -> Iterator[LocalWork]:
        """Lock the destination until the end of the `with` block; see `Staging.opened`."""
        journal = self._lock_journal()
        try:
            self._recover(journal, purpose, nbytes)
            if not self.is_complete(journal, purpose.plan):
                self._check_occupied()
                self._check_can_replace()
                self._begin(journal, purpose)
            yield LocalWork(self, journal, purpose.plan, self._files(journal, purpose.plan))
        finally:
            self._leave(journal)
            journal.close()

    def _files(self, journal: Journal, plan: str) -> StagingFiles | None:
        with errors_of(self.content):
            return None if self.is_complete(journal, plan) else StagingFiles(self.content)

    def _lock_journal(self) -> Journal:
        """Lock and return the journal of the directory, creating it if needed."""
        for attempt in range(1, _ATTEMPTS + 1):
            self._refuse_file()
            try:
                make_directory(self.directory)
            except OSError as error:
                raise storage_error("cannot create", error.filename or self.directory, error) from error
            with errors_of(self.directory):
                self._refuse_foreign()
                self._restore_journal()
                # Another process may have just finished and removed the directory, so try again.
                with suppress(FileNotFoundError) if attempt < _ATTEMPTS else nullcontext():
                    return self._lock_exclusively()
        raise AssertionError("the last attempt returns or raises")

    def _lock_exclusively(self) -> Journal:
        try:
            return Journal(self.directory)
        except LockedError as error:
            begun = self.looked_at()
            result = active_members(members(self.directory, begun.plan)) if begun and begun.plan else []
            if not result:
                raise
            raise in_use_error(
                "other processes are writing parts of this checkpoint",
                result,
                self.directory,
                f"wait until they are done: {members_command(begun.purpose if begun else None)} lists them",
            ) from error

    def looked_at(self) -> Journal | None:
        """Return the journal without locking it; None if it does not exist."""
        locations = [(self.directory, JOURNAL)]
        if is_journal(self.destination / PLAN_MARK):
            locations.append((self.destination, PLAN_MARK))
        for directory, name in locations:
            with suppress(FileNotFoundError, NotADirectoryError):
                result = Journal(directory, "looking", name)
                result.close()
                return result
        return None

    def _restore_journal(self) -> None:
        """Move the journal back if a run was interrupted between its last steps; see `finalize`.

        Raises:
            LockedError: The run is still active.
        """
        if not is_journal(self.destination / PLAN_MARK) or os.path.lexists(self.directory / JOURNAL):
            return
        with suppress(FileNotFoundError):  # The other process may have just removed the file.
            journal = Journal(self.destination, "alone", PLAN_MARK)
            try:
                journal.move(self.directory / JOURNAL)
            finally:
                journal.close()

    def _refuse_file(self) -> None:
        """Raise UsageError if the directory cannot be created because its name is taken."""
        if os.path.lexists(self.directory) and not self.directory.is_dir():
            is_link = self.directory.is_symlink()
            raise UsageError(
                f"{self.directory} is not a directory",
                got="a broken link, or a link to a file" if is_link else "a file",
                expected="no such file, because the conversion is staged in a directory of this name",
                hint="move it away, or choose another destination",
            )

    def _refuse_foreign(self) -> None:
        """Raise UsageError if the directory is a link, or is not empty and not owned by ckpttools."""
        try:
            names = names_in(self.directory)
        except FileNotFoundError:
            return
        if self.directory.is_symlink() or (names and JOURNAL not in names):
            raise UsageError(
                f"{self.directory} exists and has no journal of ckpttools",
                expected="no such directory, where the conversion is staged",
                hint="move it away, or choose another destination",
            )
        mount = first_mount(self.directory)
        if mount is not None:
            raise UsageError(
                f"{self.directory} contains a mount point",
                location=mount,
                expected="a directory of one file system, which can be renamed and deleted",
                hint=f"umount {mount}, then {retry_term()}",
            )

    def _recover(self, journal: Journal, purpose: JobInfo, nbytes: int) -> None:
        """Bring the remains of an earlier run into a state from which this run can resume."""
        with errors_of(self.destination):
            if self.is_published(journal.plan or purpose.plan):
                # The process that published the checkpoint may have been interrupted before this sync.
                self.sync_names()
            self.finish_removing(journal, journal.plan or purpose.plan)
            is_changed = self.is_complete(journal, purpose.plan) and self._is_changed(journal)
            self.settle(journal, journal.plan or purpose.plan)
            if is_changed:
                self._check_room(nbytes)
                remove_mark(self.destination)
            self.refuse_unmarked()
        is_anothers = journal.plan != purpose.plan and os.path.lexists(self.content)
        if is_anothers and not self.overwrite:
            from ckpttools.stores.local.directory import conflict_error

            raise conflict_error(self.directory, journal.purpose, purpose)

    def _is_changed(self, journal: Journal) -> bool:
        """Return whether the published checkpoint has changed since and may be replaced.

        Raises:
            DestinationExistsError: The checkpoint has changed and may not be replaced.
        """
        old = self.old(journal)
        rest = "" if old is None else f" ({old} is the replaced {self.destination})"
        mark = self.destination / PLAN_MARK
        keep = f"to keep it, delete {mark} and {self.directory}{rest}"
        hint = f"{keep}; to rewrite it, use {option('overwrite', True)}"
        try:
            if journal.inventory is None:
                raise DestinationExistsError(
                    f"the journal in {self.directory} is damaged, so it is unknown whether "
                    f"{self.destination} was changed after an interrupted conversion published it",
                    hint=hint,
                )
            check_inventory(self.destination, journal.inventory, hint)
        except DestinationExistsError:
            if not self.overwrite:
                raise
            return True
        return False

    def _begin(self, journal: Journal, purpose: JobInfo) -> None:
        """Assign the directory to this plan, keeping finished work if it belongs to the plan."""
        plan = purpose.plan
        with errors_of(self.directory):
            if journal.plan != plan or read_mark(self.content) != plan:
                if journal.purpose is not None:
                    # The old content may be large, and other processes are waiting for this plan.
                    journal.note_preparing(plan)
                # Records must be removed before the data that they describe.
                remove_parts(self.directory)
                self.remove(self.content)
                journal.begin(purpose)
                self.content.mkdir()
                write_synced(self.content / PLAN_MARK, plan.encode())
                sync_directory(self.content)
            else:
                self.refuse_links()
                if journal.preparing:
                    journal.note_preparing("")
            self.sync_names()

    def refuse_links(self) -> None:
        """Raise UsageError if the content is or has a symbolic link, since writing changes its target."""
        walked = (
            Path(directory, name)
            for directory, names, files in os.walk(self.content)
            for name in (*names, *files)
        )
        for path in chain([self.directory, self.content], walked):
            if path.is_symlink():
                raise UsageError(
                    f"{path} is a symbolic link",
                    got=path.readlink(),
                    expected="only files and directories that an interrupted run created",
                    hint=f"delete the link; then {retry_term()}",
                )

    def discard(self, journal: Journal) -> None:
        """Discard the finished work.

        Raises:
            StorageError: The work cannot be removed.
        """
        with errors_of(self.directory):
            remove_parts(self.directory)
            self.remove(self.content)
        if journal.purpose is not None:
            journal.begin(journal.purpose)

    def publish(self, journal: Journal, files: StagingFiles | None, check: Callable[[], None]) -> None:
        """Give the content its final name in one step, then remove a replaced checkpoint.

        Args:
            journal: The journal of this process.
            files: The files that this process has written; None if it has not written any.
            check: Called after publication, before the old checkpoint is removed. If it raises, the old
                checkpoint gets its name back.

        Raises:
            DestinationExistsError: Another process has created the destination in the meantime.
            StorageError, NoSpaceError: A written file was lost, or the system reports an error.
            CheckpointError: As for `check`.
        """
        with errors_of(self.destination):
            sync_tree(self.content)
            self._check_occupied()
            if files is not None:
                journal.check_in_location()
                files.written.check()
                files.written.check_no_foreign_files()
            journal.note_publishing(inventory(self.content))
            self.rename()
            self.sync_names()
        old = self.old(journal)
        if old is not None:
            self._check_replacement(files, check)
            try:
                self.remove(old)
            except OSError as error:
                raise StorageError(
                    f"{self.destination} is complete, but the replaced checkpoint could not be removed",
                    location=error.filename or self.directory,
                    got=error.strerror,
                    hint=f"delete {self.directory}",
                ) from error

    def _check_replacement(self, files: StagingFiles | None, check: Callable[[], None]) -> None:
        """Check the new checkpoint under its final name; on failure, restore the old checkpoint."""
        try:
            if files is not None:
                files.written.check(directory=self.destination)
            check()
        except BaseException:
            with errors_of(self.destination):
                self.rename_back()
                self.sync_names()
            raise

    def finalize(self, journal: Journal) -> None:
        """Remove all remains of the work.

        The journal replaces the mark, so that it can be removed after the directory. Until then, the same
        command can finish the removal.

        Raises:
            StorageError: The remains cannot be removed.
        """
        with errors_of(self.directory):
            remove_parts(self.directory)
            if not self.destination.is_dir():
                journal.remove()
            elif not journal.move(self.destination / PLAN_MARK):
                remove_mark(self.destination)
            with suppress(OSError):  # Another process may have created a file in the directory.
                self.directory.rmdir()
                sync_directory(self.directory.absolute().parent)
            remove_mark(self.destination)

    def _leave(self, journal: Journal) -> None:
        """Remove the directory if it has no work to resume."""
        with suppress(OSError, StorageError):
            is_needed = journal.plan is not None and self.is_published(journal.plan)
            if not is_needed and names_in(self.directory) == [JOURNAL] and journal.remove():
                self.directory.rmdir()
