"""One conversion by many processes: a plan in a file, its parts, and the last steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ckpttools.api.beside import check_beside
from ckpttools.api.prepared import Prepared
from ckpttools.array.lazy import ByteSource
from ckpttools.core.budget import BASE_BYTES, does_not_fit
from ckpttools.core.errors import FormatError, UsageError
from ckpttools.core.version import __version__
from ckpttools.core.wording import option
from ckpttools.plan.dealing import Part, dealt
from ckpttools.plan.plan_file import Header, PlanFile, encoded, read_plan
from ckpttools.plan.reading import cores
from ckpttools.run.entries import unfinished
from ckpttools.run.events import Observer, Receipt
from ckpttools.run.executor import fingerprint, source_of
from ckpttools.run.parts import PartReceipt, execute_part, numbers_of
from ckpttools.stores.base import Costs
from ckpttools.stores.pace import requesting
from ckpttools.stores.place import Place
from ckpttools.stores.publishing import LockedError, Purpose, staging_of
from ckpttools.stores.registry import Where, parse
from ckpttools.stores.relocation import AS_PLANNED, Relocation
from ckpttools.stores.shares import Share, Standing, named, shared_staging

Replan = Callable[[Header, Relocation], Prepared]
"""Makes the plan again of the command line that a header has, with places as they are here."""

# A line of a plan, and what is made of those that a part needs.
_BYTES_PER_FILE_BYTE = 4


@dataclass(frozen=True, slots=True)
class PlanWritten:
    """A plan that was written.

    Attributes:
        file: where; `nbytes` long.
        destination: of the conversion.
        plan: its fingerprint.
        tasks, bytes_in, bytes_out: of all of it.
        groups: what it can be dealt out in: so many parts have something to do.
        has_tasks: whether parts are done without planning again.
    """

    file: Place
    nbytes: int
    destination: Place
    plan: str
    tasks: int
    groups: int
    bytes_in: int
    bytes_out: int
    has_tasks: bool


def write_plan(prepared: Prepared, file: Where, words: Sequence[str]) -> PlanWritten:
    """Writes what has been decided to a file, from which many processes carry it out.

    Args:
        prepared: the conversion.
        file: where; a plan that is there is replaced.
        words: of the command line that it was made of, after `ckpt`.

    Raises:
        UsageError: one process has to do it, or something else is at `file`.
        CheckpointError: what would stop the conversion before it writes anything.
    """
    place = parse(file, is_written=True)
    _check_file(place)
    check_beside(place, prepared.plan.tree.metadata.place, prepared.destination)
    content = content_of(prepared, words)
    place.put(content)
    made = read_plan(place)
    said = made.header
    return PlanWritten(
        place,
        len(content),
        prepared.destination,
        said.plan,
        said.tasks,
        len(made.groups),
        said.bytes_in,
        said.bytes_out,
        said.has_tasks,
    )


def content_of(prepared: Prepared, words: Sequence[str]) -> bytes:
    """The content of a plan's file; arguments and errors as of `write_plan`."""
    _check_shareable(prepared)
    header = header_of(prepared, words)
    prepared.conversion.check(prepared.destination, overwrite=prepared.overwrite, planned=header.plan)
    return encoded(prepared.plan, header)


def header_of(prepared: Prepared, words: Sequence[str]) -> Header:
    """What the first line of a plan's file says."""
    plan, conversion = prepared.plan, prepared.conversion
    return Header(
        version=__version__,
        command=tuple(words),
        directory=str(parse(".").absolute()),
        jobs=conversion.jobs,
        source=source_of(plan),
        destination=str(prepared.destination.absolute()),
        plan=fingerprint(plan, conversion.writer),
        overwrite=prepared.overwrite,
        memory=plan.memory,
        requests=conversion.requests,
        nbytes=plan.layout.nbytes,
        arrays=len(plan.tree.arrays),
        tasks=len(plan.tasks),
        bytes_in=plan.bytes_in,
        bytes_out=plan.bytes_out,
        buffer_bytes=plan.buffer_bytes,
        scratch_bytes=plan.scratch_bytes,
    )


def _check_shareable(prepared: Prepared) -> None:
    """Raises UsageError where one process has to see all of it."""
    shared_staging(staging_of(prepared.destination), prepared.destination)
    if prepared.manifest is not None:
        raise UsageError(
            f"{option('manifest')} takes one process, through which everything passes",
            wanted="the plan without it",
            hint=f"hash what was written: ckpt hash {prepared.destination} --manifest {prepared.manifest}",
        )
    if prepared.download:
        raise UsageError(
            f"{option('download', True)} copies to one machine",
            wanted="the plan without it: each part reads what it needs from the hub",
        )


def _check_file(place: Place) -> None:
    place.check_takes_files()
    if not place.exists():
        return
    try:
        read_plan(place)
    except FormatError as error:
        raise UsageError(
            f"{place} is there, and is no plan", hint="choose another name for the plan"
        ) from error


def part_share(file: PlanFile, part: Part) -> Share:
    """The groups of a part."""
    ends = dealt(file.groups, part.count)
    return Share(str(part), ends[part.number], ends[part.number + 1])


