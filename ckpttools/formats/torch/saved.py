"""One file of `torch.save`: its value, and the ranges of its tensors."""

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

# A Python object in a pickle takes about this many times its pickled bytes.
_OBJECTS = 12
# Larger ranks are not real; file names are untrusted.
MOST_RANKS = 100_000
COPY_ALL = "copy the files of all processes of one save into one directory"


@dataclass(frozen=True)
class SavedFile:
    """The content of a `torch.save` file.

    Attributes:
        location: the file.
        value: the value, with records for tensors.
        storages: byte range of each storage, by name.
        nbytes: bytes of the pickle.
    """

    location: Location
    value: Any
    storages: Mapping[str, StorageRange]
    nbytes: int

    def tensor(self, record: Record) -> LazyArray:
        """See `lazy_tensor`, for a record in this file."""
        return lazy_tensor(record, self.storages)


def saved_file(location: Location, options: ReadOptions) -> SavedFile:
    """Open a file of `torch.save`; reads its pickle and no tensor.

    Raises:
        FormatError: it is damaged, or contains objects that weights do not have.
        StorageError: it cannot be read.
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
