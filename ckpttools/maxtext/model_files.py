"""The files of a model besides its weights: next to them, in the checkpoint, or chosen by the user."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import field, replace
from typing import Any

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Metadata, Tree, by_name
from ckpttools.array.tree import Path as TreePath
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, ConfigError, FormatError, MissingPathError
from ckpttools.core.message_terms import option
from ckpttools.core.notes import Notes
from ckpttools.formats.adapters import ADAPTER, adapter_in, has_adapter, is_adapter_alone
from ckpttools.formats.base import RECORD, SIDECARS
from ckpttools.formats.json_file import read_json
from ckpttools.formats.registry import open_tree, sidecars_at
from ckpttools.formats.sidecar import CARRIED, Sidecars, files_of_model, read_file
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.maxtext.model_config import WeightsConfig
from ckpttools.maxtext.model_options import ModelOptions
from ckpttools.maxtext.versions import CARRIED_PREFIX
from ckpttools.quantized.config import FILES, declared_quantization
from ckpttools.quantized.view import quantized_view
from ckpttools.stores.base import File
from ckpttools.stores.location import Location
from ckpttools.stores.registry import LocationLike, parse

_CARRIED_FILE = f"{CARRIED}.safetensors"
_COMPLETE_MODEL = "the directory of the complete model"


@dataclass(frozen=True)
class ModelFiles:
    """Configuration, tokenizer and arrays of the model that a checkpoint came from.

    Attributes:
        config: The parsed `config.json`, or None.
        location: The location of the configuration, for messages.
        sidecars: Name -> file of the model, whose status was recorded before it was read.
        carried: Arrays that the checkpoint keeps for the reverse conversion, by name.
        weights: Arrays of the original model, if available.
        fault: The reason why the weights cannot be read from the user's location; None if they can.
        spelling: The spelling of names in the model's files, if recorded.
        overruled: The configuration in the checkpoint, if another one is used.
        rope_layout: The order of rotary pairs that the user chose when the checkpoint was created, if any.
        dtypes: Name in the family's rows -> dtype of the array in the original model, if recorded.
        family: The family that the user named when the checkpoint was created, or the name of the file that
            describes it.
        tied: How the user chose to handle the output head when the checkpoint was created, or None.
    """

    config: Mapping[str, Any] | None = None
    location: str = CONFIG
    sidecars: Mapping[str, File] = field(default_factory=dict)
    carried: Mapping[str, LazyArray] = field(default_factory=dict)
    weights: Mapping[str, LazyArray] = field(default_factory=dict)
    fault: CheckpointError | None = None
    spelling: str | None = None
    overruled: Mapping[str, Any] | None = None
    rope_layout: str | None = None
    dtypes: Mapping[str, str] = field(default_factory=dict)
    family: str | None = None
    tied: str | None = None

    @classmethod
    def of(cls, tree: Tree, like: LocationLike | None) -> ModelFiles:
        """Return the files of the model of `tree`, from `like` or from the checkpoint.

        Raises:
            StorageError, ConfigError: The files that `like` names do not exist, or are not a configuration.
        """
        if not tree.metadata.location:
            return cls() if like is None else cls._from_model(parse(like))
        carried = parse(tree.metadata.location) / SIDECARS
        if like is not None:
            config = carried / CONFIG
            overruled = read_json(config) if config.is_file() else None
            declared = _read_record(carried)
            return replace(cls._from_model(parse(like)), overruled=overruled, **_recorded_options(declared))
        return cls._from_checkpoint(carried) if carried.is_dir() else cls()

    @classmethod
    def _from_model(cls, path: Location) -> ModelFiles:
        if not path.exists():
            raise MissingPathError(
                f"{path} does not exist",
                hint=f"{option('like')} names a model's directory, or its config.json",
            )
        if path.is_file():
            config_only_error = FormatError(
                "this is only a configuration", location=path, expected=_COMPLETE_MODEL
            )
            return cls(read_json(path), str(path), {CONFIG: path.open()}, fault=config_only_error)
        if is_adapter_alone(path):
            raise FormatError(
                f"this is {adapter_in(path)}, not a complete model",
                location=path,
                expected=f"{_COMPLETE_MODEL}, or its config.json",
                hint=f"{option('like')} names the model that the checkpoint came from",
            )
        if not (path / CONFIG).is_file():
            hint = f"{option('like')} names a model's directory"
            raise ConfigError("config.json does not exist", location=path, hint=hint)
        known = cls(read_json(path / CONFIG), str(path / CONFIG), files_of_model(path))
        try:
            return replace(known, weights=_model_arrays(path))
        except FormatError as error:
            # There may be only a configuration, or an index without the files that it names.
            return replace(known, fault=error)

    def require_weights(self) -> None:
        """Raise an error if the weights of a model that the user named are missing or damaged.

        Raises:
            FormatError: The weights are missing or damaged.
        """
        if self.fault is not None:
            raise self.fault

    @classmethod
    def _from_checkpoint(cls, directory: Location) -> ModelFiles:
        config, files = directory / CONFIG, files_of_model(directory)
        record = _read_record(directory)
        return cls(
            read_json(config) if config.is_file() else None,
            str(config),
            files,
            _carried_arrays(directory),
            spelling=record.get("spelling"),
            **_recorded_options(record),
        )


def carried_arrays(tree: Tree) -> Mapping[str, LazyArray]:
    """Return the Hugging Face arrays that a MaxText checkpoint keeps, dequantized, by name."""
    if not tree.metadata.location:
        return {}
    directory = parse(tree.metadata.location) / SIDECARS
    carried = _carried_arrays(directory)
    if not carried:
        return {}
    config = read_json(directory / CONFIG) if (directory / CONFIG).is_file() else None
    leaves: dict[TreePath, LazyArray] = {(name,): array for name, array in carried.items()}
    view = quantized_view(Tree(leaves, Metadata(config=config)))
    return by_name(view.plain_where_possible().tree.arrays)


def carried_stored_arrays(tree: Tree) -> dict[str, LazyArray]:
    """Return the arrays that a MaxText checkpoint keeps, under the names in the plan that wrote them."""
    if not tree.metadata.location:
        return {}
    carried = _carried_arrays(parse(tree.metadata.location) / SIDECARS)
    return {f"{CARRIED_PREFIX}{name}": array for name, array in carried.items()}


def sidecars_of(tree: Tree) -> Sidecars:
    """Return the sidecars of a checkpoint; none for other formats."""
    directory = sidecars_at(tree)
    if directory is None or not directory.is_dir():
        return Sidecars()
    files = files_of_model(directory)
    if has_sidecars(tree):
        # Adapter files next to a complete model are left over from a merge. transformers could not load a
        # copy that has the adapter's configuration but not its weights.
        is_left_over = ADAPTER in files and CONFIG in files and not has_adapter(tree)
        return Sidecars({name: file for name, file in files.items() if not is_left_over or name != ADAPTER})
    if (directory / RECORD).is_file():
        files[RECORD] = (directory / RECORD).open()
    return Sidecars(files, _carried_arrays(directory))


def has_sidecars(tree: Tree) -> bool:
    """Return whether sidecars are next to the weights, as in Hugging Face directories."""
    location = parse(tree.metadata.location)
    return sidecars_at(tree) == location.folder()


def sidecar_names(tree: Tree) -> list[str]:
    """Return the files of `sidecars_of`, relative to the checkpoint's directory."""
    result, directory = sidecars_of(tree), sidecars_at(tree)
    carried = [_CARRIED_FILE] if result.arrays else []
    above = "" if directory is None or has_sidecars(tree) else f"{directory.name}/"
    return [f"{above}{name}" for name in (*result.files, *carried)]


