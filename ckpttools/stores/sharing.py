"""Options for repositories that other users can read."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import option
from ckpttools.stores.base import Store
from ckpttools.stores.location import Location


@dataclass(frozen=True, slots=True)
class RepositoryOptions:
    """Options for a repository that is written to.

    Attributes:
        public: Whether everyone can read the repository.
        model_card: Whether a model card is written.
        base: Base model for the card; "" takes it from the source.
    """

    public: bool = False
    model_card: bool = False
    base: str = ""


@runtime_checkable
class SupportsSharing(Protocol):
    """A store of repositories with access control."""

    def shared(self, sharing: RepositoryOptions) -> Store:
        """Return the same store with these options for new checkpoints."""

    def is_of_repository(self, path: str) -> bool:
        """Return whether a path below a checkpoint belongs to the repository rather than the checkpoint.

        Files of the repository are not replaced or deleted together with a checkpoint.
        """


def shared(destination: Location, sharing: RepositoryOptions) -> Location:
    """Return the destination with these options.

    Raises:
        UsageError: Options are set, but the store has no repositories.
    """
    if sharing == RepositoryOptions():
        return destination
    if isinstance(destination.store, SupportsSharing):
        return Location(destination.store.shared(sharing), destination.key)
    text = option("public", True) if sharing.public else option("model_card", True)
    raise UsageError(
        f"{text} applies only to repositories on the Hub",
        location=destination,
        expected="hf://org/name as destination",
        hint=f"leave out {text}",
    )


def is_of_repository(root: Location, path: str) -> bool:
    """Return whether a file below a checkpoint belongs to the repository that contains it."""
    return isinstance(root.store, SupportsSharing) and root.store.is_of_repository(path)
