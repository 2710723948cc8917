"""What a user says of who may read what is written, where a store lets others read."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import option
from ckpttools.stores.base import Store
from ckpttools.stores.location import Location


@dataclass(frozen=True, slots=True)
class RepositoryOptions:
    """What a user says of a repository that is written.

    Attributes:
        public: whether it is for everybody to read.
        model_card: whether it gets a page.
        base: the model that it came from, for that page; "" where only the source tells.
    """

    public: bool = False
    model_card: bool = False
    base: str = ""


@runtime_checkable
class Shares(Protocol):
    """A store of repositories that others read."""

    def shared(self, sharing: RepositoryOptions) -> Store:
        """The same store, in which what is written is shared so."""

    def is_of_repository(self, path: str) -> bool:
        """Whether a file, by its path below a checkpoint, is one that repositories have beside checkpoints.

        It is never taken for a part of one, replaced or deleted with one.
        """


def shared(destination: Location, sharing: RepositoryOptions) -> Location:
    """The destination, written as the user says.

    Raises:
        UsageError: it is shared with nobody, whatever the user says.
    """
    if sharing == RepositoryOptions():
        return destination
    if isinstance(destination.store, Shares):
        return Location(destination.store.shared(sharing), destination.key)
    declared = option("public", True) if sharing.public else option("model_card", True)
    raise UsageError(
        f"{declared} applies only to repositories on the hub",
        location=destination,
        expected="hf://org/name as destination",
        hint=f"leave out {declared}",
    )


def is_of_repository(root: Location, path: str) -> bool:
    """Whether a file below a checkpoint is one of the repository that it lies in."""
    return isinstance(root.store, Shares) and root.store.is_of_repository(path)
