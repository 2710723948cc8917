"""Encode plans as files, and decode them."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from ckpttools.array.lazy import ByteSource
from ckpttools.core.errors import FormatError
from ckpttools.core.message_terms import action
from ckpttools.core.region import ceil_div
from ckpttools.plan.node_lines import NodeLines
from ckpttools.plan.plan import Plan
from ckpttools.plan.plan_file import KIND, Header, PlanFile, PlannedSource
from ckpttools.plan.value_lines import NotInLinesError, encode_placement, texts
from ckpttools.stores.base import File, is_inside
from ckpttools.stores.location import Location
from ckpttools.stores.memory import Bytes
from ckpttools.stores.publishing import PLAN_KINDS
from ckpttools.stores.registry import parse
from ckpttools.stores.samples import BLOCK_BYTES, MOST_BLOCKS, compute_sample_digests

# Limits on sampled blocks of all local files together. The minimum is that of 128 files, and a few files
# share it. Reading the minimum takes 10 ms from the page cache, and 5 s from a disk with a seek time of 5 ms.
_MOST_SAMPLES, _MIN_SAMPLES = 20_000, 1024
# Sources in memory up to this size are stored in the plan.
_LARGEST_INLINE = 1 << 16


def encoded(plan: Plan, header: Header) -> bytes:
    """Return the content of a plan file.

    Args:
        plan: The full plan.
        header: Its header; `has_tasks` is set here.
    """
    sources = _Sources()
    nodes = NodeLines(sources.number)
    for source in plan.sources:
        sources.number(source)
    try:
        arrays = list(_arrays(plan, nodes))
    except (NotInLinesError, RecursionError):
        arrays, nodes, header = [], NodeLines(sources.number), replace(header, has_tasks=False)
    groups = [list(group) for group in plan.groups]
    sizes = [sum(plan.tasks[n].bytes_in + plan.tasks[n].bytes_out for n in group) for group in groups]
    counts = None if plan.streams is None else [len(group) for group in groups]
    heads = {name: base64.b64encode(head).decode() for name, head in plan.layout.heads.items()}
    numbers = {path: number for number, (path, _, _) in enumerate(arrays)}
    tasks = [
        [numbers[task.path], task.region.start, task.region.stop, task.bytes_in, task.bytes_out]
        for task in (plan.tasks if header.has_tasks else ())
    ]
    first: list[object] = [KIND, asdict(header), [len(arrays), len(nodes.lines), len(tasks)]]
    declared = [
        *texts([first]),
        *_compact_json([sources.declared(), sources.inline, sizes, counts, plan.layout.files, heads]),
    ]
    text = "\n".join([*declared, *texts(arrays), *nodes.lines, *texts(tasks), ""]).encode()
    return text + f"{hashlib.sha256(text).hexdigest()}\n".encode()


def _compact_json(values: Iterable[object]) -> Iterator[str]:
    return (json.dumps(value, separators=(",", ":")) for value in values)


def _arrays(plan: Plan, nodes: NodeLines) -> Iterator[list[object]]:
    for path in dict.fromkeys(task.path for task in plan.tasks):
        yield [path, nodes.number(plan.tree.arrays[path]), encode_placement(plan.layout.placements[path])]


class _Sources:
    """Numbering of source files."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._listed: list[ByteSource] = []
        self._inline_indices: dict[int, int] = {}
        self.inline: dict[int, str] = {}

    def number(self, source: ByteSource) -> int:
        """Return a source's index. Raise NotInLinesError if other processes cannot open it."""
        if isinstance(source, Bytes):
            return self._inline_number(source)
        if not isinstance(source, File):
            raise NotInLinesError(f"{source!r:.80}")
        result = self._numbers.get(source.path)
        if result is None:
            result = self._numbers[source.path] = len(self._listed)
            self._listed.append(source)
        return result

    def _inline_number(self, source: Bytes) -> int:
        result = self._inline_indices.get(id(source))
        if result is None:
            if source.size > _LARGEST_INLINE:
                raise NotInLinesError(f"{source!r:.80}")
            result = self._inline_indices[id(source)] = len(self._listed)
            self._listed.append(source)
            self.inline[result] = base64.b64encode(source.read(0, source.size)).decode()
        return result

    def declared(self) -> list[list[object]]:
        """Return the sources in the order of their indices."""
        count = max(1, len(self._listed))
        samples = max(2, min(MOST_BLOCKS, _MOST_SAMPLES // count), _MIN_SAMPLES // count)
        return [list(asdict(_plan_source(item, samples)).values()) for item in self._listed]


def _plan_source(source: ByteSource, samples: int) -> PlannedSource:
    if isinstance(source, Bytes) or not isinstance(source, File):
        return PlannedSource(source.path, source.path, source.size, source.version, is_inline=True)
    location = parse(source.path)
    blocks = min(samples, ceil_div(source.size, BLOCK_BYTES) or 1)
    if blocks > MOST_BLOCKS:
        # These samples include those of the fingerprint, so that the error can name the file that differs.
        blocks += (1 - blocks) % (MOST_BLOCKS - 1)
    sample = compute_sample_digests(source, blocks) if location.store.scheme == "file" else ""
    return PlannedSource(
        str(location.absolute()), str(location.resolve()), source.size, source.version, sample
    )


def read_plan(location: Location) -> PlanFile:
    """Read a plan from its file.

    Raises:
        FormatError: The file is not a plan, or is damaged.
        StorageError: The file cannot be read.
    """
    location = location.absolute()
    return decoded(location.require_exists().read_bytes(), location)


def decoded(data: bytes, location: object) -> PlanFile:
    """Decode the content of a plan file. `location` is its origin, for messages; errors as in `read_plan`."""
    *lines, checksum, rest = data.split(b"\n") if data.count(b"\n") > 1 else (b"", b"", b"")
    whole = len(data) - len(checksum) - 1
    if not lines[0].startswith(f'["{KIND}"'.encode()):
        raise _not_a_plan_error(lines[0], location)
    if rest or hashlib.sha256(data[:whole]).hexdigest().encode() != checksum:
        raise FormatError(
            "the plan is damaged or incomplete",
            location=location,
            got=f"{len(data)} bytes with another checksum",
            hint=f"copy it again, or recreate it with {_writing_command()}",
        )
    try:
        return _parse_lines(
            lines, len(data), checksum.decode(), location if isinstance(location, Location) else None
        )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise FormatError(
            "the plan has invalid contents",
            location=location,
            got=f"{type(error).__name__}: {error}",
            hint=f"recreate it with {_writing_command()}",
        ) from error


def _not_a_plan_error(line: bytes, location: object) -> FormatError:
    """Return the error for a file that does not begin like a plan."""
    if line.startswith(f'["{PLAN_KINDS}'.encode()):
        return FormatError(
            "the plan was written by another version of ckpttools",
            location=location,
            got=line[2:].partition(b'"')[0].decode(errors="replace"),
            expected=KIND,
            hint="use that version for all parts, or recreate the plan",
        )
    return FormatError(
        f"the file is not a plan of {_writing_command()}",
        location=location,
        got=repr(line[:40].decode(errors="replace")),
    )


def _writing_command() -> str:
    return action("write_plan")


def _parse_lines(lines: Sequence[bytes], size: int, checksum: str, location: Location | None) -> PlanFile:
    _, header, sizes = json.loads(lines[0])
    sources, inline, groups, counts, files, heads = map(json.loads, lines[1:7])
    for name in (*files, *heads):
        if not is_inside(name):
            raise ValueError(f"a file outside the destination, {name!r}")
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
    """Decode the header. Raise TypeError if fields are missing, unknown or of another type."""
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
