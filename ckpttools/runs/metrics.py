"""The metrics that Orbax stores next to a step's trees, as numbers by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress

from ckpttools.formats.json_file import read_json
from ckpttools.stores.location import Location

METRICS = "metrics"
"""Name of the item, and of the one file in it."""


def load_step_metrics(step: Location) -> Mapping[str, float] | None:
    """Name -> number, names of nested ones joined by "/"; None where none are stored.

    Raises:
        FormatError, StorageError: the file is not a JSON object, or cannot be read.
    """
    location = step / METRICS / METRICS
    return dict(_numbers(read_json(location), "")) if location.is_file() else None


def _numbers(document: Mapping[str, object], above: str) -> Iterator[tuple[str, float]]:
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{above}{name}/")
        elif isinstance(value, int | float | str) and not isinstance(value, bool):
            # Whole numbers beyond float64 are as large as it has any. What JSON does not know, such as an
            # array of one number, is often saved as its text.
            with suppress(ValueError):
                yield f"{above}{name}", float(str(value))
