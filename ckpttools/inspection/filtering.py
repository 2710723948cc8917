"""Arrays chosen by a shell pattern of their whole paths, as `--filter` gives one."""

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
        items: with names.
        name: of an item.
        pattern: of whole names, or one of them.
        or_none: whether none may match.

    Raises:
        UsageError: there are items and none matches: "no NaN in 0 arrays" would be a false all-clear.
    """
    every = tuple(items)
    result = tuple(item for item in every if matches(name(item), pattern))
    if every and not (result or or_none):
        raise UsageError(
            "no array has a path that matches",
            got=pattern,
            expected=f"a pattern of whole paths, such as {name(every[0])}",
            hint=f"put a * before and behind a part of a name; {action('inspect.names', 'PATH')} shows all",
        )
    return result
