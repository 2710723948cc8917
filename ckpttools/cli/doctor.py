"""`ckpt doctor`: what is wrong with a checkpoint and what to do."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckpttools.cli.options import ANY_PATH, json_option
from ckpttools.cli.output import print_json, show, width
from ckpttools.cli.units import counted
from ckpttools.names import printable

if TYPE_CHECKING:
    from ckpttools.doctor.base import Finding
    from ckpttools.doctor.examine import Diagnosis

_COLOURS = {"error": "red", "warning": "yellow", "info": "cyan"}


@click.command()
@click.argument("path", type=ANY_PATH, required=False)
@json_option
@click.option("--fix", metavar="NAME", help="Mend what this fix can mend; nothing is deleted or overwritten.")
@click.option("--list", "as_list", is_flag=True, help="List the checks and the fixes.")
@click.pass_context
def doctor(ctx: click.Context, path: Path | None, as_json: bool, fix: str | None, as_list: bool) -> None:
    """What is wrong with a checkpoint, and what to do.

    PATH is anything: a run, a step, an item, a directory or file of safetensors, a zarr v3 hierarchy, whole
    or damaged. Indexes, headers and metadata are read, arrays are not. Exits with 1 if something is an
    error; warnings and infos leave it at 0. A fix mends what it can, and says where it was refused: then it
    exits with 3, or with 5 where the system did not allow it.

    \b
    Example:
      ckpt doctor ~/maxtext/run/checkpoints
      ckpt doctor ~/maxtext/run/checkpoints --fix merge
    """
    from ckpttools.doctor.examine import checks, examine, fixes, mend

    if as_list and (path is not None or fix is not None):
        raise click.UsageError("--list looks at nothing: leave out PATH and --fix, or --list")
    if as_list:
        listed = [("check", each.name, each.summary) for each in checks()]
        listed += [("fix", each.name, each.summary) for each in fixes().values()]
        if as_json:
            print_json([dict(zip(("kind", "name", "summary"), each, strict=True)) for each in listed])
        else:
            show(f"{kind:5}  {name:<18} {summary}" for kind, name, summary in listed)
        return
    if path is None:
        raise click.UsageError("Missing argument 'PATH'.", ctx)
    diagnosis = mend(path, fix) if fix is not None else examine(path)
    if as_json:
        print_json(diagnosis)
    else:
        show(_view(diagnosis, fix))
    ctx.exit(diagnosis.exit_code)


def _view(diagnosis: Diagnosis, fix: str | None) -> Iterator[str]:
    yield click.style(printable(diagnosis.path), bold=True)
    if diagnosis.looked_at:
        yield ", ".join(diagnosis.looked_at)
    for line in diagnosis.fixed:
        yield click.style("fixed: ", fg="green") + printable(line)
    for each in diagnosis.refused:
        yield click.style("refused: ", fg="red") + printable(f"{each.place}: {each.what}; {each.do}")
    if fix is not None and not diagnosis.fixed:
        yield f"nothing here that --fix {fix} could mend"
    for finding in diagnosis.findings:
        yield ""
        yield from _lines(finding)
    yield ""
    is_gone = bool(diagnosis.fixed) and not os.path.lexists(diagnosis.path)
    yield "nothing has this name any more" if is_gone else _verdict(diagnosis)


def _lines(finding: Finding) -> Iterator[str]:
    room = max(40, (width() or 110) - 8)
    place = click.style(finding.level, fg=_COLOURS[finding.level], bold=True)
    yield f"{place}  {printable(finding.place)}  [{finding.check}]"
    for label, text in (("", finding.what), ("why", finding.why)):
        wrapped = textwrap.wrap(printable(text), room, break_long_words=False, break_on_hyphens=False) or [""]
        yield f"  {label:<6}{wrapped[0]}"
        yield from (f"        {line}" for line in wrapped[1:])
    # In one piece, whatever the width: it is there to be copied.
    yield f"  next  {printable(finding.do)}"


def _verdict(diagnosis: Diagnosis) -> str:
    if not diagnosis.findings:
        return "healthy: nothing found"
    levels = [each.level for each in diagnosis.findings]
    parts = [counted(levels.count(level), level) for level in ("error", "warning", "info") if level in levels]
    return ("no errors, " if diagnosis.healthy else "") + ", ".join(parts)
