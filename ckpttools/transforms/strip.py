"""Parameters without training state: what inference and fine-tuning load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ckpttools.errors import FormatError, UsageError
from ckpttools.ir.array import LazyArray
from ckpttools.ir.flavours import LINEN, NNX, Flavour, flavour_of, parameters, role
from ckpttools.ir.kinds import linen_state
from ckpttools.ir.tree import Leaf, Path, Tree, spelled
from ckpttools.notes import Notes
from ckpttools.transforms.base import Transformed

FlavourName = Literal["same", "linen", "nnx"]
_STEP: Path = ("step",)
_STEPS: tuple[Path, ...] = (_STEP, ("optimizer", "step"), ("optimizer", "step", "value"))


@dataclass(frozen=True, slots=True)
class StripOptimizer:
    """Only the parameters: no optimizer state, no random states, no step unless asked for.

    Attributes:
        keep_step: keep the step's array and the number of the step directory; else the directory is 0, and in
            Linen's flavour so is the array, as MaxText's own tool writes them. The NNX flavour has no array.
        flavour: how to nest the parameters: "same" as in the source, "linen" or "nnx".
    """

    keep_step: bool = False
    flavour: FlavourName = "same"

    def __call__(self, tree: Tree) -> Transformed:
        """The parameters' tree, in Linen's flavour with the nodes around them that MaxText writes.

        Raises:
            FormatError: there are no parameters.
            UsageError: there is nothing to strip, or no step to keep.
        """
        own, place = flavour_of(tree), tree.metadata.place or None
        target = {"linen": LINEN, "nnx": NNX}.get(self.flavour, own)
        if not parameters(tree):
            raise FormatError("there are no parameters", place=place)
        kept = {path: leaf for path, leaf in tree.items() if _belongs(path, own)}
        if target != own:
            kept = {target.wrapped(path): array for path, array in parameters(tree).items()}
        dropped = [path for path in tree.arrays if path not in kept and path not in _STEPS]
        if not dropped and target == own:
            raise UsageError(
                "there is nothing to strip: no optimizer state, no random states",
                place=place,
                hint="to cast it, use ckpt cast",
            )
        gone = [spelled(path) for path in dropped if not _belongs(path, own)]
        return Transformed(_dressed(kept, tree, target, self._step(tree)), Notes(dropped=tuple(gone)))

    def _step(self, tree: Tree) -> LazyArray | None:
        """The array of the step if it stays."""
        if not self.keep_step:
            return None
        step = next((tree.arrays[path] for path in _STEPS if path in tree.arrays), None)
        if step is None:
            raise UsageError("there is no step to keep", place=tree.metadata.place or None)
        return step


def _belongs(path: Path, flavour: Flavour) -> bool:
    """Whether a leaf stays: parameters and what lies in one node with them, such as other collections."""
    enclosed = flavour.name != "nnx-rl" and flavour.prefix
    return role(path) == "parameter" and (not enclosed or path[:1] == flavour.prefix[:1])


def _dressed(kept: Mapping[Path, Leaf], tree: Tree, target: Flavour, step: LazyArray | None) -> Tree:
    """The leaves with what their flavour has around parameters; a step of None becomes 0."""
    leaves, scalars, source = dict(kept), tree.metadata.scalars, tree.metadata
    if target == LINEN:
        around = linen_state({}, 0, {})
        leaves = {_STEP: around[_STEP], **leaves, ("opt_state",): around["opt_state",]}
        scalars = scalars | around.metadata.scalars if step is None else scalars
    if step is not None and target.name != "nnx":
        leaves[_STEP] = step
    return Tree(
        leaves,
        replace(
            source,
            step=None if step is None else source.step,
            scalars=scalars & leaves.keys(),
            key_impls={path: name for path, name in source.key_impls.items() if path in leaves},
        ),
    )
