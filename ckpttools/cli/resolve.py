"""`ckpt resolve`: predict which checkpoint a MaxText run will load."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

import click

from ckpttools.api.options.runs import RESOLVE
from ckpttools.cli.command import BaseCommand
from ckpttools.cli.options import flags, json_option
from ckpttools.cli.output import exit_with_differences, format_labeled, print_report, styled, width
from ckpttools.core.text import printable

if TYPE_CHECKING:
    from ckpttools.maxtext.loading.report import Resolution, RunSetting

_COLUMN = 11
_COLORS = {"loads": "green", "fails": "red", "scratch": "yellow", "unknown": "yellow"}


@click.command(
    short_help="Predict which checkpoint a MaxText run would load.",
    # In a complete command, Python's own options, such as -m, are ignored.
    context_settings={"ignore_unknown_options": True},
    cls=BaseCommand,
)
@click.argument("words", metavar="[--] [CONFIG.yml] [NAME=VALUE]...", nargs=-1)
@flags(*RESOLVE)
@json_option
def resolve(words: tuple[str, ...], maxtext: str, requests: int | None, as_json: bool) -> None:
    """Predict which checkpoint a MaxText run would load, by which rule, and which arrays would be missing.

    Pass the arguments of `python3 -m maxtext.trainers.pre_train.train`, or the complete command: a
    configuration file, then settings. MaxText's rules apply in its order: the latest step of the run itself;
    load_parameters_path or load_full_state_path; else random parameters. Then the kind, layers and sizes of
    the checkpoint are compared with the settings. Environment variables such as M_RUN_NAME count as for
    MaxText. No array is read.

    Exit codes: 0 the named checkpoint will be loaded; 1 it will not, or training would start with random
    parameters.

    \b
    Examples:
      $ ckpt resolve base_output_directory=gs://bucket/out run_name=llama
      $ ckpt resolve load_parameters_path=gs://bucket/x/0/items
      $ ckpt resolve -- base.yml run_name=llama load_full_state_path=gs://bucket/x/3
    """
    from ckpttools.api.resolve import resolve as find

    if not words:
        raise click.UsageError(
            "No run is described: pass a configuration file or settings, as in the example."
        )
    result = find(*words, maxtext=maxtext, requests=requests)
    print_report(result, _report_lines(result), as_json=as_json)
    if not result.loads:
        exit_with_differences()


def _report_lines(result: Resolution) -> Iterator[str]:
    yield from _head_line(result, f"MaxText {result.maxtext}")
    for item in result.rules:
        rule = "the run's own steps" if item.rule == "resume" else item.rule
        yield from _format_labeled("looked", f"{rule}: {f'{item.path}: ' if item.path else ''}{item.result}")
    yield from _detail_lines(result)
    if result.adapter is not None:
        yield ""
        yield from _head_line(result.adapter, "LoRA")
        yield from _detail_lines(result.adapter)
    if result.settings:
        yield ""
        yield from (f"  {printable(_setting_text(setting))}" for setting in result.settings)


def _head_line(result: Resolution, before: str) -> Iterator[str]:
    yield styled(f"{before}: {printable(result.verdict)}", bold=True, fg=_COLORS[result.outcome])
    if result.path:
        yield from _format_labeled("from", result.path)


def _detail_lines(result: Resolution) -> Iterator[str]:
    for do, problems in groupby(result.problems, key=lambda item: item.hint):
        for problem in problems:
            yield from _format_labeled("problem", problem.what)
        if do:
            yield from _format_labeled("next", do)
    for note in result.notes:
        yield from _format_labeled("note", note)


def _format_labeled(label: str, text: str) -> list[str]:
    return format_labeled(f"  {label}", printable(text), _COLUMN, width(), whole_words=True)


def _setting_text(setting: RunSetting) -> str:
    value = "" if setting.value is None else setting.value
    value = str(value).lower() if isinstance(value, bool) else value
    return f"{setting.name}={value}  ({setting.source})"
