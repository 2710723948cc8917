"""Rooms below the command line name public functions and options, and no commands or flags."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from support.internals import main, render

import ckpttools
from ckpttools.cli.message_terms import FlagTerms
from ckpttools.core.message_terms import call

PACKAGE = Path(ckpttools.__file__).parent
# Commands of ckpt, and flags; not the programs that hints name for other work.
NAMED = re.compile(r"`ckpt\b|\bckpt [a-z]|(?<![\w-])--[a-z]")
OTHER_PROGRAMS = re.compile(
    r"hf download|gcloud|aws |az storage|sbatch|vllm|--(local-dir|include|revision|trust-remote-code)"
)
# Recorded command lines are data, and files of other programs are no messages.
DATA = {
    "api/prune.py": "the command line that a job records",
    "api/run_part.py": "the command line that a job records",
    "stores/local/directory.py": "reads recorded command lines",
    "stores/publishing.py": "reads recorded command lines",
    "maxtext/training_plan.py": "a shell script for xpk",
    "stores/objects/gs.py": "a gcloud command",
    "stores/objects/s3.py": "an aws command",
}
# The help of commands that formats add, as those of plug-ins do.
HELP = re.compile(r"Write any checkpoint as")


def files() -> Iterator[Path]:
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).parts[0] != "cli":
            yield path


def texts(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the strings of a module, except docstrings and the flags in declarations of options."""
    others = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) or (isinstance(node, ast.keyword) and node.arg in ("flag", "negative"))
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in others:
            yield node


def test_no_message_below_the_command_line_names_a_command_or_a_flag():
    named = [
        f"{path.relative_to(PACKAGE)}:{text.lineno}: {text.value}"
        for path in files()
        if str(path.relative_to(PACKAGE)) not in DATA
        for text in texts(ast.parse(path.read_text()))
        if NAMED.search(text.value) and not OTHER_PROGRAMS.search(text.value) and not HELP.match(text.value)
    ]
    assert named == []


def calls() -> Iterator[tuple[str, str, int, tuple[str, ...], bool]]:
    """Yield location, function, number of positional arguments, names of options; whether any is unpacked."""
    for path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute)):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if name not in ("call", "action") or not node.args or not isinstance(node.args[0], ast.Constant):
                continue
            where = f"{path.relative_to(PACKAGE)}:{node.lineno}"
            options = tuple(keyword.arg for keyword in node.keywords if keyword.arg)
            yield (
                where,
                str(node.args[0].value),
                len(node.args) - 1,
                options,
                len(options) < len(node.keywords),
            )


CALLS = [entry for entry in calls() if not entry[0].startswith("core/message_terms.py")]


def test_calls_exist_and_accept_these_arguments():
    wrong = []
    for where, name, count, options, _ in CALLS:
        function = getattr(ckpttools, name.partition(".")[0], None)
        if name.startswith("families."):
            continue
        if function is None:
            wrong.append(f"{where}: ckpttools.{name}")
            continue
        given = dict.fromkeys(options)
        try:
            inspect.signature(function).bind_partial(*[None] * count, **given)
        except TypeError as error:
            wrong.append(f"{where}: ckpttools.{name}: {error}")
    assert wrong == []


def _format(options: tuple[str, ...]) -> str:
    return "safetensors" if "names" in options else "orbax"


@pytest.mark.parametrize(
    ("name", "count", "options"), sorted({(name, count, options) for _, name, count, options, _ in CALLS})
)
def test_commands_exist_and_have_these_options(name: str, count: int, options: tuple[str, ...]):
    values = {option: _format(options) if option == "format" else "X" for option in options}
    flags = {
        option: True
        for option in ("finish", "undo", "cast", "parameters", "force", "ocdbt")
        if option in options
    }
    text = render(call(name, *["X"] * count, **(values | flags)), FlagTerms())
    words = text.split()[1:]
    command: click.Command = main
    while words and isinstance(command, click.Group) and not words[0].startswith("-"):
        below = command.get_command(click.Context(command), words[0])
        if below is None:
            break
        command, words = below, words[1:]
    if name == "summary":
        assert words == ["X"] * count
        return
    assert command is not main, text
    known = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= known, (text, sorted(known))
