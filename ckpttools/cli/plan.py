"""`ckpt plan`: a conversion in a file, for many processes to carry out."""

from __future__ import annotations

import click

from ckpttools.cli.options import ANY_PATH, json_option
from ckpttools.cli.output import print_json, say, show
from ckpttools.cli.planning import prepared_by
from ckpttools.cli.units import disk
from ckpttools.core.text import plural
from ckpttools.stores.location import Location


@click.command(
    "plan",
    short_help="A conversion in a file, for many processes to carry out.",
    context_settings={"ignore_unknown_options": True},
    options_metavar="-o PLAN",
    no_args_is_help=True,
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="COMMAND [ARGS]...")
@click.option("-o", "--output", type=ANY_PATH, metavar="PLAN", required=True, help="File that gets the plan.")
@json_option
def plan(words: tuple[str, ...], output: Location, as_json: bool) -> None:
    """Write a conversion down, for many processes to carry out, each a part.

    COMMAND is the whole command line of any command that writes a checkpoint, without `ckpt`. Nothing is
    written but PLAN: it names the sources as they are now, and says what every task does. The parts are done
    by `ckpt run PLAN --part 0/8` and so on, in any order, on any machines that see the source and the
    destination; `ckpt run PLAN --publish` then gives the checkpoint its name.

    \b
    Example:
      ckpt plan convert hf-to-maxtext ~/Llama-3.1-405B /shared/llama -o llama.plan
    """
    from ckpttools.api.plans import write_plan

    written = write_plan(prepared_by(words), output)
    if as_json:
        print_json(written)
        return
    if not written.has_tasks:
        say("note     arrays in it are known only to the process that opens them: each part plans again")
    limit = f"at most {plural(written.groups, 'part')}"
    moved = f"{disk(written.bytes_in)} to read, {disk(written.bytes_out)} to write"
    show([f"{output}: {plural(written.tasks, 'task')}, {moved}, {limit}; next: ckpt run {output} --part 0/N"])
