"""A store that does not answer says nothing of what is in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ckpttools.core.errors import CheckpointError, StorageError
from ckpttools.stores.place import Place


def is_unanswered(error: Exception, place: Place) -> bool:
    """Whether an error tells of a store behind a network, and nothing of the file that is there."""
    return isinstance(error, StorageError) and place.store.scheme != "file" and place.exists()


def kept_unless_unanswered(error: CheckpointError, place: Place) -> CheckpointError:
    """The error, if it says something of the file at a place; raises it if the store did not answer."""
    if is_unanswered(error, place):
        raise error
    return error


@contextmanager
def faults_told_elsewhere(place: Place) -> Iterator[None]:
    """Ends what is done in it at an error that says something of the files at a place, which others tell.

    Raises:
        StorageError: the store did not answer.
    """
    try:
        yield
    except CheckpointError as error:
        kept_unless_unanswered(error, place)
