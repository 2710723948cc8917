"""Execute a plan, from the checks of the destination to the published checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import field, replace
from functools import partial

from ckpttools.array.blockwise import drop_error_counts, quantization_errors
from ckpttools.core.dataclass import dataclass
from ckpttools.core.details import log_detail
from ckpttools.core.errors import SourceChangedError, UsageError
from ckpttools.core.message_terms import option
from ckpttools.core.process_memory import peak_bytes
from ckpttools.core.text import plural
from ckpttools.formats.base import Extents, Layout, Writer
from ckpttools.formats.placement import Appended
from ckpttools.plan.plan import Plan
from ckpttools.run.bindings import select_sound_records
from ckpttools.run.events import Comparing, Observer, Publishing, Receipt, Started, Watch
from ckpttools.run.execution import Execution, WorkerPool, worker_processes
from ckpttools.run.finished_tasks import FinishedTask, select_kept_tasks, unfinished_error, unfinished_tasks
from ckpttools.run.overlap_check import check_no_overlap, check_unread
from ckpttools.run.source_copies import (
    SourceCopy,
    check_same_model,
    fingerprint,
    identify_plan_copy,
    is_written_from,
    read_plan_states,
    repeat_if_touched,
    select_comparable,
    source_of,
    source_state_record,
)
from ckpttools.run.task_runner import TaskRunner, ignore_output
from ckpttools.stores.abilities import SupportsLinks
from ckpttools.stores.base import File, check_unchanged
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import (
    DataFiles,
    JobInfo,
    Staging,
    SupportsCheckedPublish,
    SupportsKeepFiles,
    SupportsPublished,
    Work,
    staging_of,
)
from ckpttools.stores.registry import LocationLike, count_traffic, parse


def execute(
    plan: Plan,
    writer: Writer,
    destination: LocationLike,
    *,
    overwrite: bool = False,
    check_replaced: Callable[[Location], None] = lambda destination: None,
    check_published: Callable[[Location], None] = lambda destination: None,
    observe: Observer = lambda event: None,
    watch: Watch = ignore_output,
    finalize: Callable[[], None] = lambda: None,
    command: str = "",
    planned: str = "",
) -> Receipt:
    """Create the checkpoint that a plan describes, or resume an interrupted run.

    Args:
        plan: The plan.
        writer: The writer for which the plan was built.
        destination: The final location, which is created only when everything is written.
        overwrite: Whether an existing checkpoint, or another unfinished conversion, may be replaced.
        check_replaced: Called with the destination if it exists. Raises `DestinationExistsError` if it may
            never be replaced by the new checkpoint.
        check_published: Called with the destination after the checkpoint has replaced an older one. If it
            raises, the older one gets its name back.
        observe: Called with every event, from several threads but one at a time.
        watch: Receives all output, except data of earlier runs and referenced data.
        finalize: Called after the checkpoint is published and before the journal is removed. If it raises,
            the same command can resume.
        command: The command line, for messages about unfinished work; "" if there is none.
        planned: Fingerprint under which other processes have done all tasks, so that only the last steps
            remain; "" to do the tasks, too.

    Raises:
        UnfinishedError: `planned` is set, and tasks are missing.
        CheckpointError: Any other failure. The destination is unchanged, and `<destination>.partial` keeps
            the finished work.
    """
    started = time.monotonic()
    location = parse(destination)
    staging = staging_of(location, overwrite, partial(check_replaced, location))
    own = _check_and_fingerprint(plan, writer, location, staging, planned)
    directory = str(parse(".").absolute()) if command else ""
    division = plan.division.to_text() if plan.division else ""
    purpose = JobInfo(own, source_of(plan), command, directory, division)
    with count_traffic() as traffic, ExitStack() as opened:
        work = _open_work(opened, staging, purpose, plan, location, overwrite=overwrite)
        if work.is_complete:
            done = _TaskResults(len(plan.tasks), plan.bytes_out)
            observe(Started(plan, done.tasks, done.bytes_out))
        else:
            done = _write_content(plan, writer, work, observe, watch, only_last_steps=bool(planned))
            if isinstance(work, SupportsCheckedPublish):
                work.publish_checked(partial(check_published, location))
            else:
                work.publish()
            log_detail("published %s", location)
        finalize()
        work.finalize()
        published = work.published if isinstance(work, SupportsPublished) else None
    receipt = Receipt(
        destination=location,
        **plan.totals,
        tasks_resumed=done.tasks,
        bytes_resumed=done.bytes_out,
        seconds=time.monotonic() - started,
        peak_bytes=peak_bytes(done.forked),
        bytes_referenced=plan.bytes_referenced,
        bytes_unreferenced=plan.bytes_unreferenced,
        bytes_unlinked=done.unlinked,
        source=purpose.source,
        counts=drop_error_counts(done.counts),
        errors=quantization_errors(done.counts),
        traffic=traffic(),
        published=published,
        notes=replace(plan.notes, remarks=plan.raw_remarks),
    )
    observe(receipt)
    return receipt


def _open_work(
    opened: ExitStack, staging: Staging, purpose: JobInfo, plan: Plan, location: Location, *, overwrite: bool
) -> Work:
    """Lock the destination. An earlier run's complete result counts only if the source is unchanged."""
    work = opened.enter_context(staging.opened(purpose, plan.layout.nbytes))
    if not work.is_complete or is_written_from(work.records, identify_plan_copy(plan)):
        return work
    # The plan did not notice the change, because sizes, times and samples are equal.
    if not overwrite:
        raise _stale_error(purpose.source, location)
    # Replace it like any other checkpoint.
    work.finalize()
    opened.close()
    return opened.enter_context(staging.opened(purpose, plan.layout.nbytes))


