"""Globs of paths, as users write them: of a whole path, or of a key with everything below it."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

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
    return next((p for p in patterns if any(fnmatchcase(name, p) for name in names)), None)


def prefixes(name: str, separator: str) -> list[str]:
    """The name, and what of it ends before a separator, longest first."""
    found = [name]
    while separator in found[-1]:
        found.append(found[-1].rpartition(separator)[0])
    return found
