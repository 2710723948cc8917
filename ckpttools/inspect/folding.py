"""A short view of many arrays: siblings that are alike but for one number in their names become one.

`layers_0 … layers_31` with equal contents are shown as `layers_{0..31}`; experts inside them fold, too.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ckpttools.inspect.tree import ArrayReport

_NUMBER = re.compile(r"[0-9]+")
# Deeper names are not a tree made by anyone; what is beyond stays one key.
_DEEPEST = 64


@dataclass(frozen=True, slots=True)
class Branch:
    """One line of the view.

    Attributes:
        name: key, or pattern such as `layers_{0..31}`; keys on a way without a fork are joined.
        array: the array at this place, the first of those folded; None where there is none.
        count: arrays here and below, all repetitions counted, those of folded parents, too.
        nbytes: bytes of those.
        children: what is below one of the siblings.
    """

    name: str
    array: ArrayReport | None
    count: int
    nbytes: int
    children: tuple[Branch, ...]


def fold(arrays: Iterable[ArrayReport]) -> tuple[Branch, ...]:
    """The arrays as a tree with repetitions folded, in natural order."""
    listed = list(arrays)
    # Formats without a tree have flat names, whose dots are meant as one.
    joint = "/" if any("/" in each.path for each in listed) else "."
    root = _Node()
    for array in listed:
        root.place(array.path.split(joint, _DEEPEST), array)
    root.sign({})
    return tuple(_branches(root, joint, repeated=1))


@dataclass(slots=True)
class _Node:
    """A place in the tree while it grows. Equal signatures mean equal names, shapes and dtypes below."""

    array: ArrayReport | None = None
    children: dict[str, _Node] = field(default_factory=dict)
    signature: int = 0
    count: int = 0
    nbytes: int = 0

    def place(self, keys: Iterable[str], array: ArrayReport) -> None:
        node = self
        for key in keys:
            node = node.children.setdefault(key, _Node())
        node.array = array

    def sign(self, known: dict[object, int]) -> None:
        """Numbers every distinct content below; `known` holds the numbers given."""
        for child in self.children.values():
            child.sign(known)
        own = (self.array.shape, self.array.dtype, self.array.role) if self.array else None
        below = tuple(sorted((name, child.signature) for name, child in self.children.items()))
        self.signature = known.setdefault((own, below), len(known))
        children = self.children.values()
        self.count = (self.array is not None) + sum(child.count for child in children)
        self.nbytes = (self.array.nbytes if self.array else 0) + sum(child.nbytes for child in children)


def _branches(node: _Node, joint: str, repeated: int) -> Iterator[Branch]:
    """The folded children of a node which itself stands for `repeated` ones."""
    for name, members in _folded(node.children):
        first, times = node.children[members[0]], repeated * len(members)
        below = tuple(_branches(first, joint, times))
        if len(below) == 1 and first.array is None:
            yield replace(below[0], name=f"{name}{joint}{below[0].name}")
        else:
            yield Branch(name, first.array, first.count * times, first.nbytes * times, below)


def _folded(children: Mapping[str, _Node]) -> list[tuple[str, list[str]]]:
    """Each line's name and the children it stands for, in natural order; large groups are formed first."""
    left = set(children)
    lines: list[tuple[str, list[str]]] = []
    for (prefix, suffix, _, _), group in sorted(_alike(children).items(), key=_largest_first):
        members = {number: name for number, name in group.items() if name in left}
        if len(members) > 1:
            numbers = sorted(members, key=int)
            left.difference_update(members.values())
            lines.append((f"{prefix}{{{_ranges(numbers)}}}{suffix}", [members[each] for each in numbers]))
    lines += [(name, [name]) for name in left]
    return sorted(lines, key=lambda line: natural(line[1][0]))


# Text before and after the number, its width if it is padded with zeros, and what is below.
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
    """Widths in which numbers with leading zeros occur: there 10 beside 09 is padded, too."""
    widths: dict[tuple[str, str], set[int]] = defaultdict(set)
    for name in names:
        for match in _NUMBER.finditer(name):
            if match[0].startswith("0") and len(match[0]) > 1:
                widths[name[: match.start()], name[match.end() :]].add(len(match[0]))
    return widths


def _largest_first(item: tuple[_Alike, dict[str, str]]) -> tuple[int, _Alike]:
    return -len(item[1]), item[0]


def _ranges(numbers: list[str]) -> str:
    """`0..3,5` for 0, 1, 2, 3, 5."""
    runs: list[list[str]] = []
    for number in numbers:
        if runs and int(number) == int(runs[-1][-1]) + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(run[0] if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)


def natural(name: str) -> list[tuple[int, int | str]]:
    """A key that sorts `layers_2` before `layers_10`."""
    parts = re.split(r"([0-9]+)", name)
    return [(0, int(part)) if k % 2 else (1, part) for k, part in enumerate(parts)]
