"""Stacking layers as their model's family groups them: single layers do not show how they repeat."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckpttools.array.tree import Tree
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, FormatError, listing
from ckpttools.core.wording import option
from ckpttools.families.family import Family
from ckpttools.families.registry import families, family_of
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.mapping.keys import longest_stride, parse_key
from ckpttools.maxtext.cycles import Cycle, CycleNames
from ckpttools.maxtext.family_layouts import family_in
from ckpttools.maxtext.layer_notes import fits
from ckpttools.maxtext.layout import BLOCKS, DECODER, LAYER, LAYERS, LOCAL, SCAN_AXIS
from ckpttools.maxtext.model import ModelOptions, family_for
from ckpttools.maxtext.recognition import FamilyFit, family_fits
from ckpttools.maxtext.scan import StackLayers
from ckpttools.maxtext.versions import NEWEST, Version, version_called
from ckpttools.maxtext.view import view_of
from ckpttools.transforms.base import Transformed

_LAYERS = f"{DECODER}.{LAYERS}_"


@dataclass(frozen=True, slots=True)
class StackAsModel:
    """`StackLayers`, with the layout that the model has where the user names none.

    That is what `ckpttools.maxtext.scan.UnstackLayers` noted; else that of the family: the one which the
    configuration that was carried along names, or all whose names these are, if they agree.

    Attributes:
        axis: as of `StackLayers`; None for the axis that was noted, or 1.
        cycle, names, maxtext: as of `StackLayers`; the version decides about names, too.
        family: name of the family, or a file that describes one; None to infer it.
    """

    axis: int | None = None
    cycle: int | None = None
    names: CycleNames | None = None
    family: str | None = None
    maxtext: str | None = None

    def __call__(self, tree: Tree) -> Transformed:
        """As `StackLayers`.

        Raises:
            UnknownNameError: there is no such family.
            FormatError: nothing says which layout it is, or several fit.
        """
        view = view_of(tree)
        noted = view.notes.scan_axis if fits(view.notes, view.single_layers) else None
        axis = self.axis if self.axis is not None else SCAN_AXIS if noted is None else noted
        said = any(each is not None for each in (self.family, self.cycle, self.names, self.maxtext))
        if LAYERS not in view.single_layers or (noted is not None and not said):
            return StackLayers(axis, self.cycle, self.names, self.maxtext)(tree)
        cycle = self._cycle(tree) if self.cycle is None else Cycle(self.cycle, None)
        return StackLayers(axis, cycle.length, self.names or cycle.names, self.maxtext)(tree)

    def _cycle(self, tree: Tree) -> Cycle:
        place, version = tree.metadata.place, version_called(self.maxtext or NEWEST)
        if self.family is not None:
            return cycle_of(family_for(None, ModelOptions(self.family), place), version)
        if tree.metadata.config is not None:
            try:
                family = family_of(tree.metadata.config, CONFIG)
            except CheckpointError:
                pass  # of a model that is not known: its names must tell
            else:
                return cycle_of(family, version)
        return _only(_layouts(tree, version), place, self.names)


def cycle_of(family: Family, version: Version) -> Cycle:
    """The cycle in which a family's layers repeat; of length 1 where they do not, or are of several names.

    Raises:
        UsageError: MaxText does not scan such layers.
    """
    family.refuse_scanned("leave them as they are: MaxText runs them with scan_layers=false")
    groups = [group for group in family_in(family, version).layers if group.left.startswith(_LAYERS)]
    length = longest_stride(parse_key(group.left) for group in groups)
    return Cycle(length, _names([group.scanned for group in groups]) if length > 1 else None)


def _names(scanned: list[str]) -> CycleNames:
    if any(BLOCKS in key for key in scanned):
        return "blocks-layers" if any(f"{BLOCKS}.{LAYERS}_" in key for key in scanned) else "local-global"
    if any(key.endswith(f".{LOCAL}") for key in scanned):
        return "layers-local-global"
    return "layer" if any(f".{LAYER}_" in key for key in scanned) else "layers"


def _layouts(tree: Tree, version: Version) -> dict[Cycle, list[str]]:
    """The layouts of the families whose layers have exactly the names of these, with the families' names."""
    found: dict[Cycle, list[str]] = {}
    for fit in family_fits(_layers_alone(tree), families().values()):
        if fit.matched and not fit.others and not _missing(fit):
            names = found.setdefault(cycle_of(fit.keys.family, version), [])
            names += [fit.keys.family.name] if fit.keys.family.name not in names else []
    return found


def _layers_alone(tree: Tree) -> Tree:
    """The parameters of the layers, which alone show how layers are stacked."""
    found = view_of(tree).decoder
    return Tree({(DECODER, *path): each for path, each in found.items() if path and LAYERS in str(path[0])})


def _missing(fit: FamilyFit) -> list[str]:
    return [template for template in fit.missing if template.startswith(_LAYERS)]


def _only(layouts: Mapping[Cycle, Iterable[str]], place: str, names: CycleNames | None) -> Cycle:
    """The one layout that fits.

    Raises:
        FormatError: there is none, or there are several.
    """
    if len(layouts) == 1:
        return next(iter(layouts))
    lines = [f"{_said(cycle, names)}, as in {', '.join(families)}" for cycle, families in layouts.items()]
    raise FormatError(
        "single layers do not show how the model stacks them, and "
        + (
            "these layouts fit" + listing(sorted(lines))
            if lines
            else "their names are those of no known family"
        ),
        place=place or None,
        hint=f"say {option('cycle')} N (1 for all in one stack) with {option('cycle_names')}, or "
        f"{option('family', 'NAME')}, of which `ckpt families` lists all",
    )


def _said(cycle: Cycle, names: CycleNames | None) -> str:
    if cycle.length == 1:
        return option("cycle", 1)
    return f"{option('cycle', cycle.length)} {option('cycle_names', names or cycle.names)}"
