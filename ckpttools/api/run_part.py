"""Run a part of a plan in one of many processes."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from ckpttools.api.calls import user_code
from ckpttools.api.options.runs import CODE, PLAN_LIMITS, RUN_PART
from ckpttools.api.plans import (
    Planned,
    check_unpublished,
    check_version,
    destination_of,
    find_published,
    open_plan,
    relocation_of,
    replan_file,
)
from ckpttools.api.prepared import Prepared
from ckpttools.core.argument_checks import validate_arguments
from ckpttools.core.memory_limit import baseline_bytes, memory_error
from ckpttools.core.message_terms import error_in_plan
from ckpttools.core.options import declare, parse_size_option
from ckpttools.plan.parts import Part, dealt, detect_part, parse_part
from ckpttools.plan.plan_file import Header, PlanFile, PlannedSource
from ckpttools.plan.task import cores
from ckpttools.run.events import Observer
from ckpttools.run.parts import PartReceipt, execute_part, finished_tasks
from ckpttools.run.source_copies import SourceCopy, SourceStates, identify_copy, read_source_states
from ckpttools.stores.concurrency import use_concurrency
from ckpttools.stores.costs import Costs
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import JobInfo, LockedError, staging_of
from ckpttools.stores.registry import parse
from ckpttools.stores.relocation import Relocation, Roots
from ckpttools.stores.shares import PublishedError, Share, Standing, shared_staging

# Memory for a line of a plan and for the objects of the lines that a part needs, per byte of the file.
_BYTES_PER_FILE_BYTE = 4
# Polling interval while another process publishes.
_POLL_SECONDS = 1.0


@validate_arguments
@declare(*RUN_PART, *CODE, *PLAN_LIMITS)
def run_part(
    plan: Planned,
    part: Part | str | None = None,
    *,
    parts: int | None = None,
    root: Roots = (),
    memory: int | str | None = None,
    jobs: int | None = None,
    observe: Observer = lambda event: None,
    prepared: Prepared | None = None,
    map: str | None = None,
    family: str | None = None,
) -> PartReceipt:
    """Run the unfinished tasks of a part of a plan.

    Parts may run in any order, on any machines, concurrently, repeatedly, and again after they were killed.

    Args:
        plan: The plan file.
        root: New roots for locations of the plan that differ on this machine: "/data=/mnt/data", several of
            these, or a mapping.
        observe: Called with every event (`ckpttools.run.events`).
        prepared: The same conversion, prepared in this process; needed if the file has neither the tasks nor
            the call.

    Returns:
        The receipt of the part; `is_published` is true if the plan was already published.

    Raises:
        UsageError: The part is unknown.
        CodeNotAllowedError: The part must be planned again with code that the user did not name.
        LockedError: A single run uses the destination, or another process has some of these tasks.
        SourceChangedError: A source has changed since the plan was made.
        CheckpointError: Any other failure. Finished work is kept.
    """
    selected_part = (
        detect_part(parts) if part is None else parse_part(part) if isinstance(part, str) else part
    )
    allowed = None if memory is None else parse_size_option("memory", memory)
    code = user_code(map=map, family=family)
    file = open_plan(plan)
    relocation = relocation_of(file, root)
    with error_in_plan(file.location):
        return part_done(
            file,
            selected_part,
            relocation,
            allowed,
            jobs,
            observe=observe,
            prepared=prepared,
            code=code,
        )


def part_done(
    file: PlanFile,
    part: Part,
    relocation: Relocation,
    memory: int | None = None,
    jobs: int | None = None,
    *,
    observe: Observer,
    prepared: Prepared | None = None,
    code: Mapping[str, str] | None = None,
) -> PartReceipt:
    """Run a part. See `run_part` for arguments, result and errors, and `replan_file` for `code`."""
    header, share = file.header, part_share(file, part)
    check_version(header)
    destination = destination_of(header, relocation)
    is_published = find_published(file, destination) is not None
    if is_published or share.first == share.stop:
        return PartReceipt(str(part), destination, is_published=is_published)
    tasks = file.tasks_of(share.first, share.stop)
    with use_concurrency(header.requests), ExitStack() as closing:
        if header.has_tasks:
            workers = _workers(file, memory or header.memory, jobs, relocation)
            plan, opened = file.part(share.first, share.stop, workers, relocation.there)
            closing.callback(opened.close)
        else:
            full_plan = replan_file(file, relocation, prepared, code).plan
            plan, opened = replace(full_plan, tasks=full_plan.tasks[tasks.start : tasks.stop]), None
        execute = partial(
            execute_part,
            replace(plan, has_digests=True),
            tasks.start,
            share,
            destination,
            JobInfo(header.plan, header.source, *_resume_instructions(file)),
            nbytes=header.nbytes,
            overwrite=header.overwrite,
            sources=lambda: plan.sources if opened is None else opened.files,
            identify=partial(_identify_local_copy, file, relocation),
            states=partial(_read_local_states, file, relocation),
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
                # Another process is publishing the plan, so wait for it.
                time.sleep(_POLL_SECONDS)


def _identify_local_copy(file: PlanFile, relocation: Relocation) -> SourceCopy:
    """Identify the copy of a plan's sources that this process reads.

    Raises:
        StorageError: A file cannot be inspected.
    """
    return identify_copy(
        _local_version(source, relocation) for source in file.sources if not source.is_inline
    )


def _read_local_states(file: PlanFile, relocation: Relocation) -> SourceStates:
    """Read the states of a plan's local sources on this host; raises the errors of `_identify_local_copy`."""
    return read_source_states(
        relocation.there(source.path) for source in file.sources if not source.is_inline
    )


