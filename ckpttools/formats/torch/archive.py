"""Files of `torch.save`: ZIP archives of uncompressed members, with one value and its tensors.

Each member is a byte range of the file, so tensors are read by range as in safetensors. torch 1.6 and
later write this format; older files are a series of pickles without an index and are rejected.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from ckpttools.array.lazy import LazyArray
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError
from ckpttools.core.memory_limit import check_memory
from ckpttools.formats.base import ReadOptions
from ckpttools.formats.torch.pickled import Record, is_of_training
from ckpttools.formats.torch.tensors import StorageRange, lazy_tensor
from ckpttools.formats.torch.unpickling import unpickle
from ckpttools.stores.base import File
from ckpttools.stores.checksums import ChecksummedRange
from ckpttools.stores.concurrency import map_concurrently
from ckpttools.stores.location import Location, suppress_file_errors

MAGIC = b"PK\x03\x04"
# Start of files from `torch.save` before 1.6: protocol 2 and the integer 0x1950a86a20f9469cfc6c.
_OLD_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19"
# Before 0.1.10 (2017), the file was a tar archive of these members in any order.
_TAR_AT, _TAR_MAGIC, _TAR_MEMBERS = 257, b"ustar", (b"sys_info", b"pickle", b"tensors", b"storages")
_PICKLE, _BYTE_ORDER = "data.pkl", "byteorder"
# Limits on the ZIP directory and the byte order. A directory of 64 MiB has half a million members and takes
# five times that in memory. The byte order is one word.
_MAX_DIRECTORY, _MAX_ORDER = 64 << 20, 64
_LOCAL = struct.Struct("<4s5H3I2H")
# The flag for names in UTF-8; other names are in the original ZIP code page.
_UTF8 = 0x800
# Exceptions that zipfile raises for archives that are truncated, encrypted, of another kind, or malicious.
_FAULTS = (struct.error, EOFError, LookupError, OverflowError, RuntimeError, ValueError)
_HINT = "fetch the file again; if it is complete, save it again with torch.save"


@dataclass(frozen=True, slots=True)
class Archive:
    """The layout of a `torch.save` archive.

    Attributes:
        file: The file.
        root: The top-level directory in the archive.
        pickled: The pickle that describes the tensors.
        storages: The archive entries of the storages, by name.
    """

    file: File
    root: str
    pickled: bytes
    storages: Mapping[str, zipfile.ZipInfo]

    def range_of(self, name: str) -> tuple[int, int]:
        """Return the offset and length of a storage in the file.

        Args:
            name: Name of the storage.

        Raises:
            FormatError: The storage does not exist, or its entry is damaged.
        """
        entry = self.storages.get(name)
        if entry is None:
            raise _damaged_error(self.file.path, f"no {self.root}/data/{name} in it")
        return _location(self.file, entry)

    def checksums(self) -> Iterator[ChecksummedRange]:
        """Yield the byte ranges of storages that have a checksum.

        Raises:
            FormatError: As for `range_of`.
        """
        for name, entry in self.storages.items():
            if entry.CRC:
                yield ChecksummedRange(self.file, entry.filename, *self.range_of(name), entry.CRC)


def _location(file: File, entry: zipfile.ZipInfo) -> tuple[int, int]:
    """Return the offset and length of a member in the file."""
    at, named = entry.header_offset, _raw_name(entry)
    head = file.read(at, _LOCAL.size + len(named))
    fields = _LOCAL.unpack(head[: _LOCAL.size])
    start = at + _LOCAL.size + fields[-2] + fields[-1]
    is_there = fields[0] == MAGIC and head[_LOCAL.size :] == named and fields[-2] == len(named)
    if not is_there or start + entry.file_size > file.size:
        raise _damaged_error(file.path, f"{entry.filename} is not at the offset in the archive's directory")
    return start, entry.file_size


def _content(file: File, entry: zipfile.ZipInfo) -> bytes:
    """Read a member. A checksum of 0 means that there is none (see `torch.serialization`)."""
    content = file.read(*_location(file, entry))
    if entry.CRC and zlib.crc32(content) != entry.CRC:
        raise _damaged_error(file.path, f"the bytes of {entry.filename} do not match its checksum")
    return content


def checksums_in(locations: Iterable[Location], limit: int) -> Iterator[ChecksummedRange]:
    """Yield the storages that have a checksum in several files; skip files that are not complete archives.

    Args:
        locations: The locations of the files.
        limit: As for `open_archive`.

    Raises:
        StorageError: A network store does not respond.
    """
    for location in locations:
        with suppress_file_errors(location), location.open() as file:
            yield from open_archive(file, limit).checksums()


def archive_kind(file: File) -> str | None:
    """Return the kind of a file: "zip", or "pickles" or "tar" of older torch versions, or None."""
    head = file.read(0, min(_TAR_AT + len(_TAR_MAGIC), file.size))
    if head.startswith(MAGIC):
        return "zip"
    if head.startswith(_OLD_MAGIC):
        return "pickles"
    is_tar = head[_TAR_AT:] == _TAR_MAGIC and head.partition(b"\0")[0] in _TAR_MEMBERS
    return "tar" if is_tar else None


def refuse_old(file: File) -> None:
    """Raise FormatError for files from torch before 1.6, which have no index."""
    kind = archive_kind(file)
    if kind not in ("pickles", "tar"):
        return
    is_tar = kind == "tar"
    version = "0.1.10, a tar of pickles" if is_tar else "1.6, a series of pickles without an index"
    # torch does not load tar files with weights_only.
    trusted = ", if you trust its author" if is_tar else ""
    raise FormatError(
        f"the file was saved by torch before version {version}",
        location=file.path,
        hint=f"save it again{trusted}: "
        f"torch.save(torch.load(FILE, map_location='cpu', weights_only={not is_tar}), OTHER)",
    )


def open_archive(file: File, limit: int) -> Archive:
    """Read the directory and the pickle of an archive.

    Args:
        file: A `torch.save` file.
        limit: Maximum size of the pickle, in bytes.

    Raises:
        FormatError: The file is not such an archive, is compressed or damaged, or has another byte order.
    """
    if not file.size:
        raise _damaged_error(file.path, "an empty file")
    try:
        with zipfile.ZipFile(_Positioned(file)) as archive:
            return _archive(file, archive.infolist(), limit)
    except (zipfile.BadZipFile, *_FAULTS) as error:
        raise _damaged_error(file.path, str(error)) from error


def _archive(file: File, entries: Sequence[zipfile.ZipInfo], limit: int) -> Archive:
    names = {entry.filename: entry for entry in entries}
    if len(names) < len(entries):
        raise _damaged_error(file.path, "two members with one name")
    _refuse_script(file, names)
    _refuse_compressed(file, entries)
    _refuse_overlaps(file, entries)
    result = [name for name in names if name.rpartition("/")[2] == _PICKLE and name.count("/") <= 1]
    if len(result) != 1:
        raise _damaged_error(file.path, f"{len(result)} members named {_PICKLE}")
    root = result[0].rpartition("/")[0]
    below = f"{root}/" if root else ""
    size = names[result[0]].file_size
    if size > limit:
        raise FormatError(
            "the pickle in the file is larger than torch ever writes",
            location=file.path,
            got=f"{size:,} bytes",
            expected=f"at most {limit:,}",
            hint=_HINT,
        )
    order = names.get(below + _BYTE_ORDER)
    if order is not None and order.file_size > _MAX_ORDER:
        raise _damaged_error(file.path, f"a {order.filename} of {order.file_size:,} bytes")
    if order is not None and _content(file, order).strip() != b"little":
        raise FormatError(
            "the tensors of this file are big-endian",
            location=file.path,
            hint="save it again on a little-endian machine",
        )
    data = f"{below}data/"
    storages = {name.removeprefix(data): item for name, item in names.items() if name.startswith(data)}
    return Archive(file, root, _content(file, names[result[0]]), storages)


def _raw_name(entry: zipfile.ZipInfo) -> bytes:
    """Return the name as stored in the file."""
    return entry.orig_filename.encode("utf-8" if entry.flag_bits & _UTF8 else "cp437")


def _refuse_overlaps(file: File, entries: Iterable[zipfile.ZipInfo]) -> None:
    """Reject overlapping members, which only a malicious archive declares."""
    ordered = sorted(entries, key=lambda entry: entry.header_offset)
    for one, other in pairwise(ordered):
        if one.header_offset + _LOCAL.size + len(_raw_name(one)) + one.file_size > other.header_offset:
            raise _damaged_error(file.path, f"{one.filename} overlaps {other.filename}")


def _refuse_script(file: File, names: Iterable[str]) -> None:
    if any(name.partition("/")[2] == "constants.pkl" for name in names):
        raise FormatError(
            "the file is a program of TorchScript (torch.jit.save), not weights",
            location=file.path,
            hint="if you trust its author: torch.save(torch.jit.load(FILE).state_dict(), OTHER)",
        )


def _refuse_compressed(file: File, entries: Iterable[zipfile.ZipInfo]) -> None:
    packed = next((entry for entry in entries if entry.compress_type != zipfile.ZIP_STORED), None)
    if packed is not None:
        raise FormatError(
            "a member of the archive is compressed, which torch.save never does",
            location=file.path,
            got=packed.filename,
            hint="save the file again with torch.save, or unpack the archive and pass its content",
        )


def _damaged_error(location: str, problem: str) -> FormatError:
    message = "the file is not a complete torch.save archive"
    return FormatError(message, location=location, got=problem, hint=_HINT)


class _Positioned(io.RawIOBase):
    """Adapts a file with positional reads to the file object that `zipfile` expects."""

    def __init__(self, file: File) -> None:
        self._file, self._at = file, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        if base + offset < 0:
            raise ValueError("a position before the start")
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._file.size - self._at)
        length = left if size is None or size < 0 else min(size, left)
        if length > _MAX_DIRECTORY:
            raise ValueError(f"a directory of {length:,} bytes")
        result = self._file.read(self._at, length)
        self._at += length
        return result


# A Python object takes about this many times the bytes of its pickle.
_OBJECTS = 12
# Larger ranks do not occur in practice; file names are untrusted.
MAX_RANKS = 100_000
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


def open_saved_file(location: Location, options: ReadOptions) -> SavedFile:
    """Open a `torch.save` file; reads its pickle but no tensor data.

    Raises:
        FormatError: The file is damaged, or has objects that weights do not have.
        StorageError: The file cannot be read.
    """
    file = location.open()
    try:
        refuse_old(file)
        result = open_archive(file, options.max_header_bytes)
        check_memory(len(result.storages), _OBJECTS * len(result.pickled), location)
        names = list(result.storages)
        spans = map_concurrently(location.store, result.range_of, names)
    finally:
        file.close()
    ranges = {name: StorageRange(file, *span) for name, span in zip(names, spans, strict=True)}
    value = unpickle(result.pickled, is_of_training, f"{location}: {result.root}/data.pkl")
    return SavedFile(location, value, ranges, len(result.pickled))
