"""Hugging Face models at a path: what their `config.json` says, and what their headers list."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError
from ckpttools.diagnosis.inventory import Inventory, SafetensorsFiles, json_or_error
from ckpttools.formats.safetensors.faults import header_of
from ckpttools.formats.safetensors.format import NAMES
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.quantized.scales import Described
from ckpttools.stores.location import Location

_TEXT = ("thinker_config", "text_config")
# What a name of a decoder's array begins with, up to its layers or its embedding.
_DECODERS = ("model.language_model.", "language_model.model.", "thinker.model.", "model.", "")


@dataclass(frozen=True)
class StoredModel:
    """A directory with weights that can be read and a configuration.

    Attributes:
        folder: the directory.
        config: the parsed `config.json`.
        arrays: name -> what the headers say of a tensor.
        files, indexes: names of the files with tensors, and of those that say which there should be.
        has_skipped_shards: whether there are shards that the index does not name.
    """

    folder: Location
    config: Mapping[str, Any]
    arrays: Mapping[str, Described]
    files: tuple[str, ...] = ()
    indexes: tuple[str, ...] = ()
    has_skipped_shards: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether all shards are there, by their names and the index; another check reports those missing."""
        if NAMES.missing(self.files) or self.has_skipped_shards:
            return False
        maps = ((self.sidecar(index) or {}).get("weight_map") for index in self.indexes)
        return all(set(item) <= self.arrays.keys() for item in maps if isinstance(item, Mapping))

    @property
    def text(self) -> Mapping[str, Any]:
        """What the configuration says of the text model."""
        result = self.config
        for name in _TEXT:
            result = result[name] if isinstance(result.get(name), Mapping) else result
        return result

    def of_decoder(self, name: str) -> str | None:
        """A name of the decoder's without what it begins with, such as layers.0.mlp.up_proj.weight."""
        prefix = next((decoder for decoder in _DECODERS if name.startswith(decoder)), "")
        rest = name.removeprefix(prefix)
        return rest if rest.startswith(("layers.", "embed_tokens.")) else None

    def sidecar(self, name: str) -> Mapping[str, Any] | None:
        """A JSON file beside the weights; None where there is none, or none that can be read."""
        if not (self.folder / name).is_file():
            return None
        result = json_or_error(self.folder / name)
        return None if isinstance(result, CheckpointError) else result

    @property
    def embedding_rows(self) -> int | None:
        """Rows of the embedding; None where there is none of that name."""
        result = (
            item for name, item in self.arrays.items() if self.of_decoder(name) == "embed_tokens.weight"
        )
        return next((item.shape[0] for item in result if item.shape), None)


def models_in(inventory: Inventory) -> Iterator[StoredModel]:
    """The models at a path of which all headers and the configuration can be read."""
    for weights in inventory.weights:
        arrays = tensors_of_all(weights) if weights.is_whole else None
        config = json_or_error(weights.folder / CONFIG) if arrays else None
        if arrays is not None and config is not None and not isinstance(config, CheckpointError):
            skipped = {*weights.files} - {*_read_from(weights)}
            is_cut = any(NAMES.numbered.fullmatch(name) for name in skipped)
            yield StoredModel(weights.folder, config, arrays, weights.files, weights.indexes, is_cut)


def _read_from(weights: SafetensorsFiles) -> Sequence[str]:
    """The files that whoever opens the directory reads; all where that is not clear, which others report."""
    try:
        named = NAMES.find(weights.folder).names
    except CheckpointError:
        return weights.files
    return [name for name in weights.files if name in named]


def tensors_of_all(weights: SafetensorsFiles) -> dict[str, Described] | None:
    """All tensors that are read; None if a file cannot be read, which other checks report."""
    headers = [header_of(weights.folder / name) for name in _read_from(weights)]
    read = [header for header in headers if not isinstance(header, CheckpointError)]
    if len(read) < len(headers):
        return None
    return {entry.name: entry for header in read for entry in header.entries}
