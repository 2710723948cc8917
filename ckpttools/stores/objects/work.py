"""The work on a destination in a bucket until it is published."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from functools import partial
from typing import TYPE_CHECKING

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import StorageError, UsageError
from ckpttools.core.message_terms import retry_term
from ckpttools.stores.concurrency import map_in_threads, write_concurrency
from ckpttools.stores.location import Location
from ckpttools.stores.objects.client import Bucket, Object
from ckpttools.stores.objects.data_files import ObjectDataFiles, find_changed_objects, recorded_versions
from ckpttools.stores.objects.journal import Inventory, JournalEntries, ObjectJournal
from ckpttools.stores.objects.lock import Lock
from ckpttools.stores.objects.write_buffer import PendingFiles
from ckpttools.stores.objects.writing import conflict_error, copy, delete, mark, put_or_replace_own
from ckpttools.stores.publishing import SUFFIX, JobInfo, Record

if TYPE_CHECKING:
    from ckpttools.stores.objects.staging import ObjectStaging

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
        there = dict(self.staging.objects(self._content))
        versions = recorded_versions(self.journal.records)
        return find_changed_objects(self._bucket, self._content, there, versions)

    def data_files(self, sizes: Mapping[str, int], heads: Mapping[str, bytes]) -> ObjectDataFiles:
        self.staging.check_copied(self.journal, sizes)
        bucket, plan = self._bucket, self.purpose.plan
        self.files = ObjectDataFiles(bucket, self._content, sizes, heads, plan, self.lock.check)
        return self.files

    def record(self, records: Iterable[Record]) -> None:
        self.lock.check()
        versions = [] if self.files is None else self.files.take_version_records()
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
                self.staging.check_taken(ObjectJournal(self._bucket, self.journal.key))
                self.pending.put_all(self._put)
                self.lock.renew()
                staging = self.staging
                self.journal = self.journal.note_replacing(
                    staging.inventory(), staging.inventory(self._content)
                )
            self._replace(*self.journal.replacing or ({}, {}))
        self.lock.renew()
        self.journal.note_published(self._checked_inventory())

    def _check_written(self) -> None:
        """Raise StorageError if a written object is missing or was replaced by another one.

        This takes one listing.
        """
        if self.files is None or self.journal.replacing is not None:
            return
        there = dict(self.staging.objects(self._content))
        lost = [
            name
            for name, size in self.files.written.items()
            if (there[name].size if name in there else -1) < size
        ]
        versions = {
            **recorded_versions(self.journal.records),
            **{name: [item] for name, item in self.files.versions.items()},
        }
        lost += find_changed_objects(self._bucket, self._content, there, versions)
        if lost:
            name = min(lost)
            raise StorageError(
                f"{self.content / name} was removed or replaced while the checkpoint was written",
                got=f"{there[name].size:,} bytes, version {there[name].version}"
                if name in there
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
        there = {name: result.size for name, result in self.staging.objects(self._content)}
        sizes = {name: size for name, (size, _) in new.items()}
        if lost := sorted(name for name in {*new, *last} if there.get(name, -1) != sizes.get(name)):
            raise UsageError(
                f"{self.staging.location}{SUFFIX} has changed since it was complete",
                got=f"{len(lost)} of {len(there)} objects changed or missing, such as {lost[0]}",
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


def _small_first(result: Object) -> tuple[bool, int, int]:
    name, status = result
    return status.size > _SMALL, name.count("/"), status.size
