"""Files next to a model's weights: its configuration and other sidecars."""

from __future__ import annotations

from typing import Any

from ckpttools.array.tree import Tree
from ckpttools.core.errors import CheckpointError, ConfigError, StorageError
from ckpttools.formats.adapters import ADAPTER, is_adapter
from ckpttools.formats.base import SIDECARS
from ckpttools.formats.json_file import json_object, reject_duplicates
from ckpttools.formats.lookalikes import refuse_disguise
from ckpttools.stores.location import Location
from ckpttools.stores.registry import parse

CONFIG = "config.json"
# Field that names the weights for transformers to read instead of those with default names.
WEIGHTS_FIELD = "transformers_weights"


def is_file(path: Location) -> bool:
    """Return whether the path is an existing file."""
    try:
        return path.is_file()
    except StorageError:
        # On a disk, an error means that the file does not exist, for example because its name is too long. A
        # network store that fails to answer raises the error.
        if path.store.scheme != "file":
            raise
        return False


def sidecar_json(
    path: Location, kind: type[CheckpointError], hint: str, unique: bool = True
) -> dict[str, Any]:
    """Read a JSON object from a file that may be a failed download.

    Args:
        path: Path of the file.
        kind: The class of error to raise.
        hint: The hint of the error.
        unique: Whether to reject duplicate keys.

    Raises:
        CheckpointError: The file is not a JSON object; the message identifies its content. The class is
            `kind`.
        StorageError: The file cannot be read.
    """
    raw = path.read_bytes()
    if not raw.lstrip().startswith((b"{", b"[")):
        refuse_disguise(raw[:1024], str(path), kind, "JSON")
    return json_object(raw, str(path), kind, hint, reject_duplicates if unique else None)


def sidecar_config(folder: Location) -> dict[str, Any] | None:
    """Return the model's configuration next to the weights, or None if there is none.

    Raises:
        ConfigError: The configuration is not a JSON object, or is a dangling link, as in an incomplete cache.
        StorageError: The configuration cannot be read.
    """
    path = folder / CONFIG
    if not path.lexists():
        return None
    hint = "correct the file, fetch it again, or move it away to continue without it"
    if path.is_link() and not is_file(path):
        raise ConfigError("the configuration is a broken link", location=path, got=path.readlink(), hint=hint)
    # Duplicate keys are allowed, as in transformers.
    return sidecar_json(path, ConfigError, hint, unique=False)


def weights_in_config(folder: Location) -> object:
    """Return the `transformers_weights` field of the configuration next to the weights, or None.

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
        return None  # `sidecar_config` reports the error.


def is_saved_by_peft(tree: Tree) -> bool:
    """Return whether a tree is an adapter with its configuration, either next to it or copied with it."""
    return bool(tree.metadata.location) and is_adapter(tree) and is_file(sidecar_directory(tree) / ADAPTER)


def sidecar_directory(tree: Tree) -> Location:
    """Return the directory for a model's sidecars: next to its weights, or a subdirectory for other trees.

    PEFT adapters count as models.
    """
    location = parse(tree.metadata.location)
    folder = location.folder()
    is_alongside = tree.metadata.config is not None or (is_adapter(tree) and is_file(folder / ADAPTER))
    return folder if is_alongside else folder / SIDECARS
