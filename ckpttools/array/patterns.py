"""Glob patterns that match a complete path, or a key and everything below it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase, translate
from functools import lru_cache
from typing import TypeVar

from ckpttools.array.tree import Path, dotted, keystr
from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import action


def matches(name: str, pattern: str) -> bool:
    """Return whether a pattern matches or equals a complete name; equality lets copied names match."""
    # A copied name may contain brackets, which are glob syntax.
    return fnmatchcase(name, pattern) or name == pattern


def first_match(path: Path, patterns: Iterable[str]) -> str | None:
    """Return the first of `patterns` that matches the path or one of its parents.

    `*` matches any text and `?` any character, separators included, so `**` is the same as `*`; `[0-9]`
    matches one of several characters. Keys are joined by "/" or by ".".
    """
    names = [*prefixes(keystr(path), "/"), *prefixes(dotted(path), ".")]
    return next((p for p in patterns if any(matches(name, p) for name in names)), None)


def prefixes(name: str, separator: str) -> list[str]:
    """Return the name and its prefixes that end before a separator, the longest first."""
    result = [name]
    while separator in result[-1]:
        result.append(result[-1].rpartition(separator)[0])
    return result


def match_names(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """Return the names that match a pattern; fast even for thousands of patterns without wildcards."""
    literal = {*patterns}
    wild = tuple(sorted(filter(_has_wildcards, literal)))
    matches = _join_patterns(wild).match if wild else lambda name: None
    return [name for name in names if name in literal or matches(name)]


def _literal(name: str) -> str:
    """Escape a name as a pattern that matches only this name."""
    return re.sub(r"[*?[]", r"[\g<0>]", name)


def _has_wildcards(pattern: str) -> bool:
    return not {"*", "?", "["}.isdisjoint(pattern)


@lru_cache
def _join_patterns(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, patterns)))


def expand_branches(patterns: Iterable[str], names: Iterable[str]) -> tuple[str, ...]:
    """Append `.*` to patterns that are parents of names; both are complete dotted names.

    Args:
        patterns: Patterns as for `first_match`, with keys joined by ".".
        names: The known names. A pattern that equals a name or matches none stays unchanged.
    """
    patterns = tuple(patterns)
    if not patterns:
        return ()
    known = {*names}
    above = {prefix for name in known for prefix in prefixes(name, ".")[1:]}

    def is_of(pattern: str, some: set[str]) -> bool:
        return pattern in some or (_has_wildcards(pattern) and bool(match_names(some, [pattern])))

    # Brackets in a copied name are not glob syntax.
    return tuple(
        f"{_literal(item) if item in above else item}.*"
        if is_of(item, above) and not is_of(item, known)
        else item
        for item in patterns
    )


_Item = TypeVar("_Item")


def filter_items(
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
    all_items = tuple(items)
    result = tuple(item for item in all_items if matches(name(item), pattern))
    if all_items and not (result or or_none):
        raise UsageError(
            "no array has a path that matches",
            got=pattern,
            expected=f"a pattern of full paths, such as {name(all_items[0])}",
            hint=f"put a * before and after a part of a name; {action('inspect.names', 'PATH')} shows all",
        )
    return result
