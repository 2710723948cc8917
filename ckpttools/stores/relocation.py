"""Places of one machine as another one sees them: a disk that is mounted elsewhere, a copy of a model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError
from ckpttools.stores.registry import parse


@dataclass(frozen=True, slots=True)
class Relocation:
    """Other beginnings of paths.

    Attributes:
        roots: what paths began with, and what they begin with here; the first that fits counts.
    """

    roots: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, declared: Roots) -> Relocation:
        """What a user means by texts such as "/data=/mnt/data", or by a mapping of them.

        Raises:
            UsageError: not of this form.
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
        """Where something is here."""
        return _moved(path, self.roots)

    def back(self, text: str) -> str:
        """A text that names places as it would name them there."""
        for old, new in self.roots:
            # Whole names alone: /data is no beginning of /database, and nothing of /my/data.
            begins = re.compile(rf"(?<![\w./:-]){re.escape(new)}(?![\w.-])")
            text = old.join(begins.split(text))
        return text


AS_PLANNED = Relocation()
"""Where everything is where it was."""
Roots: TypeAlias = str | Iterable[str] | Mapping[str, str] | Relocation
"""What a user says of it: "OLD=NEW", several of these, or new beginnings by old ones."""


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
