"""Staging of checkpoints in a bucket; see "Buckets" in `ckpttools.stores.publishing`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field
from functools import partial
from typing import TYPE_CHECKING

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import DestinationExistsError, StorageError, UsageError
from ckpttools.core.message_terms import option, retry_term, variable
from ckpttools.stores.abilities import SupportsUploads
from ckpttools.stores.base import FileKind
from ckpttools.stores.concurrency import map_in_threads, write_concurrency
from ckpttools.stores.location import Location
from ckpttools.stores.objects.client import Bucket, Object, is_usable
from ckpttools.stores.objects.data_files import ObjectDataFiles, find_changed_objects, recorded_versions
from ckpttools.stores.objects.journal import Inventory, JournalEntries, ObjectJournal
from ckpttools.stores.objects.lock import EXPIRED_SECONDS, PROBE, Lock
from ckpttools.stores.objects.parts import members
from ckpttools.stores.objects.write_buffer import PendingFiles
from ckpttools.stores.objects.writing import (
    conflict_error,
    copy,
    delete,
    mark,
    probe_conditions,
    put_or_replace_own,
)
from ckpttools.stores.publishing import (
    CONTENT,
    JOURNAL,
    LOCK,
    SUFFIX,
    UNPROTECTED,
    JobInfo,
    Record,
    check_name,
)
from ckpttools.stores.shares import PARTS, active_members, in_use_error, members_command

if TYPE_CHECKING:
    from ckpttools.stores.objects.store import ObjectStore


PREPARING = "preparing"
"""Key in the lock of a part that is preparing a destination; the value is the plan."""


@dataclass(frozen=True)
class ObjectStaging:
    """A destination in a bucket; see `ckpttools.stores.publishing.Staging`.

    Attributes:
        store: The store of the bucket.
        bucket: The bucket.
        key: Key of the destination in the store.
        rest: Key of the destination in the bucket.
        overwrite, check_replaced: As for `SupportsPublishing.staging`.
    """

    store: ObjectStore
    bucket: Bucket
    key: str
    rest: str
    overwrite: bool
    check_replaced: Callable[[], None]

    @property
    def partial(self) -> str:
        """Return the key of the staging directory in the bucket."""
        return self.rest + SUFFIX

    @property
    def taken(self) -> tuple[Location, Location]:
        return Location(self.store, self.key), Location(self.store, self.key + SUFFIX)

    @property
    def location(self) -> str:
        return self.store.uri(self.key)

    def check(self, plan: str, nbytes: int) -> None:
        check_name(self.taken[0])
        if not self.rest:
            raise UsageError(
                f"{self.location} is a complete {self.store.words.bucket}",
                expected="a name in it",
                hint=f"choose one: {self.location}/NAME",
            )
        if not is_usable(self.rest):
            raise UsageError(
                f"{self.location!r} cannot be a destination",
                expected="names without control characters, none of them `.` or `..`",
                hint="choose another name",
            )
        journal = ObjectJournal.read(self.bucket, f"{self.partial}/{JOURNAL}", with_records=False)
        is_begun = journal.plan == plan
        if not is_begun and journal.is_replacing and journal.published is None:
            raise self._about_to_replace(journal)
        if not is_begun or (journal.is_alongside and not journal.is_replacing):
            self.check_occupied(journal)

    def check_occupied(self, journal: ObjectJournal) -> None:
        """Raise DestinationExistsError if the destination exists and may not be replaced."""
        status = self.bucket.head(self.rest)
        if status is not None and status.kind is FileKind.FILE:
            raise DestinationExistsError(f"{self.location} is an object", hint="choose another destination")
        if not self.objects(self.rest):
            return
        if journal.purpose is not None and not journal.is_alongside and journal.published is None:
            return  # Another unfinished conversion uses the destination, which `opened` reports.
        # A cached listing may lack objects that would be replaced.
        self.store.forget(self.key)
        self.check_replaced()
        if not self.overwrite:
            raise DestinationExistsError(
                f"{self.location} exists",
                expected="a new name without objects below it",
                hint=f"choose another destination, or allow its replacement with {option('overwrite', True)}",
            )

    def objects(self, key: str) -> Sequence[Object]:
        """Return the current objects below a key of the bucket."""
        return self.bucket.objects_below(key) or ()

    @contextmanager
    def opened(self, purpose: JobInfo, nbytes: int = 0) -> Iterator[ObjectWork]:
        with self.opened_for(purpose) as work:
            yield work

    @contextmanager
    def opened_for(self, purpose: JobInfo, preparing: str = "") -> Iterator[ObjectWork]:
        """Lock the destination like `opened`; `preparing` is the plan whose parts this prepares, or ""."""
        declared = {PREPARING: preparing} if preparing else None
        self.check_protected(is_shared=bool(preparing))
        with Lock(self.bucket, f"{self.partial}/{LOCK}", self.location, declared) as lock:
            try:
                self._refuse_active_parts()
                result = ObjectJournal.read(self.bucket, f"{self.partial}/{JOURNAL}")
                if result.is_there:
                    self._abort_uploads()
                journal = self._start_journal(result, purpose, lock)
                yield ObjectWork(self, lock, journal, purpose)
            finally:
                for key in (self.key, self.key + SUFFIX):
                    self.store.forget(key)

    def check_protected(self, *, is_shared: bool) -> None:
        """Raise UsageError if a second writer could replace or share the checkpoint undetected.

        Args:
            is_shared: Whether several processes write the checkpoint.
        """
        is_safe = probe_conditions(self.bucket, f"{self.partial}/{LOCK}{PROBE}").creates
        if is_safe or os.environ.get(UNPROTECTED) or not (self.overwrite or is_shared):
            return
        action = "writing it with several processes" if is_shared else "replacing it"
        raise UsageError(
            f"the server of {self.location} does not detect a second writer, so {action} is not safe",
            got="it created one object twice: it, or a proxy before it, ignores `If-None-Match: *`",
            expected="a server that honors write preconditions",
            hint="write to a new name with one process; or make sure that no other process writes "
            f"{self.location}, and accept the risk with {variable(UNPROTECTED)}",
        )

    def _refuse_active_parts(self) -> None:
        """Raise LockedError if shares are active; a share that starts later sees the lock."""
        result = active_members(members(self.bucket, self.partial, None, {}, self.now()))
        if result:
            existing = ObjectJournal.read(self.bucket, f"{self.partial}/{JOURNAL}", with_records=False)
            raise in_use_error(
                "other processes are writing parts of this checkpoint",
                result,
                self.location,
                f"wait until they are done: {members_command(existing.purpose)} lists them; a claim expires "
                f"{EXPIRED_SECONDS:.0f} s after its process has ended",
            )

    def now(self, name: str = LOCK) -> float:
        """Return the time of the bucket's clock by writing an object."""
        result = self.bucket.head(f"{self.partial}/{name}")
        return time.time() if result is None or result.modified is None else result.modified / 1e9

    def _start_journal(self, journal: ObjectJournal, purpose: JobInfo, lock: Lock) -> ObjectJournal:
        """Return the journal of this plan, with its finished work if there is any."""
        is_ours = journal.plan == purpose.plan
        if journal.published is not None:
            if is_ours and self.inventory() == journal.published:
                return journal
            if is_ours and not self.overwrite:
                raise self._changed()
            self.finalize(journal, lock)
            journal.remove_last()
            journal = ObjectJournal(self.bucket, journal.key)
        elif is_ours:
            return journal
        if journal.is_there:
            self._discard(journal, purpose, lock)
        self.check_occupied(ObjectJournal(self.bucket, journal.key))
        self._refuse_foreign()
        return journal.begin(purpose, bool(self.objects(self.rest)))

    def _refuse_foreign(self) -> None:
        """Raise UsageError if `DST.partial` has objects that a conversion without a journal cannot write."""
        own_names = (LOCK + PROBE, f"{PARTS}/", f"{JOURNAL}/")
        names = (name for name, _ in self.objects(self.partial))
        foreign = [name for name in names if name != LOCK and not name.startswith(own_names)]
        if foreign:
            raise UsageError(
                f"{self.location}{SUFFIX} contains objects, but no journal of ckpttools",
                got=f"{len(foreign):,} objects, such as {min(foreign)}",
                expected="no objects there, where the conversion is staged",
                hint="move them away, or choose another destination",
            )

    def _abort_uploads(self) -> None:
        """Abort uploads to the destination by processes that have died or lost the lock."""
        if not isinstance(self.store, SupportsUploads):
            return
        # A user who may not list uploads can still write; `ckpt doctor` reports this.
        with suppress(StorageError):
            for key in (self.key, self.key + SUFFIX):
                self.store.abort(self.store.uploads(key))

    def _changed(self) -> DestinationExistsError:
        return DestinationExistsError(
            f"{self.location} was changed after an interrupted conversion published it",
            hint=f"to keep it, delete {self.location}{SUFFIX}; to rewrite it, use "
            f"{option('overwrite', True)}",
        )

    def inventory(self, key: str | None = None) -> Inventory:
        """Return the size and version of each object below a key, by default below the destination."""
        return {name: [result.size, result.version] for name, result in self.objects(key or self.rest)}

    def _discard(self, journal: ObjectJournal, purpose: JobInfo, lock: Lock) -> None:
        """Remove another unfinished conversion if that is allowed.

        Raises:
            UsageError: Removing the conversion is not allowed.
        """
        partial = self.location + SUFFIX
        existing = journal.purpose
        if existing is None and not journal.is_there:
            return
        if not self.overwrite:
            owner = "another conversion" if existing else "a conversion, and its journal cannot be read"
            same = existing and existing.is_same_command(purpose)
            raise UsageError(
                f"{partial} contains the beginning of {owner}",
                got=f"{existing.source}, plan {existing.plan[:12]}" if existing else None,
                expected=f"{purpose.source}, plan {purpose.plan[:12]}",
                hint=(
                    "its source has changed since; "
                    if same
                    else f"to resume it, run: {existing.command}; "
                    if existing and existing.command
                    else ""
                )
                + f"to discard it, use {option('overwrite', True)}",
            )
        if journal.is_replacing:
            raise self._about_to_replace(journal)
        self.discard(journal, lock)
        journal.remove(lock.check)

    def _about_to_replace(self, journal: ObjectJournal) -> UsageError:
        partial, existing = self.location + SUFFIX, journal.purpose
        go_on = f"run: {existing.command}; if that is refused, " if existing and existing.command else ""
        return UsageError(
            f"{partial} contains a complete checkpoint that was about to replace {self.location}",
            got=existing.source if existing else None,
            expected="the end of that conversion first",
            hint=f"{go_on}copy {partial}/{CONTENT} elsewhere (what was at {self.location} may be gone), "
            f"then delete {partial}",
        )

    def finalize(self, journal: ObjectJournal, lock: Lock) -> None:
        """Remove the remains of a published conversion except for the last entry."""
        kinds = [f"{PARTS}/", LOCK + PROBE, *([f"{CONTENT}/"] if journal.is_alongside else [])]
        names = [name for name, _ in self.objects(self.partial) if name.startswith(tuple(kinds))]

        def delete_one(name: str) -> None:
            lock.check()
            delete(self.bucket, [f"{self.partial}/{name}"])

        map_in_threads(write_concurrency(), delete_one, names)
        journal.remove(lock.check)

    def content(self, journal: ObjectJournal) -> str:
        """Return the key of the unpublished checkpoint in the bucket."""
        return f"{self.partial}/{CONTENT}" if journal.is_alongside else self.rest

    def check_copied(self, journal: ObjectJournal, sizes: Mapping[str, int]) -> None:
        """Raise UsageError if staged files are too large to be copied to the destination."""
        largest, limit = max(sizes.values(), default=0), self.store.largest_copy
        if journal.is_alongside and largest > limit:
            raise UsageError(
                f"the replacement of {self.location} has a file that is too large to be copied inside "
                "the cloud",
                got=f"{largest} bytes",
                expected=f"at most {limit} bytes in a file",
                hint="choose another destination, or smaller files",
            )

    def discard(self, journal: ObjectJournal, lock: Lock) -> None:
        """Delete the objects that the journal's plan has written, and nothing else.

        The lock is checked before each deletion, because a process that was suspended could delete a result
        that another process has finished in the meantime. A deletion cannot be conditional on the lock, so
        nothing else happens between the check and the deletion.
        """
        plan, content = journal.plan, self.content(journal)
        for name, _ in self.objects(content):
            key = f"{content}/{name}"
            if (
                journal.is_alongside
                or name in journal.linked
                or (plan and mark(self.bucket, key, is_brief=True) == plan)
            ):
                lock.check()
                delete(self.bucket, [key])


