"""The header of a safetensors file: 8 bytes of length, then a JSON object, then the tensor data.

Files that the reference parser rejects are rejected here with a cause and a hint. Duplicate names are also
rejected; the format forbids them, but the reference parser accepts them.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from functools import cache, lru_cache
from math import prod
from typing import Any, NamedTuple, NoReturn, TypeGuard

from ckpttools.array.lazy import ByteSource
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES, DType, from_safetensors
from ckpttools.core.errors import FormatError, similar_names
from ckpttools.core.message_terms import option
from ckpttools.core.region import Shape
from ckpttools.formats.checks import LONGEST_PATH
from ckpttools.formats.json_file import json_object, reject_duplicates
from ckpttools.formats.lookalikes import refuse_disguise

MAX_HEADER_BYTES = 100_000_000

_LENGTH_BYTES = 8
METADATA = "__metadata__"
_FIELDS = ("dtype", "shape", "data_offsets")
# Limits of numpy arrays: the number of axes, and the size in bytes as a signed 64-bit integer.
_MAX_AXES = 64
_MAX_BYTES = (1 << 63) - 1
# Number of bytes that contain any Git LFS pointer, which the specification limits to 1,024 bytes.
_HEAD_BYTES = 1024

_FETCH = "the file was cut short or is still being written: fetch it again and compare its size"
_COVERED = "each byte of the data in exactly one tensor"
_REWRITE = "the file was damaged or written by a faulty program: fetch it again or rewrite it"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in a file; `begin` and `end` are byte offsets from the start of the data."""

    name: str
    dtype: DType
    shape: Shape
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """The header of a file.

    Attributes:
        entries: The tensors sorted by offset; they cover the data without gaps or overlaps.
        metadata: The `__metadata__` of the file.
        data_start: Offset of the data in the file.
    """

    entries: tuple[TensorEntry, ...]
    metadata: Mapping[str, str]
    data_start: int


def parse_header(source: ByteSource, max_header_bytes: int = MAX_HEADER_BYTES) -> SafetensorsHeader:
    """Return the header of `source`, checked against the file size; reads no tensor data.

    Raises:
        FormatError: The file is not a safetensors file, is damaged or is incomplete.
        StorageError: The file cannot be read.
    """
    length = header_length(source, max_header_bytes)
    raw = bytearray(length)
    source.read_into(_LENGTH_BYTES, raw)
    fields = json_object(raw, f"{source.path} (header)", FormatError, _REWRITE, _compact)
    del raw
    metadata = _metadata(fields.pop(METADATA, None), source.path)
    entries = [
        _parse_valid(name, value) or _entry(name, value, source.path) for name, value in fields.items()
    ]
    del fields
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    data_start = _LENGTH_BYTES + length
    _check_cover(entries, source, data_start)
    return SafetensorsHeader(tuple(entries), metadata, data_start)


def _read(source: ByteSource, offset: int, length: int) -> bytes:
    out = bytearray(length)
    source.read_into(offset, memoryview(out))
    return bytes(out)


def _refuse(message: str, location: str, got: str, expected: str, hint: str = _REWRITE) -> NoReturn:
    raise FormatError(message, location=location, got=got, expected=expected, hint=hint)


def header_length(source: ByteSource, limit: int) -> int:
    """Return the header length in the file's first 8 bytes, if a header of that length is possible."""
    head = _read(source, 0, min(source.size, _HEAD_BYTES))
    length = int.from_bytes(head[:_LENGTH_BYTES], "little")
    fits = _LENGTH_BYTES + length <= source.size
    if fits and length <= limit and head[_LENGTH_BYTES : _LENGTH_BYTES + 1] == b"{":
        return length
    # This check comes last: a header of 19,280 bytes makes a valid file start with "PK", like a zip archive.
    refuse_disguise(head, source.path)
    if not fits:
        _refuse_short(source, head, length)
    if length > limit:
        _refuse_long(source, length, limit)
    got = repr(head[_LENGTH_BYTES : min(_LENGTH_BYTES + length, 40)])
    _refuse("the header is not a JSON object", f"{source.path}, byte {_LENGTH_BYTES}", got, "a brace '{'")


