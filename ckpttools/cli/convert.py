"""`ckpt convert`: convert between checkpoint formats and models."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ckpttools.api.options import OPENING
from ckpttools.api.options.convert import CONVERT, HF_TO_MAXTEXT, MAXTEXT_TO_HF, SHARDS
from ckpttools.cli.command import BaseCommand, PanelOption
from ckpttools.cli.command_line import command_line
from ckpttools.cli.lazy import Deferred, LazyGroup, is_path, lazy_command, mark_written
from ckpttools.cli.options import ANY_PATH, flags, given_flags, output_options, resource_options
from ckpttools.cli.output import print_json, print_stderr
from ckpttools.cli.suggestions import similar_commands
from ckpttools.cli.write import (
    REPORTS,
    OutputOptions,
    WriteCommand,
    WriteFunction,
    common_options,
    make_command,
    model_source_and_destination,
    refuse_swapped,
    storage_options,
    writes,
)
from ckpttools.core.errors import DestinationExistsError, NoSpaceError, UsageError
from ckpttools.core.message_terms import call
from ckpttools.core.text import plural
from ckpttools.stores.location import Location
from ckpttools.stores.registry import parse
from ckpttools.stores.web.hub_name import model_at

if TYPE_CHECKING:
    from ckpttools.api.prepared import Prepared


# Commands that are imported only when they run.
_COMMANDS = {
    "hf-to-maxtext": lazy_command(
        "convert", "hf_to_maxtext", "Convert Hugging Face safetensors to a MaxText checkpoint."
    ),
    "maxtext-to-hf": lazy_command(
        "convert", "maxtext_to_hf", "Convert a MaxText checkpoint to Hugging Face safetensors."
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
        if len(words) == 2 and not similar_commands(first, self.list_commands(ctx)):
            refuse_swapped(*map(parse, words))
        return super().resolve_command(ctx, [first, *rest])


def _parse_conversion(args: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Parse the arguments of a conversion whose direction is not known yet, and its reading options."""
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


_INTO = "--into"


