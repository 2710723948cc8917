"""Safetensors files made byte by byte, sound and broken ones."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

# name: (dtype code, shape, bytes)
Tensors = Mapping[str, tuple[str, Sequence[int], bytes]]


def framed(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def packed(
    tensors: Tensors,
    key_order: Sequence[str] | None = None,
    padding: int = 0,
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """A file with the data in the order of `tensors` and the header's keys in `key_order`."""
    entries: dict[str, object] = {}
    position = 0
    for name, (code, shape, raw) in tensors.items():
        offsets = [position, position + len(raw)]
        entries[name] = {"dtype": code, "shape": list(shape), "data_offsets": offsets}
        position += len(raw)
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    header.update((name, entries[name]) for name in key_order or entries)
    text = json.dumps(header).encode() + b" " * padding
    return framed(text, b"".join(raw for _, _, raw in tensors.values()))


def entry(code: object = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": code, "shape": shape, "data_offsets": offsets}


def file_of(entries: Mapping[str, object] | bytes, data: bytes = b"") -> bytes:
    """A file whose header is taken as it is, right or wrong."""
    return framed(entries if isinstance(entries, bytes) else json.dumps(entries).encode(), data)


def small(name: str) -> bytes:
    """A sound file with one tensor of two bytes."""
    return packed({name: ("U8", [2], name[:2].encode().ljust(2))})


def write_index(folder: Path, weight_map: object, name: str = "model.safetensors.index.json") -> Path:
    path = folder / name
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return path
