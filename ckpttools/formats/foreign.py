"""Recognize files of other programs that no format reads, and suggest what to do with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from shlex import quote

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, FormatError, StorageError
from ckpttools.core.message_terms import action, call
from ckpttools.core.notes import Notes
from ckpttools.core.text import matches_any, plural, sample_names
from ckpttools.formats.adapters import ADAPTER, adapter_in, merge_hint
from ckpttools.formats.json_file import read_json
from ckpttools.stores.location import Location

_PIPELINE = "model_index.json"
# Accelerate and transformers' Trainer write these files next to a checkpoint directory. They have no weights.
_RANDOM_STATES = "random_states_*.pkl"


@dataclass(frozen=True, slots=True)
class _ForeignFiles:
    """A kind of file that another program writes.

    Attributes:
        names: Patterns of the file names.
        what: Description of the files.
        way: Returns the hint, from the path that was passed and the file that was found.
        parts: Patterns of the names of files that belong to them.
    """

    names: Sequence[str]
    what: str
    way: Callable[[Location, Location], str]
    parts: Sequence[str] = ()


def _download_hint(path: Location, file: Location) -> str:
    named = path.as_local()
    fresh = quote(f"{named.removesuffix(path.suffix) if path == file else named}-safetensors")
    # Patterns are passed as positional arguments: with --include, hf would take all but the first for file
    # names and ignore --include.
    command = f"hf download REPO '*.safetensors' '*.json' 'tokenizer*' --local-dir {fresh}"
    return f"fetch the model's own weights: {command}"


def _incomplete_hint(path: Location, file: Location) -> str:
    return "copy .metadata, too: torch writes it last; without it the save is unfinished: use another"


def _unpack_hint(path: Location, file: Location) -> str:
    into = quote(file.as_local().removesuffix(".nemo"))
    unpack = f"mkdir {into} && tar -xf {quote(file.as_local())} -C {into}"
    return f"unpack it: {unpack}; then name model_weights in it"


def _from_keras(path: Location, file: Location) -> str:
    arrays = "{w.path: keras.ops.convert_to_numpy(w) for w in model.weights}"
    return f"save the weights from Keras: safetensors.numpy.save_file({arrays}, FILE)"


def _from_keras_shards(path: Location, file: Location) -> str:
    shards = _shards_of_keras(file)
    lost = [name for name in shards if not (file.parent / name).is_file()]
    if lost:
        return f"copy the missing {plural(len(lost), 'shard')} of {len(shards):,}, too: {sample_names(lost)}"
    load = f"model.load_weights({file.as_local()!r})"
    return f"load them in Keras, which reads all shards: {load}; then {_from_keras(path, file)}"


def _shards_of_keras(index: Location) -> list[str]:
    """Return the names of the files that a Keras index lists; empty if the index is damaged."""
    try:
        files = read_json(index).get("weight_map", {}).values()
        names = {name for file in files for name in ([file] if isinstance(file, str) else file)}
        return sorted(name for name in names if isinstance(name, str) and name and "/" not in name)
    except (CheckpointError, AttributeError, TypeError):
        return []


def _from_tensorflow(path: Location, file: Location) -> str:
    arrays = "{name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}"
    return (
        "save the variables from TensorFlow: reader = tf.train.load_checkpoint(DIR); "
        f"safetensors.numpy.save_file({arrays}, FILE)"
    )


def _trust_hint(path: Location, file: Location) -> str:
    return (
        "a pickle is a program and is not executed here; if you trust its author, load it "
        "in Python and save its arrays: orbax.checkpoint.StandardCheckpointer().save(DIR, tree)"
    )


def _with_numpy(path: Location, file: Location) -> str:
    return "save it as safetensors: safetensors.numpy.save_file(dict(numpy.load(FILE)), OTHER)"


_KINDS = (
    _ForeignFiles(("*.gguf",), "llama.cpp files (GGUF)", _download_hint),
    _ForeignFiles(
        ("*.distcp",), "parts of a PyTorch distributed checkpoint without .metadata", _incomplete_hint
    ),
    _ForeignFiles(("tf_model*.h5",), "TensorFlow weights", _download_hint),
    _ForeignFiles(("*.nemo",), "NeMo archives", _unpack_hint),
    _ForeignFiles(("*.weights.json",), "sharded Keras weights (HDF5)", _from_keras_shards, ("*.weights.h5",)),
    _ForeignFiles(("*.keras", "*.h5", "*.hdf5"), "Keras weights (HDF5)", _from_keras),
    _ForeignFiles(
        ("*.data-[0-9]*-of-[0-9]*", "*.ckpt.index", "*.ckpt.meta", "saved_model.pb"),
        "TensorFlow checkpoints",
        _from_tensorflow,
    ),
    _ForeignFiles(("*.pkl", "*.pickle", "*.joblib"), "Python pickles", _trust_hint),
    _ForeignFiles(("*.npz", "*.npy"), "NumPy arrays", _with_numpy),
)


def foreign_kinds(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return the kinds of foreign files among these names, each with its first name."""
    return [(kind.what, name) for kind, name in _find_foreign(list(names))]