def _refuse_short(source: ByteSource, head: bytes, length: int) -> NoReturn:
    if len(head) < _LENGTH_BYTES:
        message = "the file is too short for a safetensors file" if head else "the file is empty"
        expected = f"at least {_LENGTH_BYTES} bytes, the length of the header"
    else:
        message = "truncated file, or not a safetensors file: its header does not fit into it"
        expected = f"{_LENGTH_BYTES + length} bytes for the header alone, as the first 8 bytes state"
    _refuse(message, source.path, f"{source.size} bytes", expected, _FETCH)


def _refuse_long(source: ByteSource, length: int, limit: int) -> NoReturn:
    hint = f"if the file really has that many tensors, pass {option('max_header_bytes', length)}"
    _refuse(
        "the header is longer than allowed", source.path, f"{length} bytes", f"at most {limit} bytes", hint
    )


_INT = frozenset((int,))


class _Fields(NamedTuple):
    """A tensor entry whose fields have valid types, in a compact form because a header may have 100,000."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, ...]


def _compact(pairs: list[tuple[str, Any]]) -> Any:
    """Return a tensor's entry as a tuple, which takes a third of the memory of a dictionary."""
    if len(pairs) == len(_FIELDS):
        fields = reject_duplicates(pairs)
        code, shape, offsets = map(fields.get, _FIELDS)
        if type(code) is str and _are_integers(shape) and _are_integers(offsets):
            return _Fields(sys.intern(code), _intern_shape(tuple(shape)), tuple(offsets))
        return fields
    return reject_duplicates(pairs)


def _are_integers(value: object) -> TypeGuard[list[int]]:
    """Return whether a value is a list of integers; `type is` excludes booleans."""
    return type(value) is list and _INT.issuperset(map(type, value))


@lru_cache(maxsize=1024)
def _intern_shape(shape: Shape) -> Shape:
    """Return the same object for equal shapes, to save memory."""
    return shape


def _metadata(value: object, path: str) -> dict[str, str]:
    if value is None:  # The reference parser accepts `null` as "none".
        return {}
    if isinstance(value, dict) and all(type(text) is str for text in value.values()):
        return value
    _refuse(
        f"{METADATA} is not a map from string to string",
        f"{path} (header)",
        reprlib.repr(value),
        'an object such as {"format": "pt"}',
        "rewrite the file with every metadata value as a string",
    )


def _parse_valid(name: str, value: object) -> TensorEntry | None:
    """Parse a valid entry in a third of the time of `_entry`; return None if it needs a closer check."""
    if type(value) is not _Fields or len(value.data_offsets) != 2 or len(name) > LONGEST_PATH:
        return None
    dtype, shape, (begin, end) = from_safetensors(value.dtype), value.shape, value.data_offsets
    if dtype is None or len(shape) > _MAX_AXES or not 0 <= begin <= end <= _MAX_BYTES:
        return None
    if min(shape, default=1) < 1 or prod(shape) * dtype.bits != 8 * (end - begin):
        return None
    return TensorEntry(name, dtype, shape, begin, end)


def _entry(name: str, value: object, path: str) -> TensorEntry:
    location = f"{path}, tensor {name[:LONGEST_PATH]!r}"
    if len(name) > LONGEST_PATH:
        _refuse("the name is too long", location, f"{len(name)} characters", f"at most {LONGEST_PATH}")
    code, raw_shape, raw_offsets = _three_fields(value, location)
    dtype, shape = _dtype(code, location), _naturals(raw_shape, "shape", location)
    begin, end = _offsets(raw_offsets, location)
    nbytes = _nbytes(dtype, shape, location)
    if nbytes == end - begin:
        return TensorEntry(name, dtype, shape, begin, end)
    got = f"{end - begin} bytes, {begin} to {end}"
    expected = f"{nbytes} bytes for {code}{list(shape)}"
    _refuse("dtype and shape contradict data_offsets", location, got, expected)


def _three_fields(value: object, location: str) -> tuple[object, object, object]:
    if isinstance(value, _Fields):
        return value
    if not isinstance(value, dict):
        _refuse_field("the entry is not an object", location, value, "an object with " + ", ".join(_FIELDS))
    missing = [field for field in _FIELDS if field not in value]
    if missing:
        _refuse_field(f"the entry lacks {' and '.join(missing)}", location, value, ", ".join(_FIELDS))
    return value["dtype"], value["shape"], value["data_offsets"]


def _refuse_field(message: str, location: str, got: object, expected: str) -> NoReturn:
    as_written = got._asdict() if isinstance(got, _Fields) else got
    _refuse(message, location, reprlib.repr(as_written), expected)


