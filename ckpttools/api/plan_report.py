"""Plans as data, for dry runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from math import prod
from typing import TYPE_CHECKING

from ckpttools.api.prepared import Prepared
from ckpttools.array.dequantized import Dequantized
from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Elementwise, distinct_arrays, source_arrays
from ckpttools.array.relayout import Relayout
from ckpttools.array.tree import Tree, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.notes import Note
from ckpttools.core.text import fold_lines, format_ranges
from ckpttools.plan.plan import Plan
from ckpttools.roles.of_tree import roles
from ckpttools.stores.location import Location

if TYPE_CHECKING:
    from ckpttools.api.chunks import MeshReads


@dataclass(frozen=True, slots=True)
class PlannedArray:
    """An array of the destination."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    chunk: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rename:
    """An array of the destination whose name or axes differ from the source.

    Attributes:
        sources: Names in the source of the arrays that it consists of.
        name: Its name in the destination.
        is_rearranged: Whether it is not one of the source's arrays as a whole, with the same axes.
    """

    sources: tuple[str, ...]
    name: str
    is_rearranged: bool


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A description of a plan.

    Attributes:
        parameters: Number of elements of all parameters.
        memory: Memory limit in bytes; at most `projected_peak` of it will be used.
        inexact, values: Value changes that cannot and that can be undone bit for bit.
        dropped: Source arrays that are omitted on purpose.
        renames: Arrays with another name or other axes than in the source; empty for conversions of models.
        files: Data files of the destination with their sizes.
        bytes_referenced: Bytes that are shared with source files instead of being copied.
        bytes_unreferenced: Other bytes in the shared files, which exist as long as the destination does.
        links: The shared files, by their names in the destination.
        remarks: Other remarks and advice for the user.
        mesh_reads: Reads of the devices of a mesh before and after; None without a mesh.
    """

    source: Location
    destination: Location
    arrays: int
    parameters: int
    bytes_in: int
    bytes_out: int
    tasks: int
    jobs: int
    memory: int
    projected_peak: int
    inexact: tuple[Note, ...]
    values: tuple[Note, ...]
    dropped: tuple[str, ...]
    renames: tuple[Rename, ...]
    files: Mapping[str, int]
    bytes_referenced: int
    bytes_unreferenced: int
    links: Mapping[str, str]
    remarks: tuple[str, ...]
    array_list: tuple[PlannedArray, ...]
    mesh_reads: MeshReads | None = None


def describe(prepared: Prepared, source: Location) -> PlanReport:
    """Describe a plan as data; `source` is the location of its input."""
    plan, destination = prepared.plan, prepared.destination
    arrays, known = plan.tree.arrays, roles(plan.tree)
    return PlanReport(
        source=source,
        destination=destination,
        **plan.totals,
        parameters=sum(array.size for path, array in arrays.items() if known.of(path) == "parameter"),
        jobs=plan.jobs,
        memory=plan.memory,
        projected_peak=plan.projected_peak,
        inexact=plan.notes.inexact,
        values=plan.notes.values,
        dropped=plan.notes.dropped,
        renames=prepared.renames,
        files=plan.layout.files,
        bytes_referenced=plan.bytes_referenced,
        bytes_unreferenced=plan.bytes_unreferenced,
        links={name: source.path for name, source in plan.layout.links.items()},
        remarks=(*plan.raw_remarks, *new_parent_remarks(destination), *plan.notes.advice),
        array_list=tuple(_planned_arrays(plan)),
        mesh_reads=prepared.mesh_reads,
    )


def new_parent_remarks(destination: Location) -> Iterator[str]:
    """Yield a remark about missing parent directories, which may be a typo."""
    if destination.store.streams:
        return  # Buckets do not have directories.
    missing = [location for location in destination.absolute().parents if not location.exists()]
    if missing:
        yield f"{missing[-1]} does not exist and will be created"


def _planned_arrays(plan: Plan) -> Iterator[PlannedArray]:
    for path, array in plan.tree.arrays.items():
        chunk = plan.layout.placements[path].chunk
        yield PlannedArray(keystr(path), array.shape, array.dtype.name, array.nbytes, chunk)


def find_renames(source: Tree, tree: Tree) -> Iterator[Rename]:
    """Yield the arrays of a tree whose name or axes differ from the tree that it was made from."""
    names = {id(array): keystr(path) for path, array in source.arrays.items()}
    shapes = {keystr(path): array.shape for path, array in source.arrays.items()}
    # Expressions may be simplified, so that they contain the parts of an array instead of the array.
    parts = {id(part): keystr(path) for path, array in source.arrays.items() for part in _stored_parts(array)}
    for path, array in tree.arrays.items():
        name, own = keystr(path), names.get(id(array))
        if own is not None:
            if own != name:
                yield Rename((own,), name, False)
            continue
        whole = {names[id(item)]: None for item in distinct_arrays([array]) if id(item) in names}
        sources = tuple(whole or {parts[id(p)]: None for p in _stored_parts(array) if id(p) in parts})
        is_simplified = not whole and len(sources) == 1 and shapes[sources[0]] == array.shape
        is_rearranged = id(_before_cast(array)) not in names and not is_simplified
        # Values that are cut or computed, as by a merge of an adapter, keep their axes.
        if sources and (name not in sources or (is_rearranged and _has_other_axes(array))):
            yield Rename(sources, name, is_rearranged)


def _stored_parts(array: LazyArray) -> Iterator[LazyArray]:
    return (item for item in distinct_arrays([array]) if not source_arrays(item))


def _has_other_axes(array: LazyArray) -> bool:
    """Return whether an array has only the elements of one array, in another order of axes."""
    return isinstance(_before_cast(array), Relayout)


def _before_cast(array: LazyArray) -> LazyArray:
    """Return the array without casts and dequantization."""
    while isinstance(array, Elementwise | Dequantized):
        (array, *_) = source_arrays(array)
    return array


def fold_renames(renames: Iterable[Rename]) -> list[str]:
    """Format renames as `layers.{0..31}.wo -> layers_{0..31}/wo`, one line for those that differ in numbers.

    A number in a new name is folded only if it follows a number in the old name: it is the same, or differs
    by a constant.
    """
    targets: dict[tuple[tuple[str, ...], bool], list[str]] = {}
    for item in renames:
        targets.setdefault((item.sources, item.is_rearranged), []).append(item.name)
    # Rows with equal words, in the order of the first one of each.
    groups: dict[_Words, list[_Numbers]] = {}
    for (sources, is_rearranged), names in targets.items():
        old, new = (
            _NUMBER.split(texts[0] if len(texts) == 1 else ", ".join(fold_lines(texts)))
            for texts in (sources, names)
        )
        words = tuple(old[::2]), tuple(new[::2]), is_rearranged
        groups.setdefault(words, []).append((list(map(int, old[1::2])), list(map(int, new[1::2]))))
    return [line for words, rows in groups.items() for line in _fold_rows(words, rows)]


# Numbers with leading zeros are words.
_NUMBER = re.compile(r"(?<![0-9])(0|[1-9][0-9]{0,17})(?![0-9])")
_Words = tuple[tuple[str, ...], tuple[str, ...], bool]
"""The text between the numbers of the old name and of the new name, and whether axes are rearranged."""
_Numbers = tuple[list[int], list[int]]
"""The numbers of the old name and of the new name."""


def _fold_rows(words: _Words, rows: list[_Numbers], at: int = 0) -> Iterator[str]:
    """Yield lines for renames that differ in numbers only; those in the old name before `at` are equal."""
    (first_old, first_new), count = rows[0], len(rows[0][0])
    differences: list[tuple[int, int] | None] = []
    for position, number in enumerate(first_new):
        if all(new[position] == number for _, new in rows):
            differences.append(None)
            continue
        same = (k for k in range(count) if len({new[position] - old[k] for old, new in rows}) == 1)
        follows = next(same, None)
        if follows is None:
            break
        differences.append((follows, number - first_old[follows]))
    columns = [sorted({old[k] for old, _ in rows}) for k in range(count)]
    if len(differences) == len(first_new) and prod(map(len, columns)) == len(rows):
        old_texts = [_range_text(column) for column in columns]
        new_texts = [
            str(first_new[position]) if item is None else _range_text([n + item[1] for n in columns[item[0]]])
            for position, item in enumerate(differences)
        ]
        old_words, new_words, is_rearranged = words
        sides = (_join(old_words, old_texts), _join(new_words, new_texts))
        yield f"{' -> '.join(sides)}{' (rearranged)' * is_rearranged}"
        return
    # Fold the rows with each value of the first number by themselves.
    by_number: dict[int, list[_Numbers]] = {}
    for old, new in rows:
        by_number.setdefault(old[at], []).append((old, new))
    for same_rows in by_number.values():
        yield from _fold_rows(words, same_rows, at + 1)


def _range_text(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{{{format_ranges(numbers)}}}"


def _join(words: Sequence[str], numbers: Sequence[str]) -> str:
    return "".join(chain(*zip_longest(words, numbers, fillvalue="")))
