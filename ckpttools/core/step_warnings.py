"""Warnings of which step or item was opened, and parts of the program that need none of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ckpttools.core.errors import StepWarning

_UNWANTED: ContextVar[tuple[type[StepWarning], ...]] = ContextVar("unwanted", default=())


@contextmanager
def unwarned(kind: type[StepWarning] = StepWarning) -> Iterator[None]:
    """Within it, and in this thread alone, warnings of a kind are not given.

    `warnings.catch_warnings` is about all threads: where two leave it in another order than they came, what
    they ignored is ignored from then on.
    """
    token = _UNWANTED.set((*_UNWANTED.get(), kind))
    try:
        yield
    finally:
        _UNWANTED.reset(token)


def warn_of_step(text: str, kind: type[StepWarning]) -> None:
    """Warns of what is opened, in the name of whoever called the caller."""
    if not issubclass(kind, _UNWANTED.get()):
        warnings.warn(text, kind, stacklevel=3)
