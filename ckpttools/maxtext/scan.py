"""Layers one by one to stacks for `jax.lax.scan`, and back."""

from __future__ import annotations

from shlex import quote

from ckpttools.array.tree import Tree
from ckpttools.core.checked import checked_options
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, UsageError
from ckpttools.core.message_terms import option
from ckpttools.formats.adapters import adapter_in, is_adapter, is_lora, merging
from ckpttools.maxtext.cycles import CycleNames, stacks_to_make
from ckpttools.maxtext.layer_notes import LayerNotes, first_axis_names, fits, with_layer_notes
from ckpttools.maxtext.layers import layer_stacks
from ckpttools.maxtext.layout import DECODER, PIPELINE, SCAN_AXIS, SCAN_LAYERS
from ckpttools.maxtext.restack import check_moments, stack_layers, stacked_paths, unstack_layers
from ckpttools.maxtext.stacked_on import KeepingAxis, known_scan_axis, with_scan_axis
from ckpttools.maxtext.strip import NewFlavour, StripOptimizer
from ckpttools.maxtext.variables import first_axis_of, refuse_moments, version_of_state
from ckpttools.maxtext.versions import version_called
from ckpttools.maxtext.view import MaxTextView, view_of
from ckpttools.stores.registry import parse
from ckpttools.transforms.base import Transformed

_EXPECTED = "keys below decoder such as layers or layers_0, as MaxText names them"


@checked_options
@dataclass(frozen=True, slots=True)
class StackLayers:
    """Layers stacked as MaxText's scan_layers=true wants them, in parameters and all that mirrors them.

    Layers that `UnstackLayers` took apart come together as they were, unless a cycle or its names are given.

    Attributes:
        axis: of parameters, on which layers are stacked (MaxText's param_scan_axis).
        cycle: layers after which their kinds repeat; None to infer it from what they hold, which gives one
            stack where all hold the same. `StackAsModel` asks the model's family instead.
        names: what the model calls the layers of a cycle, as `ckpttools.maxtext.cycles.Cycle`; None to infer.
        maxtext: version that decides which variables have their layers on axis 0; None as they were before,
            else the newest that has a place for the optimizer's state.
    """

    axis: int = SCAN_AXIS
    cycle: int | None = None
    names: CycleNames | None = None
    maxtext: str | None = None

    def __call__(self, tree: Tree) -> Transformed:
        """The stacked tree.

        Raises:
            UsageError: layers are stacked already, or there is no such cycle.
            FormatError: there are no layers, numbers are missing, layers hold different arrays, or the
                optimizer holds state that the version has no place for.
            ShapeError: layers differ in shapes or dtypes, or moments do not mirror parameters.
        """
        view = _with_layers(tree)
        if view.is_stacked:
            raise UsageError(
                "layers are stacked already",
                location=tree.metadata.location or None,
                hint="nothing need be done; ckpt unstack takes them apart",
            )
        notes = view.notes
        noted = self.cycle is None and self.names is None and fits(notes, view.single_layers)
        stacks = notes.stacks if noted else stacks_to_make(view.decoder, self.cycle, self.names)
        check_moments(tree)
        first = notes.first_axis
        if self.maxtext is not None or not fits(notes, view.single_layers):
            version = version_called(self.maxtext) if self.maxtext else version_of_state(view)
            refuse_moments(tree, version)
            first = first_axis_of(stacked_paths(tree, stacks), view, version)
        built = stack_layers(tree, stacks, self.axis, first)
        done = LayerNotes(first_axis=first if self.axis else frozenset())
        built = with_scan_axis(with_layer_notes(built, done), self.axis)
        return Transformed(_said(built, scan_layers=True))


