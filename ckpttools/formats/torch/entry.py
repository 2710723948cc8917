"""A tensor of a torch distributed checkpoint: a complete `torch.save` file embedded in another file.

The tensor's bytes are located only when it is read, so a checkpoint of 100,000 tensors on many ranks can be
listed and planned from its metadata.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from ckpttools.array.lazy import ByteSource, LazyArray
from ckpttools.array.nodes import Stored, relayout
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import FormatError
from ckpttools.core.region import Region, Shape
from ckpttools.formats.safetensors.header import parse_header
from ckpttools.formats.torch import archive
from ckpttools.formats.torch.names import is_of_training
from ckpttools.formats.torch.pickled import Record
from ckpttools.formats.torch.tensors import NotReadableError, StorageRange, lazy_tensor
from ckpttools.formats.torch.unpickling import unpickled
from ckpttools.stores.base import File
from ckpttools.stores.checksums import ChecksummedRange

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Buffer

    from ckpttools.array.scratch import Scratch

# torch writes about a kilobyte in addition to the tensor.
_MOST_PICKLE = 1 << 20


# Opening an archive takes about 15 reads, so small archives are first read completely.
_SMALL = 32 << 10


class FilePart(File):
    """A byte range of a file that can be read like a file."""

    __slots__ = ("_held", "_offset", "_whole", "path", "size", "version")

    def __init__(self, whole: ByteSource, offset: int, size: int) -> None:
        self._whole, self._offset, self._held = whole, offset, b""
        self.path, self.size, self.version = whole.path, size, whole.version

    def read_into(self, offset: int, out: Buffer) -> None:
        view = memoryview(out).cast("B")
        if self.size > _SMALL or offset + len(view) > self.size:
            self._whole.read_into(self._offset + offset, out)
            return
        if not self._held:
            held = bytearray(self.size)
            self._whole.read_into(self._offset, held)
            self._held = bytes(held)
        view[:] = self._held[offset : offset + len(view)]


@dataclass(frozen=True, eq=False)
class SavedTensor:
    """A separately saved tensor, decoded by `ckpttools.array.stored.Decoded`.

    Attributes:
        source: The file.
        offset, nbytes: Byte range in the file.
        shape, dtype: Shape and dtype of the tensor according to the checkpoint's metadata.
    """

    source: ByteSource
    offset: int
    nbytes: int
    shape: Shape
    dtype: DType

    @property
    def code(self) -> str:
        return f"{self.nbytes} bytes of torch.save: {self.dtype}{list(self.shape)}"

    @property
    def _location(self) -> str:
        return f"{self.source.path}, byte {self.offset:,}"

    @property
    def scratch_bytes(self) -> int:
        """Scratch memory for any order of axes, because torch keeps a tensor's order in memory."""
        stored = Stored(self.shape, self.dtype, self.source, 0)
        rank = len(self.shape)
        if rank < 2:
            return stored.scratch_bytes
        reordered = relayout(stored, [(n,) for n in self.shape], range(rank)[::-1], [1] * rank)
        return reordered.scratch_bytes

    def fetched(self, region: Region) -> int:
        return region.size * self.dtype.itemsize

    def read_into(self, region: Region, out: np.ndarray, scratch: Scratch) -> None:
        self._array.read_into(region, out, scratch)

    @cached_property
    def _array(self) -> LazyArray:
        """The tensor as stored in the file.

        Raises:
            FormatError: The file contains another tensor, or none.
        """
        result = self._found()
        if (result.shape, result.dtype) != (self.shape, self.dtype):
            raise FormatError(
                "a tensor does not match the checkpoint's metadata",
                location=self._location,
                got=f"{result.dtype}{list(result.shape)}",
                expected=f"{self.dtype}{list(self.shape)}",
                hint="the files are from another save: fetch the checkpoint again",
            )
        if result.scratch_bytes > self.scratch_bytes:
            raise FormatError(
                "the elements of a tensor are not contiguous, as torch always saves them here",
                location=self._location,
                hint="save each tensor again as tensor.contiguous()",
            )
        return result

    def _found(self) -> LazyArray:
        part = FilePart(self.source, self.offset, self.nbytes)
        if part.read(0, min(4, part.size)) != archive.MAGIC:
            return self._in_safetensors(part)
        value, storages = saved_value(part, self.source, self.offset)
        try:
            if isinstance(value, Record):
                return lazy_tensor(value, storages)
            why = "not a tensor"
        except NotReadableError as error:
            why = str(error)
        raise FormatError(f"a tensor cannot be read: {why}", location=self._location)

    def _in_safetensors(self, part: FilePart) -> LazyArray:
        """Return the tensor of a safetensors entry (torch's `SerializationFormat.SAFETENSORS`)."""
        header = parse_header(part)
        if len(header.entries) != 1:
            raise FormatError("not exactly one tensor", location=self._location)
        (entry,) = header.entries
        start = self.offset + header.data_start + entry.begin
        return Stored(entry.shape, entry.dtype, self.source, start)


def saved_value(part: FilePart, whole: ByteSource, offset: int) -> tuple[object, dict[str, StorageRange]]:
    """Return the value of an embedded torch.save file, and the ranges of its storages.

    Args:
        part: The embedded file.
        whole, offset: The surrounding file, and the offset of the embedded file.

    Raises:
        FormatError: The embedded file is damaged, or has objects that weights do not have.
    """
    result = archive.opened(part, _MOST_PICKLE)
    storages = {}
    for name in result.storages:
        start, nbytes = result.range_of(name)
        storages[name] = StorageRange(whole, offset + start, nbytes)
    return unpickled(result.pickled, is_of_training, f"{whole.path}, byte {offset:,}"), storages


def checksums_of(whole: File, offset: int, nbytes: int, name: str) -> Iterator[ChecksummedRange]:
    """Yield the storages with a checksum in an embedded torch.save file; files of other kinds have none.

    Args:
        whole, offset, nbytes: The surrounding file, and the byte range of the embedded file.
        name: Name of the saved object.

    Raises:
        FormatError: As for `saved_value`.
    """
    part = FilePart(whole, offset, nbytes)
    if part.read(0, min(4, part.size)) == archive.MAGIC:
        for checksum in archive.opened(part, _MOST_PICKLE).checksums():
            yield replace(checksum, file=whole, name=name, offset=offset + checksum.offset)
