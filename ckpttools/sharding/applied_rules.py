"""Rules applied to the arrays of one tree, on one mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field

from ckpttools.array.tree import Path, Tree, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.text import array_count, some
from ckpttools.maxtext.axis_names import AxisNames, axis_names
from ckpttools.sharding.mesh import MeshShape
from ckpttools.sharding.rules import Rules
from ckpttools.sharding.specs import Spec


@dataclass(frozen=True, slots=True)
class Ruled:
    """An array as rules see it.

    Attributes:
        path: that patterns are about: in the tree that the caller wants, which may be another than the
            checkpoint's.
        axes: names of its axes.
    """

    path: Path
    axes: AxisNames


@dataclass(frozen=True)
class AppliedRules:
    """How rules cut the arrays of a tree over a mesh.

    Attributes:
        rules: which.
        tree: whose arrays have names for their axes.
        mesh: the devices.

    Raises:
        UsageError: a rule names an axis that the mesh lacks.
    """

    rules: Rules
    tree: Tree
    mesh: MeshShape
    _names: Mapping[Path, AxisNames] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.rules.check(self.mesh)
        object.__setattr__(self, "_names", axis_names(self.tree))

    def of(self, path: Path, called: Path | None = None, axes: AxisNames = ()) -> Ruled:
        """An array of the tree.

        Args:
            path: in the tree.
            called: what the caller calls it; None for the same.
            axes: what the caller calls its axes; () for nothing.
        """
        known = self._names.get(path, ())
        if len(axes) == len(known):
            names = tuple((*first, *second) for first, second in zip(axes, known, strict=True))
        else:
            names = axes or known
        return Ruled(path if called is None else called, names)

    def spec(self, array: Ruled) -> Spec:
        """The partition spec of an array."""
        return self.rules.spec(array.path, array.axes, self.mesh)

    def specs(self) -> Iterator[tuple[Path, Spec]]:
        """Those of all arrays of the tree."""
        return ((path, self.spec(self.of(path))) for path in self.tree.arrays)

    def leaves_out(self, array: Ruled, rank: int) -> bool:
        """Whether no rule is about an array of several axes."""
        return rank > 1 and not self.rules.applies(array.path, array.axes)

    def remarks(self, arrays: Mapping[Ruled, int] | None = None) -> Iterator[str]:
        """What the user should know of rules that are about few arrays.

        Args:
            arrays: with the number of axes of each; None for all of the tree.
        """
        if arrays is None:
            arrays = {self.of(path): array.ndim for path, array in self.tree.arrays.items()}
        others = [item for item, rank in arrays.items() if self.leaves_out(item, rank)]
        if not others:
            return
        known = {logical for logical, _ in self.rules.axes}
        of_others = (names for other in others for names in other.axes)
        axes = {"/".join(names) for names in of_others if names and known.isdisjoint(names)}
        declared = f"; logical axes without a rule: {', '.join(sorted(axes))}" if axes else ""
        listed = some([keystr(other.path) for other in others])
        yield f"no rule is about {array_count(others)}, of which every device has all: {listed}{declared}"
