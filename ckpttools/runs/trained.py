"""Runs of PyTorch trainers: directories named after steps, with checkpoints of any format in them.

verl saves `global_step_10/actor`, torchtitan `step-10`, the Trainer of transformers `checkpoint-10` and
DeepSpeed `global_step10`. verl and DeepSpeed record the step to resume from in a file next to these.
"""

from __future__ import annotations

import re

from ckpttools.core.errors import CheckpointError, StorageError
from ckpttools.formats.base import ReadOptions
from ckpttools.formats.detect import PLAIN_STEP, TRAINER_STEP, find_in_step, find_trainer_steps
from ckpttools.formats.registry import open_detected
from ckpttools.formats.torch.latest import LATEST, text_in
from ckpttools.runs.listing import ItemListing, RunListing, StepListing, list_tree, measure_usage
from ckpttools.stores.concurrency import map_concurrently
from ckpttools.stores.location import Location

_TRACKED_STEP = re.compile(rf"(?:{TRAINER_STEP.pattern})|(?P<alone>\d{{1,18}})", re.DOTALL)
_TRACKERS = ("latest_checkpointed_iteration.txt", LATEST)


def find_trainer_run(location: Location) -> RunListing | None:
    """Return the PyTorch trainer's run at a location, or the one that contains the step or checkpoint there.

    Raises:
        StorageError: The store cannot be read.
    """
    directory = location.absolute()
    run = next(
        (item.parent for item in (directory.parent, directory) if TRAINER_STEP.fullmatch(item.name)),
        directory,
    )
    if not run.is_dir():
        return None
    locations = find_trainer_steps(run)
    if not locations:
        return None
    run, names = locations[0].parent, {location.name for location in locations}
    steps = map_concurrently(run.store, _list_step, locations)
    tracker, latest = _read_tracker(run)
    known = {step.step: step for step in steps}
    blocked_by = ""
    if latest is not None and latest not in known:
        blocked_by = "which does not exist here"
    elif latest is not None and known[latest].unfinished_reason is not None:
        blocked_by = "which cannot be read"
    return RunListing(
        str(run),
        tuple(steps),
        latest,
        None if blocked_by else latest,
        None,
        blocked_by,
        other_entries=tuple(entry.name for entry in run.entries() if entry.name not in names),
        tracker=tracker,
    )


def _read_tracker(run: Location) -> tuple[str, int | None]:
    """Return the name of the tracker file and the step to resume from; "" and None if there is no file."""
    for name in _TRACKERS:
        if (run / name).is_file():
            match = _TRACKED_STEP.fullmatch(text_in(run / name))
            return name, int(match["number"] or match["alone"]) if match else None
    return "", None


def _list_step(step: Location) -> StepListing:
    match, usage = TRAINER_STEP.fullmatch(step.name) or PLAIN_STEP.fullmatch(step.name), measure_usage(step)
    result = find_in_step(step)
    items, errors = list[ItemListing](), list[str]()
    for name, detected in result.items():
        try:
            items.append(list_tree(open_detected(detected, ReadOptions(with_optimizer=True)), name))
        except StorageError:
            raise
        except CheckpointError as error:
            items.append(ItemListing(name, "unreadable"))
            errors.append(f"{name}: {error.raw.line}" if name else error.raw.line)
    unfinished = "; ".join(errors) if result else "it has no readable checkpoint"
    return StepListing(
        int(match["number"]) if match else 0,
        step.name,
        tuple(items),
        usage.nbytes,
        usage.own,
        None if usage.modified is None else usage.modified / 1e9,
        unfinished or None,
    )
