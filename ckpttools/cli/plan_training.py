"""`ckpt plan-training`: what the checkpoints of a training take, and how to save them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from ckpttools.cli.options import (
    ANY_PATH,
    MODEL,
    SIZE,
    SOME_TEXT,
    count_option,
    json_option,
    read_options,
    together,
)
from ckpttools.cli.output import end_as_different, labelled, print_json, prose_width, say, show
from ckpttools.cli.units import count, disk, exact
from ckpttools.core.text import plural, printable
from ckpttools.maxtext.planning.commands import MODES

if TYPE_CHECKING:
    from ckpttools.maxtext.planning.intervals import SaveInterval
    from ckpttools.maxtext.planning.report import TrainingPlan

_LABEL = 12


def _time_option(flag: str, help: str) -> Any:
    return click.option(flag, type=SOME_TEXT, metavar="TIME", help=help)


_numbers = together(
    click.option("--hosts", type=click.IntRange(min=1), required=True, metavar="N", help="Hosts of a slice."),
    click.option(
        "--slices",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        metavar="N",
        help="Slices of the job.",
    ),
    click.option(
        "--mesh",
        type=SOME_TEXT,
        metavar="AXIS=N,…",
        help="Lengths of axes; by default as in SRC.",
    ),
    click.option(
        "--mode",
        type=click.Choice(MODES),
        help="Where to save; by default multi-tier with several slices, else persistent.",
    ),
    click.option(
        "--local-bandwidth",
        type=SIZE,
        default="2GB",
        show_default=True,
        help="Bytes that a host writes to its ramdisk in a second.",
    ),
    click.option(
        "--persistent-bandwidth",
        type=SIZE,
        default="500MB",
        show_default=True,
        help="Bytes that a host writes to storage in a second.",
    ),
    _time_option("--step-time", "How long a step of the training takes, such as 4s."),
    _time_option("--mtbf", "Time between failures of the job, such as 6h."),
    _time_option(
        "--mtbf-all", "Time between failures that no ramdisk survives; by default ten times --mtbf."
    ),
    _time_option("--local-save", "How long a local save holds training up; by default as long as it writes."),
    _time_option(
        "--persistent-save", "How long a save to storage holds training up; by default as long as it writes."
    ),
    count_option("--total-steps", "Steps of the run, for the room that its checkpoints take."),
    count_option("--keep", "How many persistent checkpoints are kept; by default all."),
)


@click.command("plan-training", short_help="What a training's checkpoints will take.")
@click.argument("source", metavar="SRC", type=MODEL)
@click.argument("settings", metavar="[NAME=VALUE]...", nargs=-1)
@_numbers
@click.option("--plot", type=ANY_PATH, metavar="FILE.svg|png", help="Draw lost time against the interval.")
@read_options
@json_option
def plan_training(as_json: bool, **options: Any) -> None:
    """Plan the checkpoints of a training: bytes of each host, ramdisk, intervals, room, settings, commands.

    SRC is a checkpoint, a config.json or a configuration file of MaxText's. A stored training state is
    counted as it is; of all else each parameter takes 12 bytes. Settings of MaxText's are checked with those
    of the plan, as MaxText does. Intervals are worked out where --mtbf is given. A TIME is 90 (seconds), 4s,
    30min, 6h or 7d.

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
        show(_lines(built))
        remarks = [("note", remark) for remark in built.remarks]
        if options["plot"] is not None:
            remarks.append(("drawn", str(options["plot"])))
        for label, text in remarks:
            say(*_row(label, printable(text)))
    if built.refusals:
        end_as_different()


def _lines(built: TrainingPlan) -> Iterator[str]:
    how = "as it is stored" if built.is_exact else "12 bytes for each parameter"
    yield from _row(
        "model", f"{count(built.parameters)} parameters, a full state of {disk(built.state_bytes)}: {how}"
    )
    share = f", {disk(built.replicated_bytes)} of it replicated" if built.replicated_bytes else ""
    yield from _row(
        "each host", f"{exact(built.host_bytes)} of {plural(built.hosts, 'host')} in a slice{share}"
    )
    yield from _row(
        "writes",
        f"{_seconds(built.local_write_seconds)} local, {_seconds(built.persistent_write_seconds)} to storage",
    )
    disks = f"{disk(built.ramdisk.documented)} by MaxText's formula"
    if built.ramdisk.exact is not None:
        disks += f", {disk(built.ramdisk.exact)} by what a host holds"
    yield from _row("ramdisk", f"{disks}: RAMDISK_SIZE={built.ramdisk.setting}")
    for interval in built.intervals:
        yield from _row(interval.tier, _interval(interval))
    if built.run_bytes is not None:
        yield from _row("run", f"{plural(built.run_checkpoints or 0, 'checkpoint')}, {disk(built.run_bytes)}")
    yield ""
    yield from (f"{name}={value}" for name, value in built.settings.items())
    for command in built.commands:
        yield from ("", *command.splitlines())
    for refusal in built.refusals:
        yield from ("", *_row("refused", f"MaxText: {refusal}"))


def _row(label: str, text: str) -> list[str]:
    return labelled(label, text, _LABEL, prose_width())


def _interval(each: SaveInterval) -> str:
    steps = "" if each.steps is None else f" ({plural(each.steps, 'step')})"
    return f"every {_seconds(each.seconds)}{steps}: {100 * each.lost:.2g} % of the time is lost"


def _seconds(number: float) -> str:
    return f"{number:.0f} s" if number >= 100 else f"{number:.2g} s"
