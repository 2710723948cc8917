"""Models too large for the memory that a test allows, and what is said of them there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ckpttools.testing.models import LlamaSizes, write_llama


def differing_models(directory: Path) -> list[Path]:
    """Two models of a gigabyte, sparse on the disk, of which 64 MiB differ: all in one array."""
    sizes = LlamaSizes(layers=1, hidden=2048, mlp=16384, heads=16, kv_heads=4, head_dim=128, vocab=32768)
    locations = [directory / name for name in ("a", "b")]
    for location in locations:
        write_llama(location, sizes, sparse=True)
    with (locations[1] / "model.safetensors").open("r+b") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        file.write(b"\1" * (64 << 20))
    return locations


def said_within(script: str, memory: int, locations: list[Path]) -> tuple[int, int]:
    """The two numbers that a script prints, which gets a memory and places: what it found, and its peak."""
    command = [sys.executable, "-c", script, str(memory), *map(str, locations)]
    result, peak = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return int(result), int(peak)
