"""`ckpt convert`: convert between checkpoint formats and models."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ckpttools.api.options import OPENING
from ckpttools.api.options.convert import CONVERT
from ckpttools.cli.command import BaseCommand
from ckpttools.cli.convert_many import ConvertCommand
from ckpttools.cli.lazy import Deferred, LazyGroup, is_path, lazy_command
from ckpttools.cli.options import flags, given_flags
from ckpttools.cli.output import print_stderr
from ckpttools.cli.suggestions import near_commands
from ckpttools.cli.write import common_options, make_command, model_source_and_destination, refuse_swapped
from ckpttools.stores.location import Location
from ckpttools.stores.registry import parse
from ckpttools.stores.web.hub_name import model_at

if TYPE_CHECKING:
    from ckpttools.api.prepared import Prepared

# Commands that are imported only when they run.
_COMMANDS = {
    "hf-to-maxtext": lazy_command(
        "models", "hf_to_maxtext", "Convert Hugging Face safetensors to a MaxText checkpoint."
    ),
    "maxtext-to-hf": lazy_command(
        "models", "maxtext_to_hf", "Convert a MaxText checkpoint to Hugging Face safetensors."
    ),
}


def _to_formats() -> dict[str, Deferred]:
    """Return one command for each writable format."""
    from ckpttools.formats.known_formats import writable

    return {
        f"to-{name}": Deferred(partial(to_format, name), f"Convert any format to {name}.")
        for name in writable()
    }


class _ConvertGroup(LazyGroup):
    """The conversions. A path instead of a command selects one by the contents of the path."""

    accepts_path = True

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        words, opening = (args, {}) if self.get_command(ctx, args[0]) else _parse_conversion(args)
        if not words:
            raise click.UsageError("Missing arguments SRC and DST.", ctx)
        first, rest = words[0], list(args)
        if self.get_command(ctx, first) is not None:
            rest.remove(first)
            return super().resolve_command(ctx, [first, *rest])
        if is_path(first):
            source = model_at(first)
            if source.store is not parse(first).store:
                print_stderr(f"{first} is not a local directory; using {source}")
            rest[rest.index(first)] = str(source)
            return super().resolve_command(ctx, [_infer(source, opening, ctx.resilient_parsing), *rest])
        if len(words) == 2 and not near_commands(first, self.list_commands(ctx)):
            refuse_swapped(*map(parse, words))
        return super().resolve_command(ctx, [first, *rest])

    def suggest(self, ctx: click.Context, args: Sequence[str], known: Sequence[str]) -> str:
        meant = super().suggest(ctx, args, known)
        return meant if meant.startswith("Did") else f"No path has this name either. {meant}"


def _parse_conversion(args: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Parse the arguments of a conversion whose direction is not known yet, and its reading options."""
    from ckpttools.cli.models import hf_to_maxtext, maxtext_to_hf

    both = {item.name: item for item in (*hf_to_maxtext.params, *maxtext_to_hf.params)}
    parser = BaseCommand(
        "convert",
        params=[item for item in both.values() if isinstance(item, click.Option)],
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        add_help_option=False,
    )
    context = parser.make_context("convert", list(args), resilient_parsing=True)
    reading = {option.name for option in OPENING}
    given = {
        name: value
        for name, value in context.params.items()
        if name in reading and context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    return [word for word in context.args if not word.startswith("-")], given


def _infer(source: Location, opening: dict[str, Any], is_silent: bool) -> str:
    """Return the conversion command for a path, and print why it was chosen."""
    from ckpttools.api.convert import infer_conversion

    result = infer_conversion(source, **opening)
    command = result.function.replace("_", "-")
    if not is_silent:
        print_stderr(f"{source} is {result.what}: converting to {result.target} (ckpt convert {command})")
    return command


@click.group(
    cls=_ConvertGroup,
    lazy=_COMMANDS,
    more=_to_formats,
    context_settings={"ignore_unknown_options": True},
    options_metavar="",
    subcommand_metavar="[COMMAND] SRC DST [OPTIONS]",
)
def convert() -> None:
    """Convert a checkpoint to another format or framework.

    Without COMMAND, SRC decides the direction: a Hugging Face model becomes a MaxText checkpoint, and a
    MaxText checkpoint a Hugging Face model. The options are those of hf-to-maxtext or maxtext-to-hf.

    \b
    Examples:
      $ ckpt convert ~/models/Llama-3.1-8B ~/maxtext/llama3.1-8b
      $ ckpt convert ~/models/* --into ~/maxtext
      $ ckpt convert to-zarr3 ~/maxtext/run/checkpoints ~/run.zarr
    """


def to_format(name: str) -> click.Command:
    """Return the command that writes a format."""
    from ckpttools.api.convert import convert
    from ckpttools.formats.known_formats import writable

    def command(**options: Any) -> Prepared:
        return convert.plan(format=name, **options)

    format = writable()[name]
    options = (
        model_source_and_destination,
        given_flags(*format.options),
        flags(*CONVERT),
        common_options,
    )
    return make_command(f"convert to-{name}", format.help, command, *options, cls=ConvertCommand)
