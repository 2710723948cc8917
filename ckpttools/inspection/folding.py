"""A short view of many arrays: siblings that differ only in one number in their names become one line.

`layers_0 … layers_31` with equal contents are shown as `layers_{0..31}`; experts inside them are folded, too.
Every second layer is shown as `layers_{0..30 by 2}`. Parameters precede optimizer state and everything else.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from math import prod

from ckpttools.core.dataclass import dataclass
from ckpttools.core.text import natural_key
from ckpttools.inspection.tree import ArrayReport
from ckpttools.roles.of_tree import ROLES

_NUMBER = re.compile(r"[0-9]+")
# Names of real trees are not deeper. The remainder stays one key.
_MAX_DEPTH = 64
RNG_STATE = "RNG state"
"""Name of the branch of collapsed random states."""
# Minimum number of evenly spaced numbers that become one range.
_MIN_STRIDE = 4


@dataclass(frozen=True, slots=True)
class Branch:
    """A line of the view.

    Attributes:
        name: Key, or pattern such as `layers_{0..31}`; keys without siblings are joined.
        array: The array at this path, the first one if several are folded; None if there is no array.
        num_subtrees: Number of subtrees in this line, including those of folded parents.
        num_arrays: Number of arrays here and below, counting all repetitions, including those of folded
            parents.
        num_elements, nbytes: Totals of these arrays.
        fraction: Fraction of all bytes in these arrays, from 0 to 1.
        children: Children of one of the siblings.
    """

    name: str
    array: ArrayReport | None
    num_subtrees: int
    num_arrays: int
    num_elements: int
    nbytes: int
    fraction: float
    children: tuple[Branch, ...]


def fold(
    arrays: Iterable[ArrayReport],
    *,
    sort: str | None = None,
    depth: int | None = None,
    collapse_random: bool = False,
) -> tuple[Branch, ...]:
    """Return the arrays as a tree with repetitions folded.

    Args:
        arrays: Arrays with distinct paths.
        sort: "size" to sort siblings by size, largest first, "name" for the natural order of their names;
            None for parameters first, then optimizer state, then others, each by name.
        depth: Number of levels to keep, at least 1; None for all. Totals include all levels.
        collapse_random: Whether several states of random number generators become one last branch, unless
            there is nothing else.
    """
    ordered = list(arrays)
    hidden = [array for array in ordered if array.is_random] if collapse_random else []
    if len(hidden) in (1, len(ordered)):
        hidden = []
    total = sum(array.nbytes for array in ordered)
    shown = [array for array in ordered if not array.is_random] if hidden else ordered
    branches = _limit_depth(_branches(FoldedLine.top(shown, sort=sort), 1, total), depth)
    return (*branches, _random_branch(hidden, total)) if hidden else branches


def _random_branch(arrays: Sequence[ArrayReport], total: int) -> Branch:
    """Return one branch without children for the states of random number generators."""
    size, nbytes = sum(prod(array.shape) for array in arrays), sum(array.nbytes for array in arrays)
    return Branch(RNG_STATE, None, 1, len(arrays), size, nbytes, nbytes / total if total else 0.0, ())


def _branches(line: FoldedLine, repeated: int, total: int) -> tuple[Branch, ...]:
    """Return the lines below a line that stands for `repeated` nodes; `total` is the size of all."""
    return tuple(_branch(below, repeated * len(below.members), total) for below in line.children())


def _branch(line: FoldedLine, times: int, total: int) -> Branch:
    nbytes = line.nbytes * times
    return Branch(
        line.name,
        line.array,
        times,
        line.count * times,
        line.num_elements * times,
        nbytes,
        nbytes / total if total else 0.0,
        _branches(line, times, total),
    )


def _limit_depth(branches: tuple[Branch, ...], depth: int | None) -> tuple[Branch, ...]:
    if depth is None or not branches:
        return branches
    children = [() if depth == 1 else _limit_depth(branch.children, depth - 1) for branch in branches]
    return tuple(replace(item, children=below) for item, below in zip(branches, children, strict=True))


def sort_arrays(arrays: Iterable[ArrayReport], by: str) -> tuple[ArrayReport, ...]:
    """Return the arrays sorted by "size", largest first, or by "name", in natural order."""
    return tuple(sorted(arrays, key=lambda array: (-array.nbytes * (by == "size"), natural_key(array.path))))


@dataclass(slots=True)
class _Node:
    """A node of the tree under construction. Equal signatures mean equal names, shapes and dtypes below."""

    array: ArrayReport | None = None
    children: dict[str, _Node] = field(default_factory=dict)
    signature: int = 0
    count: int = 0
    num_elements: int = 0
    nbytes: int = 0
    # Index of the first role, in the order of reports, that an array here or below has.
    rank: int = len(ROLES)

    def location(self, keys: Iterable[str], array: ArrayReport) -> None:
        node = self
        for key in keys:
            below = node.children.get(key)
            if below is None:
                below = node.children[key] = _Node()
            node = below
        node.array = array

    def sign(self, known: dict[object, int]) -> None:
        """Assign a number to each distinct content below; `known` has the numbers assigned so far."""
        own = None
        if array := self.array:
            own = array.shape, array.dtype, array.role, array.sharding, array.quantized
            self.count, self.num_elements, self.nbytes = 1, prod(array.shape), array.nbytes
            self.rank = ROLES.index(array.role)
        below = []
        for name, child in self.children.items():
            child.sign(known)
            self.count += child.count
            self.num_elements += child.num_elements
            self.nbytes += child.nbytes
            self.rank = min(self.rank, child.rank)
            below.append((name, child.signature))
        below.sort()
        self.signature = known.setdefault((own, *below), len(known))


@dataclass(frozen=True, slots=True, eq=False)
class FoldedLine:
    """A line of the folded tree, whose children are folded when they are needed.

    Attributes:
        name: See `Branch`.
        members: Names of the siblings in this line, relative to the line above.
        joint: Text that joins keys.
    """

    name: str
    members: Sequence[str]
    joint: str
    _node: _Node
    _below: Sequence[tuple[str, Sequence[str]]] | None
    _sort: str | None

    @classmethod
    def top(cls, arrays: Iterable[ArrayReport], *, sort: str | None = None) -> FoldedLine:
        """Return the line above all arrays, whose name is empty.

        Args:
            arrays: Arrays with distinct paths.
            sort: As in `fold`.
        """
        ordered = list(arrays)
        # Formats without a tree have flat names, in which dots separate keys.
        joint = "/" if any("/" in item.path for item in ordered) else "."
        root = _Node()
        for array in ordered:
            root.location(array.path.split(joint, _MAX_DEPTH), array)
        root.sign({})
        return cls("", ("",), joint, root, None, sort)

    @property
    def array(self) -> ArrayReport | None:
        """The array of the first sibling; None if there is none at this path."""
        return self._node.array

    @property
    def count(self) -> int:
        """Number of arrays of one sibling."""
        return self._node.count

    @property
    def num_elements(self) -> int:
        """Number of elements of one sibling."""
        return self._node.num_elements

    @property
    def nbytes(self) -> int:
        """Bytes of one sibling."""
        return self._node.nbytes

    @property
    def is_leaf(self) -> bool:
        """Whether the line has no children."""
        return not self._node.children

    def children(self) -> list[FoldedLine]:
        """Return the lines below one of the siblings. Keys without siblings are joined."""
        below = _fold_children(self._node.children) if self._below is None else self._below
        if self._sort is None:
            below = sorted(below, key=lambda line: self._node.children[line[1][0]].rank)
        lines = [self._line(name, members) for name, members in below]
        if self._sort == "size":
            lines.sort(key=lambda line: -line.nbytes * len(line.members))
        return lines

    def _line(self, name: str, members: Sequence[str]) -> FoldedLine:
        node, below = self._node.children[members[0]], None
        while node.array is None:
            below = _fold_children(node.children)
            if len(below) != 1:
                break
            ((key, keys),) = below
            name = f"{name}{self.joint}{key}"
            members = [f"{member}{self.joint}{item}" for member in members for item in keys]
            node, below = node.children[keys[0]], None
        return FoldedLine(name, members, self.joint, node, below, self._sort)


def _fold_children(children: Mapping[str, _Node]) -> list[tuple[str, list[str]]]:
    """Return the lines with the children that each stands for, in natural order.

    Large groups are formed first.
    """
    left = set(children)
    lines: list[tuple[str, list[str]]] = []
    for (prefix, suffix, _, _), group in sorted(_group_by_number(children).items(), key=_largest_first):
        members = {number: name for number, name in group.items() if name in left}
        if len(members) > 1:
            numbers = sorted(members, key=int)
            left.difference_update(members.values())
            lines.append((f"{prefix}{{{_ranges(numbers)}}}{suffix}", [members[item] for item in numbers]))
    lines += [(name, [name]) for name in left]
    return sorted(lines, key=lambda line: natural_key(line[1][0]))


# Text before and after the number, the number's width if it is zero-padded, and the signature of the subtree.
_Alike = tuple[str, str, int, int]


def _group_by_number(children: Mapping[str, _Node]) -> dict[_Alike, dict[str, str]]:
    """Group children by all but one number of their names. Returns each child's name by that number."""
    groups: dict[_Alike, dict[str, str]] = defaultdict(dict)
    padded = _zero_padded_widths(children)
    # Most names of 100,000 random ones differ in more than numbers, and would form 1,000,000 groups.
    patterns = {name: hash((_NUMBER.sub("0", name), child.signature)) for name, child in children.items()}
    counts = Counter(patterns.values())
    for name, child in children.items():
        if counts[patterns[name]] == 1:
            continue
        for match in _NUMBER.finditer(name):
            prefix, suffix, number = name[: match.start()], name[match.end() :], match[0]
            width = len(number) if len(number) in padded.get((prefix, suffix), ()) else 0
            groups[prefix, suffix, width, child.signature][number] = name
    return groups


def _zero_padded_widths(names: Iterable[str]) -> dict[tuple[str, str], set[int]]:
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
    """Format 0, 1, 2, 3, 5 as `0..3,5`, and 0, 2, 4, 6 as `0..6 by 2`."""
    values = [int(number) for number in numbers]
    parts: list[str] = []
    start = 0
    while start < len(values):
        length, step = _arithmetic_run(values, start)
        first, last = numbers[start], numbers[start + length - 1]
        parts.append(first if length == 1 else f"{first}..{last}" + (f" by {step}" if step > 1 else ""))
        start += length
    return ",".join(parts)


def _arithmetic_run(values: Sequence[int], start: int) -> tuple[int, int]:
    """Return the length of the arithmetic sequence from `start`, and its step."""
    following = range(start + 1, len(values))
    step = values[start + 1] - values[start] if following else 1
    stop = next((k for k in following if values[k] - values[k - 1] != step), len(values))
    # Three numbers with gaps are shorter unfolded.
    return (stop - start, step) if step == 1 or stop - start >= _MIN_STRIDE else (1, 1)
