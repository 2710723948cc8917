"""`ckpt hash`: print digests of a checkpoint's arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckpttools.cli.models import conversion_side_options
from ckpttools.cli.options import (
    ANY_PATH,
    combine_options,
    filter_option,
    json_option,
    read_options,
    resource_options,
)
from ckpttools.cli.output import print_json, print_lines, print_stderr
from ckpttools.cli.progress import progress_events, progress_option
from ckpttools.core.text import printable
from ckpttools.stores.location import Location

if TYPE_CHECKING:
    from ckpttools.api.hash import HashReport

selection_options = combine_options(
    filter_option(),
    click.option(
        "--per-layer/--whole",
        default=True,
        show_default=True,
        help="Hash stacked layers one by one, or as they are stored.",
    ),
    click.option("--parameters", is_flag=True, help="Ignore optimizer state, step and random states."),
)


@click.command("hash", short_help="Print layout-independent digests of every array.")
@click.argument("path", type=ANY_PATH)
@json_option
@click.option(
    "--manifest",
    type=ANY_PATH,
    metavar="FILE",
    help="Also write the digests to a new file, for ckpt verify PATH --manifest FILE.",
)
@click.option(
    "--algorithm",
    type=click.Choice(("xxh3-128", "sha256")),
    default="xxh3-128",
    show_default=True,
    help="xxh3-128 detects damage and mistakes; sha256 also detects deliberate changes.",
)
@click.option(
    "--as",
    "names",
    type=click.Choice(("stored", "maxtext")),
    default="stored",
    show_default=True,
    help="Names to print: as stored, or those of the MaxText checkpoint that a Hugging Face one converts to.",
)
@conversion_side_options
@selection_options
@resource_options
@progress_option
@read_options
def hash_command(path: Location, as_json: bool, progress: bool, **options: Any) -> None:
    """Print a digest of every array, of all parameters, and of everything.

    Digests depend only on values, shapes, dtypes and names, not on the format, chunks, compression or number
    of files. Stacked layers get one digest each, and names omit the wrappers of Linen and NNX, so scanned and
    unscanned checkpoints of one model agree.

    \b
    Example:
      ckpt hash ~/maxtext/llama3.1-8b --manifest llama.json
      diff <(ckpt hash a) <(ckpt hash b)
    """
    from ckpttools.api.hash import hash

    with progress_events(progress) as observe:
        result = hash(path, observe=observe, **options)
    if as_json:
        print_json(result)
    else:
        for remark in result.remarks:
            print_stderr(remark)
        print_lines(_hash_lines(result))


def _hash_lines(result: HashReport) -> list[str]:
    """Yield lines in the format of sha256sum; equal checkpoints yield equal lines."""
    lines = [f"{array.digest}  {printable(array.name)}" for array in result.arrays]
    return [*lines, f"{result.parameters}  (parameters)", f"{result.digest}  (everything)"]
