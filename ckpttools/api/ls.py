"""List the steps of a run."""

from __future__ import annotations

from ckpttools.core.argument_checks import validate_arguments
from ckpttools.core.errors import FormatError
from ckpttools.runs.listing import RunListing, find_run, listed, looked_at
from ckpttools.runs.trained import find_trainer_run
from ckpttools.stores.concurrency import use_concurrency
from ckpttools.stores.registry import LocationLike, parse


@validate_arguments
def ls(run: LocationLike, *, requests: int | None = None) -> RunListing:
    """List the steps of a run: kind, size, state, metrics, and where a restarted run resumes.

    Args:
        run: directory with steps, of Orbax or of a trainer of PyTorch such as verl, in any store; of a step
            or an item the run that it is of is meant.
        requests: requests under way at once to stores behind a network; None for as many as suit them.

    Raises:
        UsageError: it is no run.
        CheckpointError: nothing is there, or it cannot be read.
    """
    with use_concurrency(requests):
        try:
            result = find_run(parse(run))
        except FormatError:
            if (trained := find_trainer_run(parse(run))) is None:
                raise
            return trained
        return looked_at(result, listed)
