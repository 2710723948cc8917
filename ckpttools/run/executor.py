"""Making the checkpoint that a plan describes, from the first look at the destination to its name."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import field
from functools import partial

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import SourceChangedError, UsageError
from ckpttools.core.resident import peak_bytes
from ckpttools.formats.base import Writer
from ckpttools.plan.plan import Plan
from ckpttools.quantized.errors import errors_of, without_errors
from ckpttools.run.apart import check_apart, check_unread
from ckpttools.run.bindings import select_sound_records
from ckpttools.run.doing import see_nothing
from ckpttools.run.entries import kept, left_of, unfinished
from ckpttools.run.events import Comparing, Observer, Publishing, Receipt, Started, Watch
from ckpttools.run.execution import Execution
from ckpttools.run.fingerprint import fingerprint, source_of
from ckpttools.run.linking import link_files
from ckpttools.run.source_copies import check_same_model, identify_plan_copy, select_comparable
from ckpttools.run.worker_processes import worker_processes
from ckpttools.stores.place import Place
from ckpttools.stores.publishing import PublishesChecked, Purpose, Staging, TellsPublished, Work, staging_of
from ckpttools.stores.registry import Where, parse
from ckpttools.stores.traffic import counted
from ckpttools.stores.unchanged import check_unchanged


def execute(
    plan: Plan,
    writer: Writer,
    destination: Where,
    *,
    overwrite: bool = False,
    check_replaced: Callable[[Place], None] = lambda destination: None,
    check_published: Callable[[Place], None] = lambda destination: None,
    observe: Observer = lambda event: None,
    watch: Watch = see_nothing,
    conclude: Callable[[], None] = lambda: None,
    command: str = "",
    planned: str = "",
) -> Receipt:
    """Makes the checkpoint that the plan describes, or goes on where an earlier run stopped.

    Args:
        plan: what to do.
        writer: the one it was planned with.
        destination: final name; it appears only when everything is written.
        overwrite: whether what has that name, or an unfinished other conversion to it, may be replaced.
        check_replaced: called with the destination where something is there; raises `DestinationExistsError`
            if it may not be replaced by what will be written, whatever the user says.
        check_published: called with the destination after the checkpoint has replaced an older one. If it
            raises, the older one gets its name back.
        observe: called with every event, from several threads but never at once.
        watch: sees everything that is written; not what an earlier run wrote or what is only referenced.
        conclude: called when the checkpoint has its name, before the journal goes: what it raises leaves the
            same command something to go on with.
        command: the command line, for whoever finds the work unfinished; "" where there is none.
        planned: fingerprint under which others have done all the tasks, so that only the last steps are left;
            "" to do the tasks, too.

    Raises:
        UnfinishedError: `planned`, and tasks are missing.
        CheckpointError: of any kind; the destination is then as it was, and `<destination>.partial` keeps
            what was done.
    """
    started = time.monotonic()
    place = parse(destination)
    staging = staging_of(place, overwrite, partial(check_replaced, place))
    own = _checked(plan, writer, place, staging, planned)
    purpose = Purpose(own, source_of(plan), command, str(parse(".").absolute()) if command else "")
    with counted() as traffic, staging.opened(purpose, plan.layout.nbytes) as work:
        if work.is_complete:
            done = _Done(len(plan.tasks), plan.bytes_out)
            observe(Started(plan, done.tasks, done.bytes_out))
        else:
            done = _made(plan, writer, work, observe, watch, only_last_steps=bool(planned))
            if isinstance(work, PublishesChecked):
                work.publish_checked(partial(check_published, place))
            else:
                work.publish()
        conclude()
        work.conclude()
        published = work.published if isinstance(work, TellsPublished) else None
    receipt = Receipt(
        destination=place,
        **plan.totals,
        tasks_resumed=done.tasks,
        bytes_resumed=done.bytes_out,
        seconds=time.monotonic() - started,
        peak_bytes=peak_bytes(done.forked),
        bytes_referenced=plan.bytes_referenced,
        bytes_dead=plan.bytes_dead,
        bytes_unlinked=done.unlinked,
        source=purpose.source,
        counts=without_errors(done.counts),
        errors=errors_of(done.counts),
        traffic=traffic(),
        published=published,
    )
    observe(receipt)
    return receipt


def check(
    plan: Plan,
    writer: Writer,
    destination: Where,
    overwrite: bool,
    check_replaced: Callable[[Place], None],
    planned: str = "",
) -> None:
    """Raises what stops `execute` before it writes anything; arguments as there."""
    place = parse(destination)
    _checked(plan, writer, place, staging_of(place, overwrite, partial(check_replaced, place)), planned)


def _checked(plan: Plan, writer: Writer, destination: Place, staging: Staging, planned: str = "") -> str:
    """The fingerprint of a run that nothing stops before it writes anything."""
    own, source = planned or fingerprint(plan, writer), plan.tree.metadata.place
    if source:
        check_apart(source, destination)
    if destination.store.streams and plan.streams is None:
        raise UsageError(
            "the plan was made for a place where files are written at any offset",
            place=destination,
            wanted="a plan for this place",
            hint="also give the destination when the plan is made",
        )
    check_unread(plan.sources, staging.taken)
    staging.check(own, plan.layout.nbytes)
    return own


@dataclass(frozen=True, slots=True)
class _Done:
    """What of a run was done before it, and what came of all of it.

    Attributes:
        tasks, bytes_out: done before it.
        counts: what was counted.
        unlinked: bytes that were copied where links were refused.
        forked: bytes that worker processes had for themselves.
    """

    tasks: int
    bytes_out: int
    counts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    unlinked: int = 0
    forked: int = 0


def _made(
    plan: Plan, writer: Writer, work: Work, observe: Observer, watch: Watch, *, only_last_steps: bool
) -> _Done:
    """Makes the content, all but its name."""
    records, _ = select_sound_records(work)
    done, copy = kept(records, plan, work.content), identify_plan_copy(plan)
    # The fingerprint consists of sizes, times and samples, which other content can share. Linking changes the
    # ctime of source files, so plans with links keep tasks that read another copy.
    if only_last_steps or not plan.layout.links:
        done = select_comparable(done, copy)
    if only_last_steps and len(done) < len(plan.tasks):
        missing = sorted({*range(len(plan.tasks))} - {entry.task for entry in done})
        raise unfinished(missing, len(plan.tasks), work.content)
    check_same_model(plan, done, copy, work.content, lambda *nbytes: observe(Comparing(*nbytes)))
    bytes_done = sum(plan.tasks[entry.task].bytes_out for entry in done)
    # What is watched is done in this process.
    left = left_of(plan, done) if watch is see_nothing else ()
    # Before work is said to begin: whoever shows how far it is may do so in a thread.
    with worker_processes(plan, work, left) as processes:
        observe(Started(plan, len(done), bytes_done))
        unlinked = link_files(plan.layout, work.content)
        with closing(work.data_files(plan.layout.files, plan.layout.heads)) as files:
            run = Execution(plan, files, work, observe, watch, processes.doers, copy=copy)
            try:
                extents = run.work(done)
                observe(Publishing())
                check_unchanged(plan.sources)
                files.write_heads()
                writer.finish(work.content, plan.tree, plan.layout, extents)
            except SourceChangedError:
                # What was read, or is copied at the end, is not what was planned. One that is only away for
                # now, with the disk that it is on, may be the same when it comes back.
                work.discard()
                raise
    return _Done(len(done), bytes_done, run.counts, unlinked, processes.nbytes)
