"""What a run holds: one call, one report."""

from __future__ import annotations

from ckpttools.core.checked import checked
from ckpttools.runs.listing import RunListing, listed, looked_at, run_at
from ckpttools.stores.pace import requesting
from ckpttools.stores.registry import Where, parse


@checked
def ls(run: Where, *, requests: int | None = None) -> RunListing:
    """The steps of a run: kinds, sizes, whether they are finished, metrics, and what resuming would take.

    Args:
        run: directory with steps, in any store; of a step or an item the run that it is of is meant.
        requests: requests under way at once to stores behind a network; None for as many as suit them.

    Raises:
        UsageError: it is no run.
        CheckpointError: nothing is there, or it cannot be read.
    """
    with requesting(requests):
        return looked_at(run_at(parse(run)), listed)
