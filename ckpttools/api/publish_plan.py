"""Publish a plan: write the index and metadata of its parts, then rename the output."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from ckpttools.api.calls import user_code
from ckpttools.api.options.runs import CODE
from ckpttools.api.plan_status import PlanStatus, plan_status
from ckpttools.api.plans import (
    Planned,
    PublishedPlan,
    check_unpublished,
    check_version,
    destination_of,
    find_published,
    note_published,
    open_plan,
    relocation_of,
    replan_file,
)
from ckpttools.api.prepared import Prepared, WriteOptions
from ckpttools.api.run_part import output_state
from ckpttools.core.argument_checks import validate_arguments
from ckpttools.core.errors import CheckpointError, DestinationExistsError, UsageError
from ckpttools.core.message_terms import action, error_in_plan, option
from ckpttools.core.options import declare
from ckpttools.plan.plan_file import PlanFile
from ckpttools.run.events import Observer, Receipt
from ckpttools.run.finished_tasks import unfinished_error
from ckpttools.run.parts import finished_tasks
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import LockedError
from ckpttools.stores.relocation import Relocation, Roots
from ckpttools.stores.shares import PublishedError, Standing, active_members, in_use_error

# Polling intervals: for another process that publishes, and for parts.
_POLL_SECONDS = 1.0
_WAIT_SECONDS = 5.0


@validate_arguments
@declare(*CODE)
def publish_plan(
    plan: Planned,
    *,
    wait: bool = False,
    root: Roots = (),
    observe: Observer = lambda event: None,
    waiting: Callable[[PlanStatus], None] = lambda status: None,
    warn: Callable[[str], None] = lambda text: None,
    prepared: Prepared | None = None,
    map: str | None = None,
    family: str | None = None,
) -> Receipt | PublishedPlan:
    """Write the index and metadata of a plan's parts, and publish the checkpoint.

    Waits if another process is publishing the same plan.

    Args:
        plan: Path of the plan. A file next to it records the publication.
        wait: Whether to wait until all parts are done.
        root, observe: See `run_part`.
        waiting: Called with the status from time to time while waiting for parts.
        warn: Called with each warning.
        prepared: The same conversion, prepared in this process; None to plan it again from the call in the
            file, in the working directory recorded there.

    Returns:
        The receipt, or the record of the publication if the plan was already published.

    Raises:
        CodeNotAllowedError: The plan names code that `map` and `family` do not name.
        UnfinishedError: Tasks are missing.
        LockedError: Another process is still running.
        SourceChangedError: A source has changed since the plan was made. Finished tasks are kept.
        CheckpointError: See `ckpttools.Prepared.run`.
    """
    file = open_plan(plan)
    relocation = relocation_of(file, root)
    code = user_code(map=map, family=family)
    check_version(file.header)
    with error_in_plan(file.location):
        was_done = wait and _wait_for_processes(file, relocation, waiting)
        return _publish(file, relocation, observe, warn, prepared, code, was_done=was_done)


def _wait_for_processes(
    file: PlanFile, relocation: Relocation, waiting: Callable[[PlanStatus], None]
) -> bool:
    """Wait for other processes. Returns whether all tasks are done."""
    was_begun = False
    while True:
        result = plan_status(file, root=relocation)
        if result.state in ("done", "published", "complete", "taken"):
            return result.tasks_done == result.tasks
        if result.state == "not begun" and was_begun:
            # Another process published the plan without a record next to it, or the work was discarded.
            return False
        was_begun = was_begun or result.state != "not begun"
        waiting(result)
        time.sleep(_WAIT_SECONDS)


def _publish(
    file: PlanFile,
    relocation: Relocation,
    observe: Observer,
    warn: Callable[[str], None],
    prepared: Prepared | None,
    code: Mapping[str, str],
    *,
    was_done: bool,
) -> Receipt | PublishedPlan:
    header = file.header
    destination = destination_of(header, relocation)
    replanned = None
    while True:
        status = output_state(header, destination)
        if not status.is_published:
            result = find_published(file, destination)
            is_alone = not status.is_begun and not status.other
            if result is None and was_done and is_alone and destination.exists():
                # The publishing process could not write a record next to the plan.
                result = PublishedPlan(destination, header.plan, time.time())
            if result is not None:
                return result
            _check_done(file, status, destination)
        was_done = True
        if replanned is None:
            replanned = replan_file(file, relocation, prepared, code)
            options = WriteOptions(
                requests=replanned.options.requests, overwrite=header.overwrite, observe=observe
            )
            replanned = replace(replanned, location=destination, options=options)
            _ = replanned.mesh_reads  # Computed from the source, which may no longer exist after publication.
        try:
            return replanned.execute(
                header.plan,
                check_replaced=partial(check_unpublished, file, destination),
                finalize=partial(_conclude, file, destination, warn),
            )
        except LockedError:
            # The holder of the lock may be publishing this plan; the next iteration checks the destination.
            time.sleep(_POLL_SECONDS)
        except PublishedError:
            continue
        except DestinationExistsError:
            if output_state(header, destination).is_begun:
                raise
            # Another process published the plan first.


def _conclude(file: PlanFile, destination: Location, warn: Callable[[str], None]) -> None:
    try:
        note_published(file, destination)
    except CheckpointError as error:
        reason = error.raw.got or error.raw.message
        warn(f"note     parts run again will be refused: cannot write next to {file.location}: {reason}")


def _check_done(file: PlanFile, status: Standing, destination: Location) -> None:
    """Raise UnfinishedError if tasks are missing, or UsageError if no part has started."""
    count, working = file.header.tasks, active_members(status.members)
    if not status.is_begun and (status.other or destination.exists()):
        raise UsageError(
            f"{destination} has no output of this plan",
            got=f"unfinished output of another conversion: {status.other}"
            if status.other
            else "a checkpoint from a single run of the plan's command, or from another command",
            expected=f"the parts of plan {file.header.plan[:12]}",
            hint=f"{action('summary', str(destination))} identifies it",
        )
    missing = sorted({*range(count)} - finished_tasks(status.all_records, count))
    waits = f"publish with {option('wait', True)}, which waits for running parts"
    locked = in_use_error("a part is still running", working, destination, waits) if working else None
    if missing:
        error = unfinished_error(missing, count, destination, locked.got if locked else None)
        raise error.at(hint=f"{locked.raw.hint}; {error.raw.hint}") if locked else error
    if locked:
        raise locked
