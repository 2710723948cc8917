"""`ckpt maxtext-config`: print or check the MaxText settings of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import join
from typing import TYPE_CHECKING

import click

from ckpttools.api.options.convert import MAXTEXT_CONFIG
from ckpttools.cli.command import BaseCommand
from ckpttools.cli.options import MODEL, flags, json_option
from ckpttools.cli.output import (
    exit_with_differences,
    format_labeled,
    print_json,
    print_lines,
    print_stderr,
    styled,
    width,
)
from ckpttools.core.errors import similar_names
from ckpttools.core.options import Option, switch
from ckpttools.core.text import printable
from ckpttools.stores.location import Location

if TYPE_CHECKING:
    from ckpttools.maxtext.config.report import Contradiction, InvalidSetting, MaxTextConfig

_COLUMN = 12
_PROGRAMS = {"train": "maxtext.trainers.pre_train.train", "decode": "maxtext.inference.decode"}
_PROGRAM_NAMES = {"train": ("run_name=NAME", "base_output_directory=DIR"), "decode": ("run_name=NAME",)}


# Lets users paste a complete `python3 -m …` command after --check.
@click.command(
    "maxtext-config",
    short_help="Print the MaxText settings for a checkpoint, or check yours.",
    context_settings={"ignore_unknown_options": True},
    cls=BaseCommand,
)
@click.argument("path", type=MODEL, metavar="PATH")
@click.argument("words", metavar="[COMMAND] [CONFIG.yml] [NAME=VALUE]...", nargs=-1, type=click.UNPROCESSED)
@flags(
    switch("check", "Report which of the given settings contradict the checkpoint."),
    Option(
        "form", ("args", "yaml"), "args", "Print NAME=VALUE lines, or a configuration file.", flag="--format"
    ),
    Option("command", tuple(_PROGRAMS), None, "Print a complete command instead."),
    *MAXTEXT_CONFIG,
)
@json_option
def maxtext_config(
    path: Location,
    words: tuple[str, ...],
    check: bool,
    form: str,
    command: str | None,
    scan: bool | None,
    like: Location | None,
    family: str | None,
    maxtext: str,
    step: int | None,
    requests: int | None,
    as_json: bool,
) -> None:
    """Print the MaxText settings that reproduce a checkpoint's model, or check yours.

    PATH is a Hugging Face model, its config.json, or a MaxText checkpoint that `ckpt convert` wrote. If one
    of MaxText's own model names computes the same model, it is printed; otherwise every size and switch.
    Settings go to stdout; computations in which MaxText differs regardless of settings go to stderr.

    After --check, pass the settings of a run: a configuration file and settings, or the complete command,
    quoted or not.

    Exit codes: 0 done; 1 a setting contradicts the checkpoint, or MaxText refuses it (--check).

    \b
    Examples:
      $ ckpt maxtext-config ~/maxtext/llama3.1-8b
      $ ckpt maxtext-config ~/maxtext/llama3.1-8b --command train
      $ ckpt maxtext-config ~/models/Llama-3.2-1B --check my.yml rope_type=default
      $ ckpt maxtext-config llama --check python3 -m train my.yml steps=10
    """
    from ckpttools.api.maxtext_config import maxtext_config as call

    unknown_option = next((word for word in words if word.startswith("--")), None)
    if unknown_option is not None:
        raise click.NoSuchOption(unknown_option, possibilities=_suggest_options(unknown_option))
    if words and not check:
        raise click.UsageError(f"Settings need --check. Did you mean --check {join(words)}?")
    if check and not words:
        raise click.UsageError("--check needs settings, after PATH: a configuration file, or NAME=VALUE.")
    result = call(
        path,
        check=words,
        scan=scan,
        like=like,
        family=family,
        maxtext=maxtext,
        requests=requests,
        step=step,
    )
    if as_json:
        print_json(result)
    elif check:
        print_lines(_check_lines(result))
    else:
        print_lines(_setting_lines(result, form, command))
    if not as_json and (remarks := [*_remark_lines(result)]):
        print_stderr(*remarks)
    if result.contradictions or result.invalid_settings:
        exit_with_differences()


def _setting_lines(result: MaxTextConfig, form: str, command: str | None) -> Iterator[str]:
    if command is not None:
        yield join(["python3", "-m", _PROGRAMS[command], *_PROGRAM_NAMES[command], *result.arguments()])
    elif form == "yaml":
        yield from result.yaml().splitlines()
    else:
        yield from result.arguments()


def _remark_lines(result: MaxTextConfig) -> Iterator[str]:
    for deviation in result.deviations:
        yield from _format_labeled("differs", str(deviation))
    if result.unmapped_fields:
        yield from _format_labeled(
            "not read", f"{', '.join(result.unmapped_fields)}: no MaxText setting represents it"
        )
    for note in result.notes:
        yield from _format_labeled("note", note)


def _format_labeled(label: str, text: str) -> list[str]:
    return format_labeled(label, printable(text), _COLUMN, width(), whole_words=True)


def _suggest_options(word: str) -> list[str]:
    params = click.get_current_context().command.params
    return similar_names(word, [name for param in params for name in param.opts if name.startswith("--")], 3)


def _check_lines(result: MaxTextConfig) -> Iterator[str]:
    if not (result.contradictions or result.invalid_settings):
        yield styled("nothing contradicts the checkpoint", bold=True)
    for mistake in result.invalid_settings:
        yield _given_settings(mistake)
        yield from _format_labeled("  refused", f"{mistake.reason}; {mistake.hint}")
    for contradiction in result.contradictions:
        yield from _contradiction_lines(contradiction)


def _contradiction_lines(result: Contradiction) -> Iterator[str]:
    from ckpttools.maxtext.config.report import format_value

    yield _given_settings(result)
    yield from _format_labeled("  expected", f"{format_value(result.expected)} ({result.source})")


def _given_settings(result: Contradiction | InvalidSetting) -> str:
    from ckpttools.maxtext.config.report import format_value

    return styled(
        printable(f"{result.name}={format_value(result.declared)}  ({result.declared_in})"),
        bold=True,
        fg="red",
    )
