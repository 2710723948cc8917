"""Items of a step without arrays, such as the JSON state of a data iterator: compared file by file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Tree
from ckpttools.core.text import plural
from ckpttools.digest.pairing import LeafDifference, Pairing, Remark, Side
from ckpttools.formats.orbax.metadata import COMMIT_FILE
from ckpttools.formats.orbax.steps import OrbaxItem, Step, directories, is_item, orbax_at
from ckpttools.stores.base import File
from ckpttools.stores.location import Location
from ckpttools.stores.registry import LocationLike, parse

_MAX_SHOWN = 60
_BLOCK_BYTES = 1 << 20


class StepFiles:
    """The files of the items without arrays of a step.

    Args:
        source: The path that was opened, or the tree itself.
        tree: The opened tree.

    Attributes:
        items: Items by name; None if the user passed a tree or a single item.
    """

    def __init__(self, source: LocationLike | Tree, tree: Tree) -> None:
        self.items: dict[str, Location] | None = None
        if not isinstance(source, Tree):
            location = parse(tree.metadata.location)
            found = orbax_at(location) if tree.metadata.format == "orbax" else None
            step = found.step if isinstance(found, OrbaxItem) and found.name else found
            if step is found or location != parse(source):
                others = _items(step, tree) if isinstance(step, Step) else ()
                self.items = {item.name: item for item in others}

    def remarks(self, other: StepFiles, side: Side) -> Iterator[Remark]:
        """Yield a remark if only this side has some of the items."""
        names = [] if other.items is None else [name for name in self.items or () if name not in other.items]
        if names:
            listed = f"{plural(len(names), 'item')} without arrays ({', '.join(names)})"
            yield Remark(f"not compared, since the other side lacks them: {listed}", side)

    def differing(self, other: StepFiles) -> Iterator[LeafDifference]:
        """Yield the files that differ in items of both sides. JSON files are compared by their values.

        Raises:
            StorageError, FormatError: A file cannot be read.
        """
        mine, theirs = self.items or {}, other.items or {}
        for name in sorted(mine.keys() & theirs.keys()):
            a, b = _files(mine[name]), _files(theirs[name])
            for file in sorted(a.keys() | b.keys()):
                first, second = a.get(file), b.get(file)
                if first is None or second is None or not _is_same(first, second):
                    yield LeafDifference(f"{name}/{file}", _describe(first), _describe(second, "other "))


def with_step_files(
    both: Pairing[LazyArray], a: tuple[LocationLike | Tree, Tree], b: tuple[LocationLike | Tree, Tree]
) -> Pairing[LazyArray]:
    """Add the differences in items without arrays to a pairing.

    Args:
        both: The paired arrays.
        a, b: For each side the path that was opened, or a tree, and the opened tree.
    """
    of_a, of_b = StepFiles(*a), StepFiles(*b)
    remarks = *of_a.remarks(of_b, "A"), *of_b.remarks(of_a, "B")
    leaves = (*both.leaves, *of_a.differing(of_b))
    return replace(both, leaves=leaves, remarks=(*both.remarks, *remarks))


def _items(step: Step, tree: Tree) -> list[Location]:
    own = {*tree.metadata.items, parse(tree.metadata.location).name}
    return [
        item
        for item in directories(step.path)
        if item.name[0] not in "._" and item.name not in own and not is_item(item)
    ]


def _files(item: Location) -> dict[str, File]:
    return {name: (item / name).open(status) for name, status in item.walk() if name != COMMIT_FILE}


def _is_same(a: File, b: File) -> bool:
    if max(a.size, b.size) <= _BLOCK_BYTES and _value(a) == _value(b):
        return True
    starts = range(0, a.size, _BLOCK_BYTES)
    lengths = (min(_BLOCK_BYTES, a.size - start) for start in starts)
    return a.size == b.size and all(
        a.read(start, length) == b.read(start, length) for start, length in zip(starts, lengths, strict=True)
    )


def _value(file: File) -> object:
    """Return the value of a small JSON file, or the bytes of another."""
    content = file.read(0, file.size)
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return content


def _describe(file: File | None, label: str = "") -> str | None:
    if file is None:
        return None
    if file.size > _MAX_SHOWN:
        return f"file of {file.size:,} {label}bytes"
    return f"file {file.read(0, file.size).decode('utf-8', 'replace')!r}"
