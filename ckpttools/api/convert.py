"""From any format to any: the same tree, or what transforms make of it, in other files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ckpttools.api.conversion import Conversion, Resources
from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Tree, dotted
from ckpttools.core.errors import UsageError
from ckpttools.core.notes import Notes
from ckpttools.formats.base import COMPANIONS, RECORD, ReadOptions, Writer
from ckpttools.formats.json_file import read_json
from ckpttools.formats.orbax.write import OrbaxWriter
from ckpttools.formats.registry import open_tree
from ckpttools.formats.safetensors.write import SafetensorsWriter
from ckpttools.formats.sidecar import CARRIED, Beside, Companions
from ckpttools.formats.zarr.write import ZarrWriter
from ckpttools.maxtext.model import CONFIG
from ckpttools.maxtext.model_config import true_config
from ckpttools.maxtext.model_files import ModelFiles, companions_of, config_bytes
from ckpttools.roles.of_tree import roles
from ckpttools.run.events import Observer, Receipt
from ckpttools.transforms.base import Transform

_WRITERS: Mapping[str, type[OrbaxWriter | SafetensorsWriter | ZarrWriter]] = {
    "orbax": OrbaxWriter,
    "safetensors": SafetensorsWriter,
    "zarr3": ZarrWriter,
}


def plan_any(
    source: str | Path,
    writer: Writer,
    *,
    read: ReadOptions | None = None,
    resources: Resources | None = None,
    transforms: Sequence[Transform] = (),
) -> Conversion:
    """Plans writing the checkpoint at `source` with `writer`; reads headers and indexes, no array.

    Args:
        source: a file, an item, a step or a run directory of any format.
        writer: the format to write and its options.
        read: how to open the source.
        resources: what the conversion may take.
        transforms: what to make of the tree on the way, first to last.

    Raises:
        CheckpointError: the source cannot be read, a transform does not take it, the format cannot hold
            it, or the work does not fit into the memory.
    """
    return plan_tree(open_tree(Path(source), read).pipe(*transforms), writer, resources)


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
    resources: Resources | None = None,
    overwrite: bool = False,
    observe: Observer = lambda event: None,
    **options: Any,
) -> Receipt:
    """Writes `tree` to `destination`.

    Args:
        tree: what to write.
        destination: directory that appears when everything is written.
        format: "orbax", "safetensors" or "zarr3"; None for the one the tree was read from.
        resources: what it may take.
        overwrite: whether what is at `destination` may be replaced.
        observe: called with every event.
        options: of the format's writer, as `writer_for` takes them.

    Raises:
        CheckpointError: the format cannot hold the tree, the work does not fit, reading or writing fails.
    """
    conversion = plan_save(tree, format, resources=resources, **options)
    return conversion.run(destination, overwrite=overwrite, observe=observe)


def writer_for(tree: Tree, format: str | None = None, **options: Any) -> Writer:
    """The writer of a format, told by name.

    Args:
        tree: what will be written; Orbax's step and item are named as it was read.
        format: "orbax", "safetensors" or "zarr3"; None for the one the tree was read from.
        options: fields of `OrbaxWriter`, `SafetensorsWriter` or `ZarrWriter`.

    Raises:
        UsageError: no such format, or one that can be read only; an option that it does not have.
    """
    name = format or tree.metadata.format
    if name is None or name not in _WRITERS:
        raise UsageError(
            f"{name} cannot be written" if name else "it is not said in which format to write",
            place=tree.metadata.place or None,
            wanted=", ".join(_WRITERS),
            hint="choose one of them with --to",
        )
    return _made(name, _WRITERS[name], {**_named_as_read(tree, name), **options})


def _named_as_read(tree: Tree, name: str) -> dict[str, Any]:
    """Step and item of a tree, as arguments of Orbax's writer."""
    return {"step": None, "item": tree.metadata.item or "items"} if name == "orbax" else {}


def _made(name: str, make: Callable[..., Writer], options: Mapping[str, Any]) -> Writer:
    known = {field.name for field in fields(_WRITERS[name])} - {"name"}
    unknown = [option for option in options if option not in known]
    if unknown:
        raise UsageError(
            f"{name} is not stored with these options",
            got=", ".join(unknown),
            wanted=f"none but {', '.join(sorted(known))}",
        )
    return make(**options)