def _local_version(source: PlannedSource, relocation: Relocation) -> tuple[str, str]:
    path = relocation.there(source.path)
    if path == source.path:
        return path, source.version
    # A host may lack files that its part does not read.
    status = parse(path).status()
    return path, status.version if status else ""


def part_share(file: PlanFile, part: Part) -> Share:
    """Return the task groups of a part."""
    ends = dealt(file.groups, part.count)
    return Share(str(part), ends[part.number], ends[part.number + 1])


def output_state(header: Header, destination: Location) -> Standing:
    """Return the state of a plan's output."""
    return shared_staging(staging_of(destination, header.overwrite), destination).standing(header.plan)


def _resume_instructions(file: PlanFile) -> tuple[str, str]:
    """Return the command that resumes the unfinished work, and its directory, for messages."""
    if file.location is None:
        return "", ""
    return shlex.join(["ckpt", "run", str(file.location), "--part", "0/1"]), str(parse(".").absolute())


def _is_all_done(file: PlanFile, destination: Location) -> bool:
    """Return whether no task is left, so that another process is publishing or has published."""
    if find_published(file, destination) is not None:
        return True
    status, count = output_state(file.header, destination), file.header.tasks
    return status.is_published or len(finished_tasks(status.all_records, count)) == count


def _workers(file: PlanFile, memory: int, jobs: int | None, relocation: Relocation) -> int:
    """Return the number of workers that suit this machine and fit into the memory."""
    header = file.header
    costs = {
        parse(relocation.there(bytes_per_worker.path)).store.costs
        for bytes_per_worker in file.sources
        if "://" in bytes_per_worker.path
    } or {Costs()}
    streams = destination_of(header, relocation).store.streams
    requests = max(bytes_per_worker.requests or 0 for bytes_per_worker in costs)
    expected = jobs or max(min(16, 2 * cores()), requests, streams.files if streams else 0)
    base = (
        baseline_bytes()
        + _BYTES_PER_FILE_BYTE * file.nbytes
        + sum(bytes_per_worker.memory for bytes_per_worker in costs)
    )
    bytes_per_worker = header.buffer_bytes + header.scratch_bytes + (streams.memory if streams else 0)
    if base + bytes_per_worker > memory:
        raise memory_error("a part does not fit into the memory allowed", memory, base + bytes_per_worker)
    return max(1, min(expected, (memory - base) // max(1, bytes_per_worker)))
