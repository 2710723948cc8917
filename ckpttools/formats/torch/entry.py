"""A tensor of a distributed checkpoint of torch: a whole file of `torch.save` in the middle of another.

Which bytes of it are the tensor's is looked up when it is read, by whoever reads it: a checkpoint of 100,000
tensors on many ranks is listed and planned from its metadata alone.
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

# Of one tensor torch writes about a kilobyte.
_MOST_PICKLE = 1 << 20


# Looking into an archive takes some 15 reads; of a small one all is read with the first.
_SMALL = 32 << 10


class FilePart(File):
    """Some bytes of a file as a file of their own."""

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
    """A tensor saved by itself: what `ckpttools.array.nodes.Decoded` decodes.

    Attributes:
        source: the file.
        offset, nbytes: the part of it.
        shape, dtype: of the tensor, as the checkpoint's metadata say.
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
        """Enough for any order of axes: torch keeps the one that a tensor had in memory."""
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
        """The tensor where it lies.

        Raises:
            FormatError: what is there is another tensor, or none.
        """
        result = self._found()
        if (result.shape, result.dtype) != (self.shape, self.dtype):
            raise FormatError(
                "a tensor is another than the checkpoint's metadata say",
                location=self._location,
                got=f"{result.dtype}{list(result.shape)}",
                expected=f"{self.dtype}{list(self.shape)}",
                hint="files of another save lie here: fetch the checkpoint again",
            )
        if result.scratch_bytes > self.scratch_bytes:
            raise FormatError(
                "the elements of a tensor do not lie next to each other, as those that torch saves here do",
                location=self._location,
                hint="save it again: each as tensor.contiguous()",
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
            why = "no tensor"
        except NotReadableError as error:
            why = str(error)
        raise FormatError(f"a tensor cannot be read: {why}", location=self._location)

    def _in_safetensors(self, part: FilePart) -> LazyArray:
        """What torch writes where it is told to (`SerializationFormat.SAFETENSORS`): one tensor."""
        header = parse_header(part)
        if len(header.entries) != 1:
            raise FormatError("not one tensor by itself", location=self._location)
        (entry,) = header.entries
        start = self.offset + header.data_start + entry.begin
        return Stored(entry.shape, entry.dtype, self.source, start)


def saved_value(part: FilePart, whole: ByteSource, offset: int) -> tuple[object, dict[str, StorageRange]]:
    """What a file of torch.save within another holds, and where its storages lie.

    Args:
        part: the file in the middle.
        whole, offset: the file around it, and where in that it begins.

    Raises:
        FormatError: it is damaged, or has what no weights are made of.
    """
    result = archive.opened(part, _MOST_PICKLE)
    storages = {}
    for name in result.storages:
        start, nbytes = result.range_of(name)
        storages[name] = StorageRange(whole, offset + start, nbytes)
    return unpickled(result.pickled, is_of_training, f"{whole.path}, byte {offset:,}"), storages


def checksums_of(whole: File, offset: int, nbytes: int, name: str) -> Iterator[ChecksummedRange]:
    """Yield the storages with a checksum of a torch.save file within another; other kinds have none.

    Args:
        whole, offset, nbytes: the file around it, and which part of that it is.
        name: of what is saved there.

    Raises:
        FormatError: as `saved_value`.
    """
    part = FilePart(whole, offset, nbytes)
    if part.read(0, min(4, part.size)) == archive.MAGIC:
        for checksum in archive.opened(part, _MOST_PICKLE).checksums():
            yield replace(checksum, file=whole, name=name, offset=offset + checksum.offset)
