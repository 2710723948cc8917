"""What other programs write and no format here reads: named for what they are, with the next step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from shlex import quote

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, FormatError, StorageError
from ckpttools.core.text import matches_any, plural, sample_names
from ckpttools.formats.adapters import ADAPTER, adapter_in, merging
from ckpttools.formats.json_file import read_json
from ckpttools.stores.location import Location

_PIPELINE = "model_index.json"
# Of accelerate and transformers' Trainer, beside the directory of a checkpoint: no weights of anybody.
_RANDOM_STATES = "random_states_*.pkl"


@dataclass(frozen=True, slots=True)
class _ForeignFiles:
    """Files of another program.

    Attributes:
        names: patterns of their names.
        what: they are.
        way: what a user can do, by the path that was named and the file that tells.
        parts: Patterns of the names of further files that belong to them.
    """

    names: Sequence[str]
    what: str
    way: Callable[[Location, Location], str]
    parts: Sequence[str] = ()


def _fetched(path: Location, file: Location) -> str:
    named = path.as_local()
    fresh = quote(f"{named.removesuffix(path.suffix) if path == file else named}-safetensors")
    # Patterns in place of names: all of --include but the first are taken for names, and it is then ignored.
    command = f"hf download REPO '*.safetensors' '*.json' 'tokenizer*' --local-dir {fresh}"
    return f"fetch the model's own weights: {command}"


def _begun(path: Location, file: Location) -> str:
    return (
        "copy .metadata, too: torch writes it last; where there is none, the save has not ended: take another"
    )


def _unpacked(path: Location, file: Location) -> str:
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
    """Return names of the files that an index of Keras lists; none if it is damaged."""
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


def _trusted(path: Location, file: Location) -> str:
    return (
        "a pickle is a program, and nothing of it is executed here; where you trust who wrote it, load it "
        "there and save its arrays: orbax.checkpoint.StandardCheckpointer().save(DIR, tree)"
    )


def _with_numpy(path: Location, file: Location) -> str:
    return "save it as safetensors: safetensors.numpy.save_file(dict(numpy.load(FILE)), OTHER)"


_KINDS = (
    _ForeignFiles(("*.gguf",), "files of llama.cpp (GGUF)", _fetched),
    _ForeignFiles(("*.distcp",), "parts of a distributed checkpoint of PyTorch without .metadata", _begun),
    _ForeignFiles(("tf_model*.h5",), "weights of TensorFlow", _fetched),
    _ForeignFiles(("*.nemo",), "archives of NeMo", _unpacked),
    _ForeignFiles(
        ("*.weights.json",), "sharded weights of Keras (HDF5)", _from_keras_shards, ("*.weights.h5",)
    ),
    _ForeignFiles(("*.keras", "*.h5", "*.hdf5"), "weights of Keras (HDF5)", _from_keras),
    _ForeignFiles(
        ("*.data-[0-9]*-of-[0-9]*", "*.ckpt.index", "*.ckpt.meta", "saved_model.pb"),
        "checkpoints of TensorFlow",
        _from_tensorflow,
    ),
    _ForeignFiles(("*.pkl", "*.pickle", "*.joblib"), "pickles of Python", _trusted),
    _ForeignFiles(("*.npz", "*.npy"), "arrays of numpy", _with_numpy),
)


def foreign_kinds(names: Iterable[str]) -> list[tuple[str, str]]:
    """What others' files are among these names, and the first name of each kind."""
    return [(kind.what, name) for kind, name in _found(list(names))]


def _found(names: Sequence[str]) -> Iterator[tuple[_ForeignFiles, str]]:
    rest = list(names)
    for kind in _KINDS:
        mine = [item for item in rest if matches_any(item, kind.names)]
        if mine:
            yield kind, mine[0]
            rest = [item for item in rest if not matches_any(item, (*kind.names, *kind.parts))]


def foreign_error(path: Location) -> FormatError | None:
    """Return the error that says what a directory or a file is; None where that is not known.

    Args:
        path: of what no format can open.
    """
    folder, names = _names(path)
    if _PIPELINE in names:
        return _pipeline(folder)
    if path.is_dir() and ADAPTER in names:
        return FormatError(
            f"this is {adapter_in(folder)}, not a whole model", location=path, hint=merging(path)
        )
    result = list(_found(names))
    if not result:
        return None
    (kind, name), *others = result
    return FormatError(
        f"these are {' and '.join(item.what for item, _ in result)}, which are not read here",
        location=path,
        got=", ".join([name, *(other for _, other in others)]),
        expected="a format that `ckpt formats` lists",
        hint=kind.way(path, folder / name),
    )


def is_pipeline(path: Location) -> bool:
    """Whether a directory is a pipeline of diffusers, whose parts are models."""
    return (path / _PIPELINE).is_file()


def _names(path: Location) -> tuple[Location, list[str]]:
    """Return a directory and the names in it; of a file its own."""
    if not path.is_dir():
        return path.parent, [path.name]
    try:
        return path, [entry.name for entry in path.entries() if not fnmatchcase(entry.name, _RANDOM_STATES)]
    except StorageError:
        return path, []


def _pipeline(folder: Location) -> FormatError:
    """Return the error of a diffusers pipeline: its parts are models that can be inspected one by one."""
    try:
        declared = read_json(folder / _PIPELINE)
    except CheckpointError:
        declared = {}
    parts = [name for name in declared if any((folder / name).glob("*.safetensors"))]
    looked = f": ckpt inspect tree {quote(str(folder / parts[0]))}" if parts else ""
    return FormatError(
        f"this is a pipeline of diffusers ({declared.get('_class_name', 'of unknown class')}), not one model",
        location=folder,
        got=", ".join(parts) or None,
        expected="one checkpoint",
        hint=f"name one of its parts{looked}; of these only language models can be converted to MaxText",
    )
