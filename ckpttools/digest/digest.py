"""The digest of an array, the same in every format, layout and chunking (docs/hash-and-verify.md).

The elements in C order, little-endian, are one stream of bytes. It is cut into blocks of `BLOCK_BYTES`, each
block is hashed, and the digest is the hash of the array's type and of the blocks' digests, one after the
other. So blocks can be hashed in any order, by several threads, while data is written.
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
# ends of parts, and locate damage more precisely. Each takes 16 bytes in the manifest.
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
    """Return the function that makes a digest of bytes.

    Raises:
        UnknownNameError: the algorithm does not exist.
    """
    if name not in ALGORITHMS:
        raise UnknownNameError(f"unknown hash algorithm {name!r}", expected=" or ".join(ALGORITHMS))
    return ALGORITHMS[name]


@dataclass(frozen=True, slots=True)
class Digest:
    """The digest of an array.

    Attributes:
        dtype: name of the element type.
        shape: of the array.
        digest: of the array, as hexadecimal digits.
        blocks: digests of its blocks, one after the other, as hexadecimal digits.
    """

    dtype: str
    shape: Shape
    digest: str
    blocks: str

    @classmethod
    def of(cls, algorithm: str, dtype: str, shape: Shape, blocks: bytes) -> Digest:
        """Return an array's digest: the hash of `float32[2,3]`, a newline and the digests of its blocks."""
        head = f"{format_type(dtype, shape)}\n".encode()
        return cls(dtype, shape, algorithm_named(algorithm)(head + blocks).hex(), blocks.hex())


def tree_digest(algorithm: str, digests: Iterable[tuple[str, str]]) -> str:
    """One digest of many arrays: the hash of the lines `<digest> <name>`, in the order of the names' bytes.

    Args:
        algorithm: name of it.
        digests: pairs of name and digest as hexadecimal digits.
    """
    pairs = sorted(digests, key=lambda pair: pair[0].encode())
    lines = "".join(f"{digest} {name}\n" for name, digest in pairs)
    return algorithm_named(algorithm)(lines.encode()).hex()


def block_count(nbytes: int) -> int:
    """Blocks of an array of `nbytes`."""
    return ceil_div(nbytes, BLOCK_BYTES)


def block_ends(shape: Shape, itemsize: int, block: int) -> tuple[Shape, Shape]:
    """Return coordinates of the first and the last element of a block."""
    each = BLOCK_BYTES // itemsize
    last = Region.whole(shape).size - 1
    return coordinates(shape, block * each), coordinates(shape, min(last, (block + 1) * each - 1))


def coordinates(shape: Shape, position: int) -> Shape:
    """Return the coordinates of the element at a position in C order."""
    result: list[int] = []
    for length in reversed(shape):
        position, here = divmod(position, length)
        result.append(here)
    return tuple(reversed(result))
