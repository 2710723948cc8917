"""`ckpt` run as from a shell, but in this process: what it prints and how it ends."""

from __future__ import annotations

from typing import Any, TypeVar

from click.testing import CliRunner, Result

from ckpttools import CheckpointError
from ckpttools.api import doctor as diagnoses
from ckpttools.cli.main import main
from ckpttools.cli.message_terms import FlagTerms
from ckpttools.core.message_terms import render_all
from ckpttools.diagnosis import examine as examinations
from ckpttools.diagnosis.examine import Diagnosis

T = TypeVar("T")


def with_flags(result: T) -> T:
    """Return a result whose messages name flags and commands, as the command line prints them."""
    rendered: T = render_all(result, FlagTerms())
    return rendered


def examine(*arguments: Any, **options: Any) -> Diagnosis:
    """Return the diagnosis as the command line prints it."""
    return with_flags(examinations.examine(*arguments, **options))


def doctor(*arguments: Any, **options: Any) -> Diagnosis:
    """Return the diagnosis of a call as the command line prints it."""
    return with_flags(diagnoses.doctor(*arguments, **options))


def hint_of(error: CheckpointError) -> str:
    """Return the hint as the command line prints it."""
    return with_flags(error.raw.hint or "")


def ckpt(*arguments: object, **environment: str) -> Result:
    """Whatever becomes of it, but an exception that would be a traceback."""
    words = [str(argument) for argument in arguments]
    return CliRunner(env=environment).invoke(main, words, catch_exceptions=False)


def ended(*arguments: object, code: int = 0, **environment: str) -> Result:
    """What ends with this exit code and shows no progress."""
    result = ckpt(*arguments, "--no-progress", **environment)
    assert result.exit_code == code, result.output
    return result


def run(*arguments: object, code: int = 0) -> str:
    """What that prints, on both streams."""
    return ended(*arguments, code=code).output


def succeed(*arguments: object, **environment: str) -> Result:
    """What ends well, for commands that have no progress to show, too."""
    result = ckpt(*arguments, **environment)
    assert result.exit_code == 0, result.output
    return result
