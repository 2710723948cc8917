"""Match untrusted regular expressions within a time limit."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import NoReturn

# Matching a name takes microseconds, but nested repeats can take exponential time.
_SECONDS = 2.0
_REPETITION = frozenset("*+?{")


class PatternError(ValueError):
    """An invalid pattern, or one that takes too long to match."""


class _TimeoutError(Exception):
    """Matching exceeded the time limit."""


def is_match(pattern: str, text: str, *, below: bool = False) -> bool:
    """Return whether a regular expression matches a complete text.

    The limit of a few seconds applies only in the main thread, because signals cannot interrupt other
    threads.

    Args:
        pattern: The regular expression.
        text: The name to match.
        below: Whether any keys and a dot may precede the part that the expression matches.

    Raises:
        PatternError: The expression is invalid, or matching takes too long.
    """
    full_pattern = rf"(.*\.)?({pattern})" if below else pattern
    return _limited_match(re.fullmatch, full_pattern, pattern, text) is not None


def match_start(pattern: str, text: str) -> re.Match[str] | None:
    """Match a regular expression at the start of a text, with the time limit of `is_match`.

    Args:
        pattern: The regular expression.
        text: The text to match.

    Returns:
        The match, or None.

    Raises:
        PatternError: The expression is invalid, or matching takes too long.
    """
    return _limited_match(re.match, pattern, pattern, text)


def _limited_match(
    method: Callable[[str, str], re.Match[str] | None], expression: str, pattern: str, text: str
) -> re.Match[str] | None:
    """Call a function of `re`, with the errors of `is_match`.

    The user's `pattern` decides whether time is limited.
    """
    try:
        with nullcontext() if _REPETITION.isdisjoint(pattern) else _time_limit(_SECONDS):
            return method(expression, text)
    except RecursionError:
        raise PatternError("it is nested too deeply") from None
    except (re.error, OverflowError) as error:
        raise PatternError(str(error)) from error
    except _TimeoutError:
        raise PatternError(
            f"matching it against {text[:80]!r} took longer than {_SECONDS:g} seconds: "
            "nested or adjacent repeats, such as (a*)*, can match in too many ways"
        ) from None


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise _TimeoutError if the block takes longer; restore an existing timer afterwards."""
    try:
        handler = signal.signal(signal.SIGALRM, _raise_timeout)
    except ValueError:  # Only the main thread may set signal handlers.
        yield
        return
    before = 0.0, 0.0
    try:
        before = signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, handler or signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, *before)


def _raise_timeout(number: int, frame: FrameType | None) -> NoReturn:
    raise _TimeoutError