def _find_foreign(names: Sequence[str]) -> Iterator[tuple[_ForeignFiles, str]]:
    rest = list(names)
    for kind in _KINDS:
        matching = [item for item in rest if matches_any(item, kind.names)]
        if matching:
            yield kind, matching[0]
            rest = [item for item in rest if not matches_any(item, (*kind.names, *kind.parts))]


def foreign_error(path: Location) -> FormatError | None:
    """Return an error that identifies a foreign file or directory; None if its kind is unknown.

    Args:
        path: A path that no format can open.
    """
    folder, names = _names(path)
    if _PIPELINE in names:
        return _pipeline(folder)
    if path.is_dir() and ADAPTER in names:
        return FormatError(
            f"this is {adapter_in(folder)}, not a complete model", location=path, hint=merge_hint(path)
        )
    result = list(_find_foreign(names))
    if not result:
        return None
    (kind, name), *others = result
    return FormatError(
        f"these are {' and '.join(item.what for item, _ in result)}, which ckpttools does not read",
        location=path,
        got=", ".join([name, *(other for _, other in others)]),
        expected=f"a format that {action('families.formats')} lists",
        hint=kind.way(path, folder / name),
    )


def is_pipeline(path: Location) -> bool:
    """Return whether a directory is a diffusers pipeline, whose parts are models."""
    return (path / _PIPELINE).is_file()


def _names(path: Location) -> tuple[Location, list[str]]:
    """Return a directory and the names in it; for a file, return its parent and its own name."""
    if not path.is_dir():
        return path.parent, [path.name]
    try:
        return path, [entry.name for entry in path.entries() if not fnmatchcase(entry.name, _RANDOM_STATES)]
    except StorageError:
        return path, []


def _pipeline(folder: Location) -> FormatError:
    """Return the error for a diffusers pipeline: its parts are models that must be opened one by one."""
    try:
        document = read_json(folder / _PIPELINE)
    except CheckpointError:
        document = {}
    parts = [name for name in document if any((folder / name).glob("*.safetensors"))]
    inspect_hint = f": {call('inspect', str(folder / parts[0]))}" if parts else ""
    return FormatError(
        f"this is a diffusers pipeline ({document.get('_class_name', 'of unknown class')}), not one model",
        location=folder,
        got=", ".join(parts) or None,
        expected="one checkpoint",
        hint=f"name one of its parts{inspect_hint}; only language models can be converted to MaxText",
    )


# File names of each format, for directories in which trainers and the Hub mix several formats.
_NAMES = {
    "orbax": ("_METADATA",),
    "safetensors": ("*.safetensors",),
    "torch": ("pytorch_model*.bin", "consolidated*.pth"),
    "torch-distributed": (".metadata",),
    "torch-ranks": ("model_world_size_*_rank_*.pt",),
    "deepspeed-zero": ("*zero_pp_rank_*_optim_states.pt",),
    "deepspeed-universal": ("latest_universal",),
    "flax-msgpack": ("flax_model*.msgpack",),
}
# Adapters, optimizers and parts of distributed checkpoints are stored next to their model.
_NOT_WEIGHTS = ("adapter_model.safetensors", "*.distcp", "*.npy", "*.npz", "*.pkl", "*.pickle", "*.joblib")


def other_kinds(path: Location, format: str) -> Notes:
    """Return remarks about weights in other formats in a directory that a format opened."""
    if not path.is_dir():
        return Notes()
    entries = [entry for entry in path.entries() if not matches_any(entry.name, _NOT_WEIGHTS)]
    names = [entry.name for entry in entries]
    # Directories may have any of these names, because zarr uses array keys as directory names.
    files = [entry.name for entry in entries if not entry.is_dir]
    others = [
        kind
        for kind, patterns in _NAMES.items()
        if kind != format and any(matches_any(name, patterns) for name in files)
    ]
    others += [f"{name} ({description})" for description, name in foreign_kinds(names)]
    if not others:
        return Notes()
    result = ", ".join(others)
    return Notes(remarks=(f"the directory has several kinds of weights: {format} is read, not {result}",))


def has_weights(path: Location) -> bool:
    """Return whether a directory contains weights of any supported kind."""
    return any(matches_any(entry.name, patterns) for patterns in _NAMES.values() for entry in path.entries())