def stale_files(
    names: Collection[str], tree: Tree, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> list[str]:
    """Return the files that describe a quantization which the weights no longer have.

    Loaders read such files before the configuration.

    Args:
        names: The names of the files next to a model.
        tree: The arrays that are written.
        before, after: The configuration next to the files, and the one that is written; None if unchanged.
    """
    is_same = after is None or declared_quantization(before) == declared_quantization(after)
    return [] if is_same and quantized_view(tree).weights else [name for name in names if name in FILES]


def stale_file_notes(names: Collection[str]) -> Notes:
    """Return a note on stale files that are left out."""
    text = f"left out, because it describes weights that are no longer quantized: {', '.join(names)}"
    return Notes(remarks=(text,) if names else ())


def record_bytes(spelling: str, model: ModelOptions, dtypes: Mapping[str, str]) -> bytes:
    """Return the record of conversion options that no configuration states."""
    family = parse(model.family).name if model.family else None
    declared = {
        "spelling": spelling,
        "rope_layout": model.rope_layout,
        "tied": model.tied,
        "family": family,
        "dtypes": dict(dtypes),
    }
    return json.dumps({name: value for name, value in declared.items() if value}, indent=2).encode() + b"\n"


def _recorded_options(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recorded options that apply with any configuration."""
    dtypes = record.get("dtypes")
    return {
        "rope_layout": record.get("rope_layout"),
        "tied": record.get("tied"),
        "family": record.get("family"),
        "dtypes": dtypes if isinstance(dtypes, Mapping) else {},
    }


def _read_record(directory: Location) -> Mapping[str, Any]:
    """Read the record of a conversion to MaxText."""
    path = directory / RECORD
    document = read_json(path) if path.is_file() else {}
    for name in ("spelling", "rope_layout", "tied", "family"):
        if not isinstance(document.get(name), str | None):
            raise FormatError(
                f"{name} is not a string",
                location=path,
                got=repr(document[name]),
                hint="convert the model again, or remove that line and pass an option instead",
            )
    return document


def _carried_arrays(directory: Location) -> Mapping[str, LazyArray]:
    file = directory / _CARRIED_FILE
    return by_name(open_tree(file).arrays) if file.is_file() else {}


def _model_arrays(directory: Location) -> Mapping[str, LazyArray]:
    """Return the model's own arrays."""
    return by_name(quantized_view(open_tree(directory)).plain_where_possible().tree.arrays)


def config_bytes(files: ModelFiles, config: WeightsConfig) -> bytes:
    """Return the `config.json` to write: the model's own bytes if they are still correct."""
    if not config.changes and CONFIG in files.sidecars:
        content = read_file(files.sidecars[CONFIG])
        # Fields that the conversion left out do not count as changes.
        if json.loads(content) == config.config:
            return content
    return config.to_json()
