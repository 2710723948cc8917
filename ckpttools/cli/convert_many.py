"""Conversions of several sources with `--into DIR`."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import click

from ckpttools.cli.command import BaseCommand, PanelOption
from ckpttools.cli.command_line import command_line
from ckpttools.cli.options import ANY_PATH
from ckpttools.cli.output import print_json, print_stderr
from ckpttools.cli.write import REPORTS, OutputOptions, WriteCommand
from ckpttools.core.errors import DestinationExistsError, UsageError
from ckpttools.core.text import plural
from ckpttools.stores.location import Location

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
            return self._many.make_context(info_name, args, parent, **extra)
        words = list(args)
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            if "extra argument" not in error.message:
                raise
            # The words may be several sources and the directory for all of them.
            many = self._many.make_context(info_name, [*words, _INTO, "DIR"], parent, resilient_parsing=True)
            *_, last = map(str, many.params["sources"])
            line = shlex.split(command_line())
            position = len(line) - 1 - line[::-1].index(last) if last in line else len(line)
            line = [*line[:position], *line[position + 1 :], _INTO, last]
            raise click.UsageError(
                f"{error.message.rstrip('.')}. To convert several: {shlex.join(line)}", error.ctx
            ) from None

    @cached_property
    def _many(self) -> _ConvertMany:
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
        _require_unique(sources, pairs)
        # Every conversion is checked before the first one writes.
        ready = [item for item in pairs if ctx.params["dry_run"] or self._is_ready(ctx, *item)]
        reports = ctx.meta[REPORTS] = list[object]()
        for source, destination in ready:
            with self._single(ctx, source, destination) as single:
                self._one.invoke(single)
        if ctx.params["as_json"]:
            print_json({"reports": reports})
        elif len(pairs) > 1 and not ctx.params["dry_run"]:
            print_stderr(f"{len(ready)} of {plural(len(pairs), 'source')} converted")

    def _is_ready(self, ctx: click.Context, source: Location, destination: Location) -> bool:
        """Return whether a conversion can start; False if its output exists."""
        with self._single(ctx, source, destination) as single:
            single.obj = OutputOptions.taken(single)
            prepared = self._one.plan(single)
            try:
                if prepared is not None:
                    prepared.check()
            except DestinationExistsError:
                print_stderr(f"{destination} exists: skipped; --overwrite replaces it")
                return False
        return True

    def _single(self, ctx: click.Context, source: Location, destination: Location) -> click.Context:
        """Return the context of a single conversion."""
        result = click.Context(self._one, info_name=ctx.info_name, parent=ctx.parent)
        result.params = {**ctx.params, "source": source, "destination": destination}
        return result


def _pair(sources: Sequence[Location], into: Location) -> list[tuple[Location, Location]]:
    return [(source, into / _name_of(source)) for source in sources]


def _name_of(source: Location) -> str:
    """Return the name of a source: that of a directory, or of a Hub model without its revision."""
    if source.store.scheme == "hf":
        from ckpttools.stores.web.hub_name import HubName

        return HubName.of(source.key).repo.rpartition("/")[2]
    return source.absolute().name


def _require_unique(sources: Sequence[Location], pairs: Sequence[tuple[Location, Location]]) -> None:
    count = Counter(destination for _, destination in pairs)
    if twice := next((item for item, times in count.items() if times > 1), None):
        shared = [str(source) for source, destination in pairs if destination == twice]
        raise UsageError(
            f"several sources would become {twice}",
            got=", ".join(shared),
            hint="convert these one at a time: SRC DST",
        )
