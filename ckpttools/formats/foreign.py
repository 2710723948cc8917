"""What other programs write and no format here reads: named for what they are, with the next step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from shlex import quote

from ckpttools.core.errors import CheckpointError, FormatError, StorageError
from ckpttools.formats.adapters import ADAPTER, MERGE, adapter_in
from ckpttools.formats.json_file import read_json
from ckpttools.stores.place import Place

_PIPELINE = "model_index.json"


@dataclass(frozen=True, slots=True)
class _ForeignFiles:
    """Files of another program.

    Attributes:
        names: patterns of their names.
        what: they are.
        way: what a user can do, by the path that was named and the file that tells.
    """

    names: Sequence[str]
    what: str
    way: Callable[[Place, Place], str]


def _fetched(path: Place, file: Place) -> str:
    named = path.as_local()
    fresh = quote(f"{named.removesuffix(path.suffix) if path == file else named}-safetensors")
    command = f"hf download REPO --include '*.safetensors' '*.json' 'tokenizer*' --local-dir {fresh}"
    return f"fetch the model's own weights: {command}"


def _begun(path: Place, file: Place) -> str:
    return (
        "copy .metadata, too: torch writes it last; where there is none, the save has not ended: take another"
    )


_KINDS = (
    _ForeignFiles(("*.gguf",), "files of llama.cpp (GGUF)", _fetched),
    _ForeignFiles(("*.distcp",), "parts of a distributed checkpoint of PyTorch without .metadata", _begun),
    _ForeignFiles(("tf_model*.h5", "flax_model*.msgpack"), "weights of TensorFlow or Flax", _fetched),
)


def foreign_error(path: Place) -> FormatError | None:
    """The error that says what a directory or a file is; None where that is not known.

    Args:
        path: of what no format can open.
    """
    folder, names = _names(path)
    if _PIPELINE in names:
        return _pipeline(folder)
    if path.is_dir() and ADAPTER in names:
        return FormatError(f"this is {adapter_in(folder)}, not a whole model", place=path, hint=MERGE)
    for kind in _KINDS:
        name = next((each for each in names if any(fnmatchcase(each, one) for one in kind.names)), None)
        if name is not None:
            return FormatError(
                f"these are {kind.what}, which are not read here",
                place=path,
                got=name,
                wanted="a format that `ckpt formats` lists",
                hint=kind.way(path, folder / name),
            )
    return None


def _names(path: Place) -> tuple[Place, list[str]]:
    """A directory and the names in it; of a file its own."""
    if not path.is_dir():
        return path.parent, [path.name]
    try:
        return path, [each.name for each in path.entries()]
    except StorageError:
        return path, []


def _pipeline(folder: Place) -> FormatError:
    """A pipeline's parts are models, each of which can be looked at."""
    try:
        said = read_json(folder / _PIPELINE)
    except CheckpointError:
        said = {}
    parts = [name for name in said if any((folder / name).glob("*.safetensors"))]
    looked = f": ckpt inspect tree {quote(str(folder / parts[0]))}" if parts else ""
    return FormatError(
        f"this is a pipeline of diffusers ({said.get('_class_name', 'of unknown class')}), not one model",
        place=folder,
        got=", ".join(parts) or None,
        wanted="one checkpoint",
        hint=f"name one of its parts{looked}; of these only language models can be converted to MaxText",
    )
