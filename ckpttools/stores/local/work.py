"""A destination on a disk while this process has it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ckpttools.core.dataclass import dataclass
from ckpttools.stores.local.data_files import LocalDataFiles
from ckpttools.stores.local.files import errors_of
from ckpttools.stores.local.journal import Journal
from ckpttools.stores.local.parts import members
from ckpttools.stores.local.store import STORE
from ckpttools.stores.local.written import StagingFiles
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import Record

if TYPE_CHECKING:
    from ckpttools.stores.local.staging import LocalStaging


@dataclass(frozen=True, slots=True)
class LocalWork:
    """A staging directory that is this process's; see `publishing.Work`.

    Attributes:
        staging: the directory.
        journal: open and locked.
        plan: fingerprint of what is to be done.
        files: the files that are written in the directory; None if everything is published already.
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
        written = None if self.files is None else self.files.written
        return LocalDataFiles(self.staging.content, sizes, heads, written=written)

    def files_of_fork(self, sizes: Mapping[str, int]) -> LocalDataFiles:
        return LocalDataFiles(self.staging.content, sizes, {})

    def enter(self, records: Iterable[Record]) -> None:
        self.journal.enter(records)

    def discard(self) -> None:
        self.staging.discard(self.journal)

    def publish(self) -> None:
        self.publish_checked(lambda: None)

    def publish_checked(self, check: Callable[[], None]) -> None:
        self.staging.publish(self.journal, self.files, check)

    def conclude(self) -> None:
        self.staging.conclude(self.journal)
