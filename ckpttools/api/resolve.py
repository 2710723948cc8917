"""Predict what a MaxText run would load."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpttools.api.options.runs import RESOLVE
from ckpttools.core.argument_checks import validate_arguments
from ckpttools.core.options import declare
from ckpttools.maxtext.loading.command import ParsedCommand, merge_nested, parse_command
from ckpttools.maxtext.loading.configuration import merge_settings
from ckpttools.maxtext.loading.report import Resolution
from ckpttools.maxtext.loading.resolution import resolve_run
from ckpttools.maxtext.versions import NEWEST, version_called
from ckpttools.stores.concurrency import use_concurrency
from ckpttools.stores.registry import LocationLike

_TRAINERS = ("pre_train.train", "train.py")


@validate_arguments
@declare(*RESOLVE)
def resolve(
    *command: LocationLike, maxtext: str = NEWEST, requests: int | None = None, **settings: Any
) -> Resolution:
    """Predict which checkpoint a MaxText run would load, by which rule, and which arrays would be missing.

        ckpttools.resolve(base_output_directory="gs://bucket/out", run_name="llama")
        ckpttools.resolve("base.yml", "run_name=llama", load_parameters_path="gs://bucket/base/0/items")

    MaxText does not run, and no array is read. Environment variables that MaxText reads count: `JOBSET_NAME`,
    and `M_RUN_NAME` and the like.

    Args:
        command: Arguments of MaxText's trainer: a configuration file, then settings `NAME=VALUE`. Python and
            the trainer's name may precede them.
        settings: Further MaxText settings; those of a group as a mapping, `lora={…}`.

    Raises:
        UsageError: An argument of the command is not a setting.
        UnknownNameError: The rules of this version are unknown.
        StorageError: A configuration file does not exist, or a location cannot be inspected.
        FormatError, ConfigError: A file is not a configuration.
    """
    version = version_called(maxtext)
    read = parse_command(list(map(str, command)))
    declared = _with(read, settings)
    with use_concurrency(requests):
        result = resolve_run(merge_settings(declared, os.environ), version, os.environ)
    return _add_program_note(result, read.program)


def _with(command: ParsedCommand, settings: Mapping[str, Any]) -> ParsedCommand:
    return ParsedCommand(command.program, command.file, merge_nested(command.overrides, _plain(settings)))


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert settings to YAML values; paths become text."""
    return {name: _value(item) for name, item in settings.items()}


def _value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _plain(value)
    return str(value) if isinstance(value, os.PathLike) else value


def _add_program_note(resolution: Resolution, program: str | None) -> Resolution:
    """Add a note if the program is not the trainer."""
    if program is None or program.endswith(_TRAINERS):
        return resolution
    note = f"these are the rules of MaxText's pre-training; {program} may have others"
    if "post_train" in program:
        note += ": post-training loads only an item directory, and has its own rules for resuming"
    return replace(resolution, notes=(*resolution.notes, note))
