"""Globs of paths, as users write them: of a whole path, or of a key with everything below it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase, translate
from functools import lru_cache

from ckpttools.array.tree import Path, dotted, keystr


def matches(name: str, pattern: str) -> bool:
    """Whether a whole name matches a pattern, or is the pattern: a copied name means itself."""
    # Names may have brackets.
    return fnmatchcase(name, pattern) or name == pattern


def first_match(path: Path, patterns: Iterable[str]) -> str | None:
    """The first of `patterns` that names the path or a key above it.

    `*` stands for any text and `?` for any character, borders between keys included, so `**` says no more
    than `*`; `[0-9]` is one character of several. Keys are joined by "/" or by ".".
    """
    names = [*prefixes(keystr(path), "/"), *prefixes(dotted(path), ".")]
    return next((p for p in patterns if any(matches(name, p) for name in names)), None)


def prefixes(name: str, separator: str) -> list[str]:
    """The name, and what of it ends before a separator, longest first."""
    result = [name]
    while separator in result[-1]:
        result.append(result[-1].rpartition(separator)[0])
    return result


def matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """The names that match a pattern. Most patterns are names as they are, which may be thousands."""
    literal = {*patterns}
    wild = tuple(sorted(filter(_is_wild, literal)))
    matches = _any_of(wild).match if wild else lambda name: None
    return [name for name in names if name in literal or matches(name)]


def _literal(name: str) -> str:
    """A pattern of this name alone."""
    return re.sub(r"[*?[]", r"[\g<0>]", name)


def _is_wild(pattern: str) -> bool:
    return not {"*", "?", "["}.isdisjoint(pattern)


@lru_cache
def _any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, patterns)))


def expand_branches(patterns: Iterable[str], names: Iterable[str]) -> tuple[str, ...]:
    """The same patterns for whole dotted names: one of keys above some names gets `.*`.

    Args:
        patterns: as of `first_match`, of names whose keys are joined by ".".
        names: that there are; a pattern of one of them, or of none, stays as it is.
    """
    patterns = tuple(patterns)
    if not patterns:
        return ()
    known = {*names}
    above = {prefix for name in known for prefix in prefixes(name, ".")[1:]}

    def is_of(pattern: str, some: set[str]) -> bool:
        return pattern in some or (_is_wild(pattern) and bool(matching(some, [pattern])))

    # Brackets of a name that was copied are no glob.
    return tuple(
        f"{_literal(item) if item in above else item}.*"
        if is_of(item, above) and not is_of(item, known)
        else item
        for item in patterns
    )