def _stale_error(source: str, destination: Location) -> SourceChangedError:
    return SourceChangedError(
        f"{source} may have changed since an interrupted run wrote {destination}",
        got="a file with other status times (ctime), or another file",
        expected="the files that were read",
        hint=f"replace the checkpoint with {option('overwrite', True)}",
    )


def check(
    plan: Plan,
    writer: Writer,
    destination: LocationLike,
    overwrite: bool,
    check_replaced: Callable[[Location], None],
    planned: str = "",
) -> None:
    """Raise the errors that stop `execute` before it writes anything; takes the same arguments."""
    location = parse(destination)
    _check_and_fingerprint(
        plan, writer, location, staging_of(location, overwrite, partial(check_replaced, location)), planned
    )


def _check_and_fingerprint(
    plan: Plan, writer: Writer, destination: Location, staging: Staging, planned: str = ""
) -> str:
    """Return the fingerprint of a run after all checks that precede the first write."""
    own, source = planned or fingerprint(plan, writer), plan.tree.metadata.location
    if source:
        check_no_overlap(source, destination)
    if destination.store.streams and plan.streams is None:
        raise UsageError(
            "the plan was made for a store with writes at any offset",
            location=destination,
            expected="a plan for this destination",
            hint="pass the destination when you create the plan",
        )
    check_unread(plan.sources, staging.taken)
    staging.check(own, plan.layout.nbytes)
    return own


@dataclass(frozen=True, slots=True)
class _TaskResults:
    """The result of a run's tasks.

    Attributes:
        tasks, bytes_out: Work of earlier runs.
        counts: Counters by array.
        unlinked: Bytes that were copied because the store refused links.
        forked: Memory of the worker processes in bytes.
    """

    tasks: int
    bytes_out: int
    counts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    unlinked: int = 0
    forked: int = 0


