"""`ckpt ls`: the steps of a run."""

from __future__ import annotations

import click

from ckpttools.cli.options import ANY_PATH, json_option, requests_option
from ckpttools.cli.output import print_report
from ckpttools.stores.location import Location


@click.command(short_help="The steps of a run: kind, size, age, finished or not.")
@click.argument("path", metavar="RUN", type=ANY_PATH)
@json_option
@requests_option
def ls(path: Location, as_json: bool, requests: int | None) -> None:
    """List the steps of a run: what is in each, whether it is finished, and what it takes of the disk.

    "own" is what deleting the step would free: files that have a name elsewhere, as in a checkpoint made
    by reference, are not counted. The step that a run which is started again goes on with is marked. Only
    indexes and metadata are read. Runs of trainers of PyTorch (verl, torchtitan, DeepSpeed, transformers) are
    listed by the names of their directories.

    \b
    Example:
      ckpt ls ~/maxtext/run/checkpoints
      ckpt ls gs://my-bucket/out/run --json
      ckpt ls ~/verl/checkpoints/project/experiment
    """
    from ckpttools.api.run_listing import ls as look
    from ckpttools.cli.ls_text import lines_of

    listing = look(path, requests=requests)
    print_report(listing, lines_of(listing), as_json=as_json)
