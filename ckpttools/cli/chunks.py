"""`ckpt inspect chunks`: show data files, chunk grids and codecs, and predict reads."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Unpack

import click

from ckpttools.api.options import OPENING
from ckpttools.api.options.inspect import CHUNKS
from ckpttools.cli.command import BaseCommand
from ckpttools.cli.options import ANY_PATH, flags, json_option
from ckpttools.cli.output import print_json, print_lines, report_fields, styled, width, wrap
from ckpttools.cli.table import Column, draw_table
from ckpttools.core.dataclass import dataclass
from ckpttools.core.text import fold_lines, format_count, format_disk, format_type, plural, printable
from ckpttools.inspection.chunks import Advice, ArrayChunks, ChunksReport, FileChunks
from ckpttools.sharding.load_prediction import ProcessLoading
from ckpttools.stores.location import Location

if TYPE_CHECKING:
    from ckpttools.api.sources import Opening


@click.command(short_help="Show files, chunk grids and codecs; predict load I/O.", cls=BaseCommand)
@click.argument("path", type=ANY_PATH)
@json_option
@flags(*CHUNKS, *OPENING)
def chunks(
    path: Location,
    as_json: bool,
    filter: str,
    mesh: str | None,
    spec: str | None,
    rules: str | None,
    processes: int | None,
    **reading: Unpack[Opening],
) -> None:
    """Show how a checkpoint is stored: its data files, chunk grids and codecs.

    Reads only indexes and metadata. With --mesh, predicts how many reads each device makes and how many bytes
    it needs and fetches; with --processes, the reads of processes that load together.

    \b
    Examples:
      $ ckpt inspect chunks ~/maxtext/llama3.1-8b --mesh fsdp=8 --spec "P('fsdp')"
      $ ckpt inspect chunks ~/llama --mesh fsdp=4,tensor=2 --processes 2
    """
    from ckpttools.api.chunks import chunks as look

    report = look(path, filter=filter, mesh=mesh, spec=spec, rules=rules, processes=processes, **reading)
    if as_json:
        result = report_fields(report)
        advice = result.pop("advice")
        print_json({"report": result, "advice": advice})
        return

    print_chunks(report, report.advice)


_MAX_FILES = 12
_MAX_PATHS = 3
# Indentation of a wrapped path.
_INDENT = 8
_KINDS = ("missing", "data", "unused", "index", "other")
_DOCUMENTS = ("zarr.json", ".zarray", ".zgroup", ".zattrs")
_NUMBER = re.compile(r"[0-9]+")
_LAYOUT = attrgetter("shape", "dtype", "chunk_shape", "min_read_shape", "codecs", "missing_chunks")


def print_chunks(report: ChunksReport, advice: Sequence[Advice]) -> None:
    print_lines(_chunk_report_lines(report, advice))


def _chunk_report_lines(report: ChunksReport, advice: Sequence[Advice]) -> Iterator[str]:
    yield styled(printable(report.path), bold=True)
    yield ", ".join(filter(None, [report.format, _index_line(report.indexes)]))
    yield ""
    yield from _file_lines(report.files)
    if report.arrays:
        yield ""
        yield from _array_lines(report.arrays)
    yield ""
    for line in _total_lines(report):
        yield from wrap(line, width())
    for item in advice:
        yield ""
        yield from _advice_lines(item)


def _index_line(names: Sequence[str]) -> str:
    if not names:
        return ""
    return f"OCDBT, {names[0]}" if len(names) == 1 else f"OCDBT, {len(names)} unmerged indexes"


@dataclass
class _FileLine:
    """Files that are shown as one line.

    Attributes:
        name: Name of the file, or of the directory with its number of files.
    """

    name: str
    files: list[FileChunks]

    def total(self, field: str) -> int:
        return sum(getattr(file, field) for file in self.files)

    @property
    def kind(self) -> str:
        """Return the kind of all files, or "" if they differ."""
        kinds = {file.kind for file in self.files}
        return kinds.pop() if len(kinds) == 1 else ""

    @property
    def remark(self) -> str:
        """Return the number of unused bytes, or of names that the files are shared with."""
        if missing := self.total("missing_nbytes"):
            return f"{format_disk(missing)} missing"
        links = max(file.links for file in self.files)
        return f"× {links} links" if links > 1 else ""


def _file_lines(files: Sequence[FileChunks]) -> Iterator[str]:
    groups = sorted(_group_files(files), key=lambda group: (_KINDS.index(group.kind), -group.total("nbytes")))
    visible, rest = groups[:_MAX_FILES], [file for group in groups[_MAX_FILES:] for file in group.files]
    if rest:
        visible.append(_FileLine(f"… and {plural(len(rest), 'more file')}", rest))
    columns = [
        Column("file"),
        Column("kind"),
        *(Column(name, right=True) for name in ("size", "arrays", "used", "index", "unused")),
        Column(""),
    ]
    yield from draw_table(columns, [_file_cells(group) for group in visible], width())


def _file_cells(group: _FileLine) -> list[str]:
    fields = ("referenced_nbytes", "index_nbytes", "unreferenced_nbytes")
    sizes = [format_disk(group.total(field)) if group.total(field) else "" for field in fields]
    arrays = format_count(group.total("arrays")) if group.total("arrays") else ""
    return [
        printable(group.name),
        group.kind,
        format_disk(group.total("nbytes")),
        arrays,
        *sizes,
        group.remark,
    ]


def _group_files(files: Sequence[FileChunks]) -> Iterator[_FileLine]:
    """Show a few data files one by one, or group many by directory and kind."""
    is_detailed = sum(file.kind == "data" for file in files) <= _MAX_FILES
    groups: dict[tuple[str, str], list[FileChunks]] = defaultdict(list)
    for file in files:
        groups[_file_location(file, is_detailed), file.kind].append(file)
    for (location, _), members in groups.items():
        name = members[0].name if len(members) == 1 else f"{location} ({len(members):,} files)"
        yield _FileLine(name, members)


def _file_location(file: FileChunks, is_detailed: bool) -> str:
    """Return the label under which a file is grouped with similar ones."""
    if file.kind == "other":
        return "metadata"
    last = file.name.rpartition("/")[2]
    if last in _DOCUMENTS:
        return f"*/{last}"
    return file.name if is_detailed and file.kind == "data" else _directory(file.name)


def _directory(name: str) -> str:
    """Return the database or array of a file: the first directory of its path."""
    first, slash, _ = name.partition("/")
    return f"{first}{slash}"


def _array_lines(arrays: Sequence[ArrayChunks]) -> Iterator[str]:
    predicted = arrays[0].reads is not None
    columns = [
        Column("array"),
        Column("type"),
        Column("chunk", spare=1),
        Column("bytes", right=True, spare=2),
        Column("codecs"),
        Column("chunks", right=True),
        Column("stored", right=True, spare=3 if predicted else 0),
        Column("ratio", right=True, spare=4),
    ]
    if predicted:
        columns += [Column("reads", right=True), Column("over-read", right=True), Column("", spare=5)]
    yield from draw_table(columns, [_array_cells(group) for group in _group_arrays(arrays)], width())


def _group_arrays(arrays: Iterable[ArrayChunks]) -> list[list[ArrayChunks]]:
    """Group arrays that are stored in the same way and whose names differ only in numbers."""
    groups: dict[object, list[ArrayChunks]] = {}
    for array in arrays:
        cut = array.reads.shards_per_axis if array.reads else None
        groups.setdefault((_NUMBER.sub("#", array.path), _LAYOUT(array), cut), []).append(array)
    return list(groups.values())


def _array_cells(group: Sequence[ArrayChunks]) -> list[str]:
    first = group[0]
    names = fold_lines(item.path for item in group)
    name = names[0] if len(names) == 1 else f"{names[0]} and {plural(len(group) - 1, 'other')}"
    stored = sum(item.stored_nbytes for item in group)
    nbytes = sum(item.nbytes for item in group)
    chunks = f"{sum(item.num_chunks for item in group):,}"
    if first.missing_chunks:
        chunks += f" ({sum(item.missing_chunks for item in group):,} missing)"
    ratio = f"{nbytes / stored:.2f}" if stored and stored != nbytes else ""
    piece = first.shape if first.min_read_shape is None else first.min_read_shape
    chunk = "any range" if first.min_read_shape is None else format_type("", piece)
    cells = [
        printable(name),
        format_type(first.dtype, first.shape),
        "whole" if piece == first.shape and first.min_read_shape is not None else chunk,
        format_disk(first.min_read_nbytes),
        " ".join(first.codecs) or "raw",
        chunks,
        format_disk(stored),
        ratio,
    ]
    return cells + _read_cells(group)


def _read_cells(group: Sequence[ArrayChunks]) -> list[str]:
    reads = group[0].reads
    if reads is None:
        return []
    over = f"{reads.over_read:.2f}"
    note = "does not divide" if reads.is_uneven else "replicated" if prod(reads.shards_per_axis) == 1 else ""
    return [f"{sum(item.reads.reads for item in group if item.reads):,}", over, note]


def _total_lines(report: ChunksReport) -> Iterator[str]:
    missing = f", {report.missing_chunks:,} missing" if report.missing_chunks else ""
    yield (
        f"{plural(report.num_arrays, 'array')} in {plural(report.num_chunks, 'chunk')}{missing}: "
        f"{format_disk(report.nbytes)}, stored in {format_disk(report.stored_nbytes)}; "
        f"{format_disk(report.unreferenced_nbytes)} unused in all files"
    )
    loading = report.loading
    if loading:
        mesh = ", ".join(f"{name}={size}" for name, size in loading.mesh.items())
        devices = prod(loading.mesh.values())
        yield (
            f"mesh {mesh}, {loading.spec}: a device needs {format_disk(loading.needed)} and fetches "
            f"{format_disk(loading.fetched)} in {plural(loading.reads, 'read')}"
        )
        yield (
            f"{plural(devices, 'device')} together: {format_disk(loading.total_needed)} needed, "
            f"{format_disk(loading.total_fetched)} decoded, over-read {loading.over_read:.2f}"
        )
    if report.processes:
        yield from _process_lines(report.processes)


def _process_lines(loading: ProcessLoading) -> Iterator[str]:
    processes = f"{loading.processes:,} process{'es' * (loading.processes != 1)}"
    yield (
        f"{processes} with {plural(loading.devices, 'device')} each: one needs "
        f"{format_disk(loading.needed)} and by "
        f"ckpttools.load fetches {format_disk(loading.fetched)}, over-read {loading.over_read:.2f}"
    )
    if loading.num_exchanged:
        yield (
            f"it fetches {format_disk(loading.fetched_with_exchange)} if processes exchange what they have "
            f"read, for {plural(loading.num_exchanged, 'array')}"
        )
    if loading.num_broadcast:
        yield (
            f"with single_replica=True one fetches {format_disk(loading.fetched_single_replica)}, and reads "
            f"{plural(loading.num_broadcast, 'array')} for all that need the same"
        )


def _advice_lines(advice: Advice) -> Iterator[str]:
    names, room = fold_lines(advice.paths), width()
    subject = f"{advice.subject}:"
    first, *rest = wrap(f"{subject} {advice.text}", room)
    yield styled(subject, fg="yellow") + first[len(subject) :]
    yield from rest
    visible_names = [printable(name) for name in names[:_MAX_PATHS]]
    if len(names) > _MAX_PATHS:
        last, more = visible_names.pop(), f"and {len(names) - _MAX_PATHS} more"
        fits = room is None or _INDENT + len(last) + 1 + len(more) <= room
        visible_names += [f"{last} {more}"] if fits else [last, more]
    for k, name in enumerate(visible_names):
        yield f"  {'in' if k == 0 else '':{_INDENT - 4}}  {name}"
    if advice.command:
        yield f"  next  {advice.command}"
