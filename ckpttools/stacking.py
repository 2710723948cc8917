"""Stacking layers as their model's family groups them, where it is known: a cycle cannot always be seen."""

from __future__ import annotations

from dataclasses import dataclass

from ckpttools.errors import CheckpointError
from ckpttools.families.family import Family
from ckpttools.families.registry import family_of
from ckpttools.ir.tree import Tree
from ckpttools.mapping.axes import parse_key
from ckpttools.model import CONFIG, ModelOptions, family_for
from ckpttools.transforms.base import Transformed
from ckpttools.transforms.cycles import Cycle, CycleNames
from ckpttools.transforms.scan import StackLayers

_LAYERS = "decoder.layers_"


@dataclass(frozen=True, slots=True)
class StackAsModel:
    """`StackLayers`, with the cycle of the model's family where the user names none.

    Attributes:
        axis, cycle, names: as of `StackLayers`.
        family: name of the family, or a file that describes one; None for that of the configuration that the
            checkpoint carries along, if it does.
    """

    axis: int = 1
    cycle: int | None = None
    names: CycleNames | None = None
    family: str | None = None

    def __call__(self, tree: Tree) -> Transformed:
        """As `StackLayers`.

        Raises:
            UnknownNameError: there is no such family.
        """
        known = self._known(tree) if self.cycle is None else None
        if known is None:
            return StackLayers(self.axis, self.cycle, self.names)(tree)
        return StackLayers(self.axis, known.length, self.names or known.names)(tree)

    def _known(self, tree: Tree) -> Cycle | None:
        if self.family is not None:
            return cycle_of(family_for(None, ModelOptions(self.family), tree.metadata.place))
        if tree.metadata.config is None:
            return None
        try:
            return cycle_of(family_of(tree.metadata.config, CONFIG))
        except CheckpointError:
            return None  # of a model that is not known: the layers themselves must tell


def cycle_of(family: Family) -> Cycle | None:
    """The cycle in which a family's layers repeat; None where its layers are not all of one name."""
    groups = [group for group in family.layers if group.left.startswith(_LAYERS)]
    fields = [field for group in groups for field in parse_key(group.left).fields]
    if not fields:
        return None
    length = max(max(field.strides, default=1) for field in fields)
    return Cycle(length, _names([group.scanned for group in groups])) if length > 1 else None


def _names(scanned: list[str]) -> CycleNames:
    if any("scanned_blocks" in key for key in scanned):
        return "local-global"
    return "layer" if any(".layer_" in key for key in scanned) else "layers"
