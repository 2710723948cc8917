"""One conversion by many processes: a plan in a file, its parts, and the last steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from ckpttools.api.beside import check_beside
from ckpttools.api.prepared import Prepared
from ckpttools.api.published import Published, check_unpublished, note_published, published_at
from ckpttools.array.fingerprint import identity
from ckpttools.array.lazy import ByteSource
from ckpttools.core.budget import BASE_BYTES, does_not_fit
from ckpttools.core.errors import CheckpointError, DestinationExistsError, FormatError, UsageError
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
from ckpttools.stores.memory import Bytes
from ckpttools.stores.pace import requesting
from ckpttools.stores.place import Place
from ckpttools.stores.publishing import LockedError, Purpose, staging_of
from ckpttools.stores.registry import Where, parse
from ckpttools.stores.relocation import AS_PLANNED, Relocation
from ckpttools.stores.shares import PublishedError, Share, Standing, named, shared_staging

Replan = Callable[[Header, Relocation], Prepared]
"""Makes the plan again of the command line that a header has, with places as they are here."""

# A line of a plan, and what is made of those that a part needs.
_BYTES_PER_FILE_BYTE = 4
# Of whoever waits for another process that publishes.
_LOOK_SECONDS = 1.0


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
        made=time.time(),
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


def destination_of(header: Header, relocation: Relocation = AS_PLANNED) -> Place:
    """Where the checkpoint of a plan is here.

    Raises:
        UsageError: in another kind of store, for which another plan would have been made.
    """
    planned, here = parse(header.destination, is_written=True), relocation.there(header.destination)
    destination = parse(here, is_written=True)
    if destination.store.scheme != planned.store.scheme:
        raise UsageError(
            f"the plan was made for {planned.store.scheme}://, where files are written in another way",
            place=destination,
            wanted=f"a destination as {planned} is",
            hint=f"leave {option('root')} for it out, or make the plan for this destination",
        )
    return destination


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

    Returns:
        What was done; or that all was published before, and there was nothing to do.

    Raises:
        LockedError: a single run is at work on the destination, or another process on some of these tasks.
        SourceChangedError: a source is not what it was when the plan was made.
        CheckpointError: of any kind; what was done stays.
    """
    header, share = file.header, part_share(file, part)
    _check_version(header)
    destination = destination_of(header, relocation)
    if published_at(file, destination) is not None:
        return PartReceipt(str(part), destination, is_published=True)
    if share.first == share.stop:
        return PartReceipt(str(part), destination)
    tasks = file.tasks_of(share.first, share.stop)
    with requesting(header.requests), ExitStack() as closing:
        if header.has_tasks:
            workers = _workers(file, memory or header.memory, jobs, relocation)
            plan, opened = file.part(share.first, share.stop, workers, relocation.there)
            closing.callback(opened.close)
        else:
            whole = _replanned(file, relocation, replan).plan
            plan, opened = replace(whole, tasks=whole.tasks[tasks.start : tasks.stop]), None
        execute = partial(
            execute_part,
            plan,
            tasks.start,
            share,
            destination,
            Purpose(header.plan, header.source, command, str(parse(".").absolute())),
            nbytes=header.nbytes,
            overwrite=header.overwrite,
            sources=lambda: plan.sources if opened is None else opened.files,
            check_replaced=partial(check_unpublished, file, destination),
            observe=observe,
        )
        while True:
            try:
                return execute()
            except PublishedError:
                return PartReceipt(str(part), destination, is_published=True)
            except LockedError:
                if not _is_all_done(file, destination):
                    raise
                # Somebody publishes it.
                time.sleep(_LOOK_SECONDS)


def _is_all_done(file: PlanFile, destination: Place) -> bool:
    """Whether no task is left, so that whoever has the destination is about to publish it, or has."""
    if published_at(file, destination) is not None:
        return True
    standing, count = standing_of(file.header, destination), file.header.tasks
    return standing.is_published or len(numbers_of(standing.all_records, count)) == count


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
    streams = destination_of(header, relocation).store.streams
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
        known = None if isinstance(source, Bytes) else there.get(str(parse(source.path).absolute()))
        return (known.real, known.version) if known else identity(source)

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
    warn: Callable[[str], None] = lambda text: None,
) -> Receipt | Published:
    """Writes index and metadata of what the parts have made, and gives it its name.

    Whoever comes while another process does that waits for it.

    Args:
        file, replan, relocation, observe: as of `run_part`.
        warn: called with what the user should know.

    Returns:
        What was done; or since when nothing is left to do.

    Raises:
        UnfinishedError: tasks are missing.
        LockedError: somebody is still at work.
        SourceChangedError: a source is not what it was when the plan was made; nothing is lost by that.
        CheckpointError: as `ckpttools.api.conversion.Conversion.run`.
    """
    header = file.header
    _check_version(header)
    destination = destination_of(header, relocation)
    prepared, was_done = None, False
    while True:
        standing = standing_of(header, destination)
        if not standing.is_begun:
            found = published_at(file, destination)
            if found is None and was_done and not standing.other and destination.exists():
                # Nothing could be noted beside the plan.
                found = Published(destination, header.plan, time.time())
            if found is not None:
                return found
        if not standing.is_published:
            _check_done(file, standing, destination)
        was_done = True
        prepared = prepared or _replanned(file, relocation, replan)
        try:
            return prepared.conversion.run(
                destination,
                overwrite=header.overwrite,
                observe=observe,
                planned=header.plan,
                check_replaced=partial(check_unpublished, file, destination),
                conclude=partial(_conclude, file, destination, warn),
            )
        except LockedError:
            # Whoever has it publishes this plan, or what has happened is said when it is looked at again.
            time.sleep(_LOOK_SECONDS)
        except DestinationExistsError:
            if standing_of(header, destination).is_begun:
                raise
            # Another process was quicker.


def _conclude(file: PlanFile, destination: Place, warn: Callable[[str], None]) -> None:
    try:
        note_published(file, destination)
    except CheckpointError as error:
        why = error.got or error.message
        warn(f"note     parts run again will be refused: nothing can be put beside {file.place}: {why}")


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
