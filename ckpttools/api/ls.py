"""List the steps of a run, or the checkpoints and runs in a directory."""

from __future__ import annotations

from collections.abc import Sequence

from ckpttools.api.options import REQUESTS
from ckpttools.core.argument_checks import validate_arguments
from ckpttools.core.errors import SeveralCheckpointsError
from ckpttools.core.options import declare
from ckpttools.formats.detect import Detected, LocationKind, detect
from ckpttools.runs.collection import CollectionListing, list_collection, list_member
from ckpttools.runs.listing import RunListing, list_consistently, list_run, no_run_error, run_of
from ckpttools.runs.trained import find_trainer_run
from ckpttools.stores.concurrency import use_concurrency
from ckpttools.stores.registry import LocationLike, parse


@validate_arguments
@declare(REQUESTS)
def ls(run: LocationLike, *, requests: int | None = None) -> RunListing | CollectionListing:
    """List the steps of a run: kind, size, state, metrics, and where a restarted run resumes.

    For a directory of several checkpoints or runs, list the name, kind, format, steps, size, age and state of
    each.

    Args:
        run: Directory with steps of Orbax or of a PyTorch trainer such as verl, in any store; for a step or
            an item, its run is listed. Or a directory of checkpoints or runs.

    Raises:
        UsageError: The path is not a run and does not contain checkpoints.
        CheckpointError: The path does not exist or cannot be read.
    """
    location = parse(run)
    with use_concurrency(requests):
        detected = detect(location.absolute(), is_content=True)
        listing = list_detected(detected)
        if listing is None:
            raise no_run_error(detected, location)
        return listing


def list_paths(
    paths: Sequence[LocationLike], requests: int | None = None
) -> list[RunListing | CollectionListing]:
    """List several paths like `ls`. A single checkpoint becomes a list with one member named ".".

    A path without a checkpoint becomes an empty list.

    Raises:
        CheckpointError: A path does not exist or cannot be read, or none has a checkpoint.
    """
    with use_concurrency(requests):
        first, *others = [detect(parse(path).absolute(), is_content=True) for path in paths]
        listings = [list_detected(item) or _list_single(item) for item in (first, *others)]
    if not any(isinstance(item, RunListing) or item.members for item in listings):
        raise no_run_error(first, parse(paths[0]))
    return listings


def _list_single(detected: Detected) -> CollectionListing:
    members = () if detected.format is None else (list_member(detected, "."),)
    return CollectionListing(str(detected.location), members)


def list_members(error: SeveralCheckpointsError, requests: int | None) -> RunListing | CollectionListing:
    """List the contents of a directory that was not opened because it is not a single checkpoint.

    Raises:
        CheckpointError: The directory cannot be read.
    """
    detected = error.detected
    with use_concurrency(requests):
        if isinstance(detected, Detected) and detected.kind is LocationKind.COLLECTION:
            return list_collection(detected)
        listing = find_trainer_run(parse(error.location or "."))
    if listing is None:
        raise error
    return listing


def list_detected(detected: Detected) -> RunListing | CollectionListing | None:
    """List the result of `detect`; None if it is a single checkpoint or none.

    Raises:
        StorageError: The store cannot be read.
    """
    if (run := run_of(detected)) is not None:
        return list_consistently(run, list_run)
    if detected.hosts or detected.is_empty:
        return None
    if (trained := find_trainer_run(detected.location)) is not None:
        return trained
    return list_collection(detected) if detected.kind is LocationKind.COLLECTION else None
