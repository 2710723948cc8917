"""Read the shardings that an Orbax item's arrays had when they were saved, from the `_sharding` file.

The shardings are informational: reading an array depends neither on the devices nor on this file.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckpttools.array.storage import Sharding
from ckpttools.array.tree import Path as TreePath
from ckpttools.array.tree import Tree, dotted
from ckpttools.core.errors import FormatError
from ckpttools.formats.json_file import parse_json, read_json
from ckpttools.formats.orbax.metadata import SHARDING_FILE, array_metadata
from ckpttools.stores.location import Location
from ckpttools.stores.registry import parse


def stored_shardings(tree: Tree) -> dict[TreePath, Sharding]:
    """Return the sharding of each array by path; empty if none is stored.

    Args:
        tree: The tree as opened by its format.

    Raises:
        FormatError, StorageError: The file with the shardings is damaged or cannot be read.
    """
    directory = parse(tree.metadata.location)
    location = directory / SHARDING_FILE
    if tree.metadata.format != "orbax" or not location.is_file():
        return {}
    try:
        shardings = dict(_shardings(read_json(location)))
        shapes = {name: tuple(item["write_shape"]) for name, item in array_metadata(directory).items()}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise FormatError(
            "not the shardings of an Orbax checkpoint",
            location=location,
            got=f"{type(error).__name__}: {error}",
            expected="names in base64, each with a sharding as JSON text",
        ) from error
    names = {path: dotted(path) for path in tree.arrays}
    return {
        path: replace(shardings[name], write_shape=shapes.get(name))
        for path, name in names.items()
        if name in shardings
    }


def shardings_in(item: Location) -> dict[str, Sharding]:
    """Return the shardings of an item by array name; errors of reading and parsing are not converted."""
    return dict(_shardings(read_json(item / SHARDING_FILE)))


def _shardings(document: Mapping[str, str]) -> Iterator[tuple[str, Sharding]]:
    # Most arrays have the same text as others, and each text lists all devices of the mesh.
    known: dict[str, Sharding] = {}
    for name, text in document.items():
        if text not in known:
            known[text] = _parsed(parse_json(text))
        yield base64.urlsafe_b64decode(name).decode(), known[text]


def _parsed(document: Mapping[str, Any]) -> Sharding:
    names, lengths = document.get("axis_names", ()), document.get("shape", ())
    return Sharding(
        document["sharding_type"],
        tuple((str(name), int(length)) for name, length in zip(names, lengths, strict=True)),
        tuple(_axes(entry) for entry in document.get("partition_spec", ())),
        document.get("device_str"),
        _devices(document.get("device_mesh")),
    )


def _devices(mesh: Mapping[str, Any] | None) -> tuple[int, ...] | None:
    """Return device ids; None if they are in increasing order."""
    entries: list[Any] = [mesh.get("mesh")] if mesh else []
    ids: list[int] = []
    while entries:
        each = entries.pop()
        if isinstance(each, list):
            entries += reversed(each)
        elif isinstance(each, dict):
            ids.append(int(each["id"]))
    return tuple(ids) if ids != sorted(ids) else None


def _axes(entry: object) -> tuple[str, ...]:
    """Convert an entry of a partition spec to a tuple of mesh axes."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(map(str, entry))  # type: ignore[call-overload]