class ConvertCommand(WriteCommand):
    """A conversion of SRC to DST or, with `--into DIR`, of each SRC to a directory of its name in DIR."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        text = "Convert each SRC to a directory of its name in DIR: SRC... --into DIR."
        self.params.append(PanelOption([_INTO], metavar="DIR", type=ANY_PATH, expose_value=False, help=text))

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if any(word.partition("=")[0] == _INTO for word in args):
            return self._as_group.make_context(info_name, args, parent, **extra)
        words = list(args)
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            if "extra argument" not in error.message:
                raise
            # The words may be several sources and the directory for all of them.
            multi_context = self._as_group.make_context(
                info_name, [*words, _INTO, "DIR"], parent, resilient_parsing=True
            )
            *_, last = map(str, multi_context.params["sources"])
            line = shlex.split(command_line())
            position = len(line) - 1 - line[::-1].index(last) if last in line else len(line)
            line = [*line[:position], *line[position + 1 :], _INTO, last]
            raise click.UsageError(
                f"{error.message.rstrip('.')}. To convert several: {shlex.join(line)}", error.ctx
            ) from None

    @cached_property
    def _as_group(self) -> _ConvertMany:
        return _ConvertMany(self)


class _ConvertMany(BaseCommand):
    """The same conversion of several sources."""

    def __init__(self, one: ConvertCommand) -> None:
        source = next(item for item in one.params if item.name == "source")
        sources = click.Argument(["sources"], metavar="SRC...", nargs=-1, required=True, type=source.type)
        options = [item for item in one.params if isinstance(item, click.Option) and item.name != "into"]
        into = PanelOption([_INTO], metavar="DIR", required=True, type=ANY_PATH)
        super().__init__(one.name, params=[sources, into, *options], help=one.help)
        self._one = one

    def invoke(self, ctx: click.Context) -> None:
        sources, into = ctx.params.pop("sources"), ctx.params.pop("into")
        if ctx.params["distributed"]:
            raise UsageError(
                f"{_INTO} and --distributed exclude each other", hint="convert one SRC at a time"
            )
        pairs = _pair(sources, into)
        _require_unique(pairs)
        if len(pairs) > 1 and ctx.params.get("manifest"):
            raise UsageError(
                "--manifest is the file of one output, but there are several sources",
                hint="convert them one at a time: SRC DST, or write the manifests later: "
                + call("hash", "DST", manifest="FILE"),
            )
        # Every conversion is checked before the first one writes.
        ready = [item for item in pairs if ctx.params["dry_run"] or self._is_ready(ctx, *item)]
        reports = ctx.meta[REPORTS] = list[object]()
        for source, destination in ready:
            with self._single(ctx, source, destination) as single:
                self._one.invoke(single)
        if not ctx.params["dry_run"]:
            mark_written()
        if ctx.params["as_json"]:
            skipped = [str(item[1]) for item in pairs if item not in ready]
            print_json({"reports": reports, "skipped": skipped})
        elif len(pairs) > 1 and not ctx.params["dry_run"]:
            print_stderr(f"{len(ready)} of {plural(len(pairs), 'source')} converted")

    def _is_ready(self, ctx: click.Context, source: Location, destination: Location) -> bool:
        """Return whether a conversion can start; False if its output exists."""
        from ckpttools.api.output_checks import require_same_output

        try:
            self._check(ctx, source, destination)
        except DestinationExistsError:
            if ctx.params["overwrite"] or ctx.params.get("manifest"):
                raise
            # Anything else of this name is not the output of an earlier run.
            with self._planned(ctx, source, destination, overwrite=True, resume=False) as prepared:
                with suppress(NoSpaceError):
                    prepared.check()
                compared = require_same_output(prepared)
            print_stderr(f"{destination} exists: skipped; --overwrite replaces it (compared: {compared})")
            return False
        return True

    def _check(self, ctx: click.Context, source: Location, destination: Location) -> None:
        with self._planned(ctx, source, destination) as prepared:
            if prepared is not None:
                prepared.check()

    @contextmanager
    def _planned(
        self, ctx: click.Context, source: Location, destination: Location, **changes: bool
    ) -> Iterator[Any]:
        """Plan a single conversion; the plan is None if the command has done something else."""
        with self._single(ctx, source, destination, **changes) as single:
            single.obj = OutputOptions.pop_from(single)
            yield self._one.plan(single)

    def _single(
        self, ctx: click.Context, source: Location, destination: Location, **changes: bool
    ) -> click.Context:
        """Return the context of a single conversion."""
        result = click.Context(self._one, info_name=ctx.info_name, parent=ctx.parent)
        result.params = {**ctx.params, **changes, "source": source, "destination": destination}
        return result


def _pair(sources: Sequence[Location], into: Location) -> list[tuple[Location, Location]]:
    return [(source, into / _name_of(source)) for source in sources]


def _name_of(source: Location) -> str:
    """Return the name of a source: that of a directory, or of a Hub model without its revision."""
    if source.store.scheme == "hf":
        from ckpttools.stores.web.hub_name import HubName

        return HubName.of(source.key).repo.rpartition("/")[2]
    return source.absolute().name


def _require_unique(pairs: Sequence[tuple[Location, Location]]) -> None:
    count = Counter(destination for _, destination in pairs)
    if duplicate := next((item for item, times in count.items() if times > 1), None):
        shared = [str(source) for source, destination in pairs if destination == duplicate]
        raise UsageError(
            f"several sources would become {duplicate}",
            got=", ".join(shared),
            hint="convert these one at a time: SRC DST",
        )


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


@click.command(
    "hf-to-maxtext",
    short_help="Convert Hugging Face safetensors to a MaxText checkpoint.",
    cls=ConvertCommand,
)
@model_source_and_destination
@flags(*HF_TO_MAXTEXT)
@storage_options
@resource_options
@output_options
@writes
def hf_to_maxtext() -> WriteFunction:
    """Convert a Hugging Face checkpoint to a MaxText checkpoint.

    SRC is a directory with config.json and the weights, as safetensors or as PyTorch and its trainers save
    them, or a model on the Hub. DST gets 0/items in the layout of MaxText's own converter; pass it to MaxText
    as load_parameters_path=DST/0/items.

    DST appears only when everything is written; until then the data is in DST.partial. Run the same command
    again to resume an interrupted conversion.

    \b
    Examples:
      $ ckpt convert hf-to-maxtext ~/models/Llama-3.1-8B ~/maxtext/llama3.1-8b
      $ ckpt convert hf-to-maxtext ~/Llama-3.1-8B ~/out --no-scan --dtype bfloat16
      $ ckpt convert hf-to-maxtext hf://Qwen/Qwen3-8B gs://bucket/qwen3 --dry-run
    """
    from ckpttools.api.hf_to_maxtext import hf_to_maxtext

    return hf_to_maxtext


@click.command(
    "maxtext-to-hf",
    short_help="Convert a MaxText checkpoint to Hugging Face safetensors.",
    cls=ConvertCommand,
)
@model_source_and_destination
@flags(*MAXTEXT_TO_HF)
@given_flags(*SHARDS)
@resource_options
@output_options
@writes
def maxtext_to_hf() -> WriteFunction:
    """Convert a MaxText checkpoint to a model that transformers and vLLM load.

    SRC is a run directory, a step or an item, with parameters only or training state (the optimizer is not
    read), in Linen or NNX, with stacked layers or not. DST gets the weights, config.json and the other files
    that hf-to-maxtext stored or --like has.

    \b
    Examples:
      $ ckpt convert maxtext-to-hf ~/run/checkpoints ~/tuned --like ~/Llama-3.1-8B
      $ ckpt convert maxtext-to-hf gs://bucket/run ~/tuned --step 500
    """
    from ckpttools.api.maxtext_to_hf import maxtext_to_hf

    return maxtext_to_hf
