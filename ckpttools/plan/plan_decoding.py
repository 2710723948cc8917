"""A plan from the bytes of its file."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from ckpttools.core.errors import FormatError
from ckpttools.core.message_terms import step
from ckpttools.plan.plan_file import KIND, KINDS, Header, PlanFile, PlannedSource
from ckpttools.stores.base import File, is_inside
from ckpttools.stores.location import Location


def is_plan(file: File) -> bool:
    """Whether a file begins as a plan does; StorageError if it cannot be read."""
    start = f'["{KINDS}'.encode()
    return file.size > len(start) and bytes(file.read(0, len(start))) == start


def read_plan(location: Location) -> PlanFile:
    """The plan in a file.

    Raises:
        FormatError: it is none, or damaged.
        StorageError: it cannot be read.
    """
    location = location.absolute()
    return decoded(location.read_bytes(), location)


def decoded(data: bytes, location: object) -> PlanFile:
    """Decode the content of a plan file; `location` is its origin, for messages. Errors as `read_plan`."""
    *lines, checksum, rest = data.split(b"\n") if data.count(b"\n") > 1 else (b"", b"", b"")
    whole = len(data) - len(checksum) - 1
    if not lines[0].startswith(f'["{KIND}"'.encode()):
        raise _no_plan(lines[0], location)
    if rest or hashlib.sha256(data[:whole]).hexdigest().encode() != checksum:
        raise FormatError(
            "the plan is damaged, or not all there",
            location=location,
            got=f"{len(data)} bytes with another checksum",
            hint=f"copy it again, or make it again with {_writing()}",
        )
    try:
        return _made(
            lines, len(data), checksum.decode(), location if isinstance(location, Location) else None
        )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise FormatError(
            "the plan does not say what a plan says",
            location=location,
            got=f"{type(error).__name__}: {error}",
            hint=f"make it again with {_writing()}",
        ) from error


def _no_plan(line: bytes, location: object) -> FormatError:
    """The error of a file that does not begin as a plan does."""
    if line.startswith(f'["{KINDS}'.encode()):
        return FormatError(
            "the plan was made by another version of ckpttools",
            location=location,
            got=line[2:].partition(b'"')[0].decode(errors="replace"),
            expected=KIND,
            hint="use that version for all parts, or make the plan again",
        )
    return FormatError(
        f"not a plan that {_writing()} wrote", location=location, got=repr(line[:40].decode(errors="replace"))
    )


def _writing() -> str:
    return step("ckpttools.write_plan", "ckpt plan")


def _made(lines: Sequence[bytes], size: int, checksum: str, location: Location | None) -> PlanFile:
    _, header, sizes = json.loads(lines[0])
    sources, inline, groups, counts, files, heads = map(json.loads, lines[1:7])
    for name in (*files, *heads):
        if not is_inside(name):
            raise ValueError(f"a file outside of the destination, {name!r}")
    return PlanFile(
        _header(header),
        tuple(PlannedSource(*source) for source in sources),
        tuple(groups),
        size,
        checksum,
        location,
        None if counts is None else tuple(counts),
        files,
        {name: base64.b64decode(head) for name, head in heads.items()},
        {int(number): base64.b64decode(content) for number, content in inline.items()},
        tuple(sizes),
        lines[7:],
    )


def _header(declared: Mapping[str, Any]) -> Header:
    """Raises TypeError where words of it are missing, unknown or of another type."""
    for field in fields(Header):
        none = type(None)
        kinds: Any = {
            "Mapping[str, Any] | None": (dict, none),
            "Mapping[str, Any]": dict,
            "int | None": (int, none),
            "float": (int, float),
        }
        kind = kinds.get(field.type, {"str": str, "int": int, "bool": bool}.get(str(field.type)))
        if kind is not None and not isinstance(declared[field.name], kind):
            raise TypeError(f"{field.name} is {declared[field.name]!r}")
    return Header(**declared)
