"""Conversions as a library: open, map, plan, run. The command line does nothing but call these."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckpttools.dtypes import DType
from ckpttools.errors import ConfigError, UsageError
from ckpttools.families.family import Family
from ckpttools.families.registry import family_named, family_of
from ckpttools.formats.base import ReadOptions, Writer
from ckpttools.formats.orbax_write import OrbaxWriter
from ckpttools.formats.registry import open_tree
from ckpttools.ir.array import LazyArray
from ckpttools.ir.kinds import linen_state
from ckpttools.ir.tree import Path as TreePath
from ckpttools.ir.tree import Tree, dotted
from ckpttools.mapping.table import Flag, Mapped
from ckpttools.notes import Note, Notes
from ckpttools.plan.plan import Plan, build
from ckpttools.run.events import Observer, Receipt
from ckpttools.transforms.cast import cast, cast_notes

DEFAULT_MEMORY = 1 << 30
ROPE_LAYOUTS = ("halves", "interleaved")


@dataclass(frozen=True, slots=True)
class Resources:
    """What a conversion may take.

    Attributes:
        memory: bytes resident at most.
        jobs: workers at a time; None for two a core, at most 16.
    """

    memory: int = DEFAULT_MEMORY
    jobs: int | None = None

    @property
    def workers(self) -> int:
        # A worker that writes past the page cache waits for the disk: two cores, 2.47 GB, two workers
        # 1.65 to 2.1 s, four 1.4 to 1.8 s.
        return self.jobs or min(16, 2 * len(os.sched_getaffinity(0)))


@dataclass(frozen=True, slots=True)
class ToMaxText:
    """How a Hugging Face checkpoint becomes a MaxText one.

    Attributes:
        scan: stack the layers, as MaxText's `scan_layers=true` wants them.
        scan_axis: the axis on which they are stacked (MaxText's `param_scan_axis`).
        dtype: dtype of all floating-point arrays; None keeps those stored.
        rope_layout: "halves" or "interleaved"; None as the configuration implies.
        family: name of the family whose rows are used; None as `model_type` says.
        drop: patterns of source arrays to leave out.
        read: options for opening the source.
    """

    scan: bool = True
    scan_axis: int = 1
    dtype: DType | None = None
    rope_layout: str | None = None
    family: str | None = None
    drop: Sequence[str] = ()
    read: ReadOptions = field(default_factory=ReadOptions)


def open_checkpoint(path: str | Path, step: int | None = None) -> Tree:
    """The checkpoint at `path`, whatever its format. Reads headers and indexes, no array.

    Args:
        path: a file, an item, a step or a run directory.
        step: the step to open; None takes the latest finished one.

    Raises:
        CheckpointError: nothing is there, or it cannot be read.
    """
    return open_tree(Path(path), ReadOptions(step=step))


def plan_to_maxtext(
    source: str | Path,
    options: ToMaxText | None = None,
    resources: Resources | None = None,
    writer: OrbaxWriter | None = None,
) -> Conversion:
    """Plans a conversion without reading any array or writing anything.

    Args:
        source: directory with safetensors and `config.json`, or one of its safetensors files.
        options: how to convert.
        resources: what it may take.
        writer: how Orbax stores it; None for `0/items` in one uncompressed data file.

    Raises:
        CheckpointError: the source cannot be read or does not match its configuration; or the work does
            not fit into the memory.
    """
    options, resources = options or ToMaxText(), resources or Resources()
    writer = writer or OrbaxWriter(step=0, item="items")
    tree = open_tree(Path(source), options.read)
    state, notes = to_maxtext(tree, options)
    plan = build(state, writer, memory=resources.memory, jobs=resources.workers, notes=notes)
    return Conversion(plan, writer)


@dataclass(frozen=True, slots=True)
class Conversion:
    """A plan and the writer it was made for."""

    plan: Plan
    writer: Writer

    def run(
        self, destination: str | Path, *, overwrite: bool = False, observe: Observer = lambda event: None
    ) -> Receipt:
        """Carries the plan out; see `ckpttools.run.executor.execute`."""
        from ckpttools.run.executor import execute

        return execute(self.plan, self.writer, Path(destination), overwrite=overwrite, observe=observe)


def to_maxtext(tree: Tree, options: ToMaxText) -> tuple[Tree, Notes]:
    """A Hugging Face tree as the tree MaxText's own converter makes, and what the user should know.

    Raises:
        ConfigError: there is no configuration, or it is not one.
        CoverageError: the arrays do not match it.
    """
    config, place = _config(tree)
    family = family_named(options.family) if options.family else family_of(config, place)
    table = family.table(config, place, _overrides(family, options))
    if options.scan:
        _check_scan_axis(options.scan_axis)
        for axis in family.scan_axes:
            table = table.stacked(axis, options.scan_axis)
    arrays = {dotted(path): array for path, array in tree.arrays.items()}
    table = replace(table, place=tree.metadata.place)
    mapped = table.to_left(arrays, options.drop)
    notes = _notes(mapped, options.dtype)
    made = {
        key: cast(array, options.dtype) if options.dtype else array for key, array in mapped.arrays.items()
    }
    parameters: dict[TreePath, LazyArray] = {
        tuple(key.split(".")): array for key, array in sorted(made.items())
    }
    return linen_state(parameters, 0, {"scan_layers": options.scan}), notes


def _check_scan_axis(axis: int) -> None:
    """Norms have one axis, so the stacked ones have two: MaxText knows no third place for layers."""
    if axis not in (0, 1):
        raise UsageError("layers cannot be stacked on this axis", got=axis, wanted="0 or 1")


def _config(tree: Tree) -> tuple[Mapping[str, object], str]:
    place = "config.json"
    if tree.metadata.config is None:
        raise ConfigError(
            "there is no config.json beside the weights",
            place=tree.metadata.place,
            wanted="the model's config.json, which says its family and sizes",
            hint="copy it there from where the weights came from",
        )
    return tree.metadata.config, place


def _overrides(family: Family, options: ToMaxText) -> dict[str, Flag]:
    if options.rope_layout is None:
        return {}
    if options.rope_layout not in ROPE_LAYOUTS:
        raise UsageError(f"unknown RoPE layout {options.rope_layout!r}", wanted=" or ".join(ROPE_LAYOUTS))
    wanted = options.rope_layout == "interleaved"
    if "interleaved" not in family.flags:
        if wanted:
            raise UsageError(f"family {family.name} has no interleaved RoPE layout in MaxText")
        return {}
    return {"interleaved": Flag(wanted, f"--rope-layout {options.rope_layout}")}


def _notes(mapped: Mapped, dtype: DType | None) -> Notes:
    inexact = [Note(each.key, each.reason) for each in mapped.values if not each.exact]
    values = [Note(each.key, each.reason) for each in mapped.values if each.exact]
    if dtype is not None:
        inexact += cast_notes(mapped.arrays, dtype)
    return Notes(tuple(inexact), tuple(values), mapped.dropped)
