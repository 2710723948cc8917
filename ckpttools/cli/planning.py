"""A command line that is only planned: what writes hands over what it has decided."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import click

from ckpttools.cli.options import Location
from ckpttools.cli.output import say
from ckpttools.core.errors import CheckpointError, UsageError
from ckpttools.stores.registry import parse
from ckpttools.stores.web.hub_name import is_model_name

if TYPE_CHECKING:
    from ckpttools.api.prepared import Prepared
    from ckpttools.plan.plan_file import Header
    from ckpttools.stores.relocation import Relocation

_TAKEN: ContextVar[list[Prepared] | None] = ContextVar("planned commands", default=None)


TOGETHER = "distributed"
"""The option of all commands whose work can be dealt out."""


def is_only_planned() -> bool:
    """Whether somebody has only asked for the plan."""
    return _TAKEN.get() is not None


def taken(prepared: Prepared, *, dry_run: bool, resume: bool) -> bool:
    """Whether somebody else takes over from here, who has only asked for the plan."""
    found = _TAKEN.get()
    if found is None:
        return False
    if dry_run or resume:
        flag = "--dry-run" if dry_run else "--resume"
        raise UsageError(f"{flag} has no meaning for a plan in a file", hint="leave it out")
    found.append(prepared)
    return True


def prepared_by(words: Sequence[str]) -> Prepared:
    """What a command line decides.

    Args:
        words: after `ckpt`.

    Raises:
        UsageError: it writes no checkpoint, or not by tasks that can be dealt out.
        CheckpointError: it cannot be planned.
    """
    from ckpttools.cli.lazy import LazyGroup
    from ckpttools.cli.main import main

    with _taking() as found, main.make_context("ckpt", list(words)) as context:
        # Any other command would be carried out.
        _check_writes(main, context, words)
        LazyGroup.invoke(main, context)
    return found[0]


def absolute_words(words: Sequence[str]) -> list[str]:
    """The words of a command line with places as they are called from everywhere on this machine.

    Left as they are: names of models of the hub, texts that may also name a file, such as --rules, and what
    is the value of another option as well.
    """
    from ckpttools.cli.main import main

    command, names = _command(main, click.Context(main), words)
    if command is None or isinstance(command, click.Group):
        return list(words)
    # Names of commands come first, in order.
    first = words.index(names[-1], len(names) - 1) + 1
    parser = command.make_parser(click.Context(command, ignore_unknown_options=True))
    try:
        given, _, _ = parser.parse_args([*words[first:]])
    except click.UsageError:
        # Whoever carries it out says so.
        return list(words)
    places, others = set[str](), set[str]()
    for each in command.params:
        value = given.get(each.name or "")
        texts = value if isinstance(value, list | tuple) else [value]
        found = places if isinstance(each.type, Location) else others
        found.update(text for text in texts if isinstance(text, str))
    relative = {text: _absolute(text) for text in places - others}

    def said(word: str) -> str:
        flag, equals, value = word.partition("=")
        is_flag = word.startswith("-") and equals
        return f"{flag}={relative.get(value, value)}" if is_flag else relative.get(word, word)

    return [*words[:first], *map(said, words[first:])]


def _absolute(text: str) -> str:
    place = parse(text)
    if place.store.scheme != "file" or (is_model_name(text) and not place.parent.exists()):
        return text
    if ".." not in place.parts:
        return str(place.absolute())
    # What is above a link is not what `..` leads to; and the directory that is left may not be there later.
    last = place.name
    return str(place.resolve() if last == ".." else parse(place.parent.resolve()) / last)


def _command(
    group: click.Group, context: click.Context, words: Sequence[str]
) -> tuple[click.Command | None, list[str]]:
    """The command of a command line, None where there is none; and the names that lead to it."""
    command: click.Command | None = group
    names = [word for word in words if not word.startswith("-")]
    depth = 0
    while isinstance(command, click.Group) and depth < len(names):
        command = command.get_command(context, names[depth])
        depth += 1
    return command, names[:depth]


def _check_writes(group: click.Group, context: click.Context, words: Sequence[str]) -> None:
    """Raises UsageError for a command that does not hand over what it has decided."""
    command, names = _command(group, context, words)
    # What is no command, click refuses in its own words.
    if isinstance(command, click.Group) or command is None:
        return
    if not any(each.name == TOGETHER for each in command.params):
        raise UsageError(
            f"`ckpt {' '.join(names)}` does no work that can be dealt out",
            wanted="a command that writes a checkpoint, such as convert hf-to-maxtext, cast, select or stack",
            hint="run it by itself",
        )


@contextmanager
def _taking() -> Iterator[list[Prepared]]:
    found: list[Prepared] = []
    token = _TAKEN.set(found)
    try:
        yield found
    finally:
        _TAKEN.reset(token)


def replanned(header: Header, relocation: Relocation) -> Prepared:
    """The plan of a file, made again: see `ckpttools.api.parts.Replan`."""
    words = [relocation.word(word) for word in header.command]
    # The number of workers decides how large tasks are, and must not be that of this machine.
    return prepared_by([*words, "--jobs", str(header.jobs)])


@contextmanager
def where_planned(header: Header, relocation: Relocation) -> Iterator[None]:
    """In the directory in which a command was given that is planned again, where that is here."""
    directory = relocation.there(header.directory)
    is_here = os.path.isdir(directory)  # noqa: PTH112
    with chdir(directory if is_here else "."):
        try:
            yield
        except CheckpointError:
            if not is_here:
                say(f"note     {directory}, where the plan was made, is not here; relative names mean others")
            raise
