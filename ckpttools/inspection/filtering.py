"""Select arrays by a shell pattern of their full paths, as passed with `--filter`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from ckpttools.array.patterns import matches
from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import action

_Item = TypeVar("_Item")


def filtered(
    items: Iterable[_Item], name: Callable[[_Item], str], pattern: str, *, or_none: bool = False
) -> tuple[_Item, ...]:
    """Return the items whose names match.

    Args:
        items: The items to filter.
        name: Returns the name of an item.
        pattern: Pattern of full names, or a full name.
        or_none: Whether the pattern may match nothing.

    Raises:
        UsageError: There are items and none matches, since "no NaN in 0 arrays" would be a false all-clear.
    """
    every = tuple(items)
    result = tuple(item for item in every if matches(name(item), pattern))
    if every and not (result or or_none):
        raise UsageError(
            "no array has a path that matches",
            got=pattern,
            expected=f"a pattern of full paths, such as {name(every[0])}",
            hint=f"put a * before and after a part of a name; {action('inspect.names', 'PATH')} shows all",
        )
    return result