def run_part(
    file: PlanFile,
    part: Part,
    *,
    replan: Replan,
    relocation: Relocation = AS_PLANNED,
    memory: int | None = None,
    jobs: int | None = None,
    command: str = "",
    observe: Observer = lambda event: None,
) -> PartReceipt:
    """Does what nobody has done yet of a part.

    Args:
        file: the plan.
        part: which.
        replan: for plans whose file has no tasks.
        relocation: where its places are here.
        memory: bytes that this process may have resident; None for what the plan was made for.
        jobs: workers at a time; None for as many as suit the work.
        command: the command line, for whoever finds the work unfinished.
        observe: called with every event.

    Raises:
        LockedError: a single run is at work on the destination, or another process on some of these tasks.
        SourceChangedError: a source is not what it was when the plan was made.
        CheckpointError: of any kind; what was done stays.
    """
    header, share = file.header, part_share(file, part)
    _check_version(header)
    destination = parse(relocation.there(header.destination), is_written=True)
    if share.first == share.stop:
        return PartReceipt(str(part), destination)
    tasks = file.tasks_of(share.first, share.stop)
    with requesting(header.requests):
        if header.has_tasks:
            workers = _workers(file, memory or header.memory, jobs, relocation)
            plan, opened = file.part(share.first, share.stop, workers, relocation.there)
        else:
            whole = _replanned(file, relocation, replan).plan
            plan, opened = replace(whole, tasks=whole.tasks[tasks.start : tasks.stop]), None
        return execute_part(
            plan,
            tasks.start,
            share,
            destination,
            Purpose(header.plan, header.source, command, str(parse(".").absolute())),
            nbytes=header.nbytes,
            overwrite=header.overwrite,
            sources=lambda: plan.sources if opened is None else opened.files,
            observe=observe,
        )


def _check_version(header: Header) -> None:
    """Raises UsageError where what a task means may have changed since the plan was made."""
    if header.version != __version__:
        raise UsageError(
            "the plan was made by another version of ckpttools",
            got=header.version,
            wanted=__version__,
            hint="use that version for all parts, or make the plan again",
        )


def _workers(file: PlanFile, memory: int, jobs: int | None, relocation: Relocation) -> int:
    """As many as suit this machine and fit into the memory."""
    header = file.header
    costs = {
        parse(relocation.there(each.path)).store.costs for each in file.sources if "://" in each.path
    } or {Costs()}
    streams = parse(header.destination).store.streams
    requests = max(each.requests or 0 for each in costs)
    wanted = jobs or max(min(16, 2 * cores()), requests, streams.files if streams else 0)
    base = BASE_BYTES + _BYTES_PER_FILE_BYTE * file.nbytes + sum(each.memory for each in costs)
    each = header.buffer_bytes + header.scratch_bytes + (streams.memory if streams else 0)
    if base + each > memory:
        raise does_not_fit("a part does not fit into the memory allowed", memory, base + each)
    return max(1, min(wanted, (memory - base) // max(1, each)))


def _replanned(file: PlanFile, relocation: Relocation, replan: Replan) -> Prepared:
    """The plan, made again.

    Raises:
        SourceChangedError: sources are not what they were.
        UsageError: another plan comes of it.
    """
    there = {relocation.there(each.path): each for each in file.sources}
    for each in file.sources:
        if not each.is_inline:
            each.opened(relocation.there).close()
    prepared = replan(file.header, relocation)

    def identify(source: ByteSource) -> tuple[str, str]:
        place = parse(source.path)
        known = there.get(str(place.absolute()))
        return (known.real, known.version) if known else (str(place.resolve()), source.version)

    conversion = prepared.conversion
    if fingerprint(conversion.plan, conversion.writer, identify, relocation.back) != file.header.plan:
        raise UsageError(
            "the same command makes another plan now",
            wanted=f"plan {file.header.plan[:12]}",
            hint="see to it that the files beside the arrays, such as config.json and rules, are what they "
            "were; or make the plan again",
        )
    return prepared


def publish_plan(
    file: PlanFile,
    *,
    replan: Replan,
    relocation: Relocation = AS_PLANNED,
    observe: Observer = lambda event: None,
) -> Receipt:
    """Writes index and metadata of what the parts have made, and gives it its name.

    Args:
        file, replan, relocation, observe: as of `run_part`.

    Raises:
        UnfinishedError: tasks are missing.
        LockedError: somebody is still at work.
        SourceChangedError: a source is not what it was when the plan was made; nothing is lost by that.
        CheckpointError: as `ckpttools.api.conversion.Conversion.run`.
    """
    header = file.header
    _check_version(header)
    destination = parse(relocation.there(header.destination), is_written=True)
    standing = standing_of(header, destination)
    if not standing.is_published:
        _check_done(file, standing, destination)
    prepared = _replanned(file, relocation, replan)
    return prepared.conversion.run(
        destination, overwrite=header.overwrite, observe=observe, planned=header.plan
    )


def standing_of(header: Header, destination: Place) -> Standing:
    """What is there of a plan."""
    return shared_staging(staging_of(destination, header.overwrite), destination).standing(header.plan)


def _check_done(file: PlanFile, standing: Standing, destination: Place) -> None:
    """Raises UnfinishedError, or UsageError where nothing was begun."""
    count = file.header.tasks
    if not standing.is_begun and (standing.other or destination.exists()):
        raise UsageError(
            f"nothing of this plan is at {destination}",
            got=f"the beginning of another conversion: {standing.other}"
            if standing.other
            else "a checkpoint or something else, complete: this plan's, if all was published before",
            wanted=f"the parts of plan {file.header.plan[:12]}",
            hint="ckpt doctor tells what is there",
        )
    missing = sorted({*range(count)} - numbers_of(standing.all_records, count))
    if missing:
        raise unfinished(missing, count, destination, named(standing.members) or None)
    if at_work := named(standing.members):
        raise LockedError(
            "a part is still at work", place=destination, got=at_work, hint="wait until it has ended"
        )
