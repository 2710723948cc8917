"""PyTorch distributed checkpoints in safetensors: a tensor is spread over several files, cut along any axes.

Each process of torch's `HuggingFaceStorageWriter` writes a file such as
`shard-00002-model-00001-of-00003.safetensors`, whose metadata record the offsets of its parts. No file
records the full shape.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Stored
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import FormatError, listing
from ckpttools.core.region import Region, Shape
from ckpttools.formats.json_file import parse_json
from ckpttools.formats.pieced import Piece, assemble_boxes
from ckpttools.formats.safetensors.header import SafetensorsHeader
from ckpttools.stores.base import File
from ckpttools.stores.location import Location

ENTRY, _VERSION, _OFFSETS = "DCP_SHARDING_INFO", "DCP_VERSION", "saved_offsets"
# Larger ranks do not occur in practice; file names are untrusted.
_MAX_RANKS = 100_000
_RANK = re.compile(r"shard-(\d+)-(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A weights file written by one process."""

    name: str
    source: File
    header: SafetensorsHeader


def is_sharded(headers: Iterable[SafetensorsHeader]) -> bool:
    """Return whether the files record offsets of partial tensors."""
    return any(ENTRY in header.metadata for header in headers)


def drop_part_entries(custom: Mapping[str, str]) -> dict[str, str]:
    """Remove the entries about parts from metadata."""
    return {key: value for key, value in custom.items() if key not in (ENTRY, _VERSION)}


def complete_tensors(path: Location, files: Iterable[ShardFile]) -> dict[str, LazyArray]:
    """Return the complete tensors by name.

    Args:
        path: The opened directory.
        files: All files of the directory.

    Raises:
        FormatError: Files are missing, parts overlap or leave gaps, or the metadata are damaged.
    """
    files = list(files)
    _check_ranks(path, files)
    parts: dict[str, list[Piece]] = {}
    holders: dict[str, list[str]] = {}
    for file in files:
        for name, piece in _pieces(file):
            parts.setdefault(name, []).append(piece)
            holders.setdefault(name, []).append(file.name)
    _check_groups(path, {file.name for file in files}, holders.values())
    tensors: dict[str, LazyArray] = {}
    faults: list[str] = []
    for name, pieces in parts.items():
        try:
            tensors[name] = _assemble_pieces(pieces)
        except ValueError as error:
            faults.append(f"{name}: {error}")
    if faults:
        raise FormatError(
            "the parts of some tensors do not form complete tensors:" + listing(faults),
            location=path,
            expected="adjacent parts",
            hint="copy the checkpoint again, with the files of all processes",
        )
    return tensors


def ranks_remark(files: Iterable[ShardFile]) -> str:
    """Return a remark about the number of processes."""
    ranks = {rank for file in files if (rank := _rank(file.name)) is not None}
    return (
        f"assembled from the files of {len(ranks)} processes; no file records their total number: "
        "compare the shapes with the model's configuration"
    )


def _rank(name: str) -> int | None:
    match = _RANK.fullmatch(name)
    return int(match[1]) if match else None


def _check_ranks(path: Location, files: list[ShardFile]) -> None:
    """Check that processes are numbered from one without gaps; a single file is always incomplete."""
    if not path.is_dir():
        raise FormatError(
            "this file is one process's part of a distributed checkpoint",
            location=path,
            expected="the files of all processes",
            hint=f"pass their directory: {path.parent}",
        )
    ranks = {rank for file in files if (rank := _rank(file.name)) is not None}
    last = max(ranks, default=0)
    if last > _MAX_RANKS:
        raise FormatError(
            "a file name has an impossible process number", location=path, got=f"shard-{last}-…"
        )
    missing = sorted({*range(1, last + 1)} - ranks)
    if missing:
        names = [f"shard-{rank:05d}-…" for rank in missing]
        raise FormatError(
            f"files of some processes are missing:{listing(names)}",
            location=path,
            hint="copy the checkpoint again, with the files of all processes",
        )


def _check_groups(path: Location, existing: Collection[str], holders: Iterable[Collection[str]]) -> None:
    """Raise an error if a process lacks a file that other processes with the same tensors have.

    Pipeline stages share no tensors, and a process without data for a file does not write it.

    Args:
        path: The opened directory.
        existing: Names of all files.
        holders: The files that have a part of each tensor.
    """
    files = {frozenset(map(_split_process_number, names)) for names in holders}
    cut = {(frozenset(rank for rank, _ in file), min(end for _, end in file)) for file in files}
    groups = {ranks for ranks, _ in cut}
    expected = {
        f"shard-{rank}-{end}"
        for ranks, end in cut
        for group in groups
        if ranks < group
        for rank in group - ranks
    }
    if missing := sorted(expected - {*existing}):
        raise FormatError(
            f"files of processes are missing that have parts of tensors in other files:{listing(missing)}",
            location=path,
            expected="the same files of all processes that share tensors",
            hint="fetch these files; if no process wrote them, save again without "
            "fqn_to_index_mapping, so that each process writes one file",
        )


def _split_process_number(name: str) -> tuple[str, str]:
    """Split a file name into the process number, as written, and the rest of the name."""
    match = _RANK.fullmatch(name)
    return (match[1], match[2]) if match else ("", name)


def _pieces(file: ShardFile) -> Iterator[tuple[str, Piece]]:
    declared = _tensor_offsets(file)
    for entry in file.header.entries:
        start = declared.get(entry.name, (0,) * len(entry.shape))
        if len(start) != len(entry.shape):
            raise _damaged_error(
                file, f"{entry.name}: {list(start)} of an array of shape {list(entry.shape)}"
            )
        stop = tuple(a + n for a, n in zip(start, entry.shape, strict=True))
        at = file.header.data_start + entry.begin
        yield entry.name, Piece(Region(start, stop), Stored(entry.shape, entry.dtype, file.source, at))


def _tensor_offsets(file: ShardFile) -> dict[str, Shape]:
    """Return the offset of each tensor of a file in the complete tensor."""
    try:
        declared: dict[str, Any] = parse_json(file.header.metadata.get(ENTRY, "{}"))
        result = {name: tuple(item[_OFFSETS]) for name, item in declared.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _damaged_error(file, f"{type(error).__name__}: {error}") from error
    if not all(type(at) is int and 0 <= at < 1 << 62 for start in result.values() for at in start):
        raise _damaged_error(file, "offsets that are not lists of indices")
    return result


def _damaged_error(file: ShardFile, problem: str) -> FormatError:
    return FormatError(
        "the metadata do not record the offsets of partial tensors",
        location=f"{file.source.path}: {ENTRY}",
        got=problem,
        hint="copy the checkpoint again",
    )


def _assemble_pieces(pieces: list[Piece]) -> LazyArray:
    kinds: set[DType] = {piece.array.dtype for piece in pieces}
    ranks = {piece.box.rank for piece in pieces}
    if len(kinds) > 1 or len(ranks) > 1:
        raise ValueError(f"parts of several dtypes or ranks: {', '.join(sorted(map(str, kinds)))}")
    # torch writes data of several processes once, so duplicates come from two saves.
    if len({piece.box for piece in pieces}) < len(pieces):
        raise ValueError("two files have the same part of it")
    shape = tuple(max(piece.box.stop[axis] for piece in pieces) for axis in range(ranks.pop()))
    return assemble_boxes(shape, kinds.pop(), pieces)
