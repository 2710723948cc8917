"""Files of `torch.save`: ZIP archives of members that are stored as they are.

A member's bytes are a range of the file, so tensors are read by position like those of safetensors. torch 1.6
and later write this; what came before is a row of pickles without an index and is refused.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError
from ckpttools.stores.base import File
from ckpttools.stores.checksums import ChecksummedRange
from ckpttools.stores.location import Location, suppress_file_errors

MAGIC = b"PK\x03\x04"
# Of `torch.save` before 1.6: protocol 2 and the number 0x1950a86a20f9469cfc6c.
_OLD_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19"
# Before 0.1.10 (2017) it was a tar of these, of which any may come first.
_TAR_AT, _TAR_MAGIC, _TAR_MEMBERS = 257, b"ustar", (b"sys_info", b"pickle", b"tensors", b"storages")
_PICKLE, _BYTE_ORDER = "data.pkl", "byteorder"
# A directory of 64 MiB is of half a million members; read it takes five times that. The order is one word.
_MOST_DIRECTORY, _MOST_ORDER = 64 << 20, 64
_LOCAL = struct.Struct("<4s5H3I2H")
# The flag of names in UTF-8; others are in the code page that ZIP began with.
_UTF8 = 0x800
# What zipfile raises for archives that are cut, encrypted, of another kind, or made to mislead it.
_FAULTS = (struct.error, EOFError, LookupError, OverflowError, RuntimeError, ValueError)
_HINT = "fetch the file again; where it is whole, write it again with torch.save"


@dataclass(frozen=True, slots=True)
class Archive:
    """What lies where in a file of `torch.save`.

    Attributes:
        file: the file.
        root: the directory in the archive in which all lies.
        pickled: the pickle that says which tensors there are.
        storages: name -> its entry in the archive, of what tensors are made of.
    """

    file: File
    root: str
    pickled: bytes
    storages: Mapping[str, zipfile.ZipInfo]

    def range_of(self, name: str) -> tuple[int, int]:
        """Where the bytes of a storage lie: offset in the file, and how many.

        Args:
            name: of the storage.

        Raises:
            FormatError: there is none of this name, or its place is damaged.
        """
        entry = self.storages.get(name)
        if entry is None:
            raise _damaged(self.file.path, f"no {self.root}/data/{name} in it")
        return _location(self.file, entry)

    def checksums(self) -> Iterator[ChecksummedRange]:
        """Yield the storages that have one.

        Raises:
            FormatError: as `range_of`.
        """
        for name, entry in self.storages.items():
            if entry.CRC:
                yield ChecksummedRange(self.file, entry.filename, *self.range_of(name), entry.CRC)


def _location(file: File, entry: zipfile.ZipInfo) -> tuple[int, int]:
    """Where the bytes of a member lie: offset in the file, and how many."""
    at, named = entry.header_offset, _raw_name(entry)
    head = file.read(at, _LOCAL.size + len(named))
    fields = _LOCAL.unpack(head[: _LOCAL.size])
    start = at + _LOCAL.size + fields[-2] + fields[-1]
    is_there = fields[0] == MAGIC and head[_LOCAL.size :] == named and fields[-2] == len(named)
    if not is_there or start + entry.file_size > file.size:
        raise _damaged(file.path, f"{entry.filename} is not where the directory of the archive says")
    return start, entry.file_size


def _content(file: File, entry: zipfile.ZipInfo) -> bytes:
    """Return the bytes of a member. A checksum of 0 means none (see `torch.serialization`)."""
    content = file.read(*_location(file, entry))
    if entry.CRC and zlib.crc32(content) != entry.CRC:
        raise _damaged(file.path, f"other bytes in {entry.filename} than its checksum is of")
    return content


def checksums_in(locations: Iterable[Location], limit: int) -> Iterator[ChecksummedRange]:
    """Yield the storages that have one in some files; files that are no whole archives have none.

    Args:
        locations: of files.
        limit: as of `opened`.

    Raises:
        StorageError: a store behind a network does not answer.
    """
    for location in locations:
        with suppress_file_errors(location), location.open() as file:
            yield from opened(file, limit).checksums()


def archive_kind(file: File) -> str | None:
    """What a file begins as: "zip", "pickles" or "tar" of older torch, or None for nothing that it wrote."""
    head = file.read(0, min(_TAR_AT + len(_TAR_MAGIC), file.size))
    if head.startswith(MAGIC):
        return "zip"
    if head.startswith(_OLD_MAGIC):
        return "pickles"
    is_tar = head[_TAR_AT:] == _TAR_MAGIC and head.partition(b"\0")[0] in _TAR_MEMBERS
    return "tar" if is_tar else None


def refuse_old(file: File) -> None:
    """Raise FormatError for a file of torch before 1.6, which has no index."""
    kind = archive_kind(file)
    if kind not in ("pickles", "tar"):
        return
    is_tar = kind == "tar"
    what = "0.1.10, a tar of pickles" if is_tar else "1.6, a row of pickles without an index"
    # torch loads no tar as weights alone.
    trusted = ", where you trust who wrote it" if is_tar else ""
    raise FormatError(
        f"the file is of torch.save before version {what}",
        location=file.path,
        hint=f"save it again{trusted}: "
        f"torch.save(torch.load(FILE, map_location='cpu', weights_only={not is_tar}), OTHER)",
    )


def opened(file: File, limit: int) -> Archive:
    """Read the directory of an archive and its pickle.

    Args:
        file: of `torch.save`.
        limit: bytes that the pickle may have.

    Raises:
        FormatError: no such archive, a compressed or damaged one, or one of another byte order.
    """
    if not file.size:
        raise _damaged(file.path, "an empty file")
    try:
        with zipfile.ZipFile(_Positioned(file)) as archive:
            return _archive(file, archive.infolist(), limit)
    except (zipfile.BadZipFile, *_FAULTS) as error:
        raise _damaged(file.path, str(error)) from error


def _archive(file: File, entries: Sequence[zipfile.ZipInfo], limit: int) -> Archive:
    names = {entry.filename: entry for entry in entries}
    if len(names) < len(entries):
        raise _damaged(file.path, "two members of one name")
    _refuse_script(file, names)
    _refuse_compressed(file, entries)
    _refuse_overlaps(file, entries)
    result = [name for name in names if name.rpartition("/")[2] == _PICKLE and name.count("/") <= 1]
    if len(result) != 1:
        raise _damaged(file.path, f"{len(result)} members called {_PICKLE}")
    root = result[0].rpartition("/")[0]
    below = f"{root}/" if root else ""
    size = names[result[0]].file_size
    if size > limit:
        raise FormatError(
            "the pickle of the file is larger than any that torch writes",
            location=file.path,
            got=f"{size:,} bytes",
            expected=f"at most {limit:,}",
            hint=_HINT,
        )
    order = names.get(below + _BYTE_ORDER)
    if order is not None and order.file_size > _MOST_ORDER:
        raise _damaged(file.path, f"a {order.filename} of {order.file_size:,} bytes")
    if order is not None and _content(file, order).strip() != b"little":
        raise FormatError(
            "the tensors of this file are in big-endian order",
            location=file.path,
            hint="write it again on a little-endian machine",
        )
    data = f"{below}data/"
    storages = {name.removeprefix(data): item for name, item in names.items() if name.startswith(data)}
    return Archive(file, root, _content(file, names[result[0]]), storages)


def _raw_name(entry: zipfile.ZipInfo) -> bytes:
    """Return the name as it stands in the file."""
    return entry.orig_filename.encode("utf-8" if entry.flag_bits & _UTF8 else "cp437")


def _refuse_overlaps(file: File, entries: Iterable[zipfile.ZipInfo]) -> None:
    """No byte is of two members: an archive may be made that says otherwise."""
    ordered = sorted(entries, key=lambda entry: entry.header_offset)
    for one, other in pairwise(ordered):
        if one.header_offset + _LOCAL.size + len(_raw_name(one)) + one.file_size > other.header_offset:
            raise _damaged(file.path, f"{one.filename} reaches into {other.filename}")


def _refuse_script(file: File, names: Iterable[str]) -> None:
    if any(name.partition("/")[2] == "constants.pkl" for name in names):
        raise FormatError(
            "the file is a program of TorchScript (torch.jit.save), not weights",
            location=file.path,
            hint="where you trust who wrote it: torch.save(torch.jit.load(FILE).state_dict(), OTHER)",
        )


def _refuse_compressed(file: File, entries: Iterable[zipfile.ZipInfo]) -> None:
    packed = next((entry for entry in entries if entry.compress_type != zipfile.ZIP_STORED), None)
    if packed is not None:
        raise FormatError(
            "a member of the archive is compressed, which torch.save never does",
            location=file.path,
            got=packed.filename,
            hint="write the file again with torch.save, or name what is in the archive",
        )


def _damaged(location: str, what: str) -> FormatError:
    return FormatError("the file is no whole archive of torch.save", location=location, got=what, hint=_HINT)


class _Positioned(io.RawIOBase):
    """A file that is read by position as the one with a cursor that `zipfile` wants."""

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
            raise ValueError("a place before the beginning")
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._file.size - self._at)
        length = left if size is None or size < 0 else min(size, left)
        if length > _MOST_DIRECTORY:
            raise ValueError(f"a directory of {length:,} bytes")
        result = self._file.read(self._at, length)
        self._at += length
        return result
