"""Relocation of paths that differ between machines, such as another mount point or a copied model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError
from ckpttools.stores.registry import parse


@dataclass(frozen=True, slots=True)
class Relocation:
    """A mapping of path prefixes.

    Attributes:
        roots: Pairs of an original prefix and its local replacement; the first match wins.
    """

    roots: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, declared: Roots) -> Relocation:
        """Parse texts such as "/data=/mnt/data", or a mapping.

        Raises:
            UsageError: A text does not have this form.
        """
        if isinstance(declared, Relocation):
            return declared
        if isinstance(declared, Mapping):
            declared = [f"{old}={new}" for old, new in declared.items()]
        roots = []
        for text in [declared] if isinstance(declared, str) else declared:
            old, equals, new = text.partition("=")
            if not (old and equals and new):
                raise UsageError(f"{text!r} is not OLD=NEW", expected="a pair such as /data=/mnt/data")
            roots.append((_bare(old), _bare(new if "://" in new else str(parse(new).absolute()))))
        return cls(tuple(roots))

    def there(self, path: str) -> str:
        """Return the local equivalent of a path."""
        return _replace_prefix(path, self.roots)

    def back(self, text: str) -> str:
        """Replace local prefixes in a text with the original ones."""
        for old, new in self.roots:
            # Match only complete names: /data is neither a prefix of /database nor part of /my/data.
            begins = re.compile(rf"(?<![\w./:-]){re.escape(new)}(?![\w.-])")
            text = old.join(begins.split(text))
        return text


NO_RELOCATION = Relocation()
"""A relocation that changes nothing."""
Roots: TypeAlias = str | Iterable[str] | Mapping[str, str] | Relocation
"""User input: one or several texts "OLD=NEW", or a mapping from old to new prefixes."""


def _bare(root: str) -> str:
    return root.rstrip("/") or "/"


def _replace_prefix(path: str, roots: Iterable[tuple[str, str]]) -> str:
    for old, new in roots:
        below = old if old == "/" else f"{old}/"
        if path == old:
            return new
        if path.startswith(below):
            return f"{'' if new == '/' else new}/{path[len(below) :]}"
    return path
