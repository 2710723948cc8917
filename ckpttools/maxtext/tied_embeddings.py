"""Tied embeddings: models whose output head is their embedding, stored once or twice."""

from __future__ import annotations

from collections.abc import Mapping

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.message_terms import option
from ckpttools.mapping.flags import Flag
from ckpttools.maxtext.versions import EMBEDDING, HEAD
from ckpttools.model_families.family import Family, Spelling

FLAG = "tied"
TIED_MODES = ("keep", "drop", "materialize")


@dataclass(frozen=True, slots=True)
class Head:
    """The names of an embedding and of an output head that may be the same array."""

    embedding: str
    head: str

    @property
    def copy_remark(self) -> str:
        """Return the remark on a head that is copied from the embedding."""
        return (
            f"{self.head} does not exist, and is written as a copy of {self.embedding}: "
            f"{option(FLAG, 'materialize')}"
        )


LEFT_HEAD = Head(keystr(EMBEDDING), keystr(HEAD))
"""Names of arrays in MaxText, with keys joined by "/"."""


def right_head(family: Family, spelling: Spelling) -> Head | None:
    """Return the names in Hugging Face files; None if the family has no separate head."""
    heads = [row for row in family.rows if FLAG in row.unless.split()]
    if not heads:
        return None
    embedding, head = (str(spelling.key(row.right.key)) for row in (family.rows[0], heads[0]))
    return Head(embedding, head)


def left_head(family: Family) -> str | None:
    """Return the name of the output head in MaxText."""
    return next((str(row.left.key) for row in family.rows if FLAG in row.unless.split()), None)


def tied_flags(tied_mode: str | None, head: str | None, names: Mapping[str, LazyArray]) -> dict[str, Flag]:
    """Return the flag that the user sets; nothing if the configuration decides.

    Args:
        tied_mode: "keep" follows the existing arrays, "drop" means a model without a head, and
            "materialize" a model that gets a head.
        head: The name of the source's head, or None.
        names: The arrays of the source.
    """
    if tied_mode is None or head is None:
        return {}
    tied = {"keep": head not in names, "drop": True, "materialize": False}[tied_mode]
    return {FLAG: Flag(tied, option("tied", tied_mode))}
