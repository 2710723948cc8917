"""A destination in a bucket that several processes write to; see `ckpttools.stores.shares`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from functools import partial

from ckpttools.core.dataclass import dataclass
from ckpttools.core.message_terms import retry_term
from ckpttools.stores.location import Location
from ckpttools.stores.objects.data_files import ObjectDataFiles, find_changed_objects, recorded_versions
from ckpttools.stores.objects.journal import JournalEntries, ObjectJournal
from ckpttools.stores.objects.lock import locked_error, read_lock, stored_lock
from ckpttools.stores.objects.parts import PartClaim, hold_claim, members
from ckpttools.stores.objects.staging import PREPARING, ObjectStaging
from ckpttools.stores.publishing import JOURNAL, LOCK, SUFFIX, JobInfo, LockedError, Record
from ckpttools.stores.shares import (
    PARTS,
    Member,
    Share,
    Standing,
    already_published_error,
    check_free,
    prepare_or_wait,
)

# A process that has prepared the destination releases it after a few requests.
_PREPARED_SECONDS = 30.0
_POLL_SECONDS = 2.0


@dataclass(frozen=True)
class SharedObjectStaging(ObjectStaging):
    """The staging of a destination in a bucket for one or several processes."""

    @contextmanager
    def joined(self, purpose: JobInfo, nbytes: int, share: Share) -> Iterator[ObjectPartWork]:
        """Join the work on the destination; see `SharedStaging.joined`."""
        self.check_protected(is_shared=True)
        self._prepare(purpose)
        self._wait_for_lost_members(purpose.plan, share)
        with hold_claim(self.bucket, self.partial, self.location, purpose.plan, share) as claim:
            journal = self._join_journal(purpose.plan, share, claim)
            try:
                yield ObjectPartWork(self, claim, journal, purpose.plan)
            finally:
                for key in (self.key, self.key + SUFFIX):
                    self.store.forget(key)

    def _prepare(self, purpose: JobInfo) -> None:
        """Prepare the destination for the parts of a plan, unless another part has already done so."""

        def attempt() -> ObjectJournal | None:
            journal = ObjectJournal.read(self.bucket, f"{self.partial}/{JOURNAL}", with_records=False)
            if journal.plan == purpose.plan:
                if journal.published is not None or journal.is_replacing:
                    raise already_published_error(self.location)
                return journal
            with self.opened_for(purpose, purpose.plan):
                return None

        prepare_or_wait(attempt, lambda: self._is_preparing(purpose.plan), _PREPARED_SECONDS)

    def _is_preparing(self, plan: str) -> bool:
        """Return whether the process that has locked the destination is preparing it for a plan."""
        return read_lock(self.bucket, f"{self.partial}/{LOCK}").get(PREPARING) == plan

    def _join_journal(self, plan: str, share: Share, claim: PartClaim) -> ObjectJournal:
        """Return the journal, read after this process wrote its claim.

        Raises:
            LockedError: Another process is active.
        """
        clock_offset = self.now(f"{PARTS}/{claim.token}") - time.time()
        # A process that has prepared the destination releases it shortly after its journal exists.
        prepare_or_wait(partial(self._refuse_owner, clock_offset), lambda: self._is_preparing(plan), 0.0)
        now = time.time() + clock_offset
        journal = ObjectJournal.read(self.bucket, f"{self.partial}/{JOURNAL}")
        if journal.plan != plan or journal.published is not None:
            raise LockedError(
                "another process has just started or finished this checkpoint",
                location=self.location,
                hint=f"{retry_term()}: it reports that process or finds the checkpoint complete",
            )
        others = (member for member in self._members(journal, now) if member.token != claim.token)
        check_free(share, others, self.location)
        return journal

    def _refuse_owner(self, clock_offset: float) -> bool:
        """Return True, or raise LockedError if a process has locked the destination.

        Args:
            clock_offset: Offset of the bucket's clock in seconds.
        """
        lock = stored_lock(self.bucket, f"{self.partial}/{LOCK}", time.time() + clock_offset)
        if lock is not None and lock.is_held:
            raise locked_error(self.location, lock)
        return True

    def _wait_for_lost_members(self, plan: str, share: Share) -> None:
        """Wait until processes that may be dead either expire or renew their claims."""
        first: dict[str, float] = {}
        while True:
            journal = ObjectJournal(self.bucket, "", JobInfo(plan))
            overlapping = [m for m in self._members(journal) if m.is_alive and m.share.overlaps(share)]
            if any(first.setdefault(item.token, item.seen) != item.seen for item in overlapping):
                check_free(share, overlapping, self.location)
            if not overlapping:
                return
            time.sleep(_POLL_SECONDS)

    def _members(self, journal: ObjectJournal, now: float | None = None) -> list[Member]:
        return members(self.bucket, self.partial, journal.plan or "", journal.by_run, now)

    def standing(self, plan: str) -> Standing:
        """Return the progress of a plan; see `SharedStaging.standing`."""
        journal = ObjectJournal.read(self.bucket, f"{self.partial}/{JOURNAL}")
        if journal.purpose is None:
            return Standing(False)
        if journal.purpose.plan != plan:
            return Standing(False, other=f"{journal.purpose.source}, plan {journal.purpose.plan[:12]}")
        result = self._members(journal)
        known = {item.token for item in result}
        rest = [record for run, item in journal.by_run.items() if run not in known for record in item]
        return Standing(True, journal.published is not None, "", rest, result)


@dataclass
class ObjectPartWork:
    """A destination in a bucket for one process's share; see `ckpttools.stores.shares.PartWork`.

    Attributes:
        staging: The destination.
        claim: The claim of the share.
        journal: The journal at the time when the process started.
        plan: Fingerprint of the plan.
    """

    staging: SharedObjectStaging
    claim: PartClaim
    journal: ObjectJournal
    plan: str
    entries: JournalEntries = field(init=False)
    files: ObjectDataFiles | None = None

    def __post_init__(self) -> None:
        self.entries = JournalEntries(self.journal, self.claim.token)

    @property
    def token(self) -> str:
        return self.claim.token

    @property
    def content(self) -> Location:
        name = self.staging.key.partition("/")[0]
        return Location(self.staging.store, f"{name}/{self.staging.content(self.journal)}")

    @property
    def records(self) -> Sequence[Record]:
        self.staging.store.forget(self.content.key)
        return self.journal.records

    def data_files(self, sizes: Mapping[str, int], heads: Mapping[str, bytes]) -> ObjectDataFiles:
        staging, check = self.staging, self.claim.lock.check
        staging.check_copied(self.journal, sizes)
        content = staging.content(self.journal)
        self.files = ObjectDataFiles(staging.bucket, content, sizes, heads, self.plan, check)
        return self.files

    def changed_files(self) -> Sequence[str]:
        """See `SupportsChangedFiles`. Takes one listing, and one request for each changed object."""
        content = self.staging.content(self.journal)
        existing = dict(self.staging.objects(content))
        versions = recorded_versions(self.journal.records)
        return find_changed_objects(self.staging.bucket, content, existing, versions)

    def record(self, records: Iterable[Record]) -> None:
        self.claim.lock.check()
        versions = [] if self.files is None else self.files.pop_version_records()
        self.entries.record([*records, *versions])

    def discard(self) -> None:
        self.entries.remove()
