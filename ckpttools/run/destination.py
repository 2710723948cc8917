"""Where a checkpoint is to be made: its store says how it grows there."""

from __future__ import annotations

from collections.abc import Callable

from ckpttools.core.errors import UsageError
from ckpttools.stores.place import Place
from ckpttools.stores.publishing import Publishes, Staging, Unfinished


def staging_of(
    destination: Place, overwrite: bool = False, check_replaced: Callable[[], None] = lambda: None
) -> Staging:
    """How a checkpoint grows before it gets this name; arguments as those of `Publishes.staging`.

    Raises:
        UsageError: no checkpoint can be made in this store.
    """
    if isinstance(destination.store, Publishes):
        return destination.store.staging(destination.key, overwrite, check_replaced)
    raise UsageError(
        f"no checkpoint can be written to {destination.store.scheme}://",
        place=destination,
        wanted="a destination that can be written, such as a local directory",
    )


def begun_at(destination: Place) -> Unfinished | None:
    """What an interrupted conversion to a destination has left, if there was one."""
    store = destination.store
    return store.begun_at(destination.key) if isinstance(store, Publishes) else None
