"""A planned copy and its execution, one part after the other.

Each part becomes visible when it is complete.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace
from functools import partial
from typing import Literal

from ckpttools.copying.execute import check_part, copy_part, room_of
from ckpttools.copying.part import FileGroup
from ckpttools.copying.pieces import CopyRoom
from ckpttools.copying.selection import CopySelection
from ckpttools.copying.target import CopyComparison, CopyTarget
from ckpttools.core.dataclass import dataclass
from ckpttools.core.process_memory import peak_bytes
from ckpttools.core.text import plural, sample_names
from ckpttools.stores.concurrency import use_concurrency
from ckpttools.stores.costs import Traffic
from ckpttools.stores.fetching import Observe
from ckpttools.stores.location import Location
from ckpttools.stores.outside_links import check_outside_links
from ckpttools.stores.publishing import Published
from ckpttools.stores.registry import count_traffic


@dataclass(frozen=True, slots=True)
class Effort:
    """Limits of a copy.

    Attributes:
        memory: Maximum resident bytes.
        jobs: Number of files or parts of files that are copied concurrently; None for as many as suit the
            stores.
        workers: Number of workers that suits the processors.
        requests: Concurrent reads in network stores; None to choose the number automatically.
    """

    memory: int
    jobs: int | None
    workers: int
    requests: int | None

    def jobs_between(self, source: Location, destination: Location) -> int:
        """Return the number of jobs for copying from one location to another."""
        streams, requests = destination.store.streams, source.store.costs.requests
        return self.jobs or max(self.workers, requests or 0, streams.files if streams else 0)


@dataclass(frozen=True, repr=False)
class PreparedCopy:
    """A planned copy. Its source is known and fits into memory; nothing has been written yet.

    Attributes:
        source: The source as the user passed it.
        target: The destination.
        selection: The selected content.
        there: Comparison with existing content, by name.
        effort: Limits of the copy.
        verify: Whether all written data is read again.
        observe: Called with the bytes copied so far and the total; may be None.
        command: The command line, for messages about unfinished work.
        unchecked: Remarks about the source, such as items that were not searched for missing chunks.
    """

    source: Location
    target: CopyTarget
    selection: CopySelection
    there: Mapping[str, CopyComparison]
    effort: Effort
    verify: bool = False
    observe: Observe | None = None
    command: str = ""
    unchecked: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<PreparedCopy: {self.report!r}>"

    @property
    def destination(self) -> Location:
        return self.target.location

    @property
    def report(self) -> CopyReport:
        """Report of a dry run."""
        parts = tuple(
            self._find_existing(part) or self._copied_part(part, "to be copied") for part in self._parts
        )
        return self._report(parts, 0.0)

    @property
    def todo(self) -> tuple[FileGroup, ...]:
        """The parts that do not exist yet."""
        return tuple(part for part in self._parts if part.name not in self.there)

    @property
    def _parts(self) -> tuple[FileGroup, ...]:
        return tuple(self.selection.parts)

    @property
    def _adds_commits(self) -> bool:
        # Orbax requires these files in stores without renames.
        return self.destination.store.streams is not None

    def run(self, observe: Observe | None = None) -> CopyReport:
        """Run the copy.

        Args:
            observe: Called with the bytes copied so far and the total, instead of `self.observe`; the first
                call has 0.

        Raises:
            CheckpointError: Reading or writing fails. Complete parts remain, and the same call resumes.
        """
        with use_concurrency(self.effort.requests), count_traffic() as traffic:
            report = self._run(observe or self.observe)
            return replace(report, traffic=traffic())

    def _run(self, observe: Observe | None) -> CopyReport:
        started, tally = time.monotonic(), _CopyTally(sum(part.nbytes for part in self.todo), observe)
        done: list[CopiedPart] = []
        published: Published | None = None
        for part in self._parts:
            existing = self._find_existing(part)
            if existing is not None:
                done.append(existing)
                continue
            result = copy_part(
                part,
                self.target.of(part),
                self._room(part),
                overwrite=self.target.overwrite,
                check_replaced=partial(self.target.check_replaced, part),
                verify=self.verify,
                add_commits=self._adds_commits,
                command=self.command,
                observe=tally,
            )
            published = result.published
            done.append(
                self._copied_part(
                    part, "copied", result.bytes_resumed, result.bytes_by_store, result.bytes_verified
                )
            )
        # After an error, the files that describe the run still describe the steps that it has.
        self._copy_small()
        return replace(self._report(tuple(done), time.monotonic() - started), published=published)

    def check(self) -> None:
        """Raise the errors that would stop `run` before it writes anything."""
        for part in self.todo:
            self._room(part)
            check_replaced = partial(self.target.check_replaced, part)
            check_part(part, self.target.of(part), self.target.overwrite, check_replaced)

    def _room(self, part: FileGroup) -> CopyRoom:
        location = self.target.of(part)
        return room_of(part, location, self.effort.memory, self.effort.jobs_between(part.source, location))

    def _copy_small(self) -> None:
        """Copy the files next to the steps, each atomically."""
        for name, source in self.selection.small.items():
            with source.open() as file:
                content, location = file.read(0, file.size), self.destination / name
                file.check_unchanged()
            if not location.exists() or location.read_bytes() != content:
                location.put(content)

    def _find_existing(self, part: FileGroup) -> CopiedPart | None:
        result = self.there.get(part.name)
        if result is None:
            return None
        built = self._copied_part(part, "there already", bytes_verified=result.bytes_compared)
        return replace(built, files_compared=result.files_compared, files_unchanged=result.files_unchanged)

    def _copied_part(
        self,
        part: FileGroup,
        outcome: Outcome,
        bytes_resumed: int = 0,
        bytes_by_store: int = 0,
        bytes_verified: int = 0,
    ) -> CopiedPart:
        added = part.missing_commits if self._adds_commits and outcome != "there already" else ()
        return CopiedPart(
            part.name,
            part.step,
            outcome,
            len(part.files),
            part.nbytes,
            bytes_resumed,
            bytes_by_store,
            bytes_verified,
            added,
        )

    def _remarks(self, parts: Iterable[CopiedPart]) -> Iterator[str]:
        added = [name for part in parts for name in part.commits_added]
        if added:
            yield (
                f"{plural(len(added), 'commit file')} added ({sample_names(added)}) that the source "
                "lacks: on gs://, Orbax considers steps and items without them unfinished"
            )
        if self.selection.small:
            yield f"also copied: {', '.join(self.selection.small)}"
        yield from self.unchecked
        links = {name: target for part in self._parts for name, target in part.outside_links.items()}
        yield from check_outside_links(links, is_public=False, is_allowed=True)
        unsure = [part.source for part in self._parts if not _lists_all(part.source)]
        if unsure:
            yield (
                f"the server does not list {unsure[0]}: only files in the index, and "
                "files with the usual names of a model, are copied"
            )

    def _report(self, parts: tuple[CopiedPart, ...], seconds: float) -> CopyReport:
        new = [part for part in parts if part.outcome != "there already"]
        return CopyReport(
            str(self.source.absolute()),
            self.destination,
            parts,
            self.selection.left_out,
            tuple(self._remarks(parts)),
            sum(part.files for part in new),
            sum(part.bytes for part in new),
            seconds,
            peak_bytes(),
        )


@dataclass
class _CopyTally:
    """Totals of copied data."""

    total: int
    observe: Observe | None
    done: int = 0

    def __post_init__(self) -> None:
        self(0)

    def __call__(self, nbytes: int) -> None:
        self.done += nbytes
        if self.observe is not None:
            self.observe(self.done, self.total)


def _lists_all(location: Location) -> bool:
    return location.store.lists_all(location.key)


Outcome = Literal["copied", "there already", "to be copied"]


@dataclass(frozen=True, slots=True)
class CopiedPart:
    """The result for a step, an item, a model, or the files next to a run's steps.

    Attributes:
        name: Name below the destination; "" for the destination itself.
        step: Number of the step, if it is one.
        outcome: Whether the part was copied, is to be copied, or already existed.
        files, bytes: Number and total size of the files.
        bytes_resumed: Bytes copied by an earlier run.
        bytes_by_store: Bytes copied within the store, without passing through this machine.
        bytes_verified: Bytes read again after writing, or compared with existing content.
        files_compared: Number of existing copies whose content was compared.
        files_unchanged: Number of existing copies that were not read, because source and copy have the inode,
            size and times, or the generation or ETag, from when they were last copied or compared.
        commits_added: Names of the commit files that were written and that the source lacks.
    """

    name: str
    step: int | None
    outcome: Outcome
    files: int
    bytes: int
    bytes_resumed: int = 0
    bytes_by_store: int = 0
    bytes_verified: int = 0
    commits_added: tuple[str, ...] = ()
    files_compared: int = 0
    files_unchanged: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class CopyReport:
    """The result of a copy or a dry run.

    Attributes:
        source: Absolute location of the source; for a Hub repository, with its commit.
        destination: The destination as the user passed it.
        parts: The parts, in the order in which they become visible.
        omitted: Content of the source that is not copied, with reasons.
        remarks: Remarks for the user.
        files, bytes: Number of files and bytes copied, including those of earlier runs.
        seconds: Wall time.
        peak_bytes: Peak resident memory, or None if the system does not report it.
        traffic: Requests to network stores and bytes received, by address, for the copying only and not for
            selecting the content.
        published: Commit in a Hub repository; None for other destinations, or if nothing was copied.
    """

    source: str
    destination: Location
    parts: tuple[CopiedPart, ...]
    omitted: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    files: int = 0
    bytes: int = 0
    seconds: float = 0.0
    peak_bytes: int | None = None
    traffic: Mapping[str, Traffic] = field(default_factory=dict)
    published: Published | None = None

    def __repr__(self) -> str:
        outcomes = Counter(part.outcome for part in self.parts)
        parts = "".join(f"{count:,} {outcome}, " for outcome, count in outcomes.items())
        copied = f"{plural(self.files, 'file')}, {self.bytes:,} bytes"
        return f"<CopyReport of {self.source} to {self.destination}: {parts}{copied}>"