def _dtype(code: object, location: str) -> DType:
    if type(code) is not str:
        _refuse_field("dtype is not a string", location, code, "a string such as 'BF16'")
    dtype = from_safetensors(code)
    if dtype is not None:
        return dtype
    known = _known_dtypes()
    # `bf16` and `FP8_E4M3` are misspellings, but `U128` is not a misspelled `U8`.
    near = [name for name in similar_names(code.upper(), known, 1) if _resembles(code.upper(), name)]
    hint = (
        f"did you mean {near[0]}?"
        if near
        else "the safetensors library also refuses the file: save the tensor again with one of these dtypes; "
        "if the dtype is new, `pip install -U ckpttools` may add it"
    )
    _refuse("unknown dtype", location, reprlib.repr(code), ", ".join(known), hint)


def _resembles(code: str, known: str) -> bool:
    """Return whether a code is a misspelling of a known code with the same width."""
    return SequenceMatcher(None, code, known).ratio() > 0.85


@cache
def _known_dtypes() -> tuple[str, ...]:
    return tuple(dtype.safetensors for dtype in DTYPES.values() if dtype.safetensors)


def _naturals(value: object, field: str, location: str) -> Shape:
    """Parse a list of integers from zero to the largest signed 64-bit integer."""
    # Not `isinstance`, because a `_Fields` may be in place of the list.
    if type(value) is tuple and all(0 <= n <= _MAX_BYTES for n in value):
        return value
    got = list(value) if type(value) is tuple else value
    if _are_integers(got) and all(0 <= n <= _MAX_BYTES for n in got):
        return tuple(got)
    _refuse_field(f"{field} is not a list of non-negative integers", location, got, "such as [2, 3]")


def _offsets(value: object, location: str) -> tuple[int, int]:
    offsets = _naturals(value, "data_offsets", location)
    if len(offsets) != 2:
        _refuse_field("data_offsets is not a pair", location, list(offsets), "[begin, end]")
    if offsets[0] > offsets[1]:
        expected = "[begin, end], with begin <= end"
        _refuse_field("data_offsets end before they begin", location, list(offsets), expected)
    return offsets[0], offsets[1]


def _nbytes(dtype: DType, shape: Shape, location: str) -> int:
    """Return the size of a tensor in the file in bytes; types smaller than a byte must fill the last byte."""
    if len(shape) > _MAX_AXES:
        _refuse_field("too many axes", location, list(shape), f"at most {_MAX_AXES}, as in numpy")
    # numpy also ignores zeros in this check.
    if prod(filter(None, shape)) * dtype.itemsize > _MAX_BYTES:
        _refuse_field("the shape is too large", location, list(shape), f"at most {_MAX_BYTES} bytes")
    bits = prod(shape) * dtype.bits
    if bits % 8:
        _refuse_field(
            f"the elements of {dtype.bits} bits do not fill whole bytes", location, list(shape), "whole bytes"
        )
    return bits // 8


def _check_cover(entries: Iterable[TensorEntry], source: ByteSource, data_start: int) -> None:
    """Check that sorted entries cover the data from its start to the end of the file without gaps."""
    reached, before = 0, None
    for entry in entries:
        if entry.begin < reached and before:
            _refuse_overlap(before, entry, source.path)
        if entry.begin > reached:
            _refuse_hole(before, entry, reached, source.path)
        reached, before = entry.end, entry
    _check_end(data_start + reached, source)


def _refuse_overlap(first: TensorEntry, second: TensorEntry, path: str) -> NoReturn:
    spans = [f"{item.name!r} at {item.begin} to {item.end}" for item in (first, second)]
    _refuse("two tensors overlap", path, " and ".join(spans), _COVERED)


def _refuse_hole(before: TensorEntry | None, after: TensorEntry, reached: int, path: str) -> NoReturn:
    between = f"between {before.name!r} and {after.name!r}" if before else f"before {after.name!r}"
    got = f"no tensor for bytes {reached} to {after.begin} of the data, {between}"
    _refuse("a gap in the data", path, got, _COVERED)


def _check_end(end: int, source: ByteSource) -> None:
    if end == source.size:
        return
    if end > source.size:
        message, hint = f"truncated file: {end - source.size:,} bytes are missing", _FETCH
    else:
        message = f"{source.size - end:,} extra bytes after the last tensor"
        hint = f"fetch it again, as two downloads may have written into it; `truncate -s {end}` cuts them off"
    _refuse(message, source.path, f"{source.size} bytes", f"{end} bytes", hint)
