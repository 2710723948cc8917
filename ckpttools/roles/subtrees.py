"""Subtrees of a tree by the paths of their heads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from ckpttools.array.tree import Path
from ckpttools.core.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of subtrees, by role.

    Attributes:
        state: An optimizer's.
        weights: Parameters within it.
        unclear: Either.
    """

    state: frozenset[Path] = frozenset()
    weights: frozenset[Path] = frozenset()
    unclear: frozenset[Path] = frozenset()

    def __or__(self, more: Heads) -> Heads:
        return Heads(self.state | more.state, self.weights | more.weights, self.unclear | more.unclear)


def outside(paths: Iterable[Path], heads: Collection[Path]) -> list[Path]:
    """Return the paths without a head above them."""
    lengths = sorted({len(head) for head in heads})
    if not lengths:
        return list(paths)
    return [path for path in paths if not any(path[:length] in heads for length in lengths)]


def inside(paths: Iterable[Path], heads: Collection[Path]) -> list[Path]:
    """Return the paths below a head."""
    lengths = sorted({len(head) for head in heads})
    return [path for path in paths if any(path[:length] in heads for length in lengths)] if lengths else []


def sizes(paths: Iterable[Path], heads: Collection[Path]) -> Counter[Path]:
    """Return the number of paths below each head."""
    lengths = {len(head) for head in heads}
    below = (path[:length] for path in paths for length in lengths if length <= len(path))
    return Counter(head for head in below if head in heads)


def lifted(heads: Collection[Path], others: Iterable[Path]) -> frozenset[Path]:
    """Return the highest key above each head that has none of the others below it, except the root."""
    blocked = {path[:length] for path in others for length in range(len(path))} if heads else set()
    return frozenset(
        next((head[:n] for n in range(1, len(head)) if head[:n] not in blocked), head) for head in heads
    )


def branch(head: Path, root: Path) -> Path:
    """Return the first keys of a head that differ from a root; () if the root is inside it."""
    shared = next((k for k, (own, other) in enumerate(zip(head, root, strict=False)) if own != other), None)
    shared = min(len(head), len(root)) if shared is None else shared
    return head[: shared + 1] if len(head) > shared else ()


def mostly(part: int, whole: int) -> bool:
    """Return whether enough is mirrored: at least half."""
    return 2 * part >= whole
