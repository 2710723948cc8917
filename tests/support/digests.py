"""Digests made without the package, from the specification in docs/internals.md alone."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import xxhash

ALGORITHMS = {
    "xxh3-128": lambda data: xxhash.xxh3_128(data).digest(),
    "sha256": lambda data: hashlib.sha256(data).digest(),
}


def array_digest(values: np.ndarray, dtype: str, algorithm: str = "xxh3-128", block: int = 262144) -> str:
    """The digest of an array that is in memory."""
    digest = ALGORITHMS[algorithm]
    data = values.tobytes(order="C")
    shape = ",".join(str(length) for length in values.shape)
    message = f"{dtype}[{shape}]\n".encode()
    for start in range(0, len(data), block):
        message += digest(data[start : start + block])
    return digest(message).hex()


def tree_digest(digests: Mapping[str, str], algorithm: str = "xxh3-128") -> str:
    """The digest of arrays by name."""
    lines = [f"{digests[name]} {name}\n".encode() for name in sorted(digests, key=str.encode)]
    return ALGORITHMS[algorithm](b"".join(lines)).hex()
