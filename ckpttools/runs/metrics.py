"""The metrics that Orbax stores next to the trees of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress

from ckpttools.formats.json_file import read_json
from ckpttools.stores.location import Location

METRICS = "metrics"
"""Name of the item, and of the only file in it."""


def load_step_metrics(step: Location) -> Mapping[str, float] | None:
    """Return the metrics by name, with nested names joined by "/"; None if there are none.

    Raises:
        FormatError, StorageError: The file is not a JSON object, or cannot be read.
    """
    location = step / METRICS / METRICS
    return dict(_numbers(read_json(location), "")) if location.is_file() else None


def _numbers(document: Mapping[str, object], above: str) -> Iterator[tuple[str, float]]:
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{above}{name}/")
        elif isinstance(value, int | float | str) and not isinstance(value, bool):
            # Integers beyond the range of float64 become infinite. Values that JSON cannot represent, such as
            # an array of one number, are often saved as text.
            with suppress(ValueError):
                yield f"{above}{name}", float(str(value))
