"""The shardings of arrays when an Orbax item was saved, and the processes that held a chunk.

The shardings are informational: reading an array depends neither on the devices nor on this file.

Processes whose devices have the same coordinates on the mesh axes that arrays are sharded over store the
same chunks, so any one of them is sufficient.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

from ckpttools.array.storage import Sharding
from ckpttools.array.tree import Path, Tree, dotted
from ckpttools.array.tree import Path as TreePath
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, FormatError
from ckpttools.core.region import Shape
from ckpttools.formats.json_file import parse_json, read_json
from ckpttools.formats.orbax.metadata import SHARDING_FILE, array_metadata
from ckpttools.formats.orbax.saves import HostShare, Save
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
            known[text] = _parse(parse_json(text))
        yield base64.urlsafe_b64decode(name).decode(), known[text]


def _parse(document: Mapping[str, Any]) -> Sharding:
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
        entry = entries.pop()
        if isinstance(entry, list):
            entries += reversed(entry)
        elif isinstance(entry, dict):
            ids.append(int(entry["id"]))
    return tuple(ids) if ids != sorted(ids) else None


def _axes(entry: object) -> tuple[str, ...]:
    """Convert an entry of a partition spec to a tuple of mesh axes."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(map(str, entry))  # type: ignore[call-overload]


@dataclass(frozen=True, slots=True)
class ExpectedHost:
    """A host that would provide missing chunks.

    Attributes:
        processes: Distributed ids of processes of the job; any one of them is sufficient.
        chunks: Number of missing chunks that each of them has.
    """

    processes: tuple[int, ...]
    chunks: int


def expected_hosts(save: Save) -> tuple[ExpectedHost, ...] | None:
    """Return a few hosts that together would complete a save; None if they cannot be determined.

    Hosts are chosen greedily by their number of chunks. If arrays are sharded along different axes, fewer
    hosts may be sufficient.
    """
    if not all(item.cells for item in save.missing):
        return None
    try:
        mesh = _mesh_of(save.shares)
        if mesh is None:
            return None
        holders = dict(_holders(save, mesh))
    except (CheckpointError, AttributeError, KeyError, TypeError, ValueError):
        return None  # The mesh only improves messages; completeness does not depend on it.
    if holders.keys() != {(item.path, cell) for item in save.missing for cell in item.cells}:
        return None
    return tuple(_covering_hosts(holders))


@dataclass(frozen=True)
class _Mesh:
    """The process of each device of a mesh, in mesh order."""

    processes: tuple[int, ...]
    shardings: Mapping[str, Sharding]


def _mesh_of(shares: Sequence[HostShare]) -> _Mesh | None:
    for share in shares:
        if share.mesh and (share.item / SHARDING_FILE).is_file():
            by_process, devices = map(parse_json, share.mesh)
            owner = {device: number for number, ids in enumerate(by_process) for device in ids}
            return _Mesh(tuple(owner[device] for device in devices), shardings_in(share.item))
    return None


def _holders(save: Save, mesh: _Mesh) -> Iterator[tuple[tuple[Path, Shape], frozenset[int]]]:
    """Yield each missing chunk with the processes that have it."""
    for item in save.missing:
        sharding, document = mesh.shardings.get(dotted(item.path)), save.arrays[item.path][1]
        if sharding is None or document is None:
            return
        cells = _cells(sharding, mesh.processes, len(document.shape))
        if cells.keys() != set(product(*map(range, document.grid))):
            return  # The grid does not match the mesh.
        yield from (((item.path, cell), frozenset(cells[cell])) for cell in item.cells)


def _cells(sharding: Sharding, processes: Sequence[int], rank: int) -> dict[Shape, set[int]]:
    """Map each cell of an array's grid to the processes whose devices have it."""
    lengths = dict(sharding.mesh)
    if len(processes) != prod(lengths.values()):
        raise ValueError("a mesh of another size")
    spec = [*sharding.spec, *([()] * (rank - len(sharding.spec)))]
    result: dict[Shape, set[int]] = {}
    for process, location in zip(processes, product(*map(range, lengths.values())), strict=True):
        at = dict(zip(lengths, location, strict=True))
        cell = []
        for axes in spec:
            number = 0
            for axis in axes:
                number = number * lengths[axis] + at[axis]
            cell.append(number)
        result.setdefault(tuple(cell), set()).add(process)
    return result


def _covering_hosts(holders: Mapping[tuple[Path, Shape], frozenset[int]]) -> Iterator[ExpectedHost]:
    """Yield hosts that together have all chunks, starting with those that have the most."""
    left = dict(holders)
    while left:
        chunks_by_process: dict[int, set[tuple[Path, Shape]]] = {}
        for chunk, processes in left.items():
            for process in processes:
                chunks_by_process.setdefault(process, set()).add(chunk)
        best = max(chunks_by_process, key=lambda process: (len(chunks_by_process[process]), -process))
        equivalent = tuple(
            sorted(
                process for process, chunks in chunks_by_process.items() if chunks == chunks_by_process[best]
            )
        )
        yield ExpectedHost(equivalent, len(chunks_by_process[best]))
        for chunk in chunks_by_process[best]:
            del left[chunk]
