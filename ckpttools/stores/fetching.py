"""Local copies of remote files that are read more than once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import option
from ckpttools.stores.base import File, Store
from ckpttools.stores.registry import parse

Observe = Callable[[int, int], None]
"""Called with the number of bytes received so far and the total; never concurrently."""


def observe_bytes(notify: Observe, total: int) -> Callable[[int], None]:
    """Return a function to call with the size of each piece; it passes the sum and the total to `notify`."""
    done = 0
    notify(0, total)

    def observe(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        notify(done, total)

    return observe


@runtime_checkable
class SupportsFetch(Protocol):
    """A store that keeps local copies of its files and reads them once they exist."""

    def fetch(self, files: Sequence[File], observe: Observe) -> None:
        """Copy files completely, including other files read earlier; existing copies are kept.

        Raises:
            FormatError: The content differs from the store's listing. The copy is discarded.
            StorageError, NoSpaceError: A file cannot be fetched or stored.
        """


def check_fetched(sources: Iterable[object]) -> None:
    """Raise UsageError if no source is in a store that keeps local copies."""
    if not _group_by_store(sources):
        raise UsageError(
            f"{option('download', True)} applies only to models on the Hub",
            got="no source on the Hub",
            expected="hf://org/name",
            hint=f"leave out {option('download', True)}: other sources are read in place",
        )


def fetch(sources: Iterable[object], observe: Observe = lambda done, total: None) -> None:
    """Copy sources to this machine if their store keeps local copies; same errors as `SupportsFetch.fetch`.

    Raises:
        UsageError: No source is in a store that keeps local copies.
    """
    read = list(sources)
    check_fetched(read)
    for store, files in _group_by_store(read).items():
        store.fetch(files, observe)


def _group_by_store(sources: Iterable[object]) -> dict[SupportsFetch, list[File]]:
    result: dict[SupportsFetch, list[File]] = {}
    for file in {source.path: source for source in sources if isinstance(source, File)}.values():
        store: Store = parse(file.path).store
        if isinstance(store, SupportsFetch):
            result.setdefault(store, []).append(file)
    return result