def _write_content(
    plan: Plan, writer: Writer, work: Work, observe: Observer, watch: Watch, *, only_last_steps: bool
) -> _TaskResults:
    """Write everything except the final name."""
    records, _ = select_sound_records(work)
    if isinstance(work, SupportsKeepFiles):
        homes = (placement.home for placement in plan.layout.placements.values())
        work.keep_files((), {home.file for home in homes if isinstance(home, Appended)})
    copy = identify_plan_copy(plan)
    if not copy.is_known:
        # If the work is resumed, only digests can show that the finished tasks read the same model.
        plan = replace(plan, has_digests=True)
    # The fingerprint covers sizes, times and samples, which different contents can share.
    done: Sequence[FinishedTask] = select_comparable(select_kept_tasks(records, plan, work.content), copy)
    if only_last_steps and len(done) < len(plan.tasks):
        missing = sorted({*range(len(plan.tasks))} - {entry.task for entry in done})
        raise unfinished_error(missing, len(plan.tasks), work.content)
    check_same_model(plan, done, copy, work.content, lambda *nbytes: observe(Comparing(*nbytes)))
    bytes_done = sum(plan.tasks[entry.task].bytes_out for entry in done)
    # A watch sees only tasks of this process.
    left = unfinished_tasks(plan, done) if watch is ignore_output else ()
    # Fork before `Started`, whose observer may start a thread.
    with worker_processes(plan, work, left) as processes:
        _log_start(plan, work, processes, len(done))
        observe(Started(plan, len(done), bytes_done))
        unlinked = link_files(plan.layout, work.content)
        if plan.layout.links:
            copy = identify_plan_copy(plan)  # Linking changes the ctimes.
        with closing(work.data_files(plan.layout.files, plan.layout.heads)) as files:
            try:
                run, extents, done = _run_tasks(
                    plan, files, work, done, copy, observe, watch, processes.runners
                )
                log_detail("wrote all chunks; writing indexes and metadata")
                observe(Publishing())
                check_unchanged(plan.sources)
                files.write_heads()
                writer.finish(work.content, plan.tree, plan.layout, extents)
                bytes_done = sum(plan.tasks[entry.task].bytes_out for entry in done)
                work.record([source_state_record(identify_plan_copy(plan))])
            except SourceChangedError:
                # The bytes that were read, or would be copied at the end, differ from the plan. A source that
                # is only missing, such as an unmounted disk, may return unchanged.
                work.discard()
                raise
    return _TaskResults(len(done), bytes_done, run.counts, unlinked, processes.nbytes)


def _log_start(plan: Plan, work: Work, processes: WorkerPool, tasks_done: int) -> None:
    workers = f"{len(processes.runners)} processes" if processes.runners else plural(plan.jobs, "thread")
    log_detail(
        "writing %s with %s, %s of %s done before",
        work.content,
        workers,
        tasks_done,
        plural(len(plan.tasks), "task"),
    )


def _run_tasks(
    plan: Plan,
    files: DataFiles,
    work: Work,
    done: Sequence[FinishedTask],
    copy: SourceCopy,
    observe: Observer,
    watch: Watch,
    processes: Sequence[TaskRunner],
) -> tuple[Execution, Extents, Sequence[FinishedTask]]:
    """Run the unfinished tasks, and repeat all tasks if a source file may have changed.

    Returns:
        The last execution, the locations of encoded chunks, and the tasks that were not repeated.

    Raises:
        SourceChangedError: A file may have changed, and tasks cannot be repeated.
    """

    def attempt(number: int) -> tuple[Execution, Extents, Sequence[FinishedTask]]:
        if number:
            observe(Started(plan, 0, 0))
        kept_tasks = () if number else done
        read = identify_plan_copy(plan) if number else copy
        run = Execution(plan, files, work, observe, watch, processes, copy=read)
        return run, run.work(kept_tasks), kept_tasks

    # A watch must not receive anything twice.
    return repeat_if_touched(attempt, partial(read_plan_states, plan), can_repeat=watch is ignore_output)


def link_files(layout: Layout, content: Location) -> int:
    """Link every file of a layout into a directory; skip existing links.

    If the store refuses a link despite a successful test, the needed parts are copied to the same offsets of
    a sparse file, so the planned index remains valid.

    Returns:
        Bytes that were copied because the store refused links.

    Raises:
        FormatError: A file has changed since the plan was made.
        StorageError, NoSpaceError: The store reports an error.
    """
    copied = 0
    store = content.store
    for name, source in layout.links.items():
        if not (isinstance(source, File) and isinstance(store, SupportsLinks)):
            raise TypeError(f"{source!r} is not a file that can be linked into {content}")
        target, parts = (content / name).key, layout.used[name]
        if not store.link(source, target):
            store.copy_parts(source, target, parts)
            copied += sum(stop - start for start, stop in parts)
    return copied
