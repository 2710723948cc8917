"""Advice on how a checkpoint is stored. Each rule examines a report independently.

The figures are from Orbax restoring a 512 MiB array [2048, 16, 8192] of bfloat16 onto 8 devices, and from
reading chunks of each encoding through tensorstore, on two cores with files in the page cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

from ckpttools.array.storage import FINE, has_giant_chunks, has_tiny_chunks
from ckpttools.core.message_terms import call
from ckpttools.core.region import grid_shape
from ckpttools.inspection.chunks import Advice, ArrayChunks, ChunksReport, LoadCost
from ckpttools.sharding.mesh import MeshShape

_MIB = 1 << 20
_LARGE = 16 * _MIB
# Our own chunk grid does not divide smaller chunks either, because their over-read costs little.
_MIN_RECHUNK_BYTES = 4 * _MIB
_OVER_READ = 1.5
_MANY_FILES = 2000
_DEAD_SHARE = 0.1
_REWRITE = call("convert", "SRC", "DST", format="orbax")


Rule = Callable[[ChunksReport], Iterator[Advice]]


def advice(report: ChunksReport) -> tuple[Advice, ...]:
    """Return all advice on a report, costliest problem first."""
    return tuple(item for rule in RULES for item in rule(report))


def _about(subject: str, result: Sequence[ArrayChunks], text: str, command: str | None) -> Iterator[Advice]:
    if result:
        yield Advice(subject, tuple(item.path for item in result), text, command)


def _select_by_chunks(report: ChunksReport, rule: Callable[[int, int], bool]) -> list[ArrayChunks]:
    """Return the arrays for which a rule applies to the number and size of separately fetched parts."""
    return [
        array
        for array in report.arrays
        if array.min_read_shape is not None
        and array.min_read_nbytes
        and rule(prod(grid_shape(array.shape, array.min_read_shape)), array.min_read_nbytes)
    ]


def _rechunk_command(loading: LoadCost | None) -> str:
    """Return the command for chunks that suit the mesh or, without a mesh, for chunks of a good size."""
    if loading is None:
        return _REWRITE
    mesh = str(MeshShape(loading.mesh))
    word, _, rules = loading.spec.partition(" ")
    return call("reshard", "SRC", "DST", mesh=mesh, rules=rules if word == "rules" else "RULES")


def _missing_advice(report: ChunksReport) -> Iterator[Advice]:
    result = [array for array in report.arrays if array.missing_chunks]
    text = (
        "they are read as the fill value if the metadata allows it, and are an error otherwise; one "
        "host's share of a local checkpoint has only its own chunks"
    )
    yield from _about("missing chunks", result, text, call("doctor", report.path))


def _lost_advice(report: ChunksReport) -> Iterator[Advice]:
    result = [file for file in report.files if file.missing_nbytes]
    if result:
        first, more = result[0], f" and {len(result) - 1} more" if len(result) > 1 else ""
        state = "does not exist" if first.kind == "missing" else f"has only {first.nbytes:,} bytes"
        text = f"{first.name}{more} {state}, and the index refers to data beyond that: the copy is incomplete"
        yield Advice("missing data", (), text, call("doctor", report.path))


def _unmerged_advice(report: ChunksReport) -> Iterator[Advice]:
    if any("/" in name for name in report.indexes):
        text = "each process of the save left an index, but there is no merged one, so Orbax cannot read it"
        yield Advice("unmerged index", (), text, call("doctor", report.path, fix="merge"))


def _giant(report: ChunksReport) -> Iterator[Advice]:
    result = _select_by_chunks(report, has_giant_chunks)
    text = (
        "each is one chunk, which every device reads completely for any sharding: 0.5 GB/s against "
        "1.5 to 1.6 from one chunk for each layer, cut by 16"
    )
    yield from _about("giant chunks", result, text, _rechunk_command(report.loading))


def _over_read_advice(report: ChunksReport) -> Iterator[Advice]:
    loading = report.loading
    if loading is None or loading.over_read < _OVER_READ:
        return
    result = [
        array
        for array in report.arrays
        if array.reads and array.reads.over_read >= _OVER_READ and array.min_read_nbytes > _MIN_RECHUNK_BYTES
    ]
    text = (
        f"with this sharding {loading.over_read:.1f} bytes are fetched for each one that is needed: "
        "shards are smaller than chunks, or cross chunk boundaries"
    )
    yield from _about("over-read", result, text, _rechunk_command(loading))


def _uneven(report: ChunksReport) -> Iterator[Advice]:
    result = [array for array in report.arrays if array.reads and array.reads.is_uneven]
    text = "an axis of these cannot be divided into equal shards, as JAX requires, so devices get all of it"
    yield from _about("does not divide", result, text, None)


def _uncut(report: ChunksReport) -> Iterator[Advice]:
    if report.loading and report.loading.has_no_effect:
        text = f"{report.loading.spec} does not partition these arrays: every device gets full copies"
        yield Advice("replicated", (), text, None)


def _short_runs(report: ChunksReport) -> Iterator[Advice]:
    result = [
        array
        for array in report.arrays
        if array.min_read_shape is None
        and array.reads
        and array.reads.reads > 1
        and array.reads.needed // array.reads.reads < 16 * 1024
        and array.reads.needed >= _MIB
    ]
    text = "shards of these are many short runs of bytes; sharded on the first axis, each would be one"
    yield from _about("short runs", result, text, None)


def _fine(report: ChunksReport) -> Iterator[Advice]:
    result = _select_by_chunks(report, has_tiny_chunks)
    text = (
        f"thousands of chunks of less than {FINE >> 10} KiB cost more in requests and index than in bytes; "
        "4 to 64 MiB serve best"
    )
    yield from _about("over-fine chunks", result, text, _REWRITE)


def _compression_advice(report: ChunksReport) -> Iterator[Advice]:
    result = [array for array in report.arrays if array.is_compressed]
    stored = sum(item.stored_nbytes for item in result)
    nbytes = sum(item.nbytes for item in result)
    if stored < _LARGE:
        return
    saved = f"{100 - 100 * stored / nbytes:.0f} %"
    text = f"compression saves {saved} here; raw chunks load 2 to 3 times faster (1.4 to 1.7, not 0.6 GB/s)"
    yield from _about(
        "compressed chunks", result, text, call("convert", "SRC", "DST", format="orbax", compression="none")
    )


def _transpose_advice(report: ChunksReport) -> Iterator[Advice]:
    result = [array for array in report.arrays if array.is_transposed]
    if sum(item.stored_nbytes for item in result) < _LARGE:
        return
    text = "loading these transposes them: 0.4 GB/s, against 1.4 GB/s from plain C order"
    yield from _about("transposed chunks", result, text, _REWRITE)


def _many_files_advice(report: ChunksReport) -> Iterator[Advice]:
    files = [file for file in report.files if file.kind == "data"]
    if len(files) >= _MANY_FILES and not report.indexes:
        text = f"every chunk is a file, {len(files):,} of them; with an OCDBT index, there would be a few"
        yield Advice("many files", (), text, call("convert", "SRC", "DST", format="orbax", ocdbt=True))


def _dead(report: ChunksReport) -> Iterator[Advice]:
    # Data of a shared file that only its other names use takes no space of this checkpoint.
    own = [file for file in report.files if file.kind != "other" and file.links == 1]
    dead, total = sum(file.unreferenced_nbytes for file in own), sum(file.nbytes for file in own)
    if dead >= _LARGE and dead >= _DEAD_SHARE * total:
        share = f"{100 * dead / total:.0f} %"
        text = f"{share} of the data files belongs to no array: gaps, or data that was overwritten"
        yield Advice("dead bytes", (), text, _REWRITE)


RULES: tuple[Rule, ...] = (
    _lost_advice,
    _missing_advice,
    _unmerged_advice,
    _giant,
    _uncut,
    _uneven,
    _over_read_advice,
    _short_runs,
    _fine,
    _compression_advice,
    _transpose_advice,
    _many_files_advice,
    _dead,
)
