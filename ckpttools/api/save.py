"""A tree in files: with what belongs to its model beside it, in the format that is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpttools.api.arguments import (
    Size,
)
from ckpttools.api.conversion import DEFAULT_MEMORY, Conversion, Resources
from ckpttools.api.prepared import prepare
from ckpttools.api.storing import writer_for
from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Tree, dotted
from ckpttools.core.notes import Notes
from ckpttools.formats.base import COMPANIONS, RECORD, Writer
from ckpttools.formats.json_file import read_json
from ckpttools.formats.orbax.write import OrbaxWriter
from ckpttools.formats.sidecar import CARRIED, Beside, Companions
from ckpttools.formats.zarr.write import ZarrWriter
from ckpttools.maxtext.model import CONFIG
from ckpttools.maxtext.model_config import true_config
from ckpttools.maxtext.model_files import ModelFiles, companions_of, config_bytes
from ckpttools.roles.of_tree import roles
from ckpttools.run.events import Observer, Receipt


def plan_tree(tree: Tree, writer: Writer, resources: Resources | None = None) -> Conversion:
    """Plans writing `tree` with `writer`; errors as `plan_any`, but for those of reading."""
    resources = resources or Resources()
    notes = tree.metadata.notes
    writer, said = _with_companions(writer, tree)
    if isinstance(writer, Beside):
        tree = writer.with_companions(tree)
    return resources.plan(tree, writer, notes + said)


def _with_companions(writer: Writer, tree: Tree) -> tuple[Writer, Notes]:
    """The writer, and the model's configuration, tokenizer and so on where they belong in what it writes.

    With them comes what there is to say of them.
    """
    companions = companions_of(tree)
    if not companions:
        return writer, Notes()
    if isinstance(writer, ZarrWriter):
        return writer, _left_out(companions)
    is_model = _is_model(tree, companions)
    files = ModelFiles(companions=companions.files)
    made, remarks = {}, []
    if CONFIG in companions.files:
        config = true_config(_config(tree, companions), _weights(tree))
        made = {CONFIG: config_bytes(files, config)}
        remarks = [f"{CONFIG}: {change}" for change in config.changes]
        if is_model and tree.metadata.notes.dropped:
            remarks.append(f"{CONFIG} describes the whole model, also what is left out")
    copied = {name: file for name, file in companions.files.items() if name not in made}
    place = "" if is_model else COMPANIONS
    if isinstance(writer, OrbaxWriter):
        step = tree.metadata.step or 0 if writer.step is None else writer.step
        place = f"{step}/{writer.item}/{COMPANIONS}"
    notes = Notes(remarks=tuple(remarks))
    return Beside(writer, Companions(copied, companions.arrays), place, made), notes


def _is_model(tree: Tree, companions: Companions) -> bool:
    """Whether the arrays have the model's own names, so that its files belong beside them.

    Of Hugging Face's directory, and of what was made of one without another spelling: what hf-to-maxtext
    makes is nested, and has a record of it.
    """
    if tree.metadata.format == "safetensors" and tree.metadata.config is not None:
        return True
    has_names = all(len(path) == 1 for path in tree)
    return has_names and RECORD not in companions.files and not companions.arrays


def _left_out(companions: Companions) -> Notes:
    """What to say where companions have no place."""
    names = ", ".join(companions.files)
    remarks = (f"left out, as plain zarr has no place for what belongs to a model: {names}",) if names else ()
    return Notes(
        dropped=tuple(f"{COMPANIONS}/{CARRIED}/{name}" for name in companions.arrays), remarks=remarks
    )


def _config(tree: Tree, companions: Companions) -> Mapping[str, Any]:
    """The configuration that goes along."""
    return tree.metadata.config or read_json(Path(companions.files[CONFIG].path))


def _weights(tree: Tree) -> dict[str, LazyArray]:
    """The arrays that a configuration speaks of, by dotted names."""
    known = roles(tree)
    return {dotted(path): each for path, each in tree.arrays.items() if known.of(path) == "parameter"}


def plan_save(
    tree: Tree, format: str | None = None, *, resources: Resources | None = None, **options: Any
) -> Conversion:
    """What `save` with these arguments would do; its `run(destination)` does it."""
    return plan_tree(tree, writer_for(tree, format, **options), resources)


def save(
    tree: Tree,
    destination: str | Path,
    format: str | None = None,
    *,
    memory: Size = DEFAULT_MEMORY,
    jobs: int | None = None,
    overwrite: bool = False,
    manifest: str | Path | None = None,
    observe: Observer = lambda event: None,
    **options: Any,
) -> Receipt:
    """Writes `tree` to `destination`.

    Args:
        tree: what to write.
        destination: directory that appears when everything is written.
        format: "orbax", "safetensors" or "zarr3"; None for the one the tree was read from.
        memory, jobs, overwrite, manifest, observe: `ckpttools.api.prepared.Writing`.
        options: of the format's writer, as `writer_for` takes them.

    Raises:
        CheckpointError: the format cannot hold the tree, the work does not fit, reading or writing fails.
    """
    return prepare(
        lambda resources: plan_save(tree, format, resources=resources, **options),
        tree,
        destination,
        memory=memory,
        jobs=jobs,
        overwrite=overwrite,
        manifest=manifest,
        observe=observe,
    ).run()
