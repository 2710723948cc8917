"""Plug-ins: objects that installed packages announce under an entry-point group."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


def load_group(group: str, kind: type[T] | None = None) -> dict[str, T]:
    """The objects of a group by name. One that cannot be loaded is a warning, not an error.

    Args:
        group: entry-point group, such as "ckpttools.families".
        kind: class that every object must have, or None.
    """
    from importlib.metadata import entry_points

    found: dict[str, T] = {}
    for point in entry_points(group=group):
        try:
            loaded = point.load()
        except Exception as error:
            _warn(point, f"cannot be loaded: {error!r}")
            continue
        if kind is not None and not isinstance(loaded, kind):
            _warn(point, f"is no {kind.__name__}")
            continue
        found[point.name] = loaded
    return found


def _warn(point: EntryPoint, what: str) -> None:
    source = point.dist.name if point.dist else "an unknown package"
    warnings.warn(f"plug-in {point.name} of {source} {what}", stacklevel=3)
