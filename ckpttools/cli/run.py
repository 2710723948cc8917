"""`ckpt run`: a part of a plan, how far it has come, or its last steps."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from ckpttools.cli.options import ANY_PATH, SIZE, json_option
from ckpttools.cli.output import print_json, say, show
from ckpttools.cli.planning import replanned, where_planned
from ckpttools.cli.progress import progress_option
from ckpttools.core.errors import UsageError
from ckpttools.stores.place import Place

if TYPE_CHECKING:
    from ckpttools.plan.plan_file import PlanFile
    from ckpttools.stores.relocation import Relocation

_LOOK_SECONDS = 5.0
_WAITED_FOR = ("done", "published", "complete", "taken")


@click.command(
    "run", short_help="A part of a plan, how far it has come, or its last steps.", no_args_is_help=True
)
@click.argument("plan", type=ANY_PATH, metavar="PLAN")
@click.option(
    "--part",
    metavar="I/N",
    help="Do part I of N, counted from 0. Without it the environment says which: JOB_COMPLETION_INDEX, "
    "SLURM_ARRAY_TASK_ID, SLURM_PROCID, CLOUD_RUN_TASK_INDEX or AWS_BATCH_JOB_ARRAY_INDEX.",
)
@click.option(
    "--parts",
    type=click.IntRange(min=1),
    metavar="N",
    help="How many parts there are, where the environment says only which one this is.",
)
@click.option(
    "--publish",
    is_flag=True,
    help="Give the checkpoint its name; refused while tasks are missing. With --part or --parts: after the "
    "part, if it was the last.",
)
@click.option("--wait", is_flag=True, help="With --publish: wait until all parts are done.")
@click.option("--status", is_flag=True, help="Show how far all parts have come, and change nothing.")
@click.option(
    "--root",
    "roots",
    multiple=True,
    metavar="OLD=NEW",
    help="Paths of the plan that begin with OLD begin with NEW here. May be repeated.",
)
@click.option(
    "--memory", type=SIZE, help="Most memory that may be resident; by default what the plan was made for."
)
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Parallel workers.")
@progress_option
@json_option
def run(
    plan: Place,
    part: str | None,
    parts: int | None,
    publish: bool,
    wait: bool,
    status: bool,
    roots: tuple[str, ...],
    memory: int | None,
    jobs: int | None,
    progress: bool,
    as_json: bool,
) -> None:
    """Carry out a part of PLAN, which `ckpt plan` wrote; show how far all have come; or publish.

    Parts may be done in any order, on any machines, at once, again, and after they were killed: what is done
    is not done again, whatever N it was done with. Nobody takes the destination for a checkpoint before it is
    published.

    \b
    Example:
      ckpt run llama.plan --part 3/8
      ckpt run llama.plan --status
      ckpt run llama.plan --publish
    """
    from ckpttools.plan.plan_file import read_plan
    from ckpttools.stores.relocation import Relocation

    does_part = part is not None or parts is not None or not (publish or status)
    if (status and (publish or part or parts)) or (wait and not publish):
        raise UsageError("these options do not go together", hint="see ckpt run --help")
    file, relocation = read_plan(plan), Relocation.parse(roots)
    if status:
        _show_status(file, relocation, as_json)
        return
    if does_part:
        _do_part(plan, file, relocation, part, parts, memory, jobs, progress, as_json)
    if publish and wait:
        _wait(file, relocation, progress)
    if publish and (not does_part or wait or _is_last(file, relocation)):
        _publish(file, relocation, beside=does_part and not wait, progress=progress, as_json=as_json)


def _do_part(
    plan: Place,
    file: PlanFile,
    relocation: Relocation,
    part: str | None,
    parts: int | None,
    memory: int | None,
    jobs: int | None,
    progress: bool,
    as_json: bool,
) -> None:
    from ckpttools.api.parts import run_part
    from ckpttools.cli.parts_text import part_line
    from ckpttools.cli.progress import listening
    from ckpttools.plan.dealing import parse_part
    from ckpttools.plan.engines import part_here

    which = parse_part(part) if part is not None else part_here(parts)
    command = shlex.join(["ckpt", "run", str(plan.absolute()), "--part", "0/1"])
    with listening(progress) as observe, where_planned(file.header, relocation):
        receipt = run_part(
            file,
            which,
            replan=replanned,
            relocation=relocation,
            memory=memory,
            jobs=jobs,
            command=command,
            observe=observe,
        )
    if as_json:
        print_json(receipt)
    else:
        show([part_line(receipt)])


def _is_last(file: PlanFile, relocation: Relocation) -> bool:
    """Whether all parts are done; says what is missing otherwise."""
    from ckpttools.api.standing import plan_standing
    from ckpttools.cli.parts_text import waiting_line

    found = plan_standing(file, relocation=relocation)
    if found.state in ("done", "published", "complete"):
        return True
    say(f"not published: {waiting_line(found)}")
    return False


def _publish(file: PlanFile, relocation: Relocation, *, beside: bool, progress: bool, as_json: bool) -> None:
    """Publishes; `beside` others that may do so, too: then whoever is at work does it later."""
    from ckpttools.api.parts import publish_plan
    from ckpttools.api.published import Published
    from ckpttools.cli.plan_text import closing_line
    from ckpttools.cli.progress import listening
    from ckpttools.stores.publishing import LockedError

    try:
        with listening(progress) as observe, where_planned(file.header, relocation):
            receipt = publish_plan(file, replan=replanned, relocation=relocation, observe=observe, warn=say)
    except LockedError as error:
        if not beside:
            raise
        say(f"not published: {error.message}: {error.got}")
        return
    if as_json:
        print_json(receipt)
    elif isinstance(receipt, Published):
        show([f"{receipt.destination}: published before; nothing is left to do"])
    else:
        show([closing_line(receipt)])


def _wait(file: PlanFile, relocation: Relocation, progress: bool) -> None:
    from ckpttools.api.standing import plan_standing
    from ckpttools.cli.parts_text import waiting_line

    said = ""
    while (found := plan_standing(file, relocation=relocation)).state not in _WAITED_FOR:
        line = waiting_line(found)
        if progress and line != said:
            say(line)
            said = line
        time.sleep(_LOOK_SECONDS)


def _show_status(file: PlanFile, relocation: Relocation, as_json: bool) -> None:
    from ckpttools.api.standing import plan_standing
    from ckpttools.cli.parts_text import status_lines

    found = plan_standing(file, relocation=relocation)
    if as_json:
        print_json(found)
    else:
        lines: Sequence[str] = list(status_lines(found))
        show(lines)
