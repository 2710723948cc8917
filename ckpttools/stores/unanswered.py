"""A store that does not answer says nothing of what is in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ckpttools.core.errors import CheckpointError, StorageError
from ckpttools.stores.location import Location


def is_unanswered(error: Exception, location: Location) -> bool:
    """Whether an error tells of a store behind a network, and nothing of the file that is there."""
    return isinstance(error, StorageError) and location.store.scheme != "file" and location.exists()


def kept_unless_unanswered(error: CheckpointError, location: Location) -> CheckpointError:
    """The error, if it says something of the file at a place; raises it if the store did not answer."""
    if is_unanswered(error, location):
        raise error
    return error


@contextmanager
def faults_told_elsewhere(location: Location) -> Iterator[None]:
    """Ends what is done in it at an error that says something of the files at a place, which others tell.

    Raises:
        StorageError: the store did not answer.
    """
    try:
        yield
    except CheckpointError as error:
        kept_unless_unanswered(error, location)
