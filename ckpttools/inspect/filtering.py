"""Arrays chosen by a shell pattern of their whole paths, as `--filter` gives one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import TypeVar

from ckpttools.core.errors import UsageError

_Item = TypeVar("_Item")


def filtered(
    items: Iterable[_Item], name: Callable[[_Item], str], pattern: str, *, or_none: bool = False
) -> tuple[_Item, ...]:
    """The items whose names match.

    Args:
        items: with names.
        name: of an item.
        pattern: of whole names, or one of them.
        or_none: whether it may be that none matches.

    Raises:
        UsageError: none of them does, where there are some: nobody looks for nothing, and "no NaN in 0
            arrays" would be a false all-clear.
    """
    every = tuple(items)
    # A path that is copied means itself, even if it has brackets.
    found = tuple(each for each in every if fnmatchcase(name(each), pattern) or name(each) == pattern)
    if every and not (found or or_none):
        raise UsageError(
            "no array has a path that matches",
            got=pattern,
            wanted=f"a pattern of whole paths, such as {name(every[0])}",
            hint="put a * before and behind a part of a name; `ckpt inspect tree --flat` shows all paths",
        )
    return found
