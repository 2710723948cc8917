"""Stack single layers for `jax.lax.scan` in the groups of their model's family, and unstack them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

from ckpttools.array.tree import Tree
from ckpttools.core.argument_checks import validate_fields
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, FormatError, UsageError, listing
from ckpttools.core.message_terms import action, call, option
from ckpttools.core.text import plural
from ckpttools.formats.adapters import adapter_in, is_adapter, is_lora, merge_hint
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.mapping.keys import longest_stride, parse_key
from ckpttools.mapping.sizes import Size, derive, lengths_of, sizes_from_config
from ckpttools.maxtext.cycles import Cycle, CycleNames, plan_stacks
from ckpttools.maxtext.family_layouts import family_in
from ckpttools.maxtext.layers import LayerNotes, first_axis_names, layer_stacks, notes_match, with_layer_notes
from ckpttools.maxtext.model_options import ModelOptions, family_for
from ckpttools.maxtext.recognition import FamilyFit, family_fits
from ckpttools.maxtext.scan_axis import KeepScanAxis, known_scan_axis, with_scan_axis
from ckpttools.maxtext.stacked_layers import check_moments, stack_layers, stacked_paths, unstack_layers
from ckpttools.maxtext.strip import NewFlavor, StripOptimizer
from ckpttools.maxtext.variables import first_axis_of, refuse_moments, version_of_state
from ckpttools.maxtext.versions import (
    BLOCKS,
    DECODER,
    LAYER,
    LAYERS,
    LOCAL,
    NEWEST,
    PIPELINE,
    SCAN_AXIS,
    SCAN_LAYERS,
    Version,
    version_called,
)
from ckpttools.maxtext.view import MaxTextView, view_of
from ckpttools.model_families.family import Family
from ckpttools.model_families.hf_defaults import default_fields
from ckpttools.model_families.registry import families, family_of
from ckpttools.stores.registry import parse
from ckpttools.transforms.base import Transformed

_EXPECTED = "keys below decoder such as layers or layers_0, as MaxText names them"


@validate_fields
@dataclass(frozen=True, slots=True)
class StackLayers:
    """A transform that stacks layers, with state that mirrors them, as MaxText's scan_layers=true expects.

    Layers from `UnstackLayers` are stacked as they were before, unless a cycle or its names are given.

    Attributes:
        axis: The axis on which the layers of parameters are stacked (MaxText's param_scan_axis).
        cycle: The number of layers after which their kinds repeat. None infers it from the contents of
            layers, which gives one stack if all are the same; `StackAsModel` uses the model's family instead.
        names: The naming of a cycle, as in `ckpttools.maxtext.cycles.Cycle`; None infers it.
        maxtext: The version that decides which variables have their layers on axis 0; None restores their
            previous axis if known, else uses the newest version that supports the optimizer's state.
    """

    axis: int = SCAN_AXIS
    cycle: int | None = None
    names: CycleNames | None = None
    maxtext: str | None = None

    def __call__(self, tree: Tree) -> Transformed:
        """Return the stacked tree.

        Raises:
            UsageError: Layers are already stacked, or do not have this cycle.
            FormatError: There are no layers, indices are missing, layers have different arrays, or the
                optimizer has state that the version does not support.
            ShapeError: Layers differ in shapes or dtypes, or moments do not mirror parameters.
        """
        view = _require_layers(tree)
        if view.is_stacked:
            raise UsageError(
                "the layers are already stacked",
                location=tree.metadata.location or None,
                hint=f"there is nothing to do; {action('unstack')} unstacks them",
            )
        notes = view.notes
        is_recorded = self.cycle is None and self.names is None and notes_match(notes, view.single_layers)
        stacks = notes.stacks if is_recorded else plan_stacks(view.decoder, self.cycle, self.names)
        check_moments(tree)
        first = notes.first_axis
        if self.maxtext is not None or not notes_match(notes, view.single_layers):
            version = version_called(self.maxtext) if self.maxtext else version_of_state(view)
            refuse_moments(tree, version)
            first = first_axis_of(stacked_paths(tree, stacks), view, version)
        result = stack_layers(tree, stacks, self.axis, first)
        done = LayerNotes(first_axis=first if self.axis else frozenset())
        result = with_scan_axis(with_layer_notes(result, done), self.axis)
        return Transformed(_with_scan_layers(result, scan_layers=True))


@validate_fields
@dataclass(frozen=True, slots=True)
class UnstackLayers:
    """A transform that unstacks layers as MaxText's scan_layers=false expects.

    The custom metadata records how layers were stacked (`ckpttools.maxtext.layers`).

    Attributes:
        axis: The axis on which the layers of parameters are stacked; None uses shapes or notes.
    """

    axis: int | None = None

    def __call__(self, tree: Tree) -> Transformed:
        """Return the unstacked tree.

        Raises:
            UsageError: Layers are not stacked.
            FormatError: There are no layers, positions of a cycle are missing, or the axis is unknown.
            ShapeError: Groups have different lengths, the scan axis is another one, or moments do not mirror
                parameters.
        """
        tree = with_scan_axis(tree, self.axis)
        view = _require_layers(tree)
        if not view.is_stacked:
            raise UsageError(
                "the layers are not stacked",
                location=tree.metadata.location or None,
                hint=f"there is nothing to do; {action('stack')} stacks them",
            )
        # With fewer layers than a cycle, no layers are stacked.
        axis = (known_scan_axis(view) if self.axis is None else self.axis) or 0
        stacks = layer_stacks(view.decoder, axis)
        check_moments(tree)
        layered_stacks = [stack for stack in stacks if stack.shape or len(stack.key) > 1]
        notes = LayerNotes(tuple(layered_stacks), axis, first_axis_names(view.leading_layer_paths))
        result = with_layer_notes(unstack_layers(tree, stacks, axis), notes)
        return Transformed(_with_scan_layers(result, scan_layers=False))


@validate_fields
@dataclass(frozen=True, slots=True)
class ForceUnroll:
    """A transform from a stacked training checkpoint to an unstacked one for inference.

    Attributes:
        axis: See `UnstackLayers`.
        keep_step, flavor: See `StripOptimizer`.
    """

    axis: int | None = None
    keep_step: bool = False
    flavor: NewFlavor = "same"

    def __call__(self, tree: Tree) -> Transformed:
        """Return the unstacked parameters.

        Raises:
            FormatError: There are no layers.
            UsageError: The tree is not a stacked training checkpoint.
            CheckpointError: See `UnstackLayers` and `StripOptimizer`.
        """
        kind = _require_layers(tree).kind
        if kind != "stacked-training":
            raise UsageError(
                "only a stacked training checkpoint can be unrolled for inference",
                location=tree.metadata.location or None,
                got=kind,
                hint=f"use {action('unstack')} or {action('strip_optimizer')} for the remaining step",
            )
        first = KeepScanAxis(StripOptimizer(self.keep_step, self.flavor))(tree)
        then = UnstackLayers(self.axis)(first.tree)
        return Transformed(then.tree, first.notes + then.notes)


def _require_layers(tree: Tree) -> MaxTextView:
    """Return the view of a tree; raise an error if it has no layers."""
    view = view_of(tree)
    if any(path[:1] == (PIPELINE,) for path in view.decoder):
        raise FormatError(
            "layers are stacked by pipeline stages, which is not supported",
            location=tree.metadata.location or None,
            got=f"{DECODER}/{PIPELINE}",
            hint="save it from MaxText without pipeline parallelism",
        )
    if not view.is_maxtext:
        _refuse_peft(tree)
        location = tree.metadata.location or "SRC"
        raise FormatError(
            "the checkpoint has no layers",
            location=tree.metadata.location or None,
            expected=_EXPECTED,
            hint=f"{action('hf_to_maxtext', location, 'DST')} converts a Hugging Face model to stacked "
            f"layers, and to single ones with {option('scan', False)}"
            if tree.metadata.format == "safetensors"
            else f"{action('inspect', location)} shows the contents",
        )
    return view


def _refuse_peft(tree: Tree) -> None:
    """Raise an error if the tree is a PEFT adapter, for which there is another command."""
    if not (tree.metadata.location and is_adapter(tree)):
        return
    location = parse(tree.metadata.location)
    command = call("adapter_to_maxtext", str(location), "DST", base="BASE")
    raise FormatError(
        f"this is {adapter_in(location.folder())}, with PEFT's names",
        location=location,
        expected=_EXPECTED,
        hint=f"`{command}` stacks its layers, or leaves them single with {option('scan', False)}"
        if is_lora(location)
        else merge_hint(location),
    )


def _with_scan_layers(tree: Tree, *, scan_layers: bool) -> Tree:
    """Record scan_layers in the custom metadata, where MaxText reads it."""
    return tree.with_metadata(custom={**tree.metadata.custom, SCAN_LAYERS: scan_layers})


_LAYERS_PREFIX = f"{DECODER}.{LAYERS}_"


@dataclass(frozen=True, slots=True)
class StackAsModel:
    """A transform like `StackLayers` that uses the layout of the model, unless the user chooses another.

    The layout is the one that `UnstackLayers` recorded. Otherwise it is that of the family which the
    checkpoint's configuration identifies, or of all families with these names, if they agree.

    Attributes:
        axis: As for `StackLayers`; None uses the recorded axis, or 1.
        cycle, names, maxtext: As for `StackLayers`; the version also decides about names.
        family: The name of the family, or a file that describes one; None infers it.
    """

    axis: int | None = None
    cycle: int | None = None
    names: CycleNames | None = None
    family: str | None = None
    maxtext: str | None = None

    def __call__(self, tree: Tree) -> Transformed:
        """Return the stacked tree, like `StackLayers`.

        Raises:
            UnknownNameError: The family does not exist.
            FormatError: The layout is unknown, or several match.
            UsageError: MaxText would ignore the layers after the last complete cycle.
        """
        view = view_of(tree)
        recorded_axis = view.notes.scan_axis if notes_match(view.notes, view.single_layers) else None
        axis = self.axis if self.axis is not None else SCAN_AXIS if recorded_axis is None else recorded_axis
        declared = any(item is not None for item in (self.family, self.cycle, self.names, self.maxtext))
        if LAYERS not in view.single_layers or (recorded_axis is not None and not declared):
            return StackLayers(axis, self.cycle, self.names, self.maxtext)(tree)
        if self.cycle is None or self.family is not None or tree.metadata.config is not None:
            refuse_incomplete_cycles(self._families(tree), tree)
        cycle = self._cycle(tree) if self.cycle is None else Cycle(self.cycle, None)
        return StackLayers(axis, cycle.length, self.names or cycle.names, self.maxtext)(tree)

    def _families(self, tree: Tree) -> list[Family]:
        """Return the family that the user or the configuration names, else those with matching names."""
        if self.family is not None:
            return [family_for(None, ModelOptions(self.family), tree.metadata.location)]
        if tree.metadata.config is not None:
            # For a model of an unknown type, the names decide.
            with suppress(CheckpointError):
                return [family_of(tree.metadata.config, CONFIG)]
        return _matching_families(tree)

    def _cycle(self, tree: Tree) -> Cycle:
        version = version_called(self.maxtext or NEWEST)
        layouts: dict[Cycle, list[str]] = {}
        for family in self._families(tree):
            layouts.setdefault(cycle_of(family, version), []).append(family.name)
        return _single_layout(layouts, tree.metadata.location, self.names)


def cycle_of(family: Family, version: Version) -> Cycle:
    """Return the cycle of a family's layers, which has length 1 if they do not repeat.

    Raises:
        UsageError: MaxText does not scan such layers.
    """
    family.refuse_scanned("keep them unstacked: MaxText runs them with scan_layers=false")
    groups = [group for group in family_in(family, version).layers if group.left.startswith(_LAYERS_PREFIX)]
    length = longest_stride(parse_key(group.left) for group in groups)
    return Cycle(length, _cycle_names([group.scanned for group in groups]) if length > 1 else None)


def _cycle_names(scanned: list[str]) -> CycleNames:
    if any(BLOCKS in key for key in scanned):
        return "blocks-layers" if any(f"{BLOCKS}.{LAYERS}_" in key for key in scanned) else "local-global"
    if any(key.endswith(f".{LOCAL}") for key in scanned):
        return "layers-local-global"
    return "layer" if any(f".{LAYER}_" in key for key in scanned) else "layers"


def refuse_incomplete_cycles(among: Collection[Family], tree: Tree) -> None:
    """Refuse layers that do not form complete cycles if MaxText scans only complete cycles.

    Args:
        among: The families that the model may belong to.
        tree: A tree with single layers.

    Raises:
        UsageError: MaxText ignores the last layers in all of these families.
    """
    numbers = view_of(tree).single_layers[LAYERS]
    leftovers = [_count_leftover_layers(family, len(numbers), tree.metadata.config) for family in among]
    if leftovers and all(leftovers):
        raise UsageError(
            f"MaxText scans complete cycles of layers, and {plural(min(leftovers), 'layer')} would be "
            "left over",
            location=tree.metadata.location or None,
            got=f"{plural(len(numbers), 'layer')} of family {', '.join(item.name for item in among)}",
            hint="keep them unstacked: MaxText runs them with scan_layers=false",
        )


def _count_leftover_layers(family: Family, layers: int, config: Mapping[str, Any] | None) -> int:
    """Return the number of layers after the last complete cycle; 0 if MaxText also scans those."""
    sizes = {} if config is None else sizes_from_config(config, family.sizes, CONFIG, default_fields(config))
    sizes |= {axis: Size(length, family.name) for axis, length in family.constants.items()}
    sizes |= {axis: Size(layers, LAYERS) for axis in ("layer", "layers") if axis in family.sizes}
    return family.layers_beyond_cycles(lengths_of(derive(sizes, family.derived, CONFIG)))


def _matching_families(tree: Tree) -> list[Family]:
    """Return the families whose layers have exactly these names."""
    fits = family_fits(_layers_alone(tree), families().values())
    matching = (
        fit.keys.family for fit in fits if fit.matched and not fit.others and not _missing_templates(fit)
    )
    return list({family.name: family for family in matching}.values())


def _layers_alone(tree: Tree) -> Tree:
    """Return the parameters of the layers, which determine how layers are stacked."""
    result = view_of(tree).decoder
    return Tree({(DECODER, *path): item for path, item in result.items() if path and LAYERS in str(path[0])})


def _missing_templates(fit: FamilyFit) -> list[str]:
    return [template for template in fit.missing if template.startswith(_LAYERS_PREFIX)]


def _single_layout(layouts: Mapping[Cycle, Iterable[str]], location: str, names: CycleNames | None) -> Cycle:
    """Return the only matching layout.

    Raises:
        FormatError: No layout matches, or several match.
    """
    if len(layouts) == 1:
        return next(iter(layouts))
    lines = [
        f"{_cycle_options(cycle, names)}, as in {', '.join(families)}" for cycle, families in layouts.items()
    ]
    raise FormatError(
        "single layers do not show how the model stacks them, and "
        + (
            "these layouts match" + listing(sorted(lines))
            if lines
            else "their names do not match a known family"
        ),
        location=location or None,
        hint=f"set {option('cycle')} N (1 for a single stack) with {option('cycle_names')}, or "
        f"{option('family', 'NAME')} (see {action('families')})",
    )


def _cycle_options(cycle: Cycle, names: CycleNames | None) -> str:
    if cycle.length == 1:
        return option("cycle", 1)
    return f"{option('cycle', cycle.length)} {option('cycle_names', names or cycle.names)}"
