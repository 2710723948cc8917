"""Places of one machine as another one sees them: a disk that is mounted elsewhere, a copy of a model."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ckpttools.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Relocation:
    """Other beginnings of paths.

    Attributes:
        roots: what paths began with, and what they begin with here; the first that fits counts.
    """

    roots: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Relocation:
        """What a user means by texts such as "/data=/mnt/data".

        Raises:
            UsageError: not of this form.
        """
        roots = []
        for text in texts:
            old, equals, new = text.partition("=")
            if not (old and equals and new):
                raise UsageError(f"{text!r} says no new root", wanted="OLD=NEW, such as /data=/mnt/data")
            roots.append((_bare(old), _bare(new)))
        return cls(tuple(roots))

    def there(self, path: str) -> str:
        """Where something is here."""
        return _moved(path, self.roots)

    def word(self, word: str) -> str:
        """A word of a command line with the places that it names here."""
        flag, equals, value = word.partition("=")
        return f"{flag}={self.there(value)}" if word.startswith("-") and equals else self.there(word)

    def back(self, text: str) -> str:
        """A text that names places as it would name them there."""
        for old, new in self.roots:
            # Whole names alone: /data is no beginning of /database, and nothing of /my/data.
            begins = re.compile(rf"(?<![\w./:-]){re.escape(new)}(?![\w.-])")
            text = old.join(begins.split(text))
        return text


AS_PLANNED = Relocation()
"""Where everything is where it was."""


def _bare(root: str) -> str:
    return root.rstrip("/") or "/"


def _moved(path: str, roots: Iterable[tuple[str, str]]) -> str:
    for old, new in roots:
        below = old if old == "/" else f"{old}/"
        if path == old:
            return new
        if path.startswith(below):
            return f"{'' if new == '/' else new}/{path[len(below) :]}"
    return path
