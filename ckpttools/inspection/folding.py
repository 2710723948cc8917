"""A short view of many arrays: siblings that differ only in one number in their names become one line.

`layers_0 … layers_31` with equal contents are shown as `layers_{0..31}`; experts inside them fold, too.
Every second layer gives `layers_{0..30 by 2}`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from math import prod

from ckpttools.core.dataclass import dataclass
from ckpttools.core.text import natural_key
from ckpttools.inspection.tree import ArrayReport

_NUMBER = re.compile(r"[0-9]+")
# Deeper names are not from a real tree; the remainder stays one key.
_DEEPEST = 64
# So many numbers at even distances become one range.
_LEAST_STRIDE = 4


@dataclass(frozen=True, slots=True)
class Branch:
    """One line of the view.

    Attributes:
        name: key, or pattern such as `layers_{0..31}`; keys on a way without a fork are joined.
        array: the array at this place, the first of those folded; None where there is none.
        times: number of subtrees in this line, including those of folded parents.
        count: number of arrays here and below, with all repetitions, including those of folded parents.
        num_elements, nbytes: of those.
        share: part of all bytes that those are, from 0 to 1.
        children: children of one of the siblings.
    """

    name: str
    array: ArrayReport | None
    times: int
    count: int
    num_elements: int
    nbytes: int
    share: float
    children: tuple[Branch, ...]


def fold(
    arrays: Iterable[ArrayReport], *, largest_first: bool = False, depth: int | None = None
) -> tuple[Branch, ...]:
    """Return the arrays as a tree with repetitions folded.

    Args:
        arrays: with different paths.
        largest_first: siblings by their bytes; otherwise in natural order of their names.
        depth: levels to keep, at least 1; None for all. Totals include all levels.
    """
    listed = list(arrays)
    # Formats without a tree have flat names, whose dots are meant as one.
    joint = "/" if any("/" in item.path for item in listed) else "."
    root = _Node()
    for array in listed:
        root.location(array.path.split(joint, _DEEPEST), array)
    root.sign({})
    return _cut(_Folding(joint, root.nbytes, largest_first).branches(root, repeated=1), depth)


def _cut(branches: tuple[Branch, ...], depth: int | None) -> tuple[Branch, ...]:
    if depth is None or not branches:
        return branches
    kept = [() if depth == 1 else _cut(branch.children, depth - 1) for branch in branches]
    return tuple(replace(item, children=below) for item, below in zip(branches, kept, strict=True))


def sort_arrays(arrays: Iterable[ArrayReport], by: str) -> tuple[ArrayReport, ...]:
    """Return the arrays sorted by "size", largest first, or by "name", in natural order."""
    return tuple(sorted(arrays, key=lambda array: (-array.nbytes * (by == "size"), natural_key(array.path))))


@dataclass(slots=True)
class _Node:
    """A place in the tree while it grows. Equal signatures mean equal names, shapes and dtypes below."""

    array: ArrayReport | None = None
    children: dict[str, _Node] = field(default_factory=dict)
    signature: int = 0
    count: int = 0
    num_elements: int = 0
    nbytes: int = 0

    def location(self, keys: Iterable[str], array: ArrayReport) -> None:
        node = self
        for key in keys:
            below = node.children.get(key)
            if below is None:
                below = node.children[key] = _Node()
            node = below
        node.array = array

    def sign(self, known: dict[object, int]) -> None:
        """Numbers every distinct content below; `known` holds the numbers given."""
        own = None
        if array := self.array:
            own = array.shape, array.dtype, array.role, array.sharding, array.quantized
            self.count, self.num_elements, self.nbytes = 1, prod(array.shape), array.nbytes
        below = []
        for name, child in self.children.items():
            child.sign(known)
            self.count += child.count
            self.num_elements += child.num_elements
            self.nbytes += child.nbytes
            below.append((name, child.signature))
        below.sort()
        self.signature = known.setdefault((own, *below), len(known))


@dataclass(frozen=True, slots=True)
class _Folding:
    """Makes branches of nodes; `total` are the bytes of all arrays."""

    joint: str
    total: int
    largest_first: bool

    def branches(self, node: _Node, repeated: int) -> tuple[Branch, ...]:
        """Return the folded children of a node which itself stands for `repeated` ones."""
        built = (
            self._branch(name, node.children[members[0]], repeated * len(members))
            for name, members in _folded(node.children)
        )
        return tuple(sorted(built, key=lambda item: -item.nbytes) if self.largest_first else built)

    def _branch(self, name: str, first: _Node, times: int) -> Branch:
        """One line for `times` nodes like `first`; keys on a way without a fork are joined."""
        below = self.branches(first, times)
        if len(below) == 1 and first.array is None:
            return replace(below[0], name=f"{name}{self.joint}{below[0].name}")
        nbytes = first.nbytes * times
        share = nbytes / self.total if self.total else 0.0
        return Branch(
            name, first.array, times, first.count * times, first.num_elements * times, nbytes, share, below
        )


def _folded(children: Mapping[str, _Node]) -> list[tuple[str, list[str]]]:
    """Return the lines and the children that each stands for, in natural order; large groups form first."""
    left = set(children)
    lines: list[tuple[str, list[str]]] = []
    for (prefix, suffix, _, _), group in sorted(_alike(children).items(), key=_largest_first):
        members = {number: name for number, name in group.items() if name in left}
        if len(members) > 1:
            numbers = sorted(members, key=int)
            left.difference_update(members.values())
            lines.append((f"{prefix}{{{_ranges(numbers)}}}{suffix}", [members[item] for item in numbers]))
    lines += [(name, [name]) for name in left]
    return sorted(lines, key=lambda line: natural_key(line[1][0]))


# Text before and after the number, its width if it is zero-padded, and the subtree.
_Alike = tuple[str, str, int, int]


def _alike(children: Mapping[str, _Node]) -> dict[_Alike, dict[str, str]]:
    """Children by all but one number of their names: number -> name."""
    groups: dict[_Alike, dict[str, str]] = defaultdict(dict)
    padded = _padded_widths(children)
    for name, child in children.items():
        for match in _NUMBER.finditer(name):
            prefix, suffix, number = name[: match.start()], name[match.end() :], match[0]
            width = len(number) if len(number) in padded.get((prefix, suffix), ()) else 0
            groups[prefix, suffix, width, child.signature][number] = name
    return groups


def _padded_widths(names: Iterable[str]) -> dict[tuple[str, str], set[int]]:
    """Return the widths of numbers with leading zeros, so that 10 next to 09 counts as padded, too."""
    widths: dict[tuple[str, str], set[int]] = defaultdict(set)
    for name in names:
        for match in _NUMBER.finditer(name):
            if match[0].startswith("0") and len(match[0]) > 1:
                widths[name[: match.start()], name[match.end() :]].add(len(match[0]))
    return widths


def _largest_first(item: tuple[_Alike, dict[str, str]]) -> tuple[int, _Alike]:
    return -len(item[1]), item[0]


def _ranges(numbers: Sequence[str]) -> str:
    """`0..3,5` for 0, 1, 2, 3, 5, and `0..6 by 2` for 0, 2, 4, 6."""
    values = [int(number) for number in numbers]
    parts: list[str] = []
    start = 0
    while start < len(values):
        length, step = _run(values, start)
        first, last = numbers[start], numbers[start + length - 1]
        parts.append(first if length == 1 else f"{first}..{last}" + (f" by {step}" if step > 1 else ""))
        start += length
    return ",".join(parts)


def _run(values: Sequence[int], start: int) -> tuple[int, int]:
    """Return the length of the arithmetic sequence from `start`, and its step."""
    following = range(start + 1, len(values))
    step = values[start + 1] - values[start] if following else 1
    stop = next((k for k in following if values[k] - values[k - 1] != step), len(values))
    # Three numbers with gaps are shorter without folding.
    return (stop - start, step) if step == 1 or stop - start >= _LEAST_STRIDE else (1, 1)
