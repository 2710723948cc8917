"""Several files as one input of a fuzzer: each after a line with its name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

_HEAD = re.compile(rb"\xf0=== ([^\n]{1,120})\n")


def packed(files: Mapping[str, bytes]) -> bytes:
    """The files as one input."""
    heads = (b"\xf0=== " + name.encode(errors="surrogateescape") + b"\n" for name in files)
    return b"".join(head + content for head, content in zip(heads, files.values(), strict=True))


def packed_directory(directory: Path, below: str = "", largest: int = 4096) -> bytes:
    """All files of a directory that are not large."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and path.stat().st_size <= largest)
    return packed({f"{below}{path.relative_to(directory)}": path.read_bytes() for path in paths})


def unpacked(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file; names lead nowhere else."""
    parts = _HEAD.split(data)
    for name, content in zip(parts[1::2], parts[2::2], strict=True):
        steps = name.decode(errors="surrogateescape").replace("\0", "").split("/")
        kept = [step for step in steps if step not in ("", ".", "..")]
        if kept:
            yield "/".join(kept), content


def write(files: Iterable[tuple[str, bytes]], root: Path) -> None:
    """Puts files below a directory, those for whose names there is room."""
    for name, content in files:
        path = root / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        except OSError:
            continue  # a name too long, or a file where a directory must be
