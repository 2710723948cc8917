"""Copying checkpoints from any store to any store. The command line does nothing but call this."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from ckpttools.api.arguments import Size
from ckpttools.api.conversion import DEFAULT_MEMORY, Resources
from ckpttools.api.prepared import command
from ckpttools.api.sources import Observe
from ckpttools.core.budget import allowing, parse_size
from ckpttools.core.errors import DestinationExistsError, UsageError
from ckpttools.core.text import plural, some
from ckpttools.core.wording import option
from ckpttools.stores.at_once import at_once
from ckpttools.stores.base import Puts, Traffic
from ckpttools.stores.pace import requesting
from ckpttools.stores.place import Place
from ckpttools.stores.publishing import Published, begun_at, staging_of
from ckpttools.stores.registry import Where, parse
from ckpttools.stores.sharing import Sharing, is_of_repository, shared
from ckpttools.stores.traffic import counted

if TYPE_CHECKING:
    from ckpttools.copying.comparison import Comparison
    from ckpttools.copying.part import FileGroup
    from ckpttools.copying.selection import Selection

Outcome = Literal["copied", "there already", "to be copied"]


@dataclass(frozen=True, slots=True)
class CopiedPart:
    """What became of a step, an item, a model, or of what lies beside the steps of a run.

    Attributes:
        name: below the destination; "" where it is the destination.
        step: its number, where it is one.
        outcome: whether it was copied, is to be copied, or was there already.
        files, bytes: of it.
        bytes_resumed: copied by an earlier run.
        bytes_by_store: copied by the store itself, from one place in it to another.
        bytes_verified: read again where they were written, or compared with what was there already.
        commits_added: names of the commit files that were written and that the source lacks.
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


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What a copy did, or would do.

    Attributes:
        source: where it lies, wherever the process is; of a repository on the hub with its commit.
        destination: as it was named.
        parts: in the order in which they become visible.
        left_out: what lies in the source and is not copied, with the reason.
        remarks: what the user should know.
        files, bytes: that were copied, those of earlier runs as well.
        seconds: wall time.
        peak_bytes: resident memory at its highest, or None where the system does not tell.
        traffic: requests to stores behind a network, and the bytes that came, by address; of the copying, not
            of looking for what to copy.
        published: what it has become in a repository of the hub; None elsewhere, or if nothing was copied.
    """

    source: str
    destination: Place
    parts: tuple[CopiedPart, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    files: int = 0
    bytes: int = 0
    seconds: float = 0.0
    peak_bytes: int | None = None
    traffic: Mapping[str, Traffic] = field(default_factory=dict)
    published: Published | None = None


@dataclass(frozen=True)
class PreparedCopy:
    """A copy decided: what is copied is known and fits; nothing is written yet.

    Attributes:
        source, destination: of it.
        selection: what is copied.
        there: what of that is there already, by its name.
        resources: what copying may take.
        overwrite, verify, observe, command: as of `copy`.
    """

    source: Place
    destination: Place
    selection: Selection
    there: Mapping[str, Comparison]
    resources: Resources
    overwrite: bool
    verify: bool
    observe: Observe | None
    command: str

    @property
    def report(self) -> CopyReport:
        """What would be done."""
        parts = tuple(self._there(part) or self._copied(part, "to be copied") for part in self._parts)
        return self._report(parts, 0.0)

    @property
    def todo(self) -> tuple[FileGroup, ...]:
        """The parts that are not there yet."""
        return tuple(part for part in self._parts if part.name not in self.there)

    @property
    def _parts(self) -> tuple[FileGroup, ...]:
        return tuple(self.selection.parts)

    @property
    def _adds_commits(self) -> bool:
        # Where there is no rename, Orbax goes by these files.
        return self.destination.store.streams is not None

    def run(self, observe: Observe | None = None) -> CopyReport:
        """Copies.

        Args:
            observe: called with the bytes copied so far and those to copy in all, in place of `self.observe`;
                the first call has 0.

        Raises:
            CheckpointError: reading or writing fails. Parts that are complete stay; the same call goes on.
        """
        with requesting(self.resources.requests), counted() as traffic:
            report = self._run(observe or self.observe)
            return replace(report, traffic=traffic())

    def _run(self, observe: Observe | None) -> CopyReport:
        from ckpttools.copying.execute import copy_part, room_of

        started, tally = time.monotonic(), _Tally(sum(part.nbytes for part in self.todo), observe)
        self._copy_small()
        done: list[CopiedPart] = []
        published: Published | None = None
        for part in self._parts:
            there = self._there(part)
            if there is not None:
                done.append(there)
                continue
            place = self._place(part)
            made = copy_part(
                part,
                place,
                room_of(part, place, self.resources.memory, self._jobs(part)),
                overwrite=self.overwrite,
                check_replaced=partial(_check_replaced, part, place),
                verify=self.verify,
                add_commits=self._adds_commits,
                command=self.command,
                observe=tally,
            )
            published = made.published
            done.append(
                self._copied(part, "copied", made.bytes_resumed, made.bytes_by_store, made.bytes_verified)
            )
        return replace(self._report(tuple(done), time.monotonic() - started), published=published)

    def check(self) -> None:
        """Raises what would stop `run` before it writes anything."""
        from ckpttools.copying.execute import check_part, room_of

        for part in self.todo:
            place = self._place(part)
            room_of(part, place, self.resources.memory, self._jobs(part))
            check_part(part, place, self.overwrite, partial(_check_replaced, part, place))

    def _place(self, part: FileGroup) -> Place:
        return self.destination / part.name if part.name else self.destination

    def _jobs(self, part: FileGroup) -> int:
        streams, requests = self.destination.store.streams, part.source.store.costs.requests
        return self.resources.jobs or max(
            self.resources.workers, requests or 0, streams.files if streams else 0
        )

    def _copy_small(self) -> None:
        """Files beside the steps: each has its name once it is complete."""
        for name, source in self.selection.small.items():
            content, place = source.read_bytes(), self.destination / name
            if not place.exists() or place.read_bytes() != content:
                place.put(content)

    def _there(self, part: FileGroup) -> CopiedPart | None:
        found = self.there.get(part.name)
        if found is None:
            return None
        return self._copied(part, "there already", bytes_verified=found.bytes_compared)

    def _copied(
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
                f"{plural(len(added), 'commit file')} added ({some(added)}) that the source lacks: on gs:// "
                "Orbax takes no step and no item for finished without them"
            )
        if self.selection.small:
            yield f"also copied: {', '.join(self.selection.small)}"
        unsure = [part.source for part in self._parts if not _lists_all(part.source)]
        if unsure:
            yield (
                f"the server does not list what is in {unsure[0]}: only files that the index names, and "
                "files with the usual names of a model, are copied"
            )

    def _report(self, parts: tuple[CopiedPart, ...], seconds: float) -> CopyReport:
        from ckpttools.run.memory import peak_bytes

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
class _Tally:
    """Adds up what is copied."""

    total: int
    observe: Observe | None
    done: int = 0

    def __post_init__(self) -> None:
        self(0)

    def __call__(self, nbytes: int) -> None:
        self.done += nbytes
        if self.observe is not None:
            self.observe(self.done, self.total)


def _lists_all(place: Place) -> bool:
    return place.store.lists_all(place.key)


def _found(prepared: PreparedCopy) -> Mapping[str, Comparison]:
    """What of a copy is there already.

    Raises:
        DestinationExistsError: something else is there, and may not be replaced.
        UsageError: the destination takes no single files, and there are some.
    """
    from ckpttools.copying.comparison import compared

    small = prepared.selection.small
    if small and not isinstance(prepared.destination.store, Puts):
        raise UsageError(
            f"what lies beside the steps of a run cannot be copied to {prepared.destination}",
            got=some(list(small)),
            wanted="a directory or a bucket as destination",
            hint="copy a step by its own path",
        )
    for name, source in small.items():
        place = prepared.destination / name
        if not prepared.overwrite and place.exists() and place.read_bytes() != source.read_bytes():
            raise _other_content(place, "different content")

    _check_run(prepared)

    def look(part: FileGroup) -> Comparison | None:
        place = prepared._place(part)
        # What was begun is gone on with, or refused by who looks into its journal.
        return None if begun_at(place) else compared(part, place, verify=prepared.verify)

    parts = prepared.selection.parts
    found: dict[str, Comparison] = {}
    for part, comparison in zip(parts, at_once(prepared.destination.store, look, parts), strict=True):
        if comparison is not None and comparison.difference is None:
            found[part.name] = comparison
        elif comparison is not None and comparison.difference is not None and not prepared.overwrite:
            _refuse_begun(prepared._place(part))
            # What no option replaces is refused for that reason: nobody is sent from one refusal to the next.
            _check_replaced(part, prepared._place(part))
            raise _other_content(prepared._place(part), comparison.difference)
    return found


def _check_run(prepared: PreparedCopy) -> None:
    """Refuses to put steps into a directory that is something else."""
    from ckpttools.formats.orbax.steps import OrbaxRun

    below = prepared.selection.steps_at
    if below is None:
        return
    place = prepared.destination / below if below else prepared.destination
    if not place.is_dir():
        return
    names = {(prepared.destination / part.name).name for part in prepared.selection.parts}
    small = {(prepared.destination / name).name for name in prepared.selection.small}
    others = [
        entry.name
        for entry in place.entries()
        if entry.name not in small and not any(entry.name.startswith(name) for name in names)
    ]
    if others and not OrbaxRun(place).steps:
        _refuse_begun(place)
        raise DestinationExistsError(
            f"{place} exists, and is not a run",
            got=f"{others[0]} in it, and no steps",
            wanted="a run, to which steps can be added, or a new name",
            hint="choose another destination, such as a directory in it",
        )


def _refuse_begun(place: Place) -> None:
    """Raises DestinationExistsError where another copy to a place was interrupted."""
    from ckpttools.formats.interrupted import begun_in, next_step

    left = begun_at(place) or begun_in(place)
    if left is not None:
        raise DestinationExistsError(
            f"another {left.kind} to {place} was interrupted",
            got=left.command or None,
            wanted="that one brought to its end, or a new name",
            hint=next_step(left),
        )


def _other_content(place: Place, difference: str) -> DestinationExistsError:
    return DestinationExistsError(
        f"{place} exists, and is not what would be copied there",
        got=difference,
        wanted="a new name, or the same content",
        hint=f"choose another destination, or allow its replacement with {option('overwrite', True)}",
    )


def _check_replaced(part: FileGroup, place: Place) -> None:
    """Refuses to replace what holds something that would be lost.

    Raises:
        DestinationExistsError: it is a checkpoint of another kind, such as a run; or there is a file that no
            checkpoint has, an item that the source lacks, or the state of an optimizer.
    """
    from ckpttools.copying.files import files_below
    from ckpttools.formats.registry import is_own_file

    there = files_below(place) if place.is_dir() else {}
    known = {*part.files, *part.commits}
    lost = [name for name in there if name not in known and not is_of_repository(place, name)]
    if lost:
        _check_kinds(part.source, place)
    items = {name.partition("/")[0] for name in part.files if "/" in name}
    for name in lost:
        head, slash, _ = name.partition("/")
        if not is_own_file(name) or (part.step is not None and slash and head not in items):
            raise DestinationExistsError(
                f"{place} is not replaced: it holds {name}, which is not in what is copied",
                wanted="a checkpoint with the same items, and nothing else",
                hint="choose another destination, or move away what is there",
            )
    if there:
        _check_optimizer(part.source, place)


def _check_kinds(source: Place, place: Place) -> None:
    """Refuses to replace a run, or a checkpoint of another kind, or one with others in it."""
    from ckpttools.copying.kinds import kind_of, others_in

    old, new = kind_of(place), kind_of(source)
    others = [name for name in others_in(place) if not (source / name).exists()] if old == new else []
    if old != new or others:
        raise DestinationExistsError(
            f"{place} is not replaced: it is {f'{old} with {others[0]} in it' if others else old}",
            wanted=f"{new}, as what is copied, and nothing else",
            hint="choose another destination, or move away what is there",
        )


def _check_optimizer(source: Place, place: Place) -> None:
    from ckpttools.api.occupant import optimizer_in

    old = optimizer_in(place)
    if old and not optimizer_in(source):
        raise DestinationExistsError(
            f"{place} is not replaced: it holds the state of an optimizer ({old})",
            wanted="no optimizer state where what replaces it has none",
            hint="choose another destination, or move away what is there",
        )


@command(returns="CopyReport")
def copy(
    source: Where,
    destination: Where,
    *,
    steps: Iterable[int] = (),
    latest: int | None = None,
    verify: bool = False,
    memory: Size = DEFAULT_MEMORY,
    jobs: int | None = None,
    requests: int | None = None,
    overwrite: bool = False,
    public: bool = False,
    observe: Observe | None = None,
    command: str = "",
) -> PreparedCopy:
    """Copies a checkpoint byte for byte, from any store to any store.

    Of a run the finished steps are copied, oldest first, each visible when it is complete; those that are
    there already are left as they are, so that the same call later copies the new ones.

    Args:
        source: a run, a step, an item, or a directory with a checkpoint of another format.
        destination: what it becomes: a run, a step, an item, a directory.
        steps: of a run, those that are wanted; none for all.
        latest: of a run, how many of the latest are wanted; None for all.
        verify: read again all that was written, and compare all of what is there already.
        memory: bytes that may be resident at most, such as "512MiB".
        jobs: files or parts of files that are copied at the same time; None for as many as suit the stores.
        requests: reads under way at once in stores behind a network; None for as many as are found good.
        overwrite: replace checkpoints at the destination whose content differs.
        public: a new repository of the hub is for everybody to read; it is private without that.
        observe: called with the bytes copied so far and those to copy in all; the first call has 0.
        command: what the user typed, for whoever finds the work unfinished.

    Raises:
        DestinationExistsError: something else is at the destination.
        FormatError: the source is not finished, not whole, or refers to files outside.
        SourceChangedError: it was changed while it was copied.
        CheckpointError: it does not fit into the memory or the disk, or reading or writing fails.
    """
    from ckpttools.copying.selection import selected
    from ckpttools.copying.whole import check_whole
    from ckpttools.run.apart import check_apart

    read, written = parse(source), parse(destination, is_written=True)
    written = shared(written, Sharing(public))
    staging_of(written)  # raises where nothing can be written
    check_apart(read, written)
    if latest is not None and latest < 1:
        raise UsageError(f"{option('latest', latest)} means no step", wanted="1 or more")
    resources = Resources(parse_size(memory), jobs, destination=written, requests=requests)
    with allowing(resources.memory), requesting(requests):
        selection = selected(read, tuple(steps), latest)
        made = PreparedCopy(read, written, selection, {}, resources, overwrite, verify, observe, command)
        made = replace(made, there=_found(made))
        at_once(read.store, check_whole, made.todo)
    return made
