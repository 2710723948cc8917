"""`ckpt run`: run a part of a plan, show its status, or publish it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from ckpttools.api.options.runs import CODE, PLAN_LIMITS, RUN_PART
from ckpttools.cli.command import BaseCommand
from ckpttools.cli.command_line import command_line
from ckpttools.cli.options import ANY_PATH, flags, json_option, progress_option, unprotected_option
from ckpttools.cli.output import print_json, print_lines, print_report, print_stderr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import quoted_option
from ckpttools.core.options import Option, any_text, switch
from ckpttools.stores.location import Location

if TYPE_CHECKING:
    from ckpttools.api.plan_status import PlanStatus
    from ckpttools.api.plans import PublishedPlan
    from ckpttools.plan.plan_file import PlanFile
    from ckpttools.run.events import Receipt
    from ckpttools.run.parts import PartReceipt
    from ckpttools.stores.relocation import Relocation


@click.command(
    "run",
    short_help="Run part of a plan, show its status, or publish it.",
    no_args_is_help=True,
    cls=BaseCommand,
)
@click.argument("plan", type=ANY_PATH, metavar="PLAN")
@flags(
    *RUN_PART,
    switch(
        "publish",
        "Publish the checkpoint; refused while tasks are missing. With --part or --parts, publish only "
        "if the part was the last one.",
    ),
    switch("wait", "With --publish: wait until all parts are done."),
    switch("status", "Show the progress of all parts, and change nothing."),
    Option(
        "roots",
        any_text,
        (),
        "Replace the prefix OLD of paths in the plan with NEW.",
        "OLD=NEW",
        many=tuple,
        flag="--root",
    ),
    *CODE,
    *PLAN_LIMITS,
)
@unprotected_option
@progress_option
@json_option
def run(
    plan: Location,
    part: str | None,
    parts: int | None,
    publish: bool,
    wait: bool,
    status: bool,
    roots: tuple[str, ...],
    map: str | None,
    family: str | None,
    memory: int | None,
    jobs: int | None,
    progress: bool,
    as_json: bool,
) -> None:
    """Run a part of PLAN, which `ckpt plan` wrote; show its status; or publish it.

    Parts may run in any order, on any machines, at the same time, repeatedly, and after being killed:
    finished tasks are not repeated, even with another N. The destination does not become a checkpoint before
    it is published.

    \b
    Examples:
      $ ckpt run llama.plan --part 3/8
      $ ckpt run llama.plan --status
      $ ckpt run llama.plan --publish
    """
    from ckpttools.plan.plan_file import read_plan
    from ckpttools.stores.relocation import Relocation

    does_part = part is not None or parts is not None or not (publish or status)
    if (status and (publish or part or parts)) or (wait and not publish):
        raise UsageError("these options cannot be combined", hint="see `ckpt run --help`")
    file, root = read_plan(plan), Relocation.of(roots)
    if status:
        _show_status(file, root, as_json)
        return
    named = {"map": map, "family": family}
    with _code_hints():
        done = published = None
        if does_part:
            limits = {"parts": parts, "memory": memory, "jobs": jobs}
            done = _run_part(file, root, part, as_json, progress, **limits, **named)
        if publish and (not does_part or wait or _is_last_part(file, root)):
            is_shared = does_part and not wait
            published = _publish_plan(
                file, root, is_shared=is_shared, progress=progress, as_json=as_json, wait=wait, **named
            )
    if as_json:
        print_json({"part": done, "published": published} if done and publish else done or published)


@contextmanager
def _code_hints() -> Iterator[None]:
    """Add the command that permits a plan's code to the error that refuses it."""
    from ckpttools.core.user_code import CodeNotAllowedError

    try:
        yield
    except CodeNotAllowedError as error:
        command = f"{command_line()} {quoted_option(error.name, error.code)}"
        raise error.at(hint=f"read the code; if you trust it: {command}") from error


def _run_part(
    file: PlanFile, root: Relocation, part: str | None, as_json: bool, progress: bool, **keywords: Any
) -> PartReceipt:
    from ckpttools.api.run_part import run_part
    from ckpttools.cli.plan_text import part_line
    from ckpttools.cli.progress import progress_observer

    with progress_observer(progress) as observe:
        receipt = run_part(file, part, root=root, observe=observe, **keywords)
    if not as_json:
        print_lines([part_line(receipt)], is_summary=True)
    return receipt


def _is_last_part(file: PlanFile, root: Relocation) -> bool:
    """Return whether all parts are done; if not, print the missing ones."""
    from ckpttools.api.plan_status import plan_status
    from ckpttools.cli.plan_text import waiting_line

    result = plan_status(file, root=root)
    if result.state in ("done", "published", "complete"):
        return True
    print_stderr(f"not published: {waiting_line(result)}")
    return False


def _publish_plan(
    file: PlanFile, root: Relocation, *, is_shared: bool, progress: bool, as_json: bool, **keywords: Any
) -> Receipt | PublishedPlan | None:
    """Publish a plan. If `is_shared`, another running process may publish it later instead."""
    from ckpttools.api.plans import PublishedPlan
    from ckpttools.api.publish_plan import publish_plan
    from ckpttools.cli.plan_text import print_gain
    from ckpttools.cli.progress import progress_observer
    from ckpttools.cli.write import finish
    from ckpttools.stores.publishing import LockedError

    waiting = _WaitingLine(progress)
    try:
        with progress_observer(progress) as observe:
            receipt = publish_plan(
                file, root=root, observe=observe, waiting=waiting, warn=print_stderr, **keywords
            )
    except LockedError as error:
        if not is_shared:
            raise
        print_stderr(f"not published: {error.raw.message}: {error.raw.got}")
        return None
    if isinstance(receipt, PublishedPlan):
        if not as_json:
            print_lines([f"{receipt.destination}: published before; nothing is left to do"], is_summary=True)
        return receipt
    if not as_json:
        print_gain(receipt)
    return finish(receipt, as_json=as_json)


@dataclass
class _WaitingLine:
    """Callback that prints the running processes whenever they change."""

    expected: bool
    printed: str = ""

    def __call__(self, result: PlanStatus) -> None:
        from ckpttools.cli.plan_text import waiting_line

        line = waiting_line(result)
        if self.expected and line != self.printed:
            print_stderr(line)
            self.printed = line


def _show_status(file: PlanFile, root: Relocation, as_json: bool) -> None:
    from ckpttools.api.plan_status import plan_status
    from ckpttools.cli.plan_text import status_lines

    result = plan_status(file, root=root)
    print_report(result, status_lines(result, str(file.location)), as_json=as_json)
