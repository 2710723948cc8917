"""`ckpt plan-training`: plan the checkpoints of a training run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from ckpttools.cli.options import (
    ANY_PATH,
    MODEL,
    NON_EMPTY_TEXT,
    SIZE,
    combine_options,
    count_option,
    json_option,
    read_options,
)
from ckpttools.cli.output import (
    exit_with_differences,
    labeled_lines,
    print_json,
    print_lines,
    print_stderr,
    prose_width,
)
from ckpttools.cli.units import format_count, format_disk, format_exact
from ckpttools.core.text import plural, printable
from ckpttools.maxtext.planning.commands import MODES

if TYPE_CHECKING:
    from ckpttools.maxtext.planning.intervals import SaveInterval
    from ckpttools.maxtext.planning.report import TrainingPlan

_LABEL = 12


def _time_option(flag: str, help: str) -> Any:
    return click.option(flag, type=NON_EMPTY_TEXT, metavar="TIME", help=help)


_number_options = combine_options(
    click.option("--hosts", type=click.IntRange(min=1), required=True, metavar="N", help="Hosts per slice."),
    click.option(
        "--slices",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        metavar="N",
        help="Number of slices.",
    ),
    click.option(
        "--mesh",
        type=NON_EMPTY_TEXT,
        metavar="AXIS=N,…",
        help="Sizes of the mesh axes. Default: as in SRC.",
    ),
    click.option(
        "--mode",
        type=click.Choice(MODES),
        help="Checkpointing mode. Default: multi-tier with several slices, else persistent.",
    ),
    click.option(
        "--local-bandwidth",
        type=SIZE,
        default="2GB",
        show_default=True,
        help="Bytes per second that a host writes to its ramdisk.",
    ),
    click.option(
        "--persistent-bandwidth",
        type=SIZE,
        default="500MB",
        show_default=True,
        help="Bytes per second that a host writes to storage.",
    ),
    _time_option("--step-time", "Duration of a training step, such as 4s."),
    _time_option("--mtbf", "Mean time between failures of the job, such as 6h."),
    _time_option("--mtbf-all", "Time between failures that no ramdisk survives. Default: ten times --mtbf."),
    _time_option("--local-save", "How long a local save blocks training. Default: as long as it writes."),
    _time_option(
        "--persistent-save", "How long a save to storage blocks training. Default: as long as it writes."
    ),
    count_option("--total-steps", "Steps of the run, to compute the space of its checkpoints."),
    count_option("--keep", "Number of persistent checkpoints to keep. Default: all."),
)


@click.command("plan-training", short_help="Plan checkpoint sizes and save intervals of a training run.")
@click.argument("source", metavar="SRC", type=MODEL)
@click.argument("settings", metavar="[NAME=VALUE]...", nargs=-1)
@_number_options
@click.option(
    "--plot", type=ANY_PATH, metavar="FILE.svg|png", help="Plot lost time against the save interval."
)
@read_options
@json_option
def plan_training(as_json: bool, **options: Any) -> None:
    """Plan the checkpoints of a training run: bytes per host, ramdisk, save intervals, settings, commands.

    SRC is a checkpoint, a config.json or a MaxText configuration file. A stored training state is measured;
    otherwise each parameter is assumed to take 12 bytes. MaxText settings are validated together with those
    of the plan. --mtbf adds optimal intervals. A TIME is 90 (seconds), 4s, 30min, 6h or 7d.

    \b
    Example:
      ckpt plan-training ~/Llama-3.1-70B/config.json --hosts 32
      ckpt plan-training ~/run --hosts 32 --slices 4 --step-time 8s --mtbf 6h
      ckpt plan-training run.yml model_name=llama3.1-8b --hosts 8 --mode emergency
    """
    from ckpttools.api.plan_training import plan_training as planned

    built = planned(**options)
    if as_json:
        print_json(built)
    else:
        print_lines(_report_lines(built))
        remarks = [("note", remark) for remark in built.remarks]
        if options["plot"] is not None:
            remarks.append(("drawn", str(options["plot"])))
        for label, text in remarks:
            print_stderr(*_row_line(label, printable(text)))
    if built.refusals:
        exit_with_differences()


def _report_lines(built: TrainingPlan) -> Iterator[str]:
    how = "as it is stored" if built.is_exact else "12 bytes for each parameter"
    yield from _row_line(
        "model",
        f"{format_count(built.parameters)} parameters, a full state of "
        f"{format_disk(built.state_bytes)}: {how}",
    )
    share = f", {format_disk(built.replicated_bytes)} of it replicated" if built.replicated_bytes else ""
    yield from _row_line(
        "each host", f"{format_exact(built.host_bytes)} of {plural(built.hosts, 'host')} in a slice{share}"
    )
    yield from _row_line(
        "writes",
        f"{_seconds_text(built.local_write_seconds)} local, "
        f"{_seconds_text(built.persistent_write_seconds)} to storage",
    )
    disks = f"{format_disk(built.ramdisk.documented)} by MaxText's formula"
    if built.ramdisk.exact is not None:
        disks += f", {format_disk(built.ramdisk.exact)} by what a host holds"
    yield from _row_line("ramdisk", f"{disks}: RAMDISK_SIZE={built.ramdisk.setting}")
    for interval in built.intervals:
        yield from _row_line(interval.tier, _interval_text(interval))
    if built.run_bytes is not None:
        yield from _row_line(
            "run", f"{plural(built.run_checkpoints or 0, 'checkpoint')}, {format_disk(built.run_bytes)}"
        )
    yield ""
    yield from (f"{name}={value}" for name, value in built.settings.items())
    for command in built.commands:
        yield from ("", *command.splitlines())
    for refusal in built.refusals:
        yield from ("", *_row_line("refused", f"MaxText: {refusal}"))


def _row_line(label: str, text: str) -> list[str]:
    return labeled_lines(label, text, _LABEL, prose_width())


def _interval_text(each: SaveInterval) -> str:
    steps = "" if each.steps is None else f" ({plural(each.steps, 'step')})"
    return f"every {_seconds_text(each.seconds)}{steps}: {100 * each.lost:.2g} % of the time is lost"


def _seconds_text(number: float) -> str:
    return f"{number:.0f} s" if number >= 100 else f"{number:.2g} s"
