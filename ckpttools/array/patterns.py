"""Globs that match a complete path, or a key and everything below it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase, translate
from functools import lru_cache

from ckpttools.array.tree import Path, dotted, keystr


def matches(name: str, pattern: str) -> bool:
    """Return whether a complete name matches a pattern, or equals it (so that copied names match)."""
    # Names may contain brackets.
    return fnmatchcase(name, pattern) or name == pattern


def first_match(path: Path, patterns: Iterable[str]) -> str | None:
    """Return the first of `patterns` that matches the path or a key above it.

    `*` matches any text and `?` any character, separators included, so `**` is the same as `*`; `[0-9]`
    matches one of several characters. Keys are joined by "/" or by ".".
    """
    names = [*prefixes(keystr(path), "/"), *prefixes(dotted(path), ".")]
    return next((p for p in patterns if any(matches(name, p) for name in names)), None)


def prefixes(name: str, separator: str) -> list[str]:
    """Return the name and its prefixes that end before a separator, longest first."""
    result = [name]
    while separator in result[-1]:
        result.append(result[-1].rpartition(separator)[0])
    return result


def matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """Return the names that match a pattern; fast for thousands of patterns that are plain names."""
    literal = {*patterns}
    wild = tuple(sorted(filter(_is_wild, literal)))
    matches = _any_of(wild).match if wild else lambda name: None
    return [name for name in names if name in literal or matches(name)]


def _literal(name: str) -> str:
    """Return a pattern that matches only this name."""
    return re.sub(r"[*?[]", r"[\g<0>]", name)


def _is_wild(pattern: str) -> bool:
    return not {"*", "?", "["}.isdisjoint(pattern)


@lru_cache
def _any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, patterns)))


def expand_branches(patterns: Iterable[str], names: Iterable[str]) -> tuple[str, ...]:
    """Adapt patterns to complete dotted names: append `.*` to patterns of keys above some names.

    Args:
        patterns: as of `first_match`, of names whose keys are joined by ".".
        names: the known names; a pattern that equals one of them, or matches none, is unchanged.
    """
    patterns = tuple(patterns)
    if not patterns:
        return ()
    known = {*names}
    above = {prefix for name in known for prefix in prefixes(name, ".")[1:]}

    def is_of(pattern: str, some: set[str]) -> bool:
        return pattern in some or (_is_wild(pattern) and bool(matching(some, [pattern])))

    # Brackets in a copied name are not a glob.
    return tuple(
        f"{_literal(item) if item in above else item}.*"
        if is_of(item, above) and not is_of(item, known)
        else item
        for item in patterns
    )
