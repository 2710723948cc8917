"""A single `torch.save` file: its value, and the byte ranges of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpttools.array.lazy import LazyArray
from ckpttools.core.budget import check_memory
from ckpttools.core.dataclass import dataclass
from ckpttools.formats.base import ReadOptions
from ckpttools.formats.torch import archive
from ckpttools.formats.torch.names import is_of_training
from ckpttools.formats.torch.pickled import Record
from ckpttools.formats.torch.tensors import StorageRange, lazy_tensor
from ckpttools.formats.torch.unpickling import unpickled
from ckpttools.stores.concurrency import map_concurrently
from ckpttools.stores.location import Location

# A Python object takes about this many times the bytes of its pickle.
_OBJECTS = 12
# Larger ranks do not occur in practice; file names are untrusted.
MOST_RANKS = 100_000
COPY_ALL = "copy the files of all processes of one save into one directory"


@dataclass(frozen=True)
class SavedFile:
    """The content of a `torch.save` file.

    Attributes:
        location: The file.
        value: The value, with records for tensors.
        storages: Byte range of each storage, by name.
        nbytes: Size of the pickle, in bytes.
    """

    location: Location
    value: Any
    storages: Mapping[str, StorageRange]
    nbytes: int

    def tensor(self, record: Record) -> LazyArray:
        """Return the array of a tensor record in this file; see `lazy_tensor`."""
        return lazy_tensor(record, self.storages)


def saved_file(location: Location, options: ReadOptions) -> SavedFile:
    """Open a `torch.save` file; reads its pickle but no tensor data.

    Raises:
        FormatError: The file is damaged, or has objects that weights do not have.
        StorageError: The file cannot be read.
    """
    file = location.open()
    try:
        archive.refuse_old(file)
        result = archive.opened(file, options.max_header_bytes)
        check_memory(len(result.storages), _OBJECTS * len(result.pickled), location)
        names = list(result.storages)
        spans = map_concurrently(location.store, result.range_of, names)
    finally:
        file.close()
    ranges = {name: StorageRange(file, *span) for name, span in zip(names, spans, strict=True)}
    value = unpickled(result.pickled, is_of_training, f"{location}: {result.root}/data.pkl")
    return SavedFile(location, value, ranges, len(result.pickled))
