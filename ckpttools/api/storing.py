"""How what is written is stored: the writer of each format, told by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ckpttools.api.arguments import Storing, compression_of
from ckpttools.array.tree import Tree
from ckpttools.core.budget import parse_size
from ckpttools.core.errors import UsageError
from ckpttools.core.wording import option
from ckpttools.formats.base import Writer
from ckpttools.formats.orbax.write import OrbaxWriter
from ckpttools.formats.references import ReferenceMode, References, reference_mode
from ckpttools.formats.safetensors.write import SafetensorsWriter
from ckpttools.formats.zarr.write import ZarrWriter

_WRITERS: Mapping[str, type[OrbaxWriter | SafetensorsWriter | ZarrWriter]] = {
    "orbax": OrbaxWriter,
    "safetensors": SafetensorsWriter,
    "zarr3": ZarrWriter,
}


def orbax_options(said: Mapping[str, Any], destination: str | Path, *, shares: bool) -> dict[str, Any]:
    """Arguments of `OrbaxWriter` where they are not its defaults.

    Args:
        said: what the user says, as `Storing`; may hold other arguments as well.
        destination: where the checkpoint will be.
        shares: whether chunks that stay as they are are shared with the source if nothing is said.
    """
    how = {name: said[name] for name in Storing.__annotations__ if said.get(name) is not None}
    mode = reference_mode(how.pop("reference", None), by_default=shares, encodes=bool(how))
    made = {name: how[name] for name in ("ocdbt", "zarr3") if how.get(name) is False}
    if (compression := compression_of(how.get("compression"))) is not None:
        made["compression"] = compression
    if "target_data_file_size" in how:
        made["target_data_file_bytes"] = parse_size(how["target_data_file_size"])
    if mode is not ReferenceMode.NONE:
        made["references"] = References(mode, Path(destination))
    return made


def fitting(storage: Mapping[str, Any], name: str | None) -> dict[str, Any]:
    """What of `orbax_options` a format is told: that bytes are shared, which nobody asked for, only Orbax."""
    shared = storage.get("references")
    unasked = shared is not None and shared.mode is ReferenceMode.SAME_ORDER
    return {
        key: value for key, value in storage.items() if key != "references" or name == "orbax" or not unasked
    }


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
            hint=f"choose one of them with {option('to')}",
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
