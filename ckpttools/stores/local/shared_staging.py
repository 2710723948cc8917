"""A staging directory in which several processes write one checkpoint; see `ckpttools.stores.shares`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import StorageError, first_line
from ckpttools.core.message_terms import render
from ckpttools.stores.local.data_files import LocalDataFiles, StagingFiles
from ckpttools.stores.local.files import errors_of
from ckpttools.stores.local.journal import Journal, read_mark
from ckpttools.stores.local.parts import PartJournal, members
from ckpttools.stores.local.staging import LocalStaging
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import JobInfo, Record
from ckpttools.stores.shares import (
    DONE,
    Share,
    Standing,
    already_published_error,
    check_free,
    prepare_or_wait,
)

# Before other processes can join, the process that prepared the directory syncs its names.
_PREPARED_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class SharedLocalStaging(LocalStaging):
    """A local staging directory for one or several processes."""

    @contextmanager
    def joined(self, purpose: JobInfo, nbytes: int, share: Share) -> Iterator[LocalPartWork]:
        """Join the work on the destination; see `SharedStaging.joined`."""
        journal = self._join_journal(purpose, nbytes)
        try:
            with errors_of(self.directory):
                check_free(share, members(self.directory, purpose.plan), self.directory)
            own = PartJournal(self.directory, purpose.plan, share)
            try:
                yield self._part_work(journal, purpose.plan, own, share)
                own.end(DONE)
            except BaseException as error:
                with suppress(OSError, StorageError):
                    own.end(render(first_line(error)))
                raise
            finally:
                own.close()
        finally:
            journal.close()

    def _part_work(self, journal: Journal, plan: str, own: PartJournal, share: Share) -> LocalPartWork:
        """Return the work; raise LockedError if another process has just started the same tasks."""
        with errors_of(self.directory):
            all_members = members(self.directory, plan)
            self.refuse_links()
            files = StagingFiles(self.content)
        others = (member for member in all_members if member.token != own.token)
        check_free(share, others, self.directory)
        records = [record for member in all_members for record in member.records]
        return LocalPartWork(self, own, [*journal.records, *records], files)

    def _join_journal(self, purpose: JobInfo, nbytes: int) -> Journal:
        """Return this plan's journal with a shared lock; the first process creates it."""

        def attempt() -> Journal | None:
            journal = self._open_shared_journal(purpose.plan)
            if journal is None:
                with self.opened(purpose, nbytes) as work:
                    if work.is_complete:
                        raise already_published_error(self.destination)
            return journal

        return prepare_or_wait(attempt, lambda: self._is_preparing(purpose.plan), _PREPARED_SECONDS)

    def _is_preparing(self, plan: str) -> bool:
        """Return whether the process that has locked the directory is preparing it for a plan."""
        with errors_of(self.directory):
            result = self.looked_at()
            return result is not None and result.preparing == plan

    def _open_shared_journal(self, plan: str) -> Journal | None:
        """Return the journal if the directory is ready for the parts of a plan, otherwise None."""
        with errors_of(self.directory):
            try:
                journal = Journal(self.directory, "together")
            except (FileNotFoundError, NotADirectoryError):
                return None
            if journal.plan == plan and read_mark(self.content) == plan and not self.is_published(plan):
                return journal
            journal.close()
            return None

    def standing(self, plan: str) -> Standing:
        """Return the progress of a plan; see `SharedStaging.standing`."""
        with errors_of(self.directory):
            result = self.looked_at()
            if result is None or result.plan is None:
                return Standing(False)
            if result.plan != plan:
                from ckpttools.stores.local.directory import describe_conversion

                return Standing(False, other=describe_conversion(result.purpose) if result.purpose else "")
            is_published = self.is_complete(result, plan)
            return Standing(True, is_published, "", result.records, members(self.directory, plan))


@dataclass(frozen=True, slots=True)
class LocalPartWork:
    """A staging directory in which this process does a share of the work; see `shares.PartWork`.

    Attributes:
        staging: The staging directory.
        own: The journal of this process.
        records: The records of all processes when this process started.
        files: The files that are written in the directory.
    """

    staging: LocalStaging
    own: PartJournal
    records: Sequence[Record]
    files: StagingFiles

    @property
    def token(self) -> str:
        return self.own.token

    @property
    def content(self) -> Location:
        return Location(self.files.store, str(self.staging.content))

    def data_files(self, sizes: Mapping[str, int], heads: Mapping[str, bytes]) -> LocalDataFiles:
        written_files = self.files.written
        return LocalDataFiles(self.staging.content, sizes, heads, is_alone=False, written_files=written_files)

    def files_of_fork(self, sizes: Mapping[str, int]) -> LocalDataFiles:
        return LocalDataFiles(self.staging.content, sizes, {}, is_alone=False)

    def record(self, records: Iterable[Record]) -> None:
        self.own.record(records)

    def discard(self) -> None:
        self.own.discard()
