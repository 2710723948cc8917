"""The files that belong to safetensors checkpoints, and their sidecars."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from ckpttools.core.text import matches_any
from ckpttools.formats.adapters import ADAPTER
from ckpttools.formats.base import RECORD, SIDECARS
from ckpttools.formats.sidecar import CARRIED, PATTERNS
from ckpttools.stores.location import Location

# Weights in torch's format are often stored next to safetensors files.
_PATTERNS = (*PATTERNS, "*.safetensors", "*.index.json", "*.bin", RECORD)


def owns(name: str) -> bool:
    """Return whether a file has the name of a weights file or a sidecar."""
    return matches_any(name.rpartition("/")[2], _PATTERNS)


def unowned_files(directory: Location, weights: Collection[str]) -> Iterator[str]:
    """Yield all files except the weights that are read, their index, and sidecars.

    Args:
        directory: The directory to list.
        weights: Names of the weight files that are read, and of their index.
    """
    return _strangers(directory, weights.__contains__)


def files_of_others(directory: Location) -> Iterator[str]:
    """Yield all files except sidecars in the directory that `sidecar.WithSidecars` writes to."""
    return _strangers(directory, f"{CARRIED}.safetensors".__eq__)


def _strangers(directory: Location, is_weights: Callable[[str], bool]) -> Iterator[str]:
    for entry in directory.entries():
        if entry.name == SIDECARS and entry.is_own_dir:
            yield from (f"{SIDECARS}/{other}" for other in files_of_others(directory / SIDECARS))
        elif entry.is_own_dir or not (is_weights(entry.name) or _goes_along(entry.name)):
            yield entry.name


def _goes_along(name: str) -> bool:
    """Return whether a file is written next to weights or copied with them."""
    known = matches_any(name, PATTERNS)
    return name == RECORD or (known and name != ADAPTER)
