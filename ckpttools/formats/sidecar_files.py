"""What lies beside weights: the model's configuration, and the other files of the model."""

from __future__ import annotations

from typing import Any

from ckpttools.array.tree import Tree
from ckpttools.core.errors import CheckpointError, ConfigError, StorageError
from ckpttools.formats.adapters import ADAPTER, is_adapter
from ckpttools.formats.base import SIDECARS
from ckpttools.formats.json_file import json_object, without_duplicates
from ckpttools.formats.lookalikes import refuse_disguise
from ckpttools.stores.location import Location
from ckpttools.stores.registry import parse

CONFIG = "config.json"
# The field of it that names the weights which transformers reads, in place of files under usual names.
WEIGHTS_FIELD = "transformers_weights"


def is_file(path: Location) -> bool:
    """Return whether a file of this name is there."""
    try:
        return path.is_file()
    except StorageError:
        # Of a disk neither "yes" nor "no", as of a name that is too long. Elsewhere nobody has answered.
        if path.store.scheme != "file":
            raise
        return False


def sidecar_json(
    path: Location, kind: type[CheckpointError], hint: str, unique: bool = True
) -> dict[str, Any]:
    """Return the JSON object in a file that a download may have left as something else.

    Args:
        path: of the file.
        kind: of error to raise.
        hint: of that error.
        unique: whether an object that names a key twice is refused.

    Raises:
        CheckpointError: of `kind`, where it is no JSON object; says what it is instead.
        StorageError: it cannot be read.
    """
    raw = path.read_bytes()
    if not raw.lstrip().startswith((b"{", b"[")):
        refuse_disguise(raw[:1024], str(path), kind, "JSON")
    return json_object(raw, str(path), kind, hint, without_duplicates if unique else None)


def sidecar_config(folder: Location) -> dict[str, Any] | None:
    """Return the model's configuration beside the weights, or None where there is none.

    Raises:
        ConfigError: what is there is not a JSON object, or a link to nothing, as a cache leaves it.
        StorageError: it cannot be read.
    """
    path = folder / CONFIG
    if not path.lexists():
        return None
    hint = "correct the file, fetch it again, or move it away to do without"
    if path.is_link() and not is_file(path):
        raise ConfigError(
            "the configuration is a link to nothing", location=path, got=path.readlink(), hint=hint
        )
    # Duplicate keys pass, as they do in transformers.
    return sidecar_json(path, ConfigError, hint, unique=False)


def weights_in_config(folder: Location) -> object:
    """Return the value of `transformers_weights` in the configuration beside the weights; None without one.

    Raises:
        StorageError: The configuration cannot be read.
    """
    path = folder / CONFIG
    if not is_file(path):
        return None
    raw = path.read_bytes()
    if WEIGHTS_FIELD.encode() not in raw:
        return None
    try:
        return json_object(raw, str(path), ConfigError, "").get(WEIGHTS_FIELD)
    except ConfigError:
        return None  # `sidecar_config` reports it


def is_saved_by_peft(tree: Tree) -> bool:
    """Return whether a tree is an adapter with its configuration, beside it or carried along."""
    return bool(tree.metadata.location) and is_adapter(tree) and is_file(sidecar_directory(tree) / ADAPTER)


def sidecar_directory(tree: Tree) -> Location:
    """Return the directory for a model's sidecars: that of its weights; for other trees, a subdirectory.

    Adapters that PEFT saved are such models.
    """
    location = parse(tree.metadata.location)
    folder = location.folder()
    is_alongside = tree.metadata.config is not None or (is_adapter(tree) and is_file(folder / ADAPTER))
    return folder if is_alongside else folder / SIDECARS
