"""`ckpt doctor`: diagnose and repair checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from ckpttools.api.options.inspect import DOCTOR
from ckpttools.cli.command import BaseCommand
from ckpttools.cli.options import ANY_PATH, flags, json_option, progress_option
from ckpttools.cli.output import format_labeled, print_json, print_lines, print_report, prose_width, styled
from ckpttools.cli.progress import progress_events
from ckpttools.core.options import switch
from ckpttools.core.text import plural, printable
from ckpttools.stores.location import Location
from ckpttools.stores.registry import parse

if TYPE_CHECKING:
    from ckpttools.diagnosis.base import Finding
    from ckpttools.diagnosis.examine import Diagnosis

# Width of the label column.
_COLUMN = 8
_COLORS = {"error": "red", "warning": "yellow", "info": "cyan"}


@click.command(short_help="Diagnose a checkpoint and suggest fixes.", cls=BaseCommand)
@click.argument("path", type=ANY_PATH, required=False)
@json_option
@flags(*DOCTOR[:3], switch("as_list", "List the checks and the fixes.", flag="--list"), *DOCTOR[3:])
@progress_option
def doctor(
    path: Location | None,
    as_json: bool,
    fix: tuple[str, ...],
    checksums: bool,
    values: bool,
    as_list: bool,
    progress: bool,
    **limits: Any,
) -> None:
    """Diagnose a checkpoint and suggest fixes.

    PATH may be a run, a step, an item, a directory or file of safetensors, or a zarr v3 hierarchy, complete
    or damaged. Indexes, headers and metadata are read. Arrays are read only with --values and --checksums,
    except scales of quantized weights and a tied output head; the last line lists skipped checks. Exits with
    1 if there are errors, and with 0 if there are only warnings and infos. A fix repairs as much as it can
    and reports where it was refused; the exit code is then 3, or 5 if the system did not allow it.

    \b
    Examples:
      $ ckpt doctor ~/maxtext/run/checkpoints
      $ ckpt doctor ~/maxtext/run/checkpoints --fix merge --fix commit-marker
      $ ckpt doctor ~/maxtext/run/checkpoints/5000 --values
      $ ckpt doctor ~/deepspeed/global_step300 --checksums
    """
    from ckpttools.api.doctor import doctor as diagnose

    if as_list and (path is not None or fix):
        raise click.UsageError("--list examines nothing: leave out PATH and --fix, or --list")
    if as_list:
        _list_checks(as_json)
        return
    if path is None:
        raise click.UsageError(
            "Missing argument 'PATH'. Pass the path of a checkpoint; --list lists the checks.",
            click.get_current_context(),
        )
    with progress_events(progress) as observe:
        diagnosis = diagnose(
            path,
            fix=fix,
            checksums=checksums,
            values=values,
            observe=observe,
            **limits,
        )
    lines = _diagnosis_lines(diagnosis, fix, values, checksums)
    print_report(diagnosis, lines, as_json=as_json, is_summary=True)
    click.get_current_context().exit(diagnosis.exit_code)


def _list_checks(as_json: bool) -> None:
    from ckpttools.diagnosis.examine import checks, fixes

    rows = [("check", check.name, check.summary) for check in checks()]
    rows += [("fix", fix.name, fix.summary) for fix in fixes().values()]
    if as_json:
        print_json([dict(zip(("kind", "name", "summary"), item, strict=True)) for item in rows])
    else:
        print_lines(f"{kind:5}  {name:<18} {summary}" for kind, name, summary in rows)


def _diagnosis_lines(
    diagnosis: Diagnosis, fix: tuple[str, ...], values: bool, checksums: bool
) -> Iterator[str]:
    yield styled(printable(diagnosis.path), bold=True)
    if diagnosis.examined:
        yield ", ".join(diagnosis.examined)
    for line in diagnosis.applied_fixes:
        yield styled("fixed: ", fg="green") + printable(line)
    for item in diagnosis.refused_fixes:
        yield styled("refused: ", fg="red") + printable(item.location) + ":"
        yield from format_labeled("", printable(item.what), _COLUMN, prose_width())
        yield from format_labeled("  next", printable(item.hint), _COLUMN, prose_width())
    if fix and not diagnosis.applied_fixes:
        yield f"nothing here that --fix {' --fix '.join(fix)} would repair"
    for finding in diagnosis.findings:
        yield ""
        yield from _finding_lines(finding)
    yield ""
    is_gone = bool(diagnosis.applied_fixes) and not parse(diagnosis.path).lexists()
    yield "the path no longer exists" if is_gone else _verdict_line(diagnosis, values, checksums)


def _finding_lines(finding: Finding) -> Iterator[str]:
    level = styled(finding.level, fg=_COLORS[finding.level], bold=True)
    yield f"{level}  {printable(finding.location)}  [{finding.check}]"
    yield from format_labeled("", printable(finding.what), _COLUMN, prose_width())
    yield from format_labeled("  why", printable(finding.consequence), _COLUMN, prose_width())
    command = None if finding.command is None else printable(finding.command)
    yield from format_labeled("  next", printable(finding.hint), _COLUMN, prose_width(), command=command)


def _verdict_line(diagnosis: Diagnosis, values: bool, checksums: bool) -> str:
    """Return the verdict, including what was not checked."""
    levels = [finding.level for finding in diagnosis.findings]
    parts = [plural(levels.count(level), level) for level in ("error", "warning", "info") if level in levels]
    verdict = ", ".join(parts) or "structure and configuration OK"
    if parts and diagnosis.healthy:
        verdict = f"no errors, {verdict}"
    checked = _values_text(diagnosis, values), _checksums_text(diagnosis, checksums)
    return "; ".join(filter(None, (verdict, *checked)))


def _values_text(diagnosis: Diagnosis, is_asked: bool) -> str:
    if not is_asked:
        return "values not checked (--values)"
    if not diagnosis.values_read:
        return "values of unfinished saves not checked"
    # Arrays with errors may not have been read.
    is_sound = diagnosis.healthy and all(finding.check != "values" for finding in diagnosis.findings)
    return "values OK" if is_sound else ""


def _checksums_text(diagnosis: Diagnosis, is_asked: bool) -> str:
    if diagnosis.checksums_compared is None:
        return "the files have no checksums of their data" if is_asked else ""
    if not diagnosis.checksums_compared:
        return "checksums not checked (--checksums)"
    return "" if any(finding.check == "checksums" for finding in diagnosis.findings) else "checksums OK"
