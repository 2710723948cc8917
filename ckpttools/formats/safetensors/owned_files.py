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
    return _unowned_files(directory, weights.__contains__)


def foreign_files(directory: Location) -> Iterator[str]:
    """Yield all files except sidecars in the directory that `sidecar.WithSidecars` writes to."""
    return _unowned_files(directory, f"{CARRIED}.safetensors".__eq__)


def _unowned_files(directory: Location, is_weights: Callable[[str], bool]) -> Iterator[str]:
    for entry in directory.entries():
        if entry.name == SIDECARS and entry.is_own_dir:
            yield from (f"{SIDECARS}/{other}" for other in foreign_files(directory / SIDECARS))
        elif entry.is_own_dir or not (is_weights(entry.name) or _is_sidecar_name(entry.name)):
            yield entry.name


def _is_sidecar_name(name: str) -> bool:
    """Return whether a file is written next to weights or copied with them."""
    known = matches_any(name, PATTERNS)
    return name == RECORD or (known and name != ADAPTER)
