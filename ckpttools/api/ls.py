"""List the steps of a run."""

from __future__ import annotations

from ckpttools.api.options import REQUESTS
from ckpttools.core.argument_checks import validate_arguments
from ckpttools.core.errors import FormatError
from ckpttools.core.options import declare
from ckpttools.runs.listing import RunListing, find_run, listed, looked_at
from ckpttools.runs.trained import find_trainer_run
from ckpttools.stores.concurrency import use_concurrency
from ckpttools.stores.registry import LocationLike, parse


@validate_arguments
@declare(REQUESTS)
def ls(run: LocationLike, *, requests: int | None = None) -> RunListing:
    """List the steps of a run: kind, size, state, metrics, and where a restarted run resumes.

    Args:
        run: directory with steps of Orbax or of a PyTorch trainer such as verl, in any store; a step or an
            item stands for its run.

    Raises:
        UsageError: the path is not a run.
        CheckpointError: the path does not exist, or cannot be read.
    """
    with use_concurrency(requests):
        try:
            result = find_run(parse(run))
        except FormatError:
            if (trained := find_trainer_run(parse(run))) is None:
                raise
            return trained
        return looked_at(result, listed)
