"""A command that writes, as one of the processes of a job of `jax.distributed`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ckpttools.cli.output import print_json, say, show

if TYPE_CHECKING:
    from ckpttools.api.prepared import Prepared


def carry_out_together(
    plan: Callable[[], Prepared],
    coordinator: str | None,
    process: str | None,
    *,
    progress: bool,
    as_json: bool,
) -> None:
    """Does what this process has to do of it, and tells of it.

    Args:
        plan: decides the conversion.
        coordinator, process, progress, as_json: as `ckpttools.cli.options.output_options` says.
    """
    from ckpttools.api.together import Callbacks, convert_together
    from ckpttools.cli.next_text import print_next
    from ckpttools.cli.parts_text import part_line, waiting_line
    from ckpttools.cli.plan_text import closing_line, say_gain
    from ckpttools.cli.progress import listening
    from ckpttools.plan.dealing import parse_part
    from ckpttools.sharding.leaving import abandoned_job, left_job
    from ckpttools.sharding.service import joined_job

    job = joined_job(coordinator, None if process is None else parse_part(process))
    try:
        with listening(progress and job.number == 0) as observe:
            told = Callbacks(
                observe, lambda made: say(part_line(made)), lambda found: say(waiting_line(found))
            )
            receipt = convert_together(job, plan, told)
        if receipt is not None:
            if as_json:
                print_json(receipt)
            else:
                say_gain(receipt)
                show([closing_line(receipt)])
                print_next(receipt.destination)
        left_job(job)
    except BaseException:
        abandoned_job(job)
        raise