# The files that complete a checkpoint are small, and are removed before large files.
_SMALL = 1 << 20


@dataclass
class ObjectWork:
    """A destination in a bucket that this process has locked; see `ckpttools.stores.publishing.Work`.

    Attributes:
        staging: The destination.
        lock: The held lock.
        journal: The journal at the time when the work was opened.
        purpose: The conversion.
    """

    staging: ObjectStaging
    lock: Lock
    journal: ObjectJournal
    purpose: JobInfo
    pending: PendingFiles = field(init=False)
    entries: JournalEntries = field(init=False)
    files: ObjectDataFiles | None = None

    def __post_init__(self) -> None:
        self.pending = PendingFiles(self.staging.store, self._note_link)
        self.entries = JournalEntries(self.journal)

    @property
    def _bucket(self) -> Bucket:
        return self.staging.bucket

    @property
    def _content(self) -> str:
        return self.staging.content(self.journal)

    @property
    def content(self) -> Location:
        name = self.staging.key.partition("/")[0]
        return Location(self.pending, f"{name}/{self._content}")

    def _note_link(self, key: str) -> None:
        self.journal.note_link(key.removeprefix(f"{self.content.key}/"))

    @property
    def is_complete(self) -> bool:
        return self.journal.published is not None

    @property
    def records(self) -> Sequence[Record]:
        # Search for files of earlier runs in the bucket, not in the cache.
        self.staging.store.forget(self.content.key)
        return self.journal.records

    def changed_files(self) -> Sequence[str]:
        """See `SupportsChangedFiles`. Takes one listing, and one request for each changed object."""
        existing = dict(self.staging.objects(self._content))
        versions = recorded_versions(self.journal.records)
        return find_changed_objects(self._bucket, self._content, existing, versions)

    def data_files(self, sizes: Mapping[str, int], heads: Mapping[str, bytes]) -> ObjectDataFiles:
        self.staging.check_copied(self.journal, sizes)
        bucket, plan = self._bucket, self.purpose.plan
        self.files = ObjectDataFiles(bucket, self._content, sizes, heads, plan, self.lock.check)
        return self.files

    def record(self, records: Iterable[Record]) -> None:
        self.lock.check()
        versions = [] if self.files is None else self.files.pop_version_records()
        self.entries.record([*records, *versions])
        # Later readers must see the new objects.
        self.staging.store.forget(self.content.key)

    def discard(self) -> None:
        self.lock.renew()
        # Read the journal again, because files that were copied in the meantime have no mark of the plan.
        self.staging.discard(ObjectJournal.read(self._bucket, self.journal.key), self.lock)
        self.journal.remove(self.lock.check)
        # Nothing remains of this plan, so another plan may start.
        self.journal = ObjectJournal(self._bucket, self.journal.key)

    def publish(self) -> None:
        self.lock.renew()
        self._check_written()
        if not self.journal.is_alongside:
            self.pending.put_all(self._put)
        else:
            if self.journal.replacing is None:
                staging, old = self.staging, self.staging.inventory()
                staging.check_occupied(ObjectJournal(self._bucket, self.journal.key))
                self.pending.put_all(self._put)
                self.lock.renew()
                # Only objects that were checked are deleted.
                there = staging.inventory()
                if changed := [name for name, item in there.items() if old.get(name) != item]:
                    raise conflict_error(self._bucket, f"{staging.rest}/{min(changed)}")
                self.journal = self.journal.note_replacing(old, staging.inventory(self._content))
            self._replace(*self.journal.replacing or ({}, {}))
        self.lock.renew()
        self.journal.note_published(self._checked_inventory())

    def _check_written(self) -> None:
        """Raise StorageError if a written object is missing or was replaced by another one.

        This takes one listing.
        """
        if self.files is None or self.journal.replacing is not None:
            return
        existing = dict(self.staging.objects(self._content))
        lost = [
            name
            for name, size in self.files.written.items()
            if (existing[name].size if name in existing else -1) < size
        ]
        versions = {
            **recorded_versions(self.journal.records),
            **{name: [item] for name, item in self.files.versions.items()},
        }
        lost += find_changed_objects(self._bucket, self._content, existing, versions)
        if lost:
            name = min(lost)
            raise StorageError(
                f"{self.content / name} was removed or replaced while the checkpoint was written",
                got=f"{existing[name].size:,} bytes, version {existing[name].version}"
                if name in existing
                else "no such object",
                expected="the object that was written",
                hint=f"find the process that changes objects there; then {retry_term()} to rewrite them",
            )

    def _checked_inventory(self) -> Inventory:
        """Check and return the inventory of the published checkpoint, whose staged copy is deleted afterward.

        Raises:
            StorageError: Objects differ from the ones that were copied.
        """
        inventory = self.staging.inventory()
        _, new = self.journal.replacing or ({}, {})
        lost = [
            name for name, (size, _) in new.items() if name not in inventory or inventory[name][0] != size
        ]
        if lost:
            raise StorageError(
                f"{self.staging.location} differs from the checkpoint that was copied there",
                got=f"{len(lost)} of {len(new)} objects changed or missing, such as {min(lost)}",
                hint=f"{self.staging.location}{SUFFIX} is complete: {retry_term()}",
            )
        return inventory

    def _put(self, key: str, content: bytes) -> None:
        """Write a small file that does not exist or that an earlier run of this plan wrote."""
        self.lock.check()
        put_or_replace_own(self._bucket, key.partition("/")[2], content, self.purpose.plan)

    def _replace(self, old: Inventory, new: Inventory) -> None:
        """Delete the old checkpoint, and copy the new one to its location, small files last.

        Args:
            old: Inventory of the old checkpoint.
            new: Inventory of the new checkpoint. Files that an earlier run copied are copied again.
        """
        last = [key.removeprefix(f"{self.content.key}/") for key in self.pending.files]
        # Files shared with a source were copied again and have a different version.
        existing = {name: result.size for name, result in self.staging.objects(self._content)}
        sizes = {name: size for name, (size, _) in new.items()}
        if lost := sorted(name for name in {*new, *last} if existing.get(name, -1) != sizes.get(name)):
            raise UsageError(
                f"{self.staging.location}{SUFFIX} has changed since it was complete",
                got=f"{len(lost)} of {len(existing)} objects changed or missing, such as {lost[0]}",
                hint=f"delete {self.staging.location}{SUFFIX} and {retry_term()}",
            )
        result = sorted(self.staging.objects(self.staging.rest), key=_small_first)
        changed = [name for name, status in result if old.get(name) != [status.size, status.version]]
        map_in_threads(write_concurrency(), partial(self._check_copied, new), changed)
        for name, _ in result:
            # Check the lock before each deletion, because after a suspension the object may belong to another
            # process.
            self.lock.check()
            delete(self._bucket, [f"{self.staging.rest}/{name}"])
        self.lock.renew()
        map_in_threads(write_concurrency(), self._move, sorted(new.keys() - set(last)))
        for name in last:
            self._move(name)

    def _check_copied(self, new: Inventory, name: str) -> None:
        """Raise DestinationExistsError if another process wrote this object."""
        key = f"{self.staging.rest}/{name}"
        is_linked = name in self.journal.linked  # Linked files have no mark of the plan.
        if name not in new or not (is_linked or mark(self._bucket, key) == self.purpose.plan):
            raise conflict_error(self._bucket, key)

    def _move(self, name: str) -> None:
        self.lock.check()
        copy(self._bucket, f"{self._content}/{name}", f"{self.staging.rest}/{name}")

    def finalize(self) -> None:
        self.staging.finalize(self.journal, self.lock)
        # A process that takes over has nothing left to do.
        self.lock.release()
        self.journal.remove_last()


def _small_first(item: Object) -> tuple[bool, int, int]:
    name, status = item
    return status.size > _SMALL, name.count("/"), status.size
