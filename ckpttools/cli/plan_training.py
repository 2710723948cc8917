"""`ckpt plan-training`: plan the checkpoints of a training run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Unpack

import click

from ckpttools.api.options import OPENING
from ckpttools.api.options.runs import PLAN_TRAINING
from ckpttools.cli.command import BaseCommand
from ckpttools.cli.options import MODEL, flags, json_option
from ckpttools.cli.output import (
    exit_with_differences,
    format_labeled,
    print_json,
    print_lines,
    print_stderr,
    prose_width,
)
from ckpttools.core.text import format_count, format_disk, format_exact, plural, printable

if TYPE_CHECKING:
    from ckpttools.api.sources import Opening
    from ckpttools.maxtext.training_plan import Mode, SaveInterval, TrainingPlan
    from ckpttools.stores.location import Location

_LABEL = 12


@click.command(
    "plan-training", short_help="Plan checkpoint sizes and save intervals of a training run.", cls=BaseCommand
)
@click.argument("source", metavar="SRC", type=MODEL)
@click.argument("settings", metavar="[NAME=VALUE]...", nargs=-1)
@flags(*PLAN_TRAINING, *OPENING)
@json_option
def plan_training(
    source: Location,
    settings: tuple[str, ...],
    hosts: int,
    slices: int,
    mesh: str | None,
    mode: Mode | None,
    local_bandwidth: int,
    persistent_bandwidth: int,
    step_time: str | None,
    mtbf: str | None,
    mtbf_all: str | None,
    local_save: str | None,
    persistent_save: str | None,
    total_steps: int | None,
    keep: int | None,
    plot: Location | None,
    as_json: bool,
    **reading: Unpack[Opening],
) -> None:
    """Plan the checkpoints of a training run: bytes per host, ramdisk, save intervals, settings, commands.

    SRC is a checkpoint, a config.json or a MaxText configuration file. A stored training state is measured;
    otherwise each parameter is assumed to take 12 bytes. MaxText settings are validated together with those
    of the plan. --mtbf adds optimal intervals. A TIME is 90 (seconds), 4s, 30min, 6h or 7d.

    \b
    Examples:
      $ ckpt plan-training ~/Llama-3.1-70B/config.json --hosts 32
      $ ckpt plan-training ~/run --hosts 32 --slices 4 --step-time 8s --mtbf 6h
      $ ckpt plan-training run.yml model_name=llama3.1-8b --hosts 8 --mode emergency
    """
    from ckpttools.api.plan_training import plan_training as planned

    result = planned(
        source,
        settings=settings,
        hosts=hosts,
        slices=slices,
        mesh=mesh,
        mode=mode,
        local_bandwidth=local_bandwidth,
        persistent_bandwidth=persistent_bandwidth,
        step_time=step_time,
        mtbf=mtbf,
        mtbf_all=mtbf_all,
        local_save=local_save,
        persistent_save=persistent_save,
        total_steps=total_steps,
        keep=keep,
        plot=plot,
        **reading,
    )
    if as_json:
        print_json(result)
    else:
        print_lines(_report_lines(result))
        remarks = [("note", remark) for remark in result.remarks]
        if plot is not None:
            remarks.append(("drawn", str(plot)))
        for label, text in remarks:
            print_stderr(*_row_line(label, printable(text)))
    if result.refusals:
        exit_with_differences()


def _report_lines(plan: TrainingPlan) -> Iterator[str]:
    size_basis = "as it is stored" if plan.is_exact else "12 bytes for each parameter"
    yield from _row_line(
        "model",
        f"{format_count(plan.parameters)} parameters, a full state of "
        f"{format_disk(plan.state_bytes)}: {size_basis}",
    )
    share = f", {format_disk(plan.replicated_bytes)} of it replicated" if plan.replicated_bytes else ""
    yield from _row_line(
        "each host", f"{format_exact(plan.host_bytes)} of {plural(plan.hosts, 'host')} in a slice{share}"
    )
    yield from _row_line(
        "writes",
        f"{_seconds_text(plan.local_write_seconds)} local, "
        f"{_seconds_text(plan.persistent_write_seconds)} to storage",
    )
    disks = f"{format_disk(plan.ramdisk.documented)} by MaxText's formula"
    if plan.ramdisk.exact is not None:
        disks += f", {format_disk(plan.ramdisk.exact)} by what a host holds"
    yield from _row_line("ramdisk", f"{disks}: RAMDISK_SIZE={plan.ramdisk.setting}")
    for interval in plan.intervals:
        yield from _row_line(interval.tier, _interval_text(interval))
    if plan.run_bytes is not None:
        yield from _row_line(
            "run", f"{plural(plan.run_checkpoints or 0, 'checkpoint')}, {format_disk(plan.run_bytes)}"
        )
    yield ""
    yield from (f"{name}={value}" for name, value in plan.settings.items())
    for command in plan.commands:
        yield from ("", *command.splitlines())
    for refusal in plan.refusals:
        yield from ("", *_row_line("refused", f"MaxText: {refusal}"))


def _row_line(label: str, text: str) -> list[str]:
    return format_labeled(label, text, _LABEL, prose_width())


def _interval_text(interval: SaveInterval) -> str:
    steps = "" if interval.steps is None else f" ({plural(interval.steps, 'step')})"
    lost = f"{100 * interval.lost_fraction:.2g} %"
    return f"every {_seconds_text(interval.seconds)}{steps}: {lost} of the time is lost"


def _seconds_text(number: float) -> str:
    return f"{number:.0f} s" if number >= 100 else f"{number:.2g} s"
