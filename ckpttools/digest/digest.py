"""The digest of an array, which is the same in every format, layout and chunking (docs/internals.md).

The elements in C order, little-endian, form one stream of bytes. The stream is divided into blocks of
`BLOCK_BYTES`, and each block is hashed. The digest is the hash of the array's type followed by the block
digests in order. So several threads can hash blocks in any order while data is written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UnknownNameError
from ckpttools.core.region import Region, Shape, ceil_div
from ckpttools.core.text import format_type

if TYPE_CHECKING:
    from typing_extensions import Buffer

# xxhash releases the interpreter lock for blocks of more than 100 kB. Smaller blocks buffer less data at the
# ends of parts, and locate damage more precisely. Each block takes 16 bytes in the manifest.
BLOCK_BYTES = 256 << 10
DEFAULT_ALGORITHM = "xxh3-128"

Hash = Callable[["Buffer"], bytes]


def _xxh3_128(data: Buffer) -> bytes:
    import xxhash

    return xxhash.xxh3_128_digest(data)


def _sha256(data: Buffer) -> bytes:
    return hashlib.sha256(data).digest()


ALGORITHMS: Mapping[str, Hash] = {DEFAULT_ALGORITHM: _xxh3_128, "sha256": _sha256}


def algorithm_named(name: str) -> Hash:
    """Return a hash function by name.

    Raises:
        UnknownNameError: The algorithm does not exist.
    """
    if name not in ALGORITHMS:
        raise UnknownNameError(f"unknown hash algorithm {name!r}", expected=" or ".join(ALGORITHMS))
    return ALGORITHMS[name]


@dataclass(frozen=True, slots=True)
class Digest:
    """The digest of an array.

    Attributes:
        dtype: Name of the element type.
        shape: Shape of the array.
        digest: Digest of the array, in hexadecimal.
        blocks: Concatenated digests of the array's blocks, in hexadecimal.
    """

    dtype: str
    shape: Shape
    digest: str
    blocks: str

    @classmethod
    def of(cls, algorithm: str, dtype: str, shape: Shape, blocks: bytes) -> Digest:
        """Compute an array's digest: the hash of `float32[2,3]`, a newline and the block digests."""
        head = f"{format_type(dtype, shape)}\n".encode()
        return cls(dtype, shape, algorithm_named(algorithm)(head + blocks).hex(), blocks.hex())


def tree_digest(algorithm: str, digests: Iterable[tuple[str, str]]) -> str:
    """Hash the lines `<digest> <name>` of many arrays, sorted by the bytes of the names.

    Args:
        algorithm: Name of the hash algorithm.
        digests: Pairs of name and hexadecimal digest.
    """
    pairs = sorted(digests, key=lambda pair: pair[0].encode())
    lines = "".join(f"{digest} {name}\n" for name, digest in pairs)
    return algorithm_named(algorithm)(lines.encode()).hex()


def block_count(nbytes: int) -> int:
    """Return the number of blocks of an array of `nbytes`."""
    return ceil_div(nbytes, BLOCK_BYTES)


def block_ends(shape: Shape, itemsize: int, block: int) -> tuple[Shape, Shape]:
    """Return the coordinates of the first and last element of a block."""
    elements_per_block = BLOCK_BYTES // itemsize
    last = Region.whole(shape).size - 1
    return coordinates(shape, block * elements_per_block), coordinates(
        shape, min(last, (block + 1) * elements_per_block - 1)
    )


def coordinates(shape: Shape, position: int) -> Shape:
    """Return the coordinates of the element at a position in C order."""
    result: list[int] = []
    for length in reversed(shape):
        position, coordinate = divmod(position, length)
        result.append(coordinate)
    return tuple(reversed(result))
