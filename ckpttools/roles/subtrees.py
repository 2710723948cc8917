"""Subtrees of a tree, identified by their prefixes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from ckpttools.array.tree import Path
from ckpttools.core.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Heads:
    """Prefixes of subtrees, by role.

    Attributes:
        state: Prefixes of optimizer states.
        weights: Prefixes of parameters inside optimizer states.
        unclear: Prefixes of subtrees that may be either.
    """

    state: frozenset[Path] = frozenset()
    weights: frozenset[Path] = frozenset()
    unclear: frozenset[Path] = frozenset()

    def __or__(self, more: Heads) -> Heads:
        return Heads(self.state | more.state, self.weights | more.weights, self.unclear | more.unclear)


def outside(paths: Iterable[Path], heads: Collection[Path]) -> list[Path]:
    """Return the paths that are not below any prefix."""
    lengths = sorted({len(head) for head in heads})
    if not lengths:
        return list(paths)
    return [path for path in paths if not any(path[:length] in heads for length in lengths)]


def inside(paths: Iterable[Path], heads: Collection[Path]) -> list[Path]:
    """Return the paths that are below a prefix."""
    lengths = sorted({len(head) for head in heads})
    return [path for path in paths if any(path[:length] in heads for length in lengths)] if lengths else []


def sizes(paths: Iterable[Path], heads: Collection[Path]) -> Counter[Path]:
    """Return the number of paths below each prefix."""
    lengths = {len(head) for head in heads}
    below = (path[:length] for path in paths for length in lengths if length <= len(path))
    return Counter(head for head in below if head in heads)


def lifted(heads: Collection[Path], others: Iterable[Path]) -> frozenset[Path]:
    """Shorten each prefix as long as none of the other paths are below it, but never to the root."""
    blocked = {path[:length] for path in others for length in range(len(path))} if heads else set()
    return frozenset(
        next((head[:n] for n in range(1, len(head)) if head[:n] not in blocked), head) for head in heads
    )


def branch(head: Path, root: Path) -> Path:
    """Return the leading keys of a prefix up to the first that differs from a root; () if there is none."""
    shared = next((k for k, (own, other) in enumerate(zip(head, root, strict=False)) if own != other), None)
    shared = min(len(head), len(root)) if shared is None else shared
    return head[: shared + 1] if len(head) > shared else ()


def mostly(part: int, whole: int) -> bool:
    """Return whether a part is at least half of the whole."""
    return 2 * part >= whole
