"""`ckpt hash`: print digests of a checkpoint's arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

import click

from ckpttools.api.options import OPENING
from ckpttools.api.options.inspect import HASH
from ckpttools.cli.command import BaseCommand
from ckpttools.cli.options import ANY_PATH, flags, json_option, progress_option, resource_options
from ckpttools.cli.output import print_json, print_lines, print_stderr
from ckpttools.cli.progress import progress_events
from ckpttools.core.text import printable
from ckpttools.stores.location import Location

if TYPE_CHECKING:
    from ckpttools.api.hash import HashReport
    from ckpttools.api.sources import Scanning


@click.command("hash", short_help="Print layout-independent digests of every array.", cls=BaseCommand)
@click.argument("path", type=ANY_PATH)
@json_option
@flags(*HASH)
@resource_options
@progress_option
@flags(*OPENING)
def hash_command(
    path: Location,
    as_json: bool,
    manifest: Location | None,
    algorithm: str,
    names: str,
    rope_layout: str | None,
    family: str | None,
    tied: str | None,
    drop: tuple[str, ...],
    filter: str,
    per_layer: bool,
    parameters: bool,
    progress: bool,
    **scanning: Unpack[Scanning],
) -> None:
    """Print a digest of every array, of all parameters, and of everything.

    Digests depend only on values, shapes, dtypes and names, not on the format, chunks, compression or number
    of files. Stacked layers get one digest each, and names omit the wrappers of Linen and NNX, so scanned and
    unscanned checkpoints of one model agree.

    \b
    Examples:
      $ ckpt hash ~/maxtext/llama3.1-8b --manifest llama.json
      $ diff <(ckpt hash a) <(ckpt hash b)
    """
    from ckpttools.api.hash import hash

    with progress_events(progress) as scanning["observe"]:
        result = hash(
            path,
            manifest=manifest,
            algorithm=algorithm,
            names=names,
            rope_layout=rope_layout,
            family=family,
            tied=tied,
            drop=drop,
            filter=filter,
            per_layer=per_layer,
            parameters=parameters,
            **scanning,
        )
    if as_json:
        print_json(result)
    else:
        for remark in result.remarks:
            print_stderr(remark)
        print_lines(_hash_lines(result))


def _hash_lines(result: HashReport) -> list[str]:
    """Return lines in the format of sha256sum; equal checkpoints have equal lines."""
    lines = [f"{array.digest}  {printable(array.name)}" for array in result.arrays]
    return [*lines, f"{result.parameters}  (parameters)", f"{result.digest}  (everything)"]
