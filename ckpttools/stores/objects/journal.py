"""The journal of a conversion to a bucket: objects below `<destination>.partial/journal/`, each written once.

plan              the conversion, and where it is written
done-RUN-NUMBER   finished tasks
linked-NUMBER     a file that is about to be copied from elsewhere in the bucket
publishing        everything is written next to the checkpoint that is now being replaced
published         the objects of the published checkpoint
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, field
from dataclasses import replace as dataclass_replace
from typing import Any, TypeAlias

from ckpttools.core.dataclass import dataclass
from ckpttools.stores.concurrency import map_in_threads, write_concurrency
from ckpttools.stores.objects.client import Bucket
from ckpttools.stores.objects.writing import TakenError, conflict_error, delete, put, read
from ckpttools.stores.publishing import JobInfo, Record

PLAN, PUBLISHING, PUBLISHED = "plan", "publishing", "published"
_DONE, _LINKED = "done-", "linked-"
Inventory: TypeAlias = Mapping[str, Sequence[Any]]
"""The size and version of objects, by path below a checkpoint."""


@dataclass(frozen=True)
class ObjectJournal:
    """The journal of a destination at the time it was read.

    Attributes:
        bucket, key: Location of the journal.
        purpose: The conversion; None if there is no readable entry.
        is_alongside: Whether the checkpoint is written next to the destination, which it will replace.
        by_run: Records of finished tasks, by run ID.
        linked: Names of files that were, or may have been, copied from elsewhere.
        replacing: Inventories of the replaced checkpoint, which may be partly deleted, and of the new one;
            None while the old checkpoint is complete.
        published: Inventory of the published checkpoint (size and ETag by name), which is the last entry to
            be removed.
        is_there: Whether the journal has any entry.
    """

    bucket: Bucket
    key: str
    purpose: JobInfo | None = None
    is_alongside: bool = False
    by_run: Mapping[str, Sequence[Record]] = field(default_factory=dict)
    linked: frozenset[str] = frozenset()
    replacing: tuple[Inventory, Inventory] | None = None
    published: Inventory | None = None
    is_there: bool = False

    @property
    def plan(self) -> str | None:
        """Return the fingerprint of the plan; None if unknown."""
        return None if self.purpose is None else self.purpose.plan

    @property
    def records(self) -> list[Record]:
        """Return the records of all runs."""
        return [record for records in self.by_run.values() for record in records]

    @property
    def is_destination_incomplete(self) -> bool:
        """Return whether the destination itself has an incomplete checkpoint."""
        return self.published is None and (self.is_replacing or not self.is_alongside)

    @classmethod
    def read(cls, bucket: Bucket, key: str, *, with_records: bool = True) -> ObjectJournal:
        """Read the journal of a destination.

        Args:
            bucket, key: Location of the journal.
            with_records: Whether to read the finished tasks: one object per process and second of work.

        Raises:
            StorageError: The store reports an error.
        """
        object_names = [name for name, _ in bucket.objects_below(key) or ()]
        names = [name for name in object_names if with_records or not name.startswith(_DONE)]
        contents = map_in_threads(write_concurrency(), lambda name: read(bucket, f"{key}/{name}"), names)
        result = {
            name: _parse_entry(item[0])
            for name, item in zip(names, contents, strict=True)
            if item is not None
        }
        plan_record: Any = result.get(PLAN)
        published: Any = result.get(PUBLISHED)
        by_run: dict[str, list[Record]] = {}
        for name, item in result.items():
            if name.startswith(_DONE) and isinstance(item, list):
                by_run.setdefault(name.removeprefix(_DONE).partition("-")[0], []).extend(item)
        linked = {str(item) for name, item in result.items() if name.startswith(_LINKED)}
        try:
            purpose = JobInfo(**(plan_record or published)["purpose"]) if plan_record or published else None
        except (KeyError, TypeError):
            purpose = None
        return cls(
            bucket,
            key,
            purpose,
            bool(plan_record and plan_record.get("is_beside")),
            by_run,
            frozenset(linked),
            _parse_inventories(result[PUBLISHING]) if PUBLISHING in result else None,
            published.get("objects") if isinstance(published, dict) else None,
            bool(object_names),
        )

    def begin(self, purpose: JobInfo, is_alongside: bool) -> ObjectJournal:
        """Record the conversion; same errors as `read`."""
        self._put(PLAN, {"purpose": asdict(purpose), "is_beside": is_alongside})
        return ObjectJournal(self.bucket, self.key, purpose, is_alongside, is_there=True)

    @property
    def is_replacing(self) -> bool:
        """Return whether the replaced checkpoint may be partly deleted."""
        return self.replacing is not None

    def note_replacing(self, old: Inventory, new: Inventory) -> ObjectJournal:
        """Record that the replaced checkpoint is being deleted; same errors as `read`."""
        self._put(PUBLISHING, [old, new])
        return dataclass_replace(self, replacing=(old, new))

    def note_published(self, inventory: Inventory) -> None:
        """Record that only the journal remains to be removed; same errors as `read`."""
        purpose = asdict(self.purpose) if self.purpose else None
        self._put(PUBLISHED, {"purpose": purpose, "objects": inventory})

    def note_link(self, name: str) -> None:
        """Record that a file is being copied, which has no mark of the plan; same errors as `read`."""
        self._put(f"{_LINKED}{uuid.uuid4().hex}", name)

    def _put(self, name: str, content: object) -> None:
        key = f"{self.key}/{name}"
        try:
            put(self.bucket, key, json.dumps(content).encode())
        except TakenError as error:
            raise conflict_error(self.bucket, key) from error

    def remove(self, check: Callable[[], None]) -> None:
        """Remove all entries except the last, in an order that keeps the remaining work recognizable.

        Args:
            check: Raises an error if the destination is no longer locked by this process; called before each
                deletion.

        Raises:
            StorageError: The store reports an error.
        """
        names = {name for name, _ in self.bucket.objects_below(self.key) or ()}
        rest = sorted(names - {PLAN, PUBLISHING, PUBLISHED})

        def remove(name: str) -> None:
            check()
            delete(self.bucket, [f"{self.key}/{name}"])

        map_in_threads(write_concurrency(), remove, rest)
        for name in (PLAN, PUBLISHING):
            if name in names:
                remove(name)

    def remove_last(self) -> None:
        """Remove the entry of the published checkpoint; same errors as `remove`."""
        delete(self.bucket, [f"{self.key}/{PUBLISHED}"])


class JournalEntries:
    """Records the finished tasks of a run in journal entries.

    Args:
        journal: The journal.
        run: ID that distinguishes this run's entries from those of other runs; "" creates a new ID.
    """

    def __init__(self, journal: ObjectJournal, run: str = "") -> None:
        self._journal = journal
        self._run = run or uuid.uuid4().hex[:12]
        self._count = 0

    def record(self, records: Iterable[Record]) -> None:
        """Record finished tasks; same errors as `ObjectJournal.read`."""
        journal, name = self._journal, f"{_DONE}{self._run}-{self._count:06d}"
        put(journal.bucket, f"{journal.key}/{name}", json.dumps(list(records)).encode())
        self._count += 1

    def remove(self) -> None:
        """Remove the entries of this run; same errors as `ObjectJournal.read`."""
        names = [f"{_DONE}{self._run}-{number:06d}" for number in range(self._count)]
        delete(self._journal.bucket, [f"{self._journal.key}/{name}" for name in names])


def _parse_inventories(value: Any) -> tuple[Inventory, Inventory]:
    """Parse the old and new inventories; both are empty if they are malformed."""
    is_known = isinstance(value, list) and len(value) == 2 and all(isinstance(item, dict) for item in value)
    return (value[0], value[1]) if is_known else ({}, {})


def _parse_entry(content: bytes) -> Any:
    """Parse an entry; return None if it is malformed."""
    try:
        return json.loads(content)
    except ValueError:
        return None
