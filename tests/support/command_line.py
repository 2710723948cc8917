"""`ckpt` run as from a shell, but in this process: what it prints and how it ends."""

from __future__ import annotations

from click.testing import CliRunner, Result

from ckpttools.cli.main import main


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