@checked_options
@dataclass(frozen=True, slots=True)
class UnstackLayers:
    """Layers one by one, as MaxText's scan_layers=false wants them, in parameters and all that mirrors them.

    How they were stacked is noted in the custom metadata (`ckpttools.maxtext.layer_notes`).

    Attributes:
        axis: of parameters, on which layers are stacked; None as shapes show it, or as it is noted.
    """

    axis: int | None = None

    def __call__(self, tree: Tree) -> Transformed:
        """The unstacked tree.

        Raises:
            UsageError: layers are not stacked.
            FormatError: there are no layers, positions of a cycle are missing, or nothing shows the axis.
            ShapeError: groups of unequal length, another scan axis, moments that do not mirror parameters.
        """
        tree = with_scan_axis(tree, self.axis)
        view = _with_layers(tree)
        if not view.is_stacked:
            raise UsageError(
                "layers are not stacked",
                location=tree.metadata.location or None,
                hint="nothing need be done; ckpt stack puts them together",
            )
        # Of fewer layers than a cycle has none is on any axis.
        axis = (known_scan_axis(view) if self.axis is None else self.axis) or 0
        stacks = layer_stacks(view.decoder, axis)
        check_moments(tree)
        singles = [stack for stack in stacks if stack.shape or len(stack.key) > 1]
        notes = LayerNotes(tuple(singles), axis, first_axis_names(view.on_first_axis))
        built = with_layer_notes(unstack_layers(tree, stacks, axis), notes)
        return Transformed(_said(built, scan_layers=False))


@checked_options
@dataclass(frozen=True, slots=True)
class ForceUnroll:
    """A stacked training checkpoint as an unstacked one for inference, as MaxText's force_unroll means it.

    Attributes:
        axis: as `UnstackLayers`.
        keep_step, flavour: as `StripOptimizer`.
    """

    axis: int | None = None
    keep_step: bool = False
    flavour: NewFlavour = "same"

    def __call__(self, tree: Tree) -> Transformed:
        """The parameters, unstacked.

        Raises:
            FormatError: there are no layers.
            UsageError: this is no stacked training checkpoint.
            CheckpointError: as the two transforms that this is made of.
        """
        kind = _with_layers(tree).kind
        if kind != "stacked-training":
            raise UsageError(
                "only a stacked training checkpoint can be unrolled for inference",
                location=tree.metadata.location or None,
                got=kind,
                hint="use ckpt unstack or ckpt strip-optimizer for what is left to do",
            )
        first = KeepingAxis(StripOptimizer(self.keep_step, self.flavour))(tree)
        then = UnstackLayers(self.axis)(first.tree)
        return Transformed(then.tree, first.notes + then.notes)


def _with_layers(tree: Tree) -> MaxTextView:
    """The view of a tree that has layers."""
    view = view_of(tree)
    if any(path[:1] == (PIPELINE,) for path in view.decoder):
        raise FormatError(
            "layers are stacked by pipeline stages, which cannot be told apart here",
            location=tree.metadata.location or None,
            got=f"{DECODER}/{PIPELINE}",
            hint="save it from MaxText without pipeline parallelism",
        )
    if not view.is_maxtext:
        _refuse_peft(tree)
        location = quote(tree.metadata.location or "SRC")
        raise FormatError(
            "there are no layers",
            location=tree.metadata.location or None,
            expected=_EXPECTED,
            hint=f"`ckpt convert hf-to-maxtext {location} DST` makes stacked layers of a Hugging Face model, "
            f"and with {option('scan', False)} single ones"
            if tree.metadata.format == "safetensors"
            else f"`ckpt inspect tree {location}` shows what is there",
        )
    return view


def _refuse_peft(tree: Tree) -> None:
    """Refuses an adapter in PEFT's names, which has a command of its own."""
    if not (tree.metadata.location and is_adapter(tree)):
        return
    location = parse(tree.metadata.location)
    command = f"ckpt adapter to-maxtext {quote(str(location))} DST --base BASE"
    raise FormatError(
        f"this is {adapter_in(location.folder())}, in PEFT's names",
        location=location,
        expected=_EXPECTED,
        hint=f"`{command}` stacks its layers, and with {option('scan', False)} leaves them single"
        if is_lora(location)
        else merging(location),
    )


def _said(tree: Tree, *, scan_layers: bool) -> Tree:
    """The custom metadata says what the tree is; MaxText reads it there."""
    return tree.with_metadata(custom={**tree.metadata.custom, SCAN_LAYERS: scan_layers})
