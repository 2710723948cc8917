"""Code of the user's own: a Python file or module that runs because an argument names it.

Whoever types an argument trusts the code that it names. A plan also carries arguments, and anybody may have
written them there. While arguments come from a file, `only_code` permits nothing but what the user named now.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ckpttools.core.errors import UsageError
from ckpttools.core.wording import quoted

_permitted: ContextVar[Collection[str] | None] = ContextVar("code that may run", default=None)


class CodeNotAllowedError(UsageError):
    """A file names code to run, and the user has not named it.

    Attributes:
        name: of the argument that names the code.
        code: file or module, as the argument names it.
    """

    name: str = ""
    code: str = ""


@contextmanager
def only_code(named: Collection[str]) -> Iterator[None]:
    """Permits no code but `named` while arguments come from a file.

    Args:
        named: what the user named, as `check_code` gets it.
    """
    token = _permitted.set(named)
    try:
        yield
    finally:
        _permitted.reset(token)


def check_code(name: str, code: str) -> None:
    """Checks that code may run; whatever runs code of the user calls this first.

    Args:
        name: of the argument that names the code.
        code: file or module, as the argument names it.

    Raises:
        CodeNotAllowedError: a file names it, and the user has not.
    """
    permitted = _permitted.get()
    if permitted is None or code in permitted:
        return
    error = CodeNotAllowedError(
        "the plan names code, and code that only a file names is never run",
        got=quoted(name, code),
        wanted="the same option from you",
        hint=f"read the code; if you trust it, add {quoted(name, code)}",
    )
    error.name, error.code = name, code
    raise error
