"""Copies on this machine of what is read elsewhere, for who reads it more than once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import option
from ckpttools.stores.base import File, Store
from ckpttools.stores.registry import parse

Observe = Callable[[int, int], None]
"""Called with the bytes that have come and those that will have come; never at once."""


@runtime_checkable
class Fetches(Protocol):
    """A store that keeps copies of its files on this machine, and reads those once they are there."""

    def fetch(self, files: Sequence[File], observe: Observe) -> None:
        """Copies files whole, and what else has been looked into; those that are there already stay.

        Raises:
            FormatError: what came is not what the store lists; it is not kept.
            StorageError, NoSpaceError: it does not come, or cannot be kept.
        """


def check_fetched(sources: Iterable[object]) -> None:
    """Raises UsageError if none of what is read is of a store that keeps copies."""
    if not _by_store(sources):
        raise UsageError(
            f"{option('download', True)} applies only to models on the hub",
            got="nothing that is read from there",
            expected="hf://org/name",
            hint=f"leave out {option('download', True)}: what lies elsewhere is read from where it is",
        )


def fetch(sources: Iterable[object], observe: Observe = lambda done, total: None) -> None:
    """Copies what is read to this machine, as far as its stores keep copies; errors as `Fetches.fetch`.

    Raises:
        UsageError: none of them does.
    """
    read = list(sources)
    check_fetched(read)
    for store, files in _by_store(read).items():
        store.fetch(files, observe)


def _by_store(sources: Iterable[object]) -> dict[Fetches, list[File]]:
    result: dict[Fetches, list[File]] = {}
    for file in {source.path: source for source in sources if isinstance(source, File)}.values():
        store: Store = parse(file.path).store
        if isinstance(store, Fetches):
            result.setdefault(store, []).append(file)
    return result
