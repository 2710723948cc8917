"""A short view of many arrays: siblings that differ only in one number in their names become one line.

`layers_0 … layers_31` with equal contents are shown as `layers_{0..31}`; experts inside them are folded, too.
Every second layer is shown as `layers_{0..30 by 2}`. Parameters precede optimizer state and everything else.
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
        times: Number of subtrees in this line, including those of folded parents.
        count: Number of arrays here and below, counting all repetitions, including those of folded parents.
        num_elements, nbytes: Totals of these arrays.
        share: Fraction of all bytes in these arrays, from 0 to 1.
        children: Children of one of the siblings.
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
    # Formats without a tree have flat names, in which dots separate keys.
    joint = "/" if any("/" in item.path for item in ordered) else "."
    root, total = _Node(), sum(array.nbytes for array in ordered)
    for array in ordered:
        if not (hidden and array.is_random):
            root.location(array.path.split(joint, _MAX_DEPTH), array)
    root.sign({})
    branches = _limit_depth(_Folding(joint, total, sort).branches(root, repeated=1), depth)
    return (*branches, _random_branch(hidden, total)) if hidden else branches


def _random_branch(arrays: Sequence[ArrayReport], total: int) -> Branch:
    """Return one branch without children for the states of random number generators."""
    size, nbytes = sum(prod(array.shape) for array in arrays), sum(array.nbytes for array in arrays)
    return Branch(RNG_STATE, None, 1, len(arrays), size, nbytes, nbytes / total if total else 0.0, ())


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


@dataclass(frozen=True, slots=True)
class _Folding:
    """Converts nodes to branches; `total` is the size of all arrays in bytes, `sort` as in `fold`."""

    joint: str
    total: int
    sort: str | None

    def branches(self, node: _Node, repeated: int) -> tuple[Branch, ...]:
        """Return the folded children of a node that itself stands for `repeated` nodes."""
        lines = _fold_children(node.children)
        if self.sort is None:
            lines.sort(key=lambda line: node.children[line[1][0]].rank)
        result = [
            self._branch(name, node.children[members[0]], repeated * len(members)) for name, members in lines
        ]
        return tuple(sorted(result, key=lambda item: -item.nbytes) if self.sort == "size" else result)

    def _branch(self, name: str, first: _Node, times: int) -> Branch:
        """Return one line for `times` nodes like `first`. Keys without siblings are joined."""
        below = self.branches(first, times)
        if len(below) == 1 and first.array is None:
            return replace(below[0], name=f"{name}{self.joint}{below[0].name}")
        nbytes = first.nbytes * times
        share = nbytes / self.total if self.total else 0.0
        return Branch(
            name, first.array, times, first.count * times, first.num_elements * times, nbytes, share, below
        )


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
    for name, child in children.items():
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
