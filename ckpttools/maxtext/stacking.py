"""Stacking layers as their model's family groups them: single layers do not show how they repeat."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

from ckpttools.array.tree import Tree
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, FormatError, UsageError, listing
from ckpttools.core.message_terms import option
from ckpttools.core.text import plural
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.mapping.keys import longest_stride, parse_key
from ckpttools.mapping.sizes import Size, derive, lengths_of, sizes_from_config
from ckpttools.maxtext.cycles import Cycle, CycleNames
from ckpttools.maxtext.family_layouts import family_in
from ckpttools.maxtext.layer_notes import fits
from ckpttools.maxtext.layout import BLOCKS, DECODER, LAYER, LAYERS, LOCAL, SCAN_AXIS
from ckpttools.maxtext.model import ModelOptions, family_for
from ckpttools.maxtext.recognition import FamilyFit, family_fits
from ckpttools.maxtext.scan import StackLayers
from ckpttools.maxtext.versions import NEWEST, Version, version_called
from ckpttools.maxtext.view import view_of
from ckpttools.model_families.family import Family
from ckpttools.model_families.hf_defaults import silent_fields
from ckpttools.model_families.registry import families, family_of
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
            UsageError: MaxText would leave out the layers after the last complete cycle.
        """
        view = view_of(tree)
        noted = view.notes.scan_axis if fits(view.notes, view.single_layers) else None
        axis = self.axis if self.axis is not None else SCAN_AXIS if noted is None else noted
        declared = any(item is not None for item in (self.family, self.cycle, self.names, self.maxtext))
        if LAYERS not in view.single_layers or (noted is not None and not declared):
            return StackLayers(axis, self.cycle, self.names, self.maxtext)(tree)
        if self.cycle is None or self.family is not None or tree.metadata.config is not None:
            refuse_left_over(self._families(tree), tree)
        cycle = self._cycle(tree) if self.cycle is None else Cycle(self.cycle, None)
        return StackLayers(axis, cycle.length, self.names or cycle.names, self.maxtext)(tree)

    def _families(self, tree: Tree) -> list[Family]:
        """Return the family that the user or the configuration names, else those with these names."""
        if self.family is not None:
            return [family_for(None, ModelOptions(self.family), tree.metadata.location)]
        if tree.metadata.config is not None:
            # The names decide for a model of an unknown type.
            with suppress(CheckpointError):
                return [family_of(tree.metadata.config, CONFIG)]
        return _fitting(tree)

    def _cycle(self, tree: Tree) -> Cycle:
        version = version_called(self.maxtext or NEWEST)
        layouts: dict[Cycle, list[str]] = {}
        for family in self._families(tree):
            layouts.setdefault(cycle_of(family, version), []).append(family.name)
        return _only(layouts, tree.metadata.location, self.names)


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


def refuse_left_over(among: Collection[Family], tree: Tree) -> None:
    """Refuse layers that do not form complete cycles if MaxText scans complete cycles only.

    Args:
        among: the families that the model may be of.
        tree: with single layers.

    Raises:
        UsageError: MaxText ignores the last layers in all of these families.
    """
    numbers = view_of(tree).single_layers[LAYERS]
    beyond = [_beyond_cycles(family, len(numbers), tree.metadata.config) for family in among]
    if beyond and all(beyond):
        raise UsageError(
            f"MaxText scans complete cycles of layers, and {plural(min(beyond), 'layer')} would be left over",
            location=tree.metadata.location or None,
            got=f"{plural(len(numbers), 'layer')} of family {', '.join(item.name for item in among)}",
            hint="leave them as they are: MaxText runs them with scan_layers=false",
        )


def _beyond_cycles(family: Family, layers: int, config: Mapping[str, Any] | None) -> int:
    """Return the number of layers after the last complete cycle; 0 if MaxText scans those too."""
    sizes = {} if config is None else sizes_from_config(config, family.sizes, CONFIG, silent_fields(config))
    sizes |= {axis: Size(length, family.name) for axis, length in family.constants.items()}
    sizes |= {axis: Size(layers, LAYERS) for axis in ("layer", "layers") if axis in family.sizes}
    return family.layers_beyond_cycles(lengths_of(derive(sizes, family.derived, CONFIG)))


def _fitting(tree: Tree) -> list[Family]:
    """Return the families whose layers have exactly these names."""
    fits = family_fits(_layers_alone(tree), families().values())
    fitting = (fit.keys.family for fit in fits if fit.matched and not fit.others and not _missing(fit))
    return list({family.name: family for family in fitting}.values())


def _layers_alone(tree: Tree) -> Tree:
    """The parameters of the layers, which alone show how layers are stacked."""
    result = view_of(tree).decoder
    return Tree({(DECODER, *path): item for path, item in result.items() if path and LAYERS in str(path[0])})


def _missing(fit: FamilyFit) -> list[str]:
    return [template for template in fit.missing if template.startswith(_LAYERS)]


def _only(layouts: Mapping[Cycle, Iterable[str]], location: str, names: CycleNames | None) -> Cycle:
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
        location=location or None,
        hint=f"say {option('cycle')} N (1 for all in one stack) with {option('cycle_names')}, or "
        f"{option('family', 'NAME')}, of which `ckpt families` lists all",
    )


def _said(cycle: Cycle, names: CycleNames | None) -> str:
    if cycle.length == 1:
        return option("cycle", 1)
    return f"{option('cycle', cycle.length)} {option('cycle_names', names or cycle.names)}"
