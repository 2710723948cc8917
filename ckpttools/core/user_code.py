"""Run a Python file or module only if the user named it.

A user trusts the code that their own arguments name. A plan file also contains arguments, which anyone may
have written. While arguments come from a file, `allow_only` permits only the code that the user named.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import quoted_option

_permitted: ContextVar[Collection[str] | None] = ContextVar("code that may run", default=None)


class CodeNotAllowedError(UsageError):
    """A file names code to run that the user did not name.

    Attributes:
        name: The argument that names the code.
        code: File or module, as in the argument.
    """

    name: str = ""
    code: str = ""


@contextmanager
def allow_only(named: Collection[str]) -> Iterator[None]:
    """Permit only `named` code to run, while arguments come from a file.

    Args:
        named: The code that the user named, as passed to `check_code`.
    """
    token = _permitted.set(named)
    try:
        yield
    finally:
        _permitted.reset(token)


def check_code(name: str, code: str) -> None:
    """Check that code may run. Everything that runs user code calls this first.

    Args:
        name: The argument that names the code.
        code: File or module, as in the argument.

    Raises:
        CodeNotAllowedError: Only a file, and not the user, names the code.
    """
    permitted = _permitted.get()
    if permitted is None or code in permitted:
        return
    error = CodeNotAllowedError(
        "the plan names code, and code that only a file names never runs",
        got=quoted_option(name, code),
        expected="the same option in your own command or call",
        hint=f"read the code; if you trust it, add {quoted_option(name, code)}",
    )
    error.name, error.code = name, code
    raise error
