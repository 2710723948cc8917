"""Reading safetensors: one file, shards with an index, or a directory that holds either.

Importing this takes neither numpy nor the safetensors package, and opening reads headers only.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn

from ckpttools.array.nodes import Stored
from ckpttools.array.tree import Metadata, Tree
from ckpttools.array.tree import Path as TreePath
from ckpttools.core.budget import parse_size, require_room
from ckpttools.core.errors import CheckpointError, ConfigError, FormatError, StorageError, listing
from ckpttools.core.options import Option
from ckpttools.formats import flat
from ckpttools.formats.base import COMPANIONS, ReadOptions, Target, Writer
from ckpttools.formats.safetensors.header import (
    Header,
    header_length,
    json_object,
    parse_header,
    refuse_disguise,
    without_duplicates,
)
from ckpttools.stores.at_once import at_once
from ckpttools.stores.base import File, is_inside, occurrences
from ckpttools.stores.place import Place
from ckpttools.stores.registry import parse

_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"
_SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors", re.DOTALL)
_INDEX_HINT = "fetch the index again, or remove it: the files themselves say which tensors they hold"
HELP = """Write any checkpoint as safetensors: the same arrays under the same names, no model known.

SRC may be a file, an item, a step or a run directory. DST is a directory; it gets model.safetensors, or
model-00001-of-00003.safetensors and so on with model.safetensors.index.json.

What safetensors has no place for (keys of lists, empty nodes, strings, custom metadata, the step) goes into
the metadata of the first file, and comes back when that is converted or inspected.

Example:
  ckpt convert to-safetensors ~/maxtext/llama ~/llama --dtype bfloat16
"""
MAX_SHARD = Option(
    "max_shard_size",
    parse_size,
    # What huggingface_hub takes (MAX_SHARD_SIZE); transformers takes 50 GB from version 5 on.
    "5GB",
    "Bytes of tensors in one file at most, unless one alone has more; as huggingface_hub splits them.",
    "SIZE",
)
SEPARATOR = Option("separator", (".", "/"), ".", "What joins the keys of a path to the name of a tensor.")


@dataclass(frozen=True)
class SafetensorsFormat:
    """The `safetensors` format, as `ckpttools.formats.base.Format` describes it."""

    name: str = "safetensors"
    options: tuple[Option, ...] = (MAX_SHARD, SEPARATOR)
    help: str = HELP
    looks_for: str = "Git LFS pointers, truncated or damaged safetensors, header and size"

    def why_not(self, path: Place) -> str | None:
        try:
            _find(path)
        except CheckpointError as error:
            if isinstance(error, StorageError) and path.exists():
                raise  # nobody has told what is there
            return error.message
        return None

    def open(self, path: Place, options: ReadOptions) -> Tree:
        found = _find(path)
        _require_room(found, options)
        named = None if found.index is None else _weight_map(found.folder / found.index)
        names = found.files if named is None else _shards(found, named)
        files = at_once(found.folder.store, lambda name: _opened(found.folder, name, options), names)
        _check_once(files)
        if named is not None:
            _check_index(named, files, found.folder / str(found.index))
        return _tree(path, found.folder, files)

    def owns(self, name: str) -> bool:
        from ckpttools.formats.safetensors.own import owns

        return owns(name)

    def strangers(self, directory: Place, tree: Tree) -> Iterable[str]:
        from ckpttools.formats.safetensors.own import strangers

        return strangers(directory, _read_in(directory))

    def faults(self, path: Place, options: ReadOptions) -> Iterable[CheckpointError]:
        from ckpttools.formats.safetensors.faults import faults

        return faults(path)

    def companions(self, tree: Tree) -> Place:
        """Beside the weights of a model; of other trees in a directory of their own."""
        place = parse(tree.metadata.place)
        folder = place if place.is_dir() else place.parent
        return folder / COMPANIONS if tree.metadata.config is None else folder

    def writer(self, target: Target, /, *, max_shard_size: int, separator: str) -> Writer:
        from ckpttools.formats.safetensors.write import SafetensorsWriter

        return SafetensorsWriter(max_shard_size, separator)


FORMAT = SafetensorsFormat()


@dataclass(frozen=True)
class _WeightsLocation:
    """Where the weights are: file names in a folder, or an index that names them."""

    folder: Place
    files: tuple[str, ...] = ()
    index: str | None = None


@dataclass(frozen=True)
class _WeightFile:
    """One file with its header; `name` is relative to the folder."""

    name: str
    source: File
    header: Header


def _find(path: Place) -> _WeightsLocation:
    """What of this format lies at `path`.

    Raises:
        FormatError: nothing, or more than one thing.
        StorageError: there is nothing there at all, or it cannot be accessed.
    """
    _look_at(path)
    if path.is_dir():
        return _find_in(path)
    if path.name.endswith(_INDEX_SUFFIX):
        return _WeightsLocation(path.parent, index=path.name)
    if path.name.endswith(_SUFFIX):
        return _WeightsLocation(path.parent, (path.name,))
    raise FormatError(
        f"the name ends neither in {_SUFFIX} nor in {_INDEX_SUFFIX}",
        place=path,
        hint="name a safetensors file, its index or the directory that holds them",
    )


def _look_at(path: Place) -> None:
    """Raises StorageError if there is nothing at what the user names, or it cannot be accessed."""
    path.stat()


def _find_in(folder: Place) -> _WeightsLocation:
    # transformers takes model.safetensors where there is one and looks at no index beside it
    # (PreTrainedModel.from_pretrained); whoever opens the directory means the same weights.
    if _is_file(folder / "model.safetensors"):
        return _WeightsLocation(folder, ("model.safetensors",))
    names = _listed(folder)
    indexes = [name for name in names if name.endswith(_INDEX_SUFFIX)]
    if "model.safetensors.index.json" in indexes:
        return _WeightsLocation(folder, index="model.safetensors.index.json")
    if indexes:
        return _WeightsLocation(folder, index=_only(indexes, folder))
    files = [name for name in names if name.endswith(_SUFFIX)]
    if not files:
        raise FormatError(
            f"no {_SUFFIX} file in the directory", place=folder, hint="name the directory of the weights"
        )
    _check_numbers(files, folder)
    return _WeightsLocation(folder, tuple(files))


def _read_in(folder: Place) -> set[str]:
    """Names of the one series of weights that is read in a directory, and of its index."""
    found = _find_in(folder)
    if found.index is not None:
        return {found.index, *_weight_map(folder / found.index).values()}
    # Without an index all files are read; another series than the first may still be another model's.
    return {name for name in found.files if _series(name) == _series(found.files[0])}


def _series(name: str) -> tuple[str, str]:
    """The stem of a file and how many it says that there are."""
    match = _SHARD_NAME.fullmatch(name)
    return (match["stem"], match["count"]) if match else (name.removesuffix(_SUFFIX), "")


def _require_room(found: _WeightsLocation, options: ReadOptions) -> None:
    """Refuses more tensors than fit into the memory allowed; an index names all those of its files."""
    if found.index is not None:
        index = (found.folder / found.index).open()
        require_room(occurrences(b".safetensors", index), 2 * index.size, index.path)
        index.close()
        return

    def sizes(name: str) -> tuple[int, int]:
        with (found.folder / name).open() as source:
            length = header_length(source, options.max_header_bytes)
            return occurrences(b'"data_offsets"', source, 8 + length), length

    tensors, nbytes = map(sum, zip(*at_once(found.folder.store, sizes, found.files), strict=True))
    require_room(tensors, nbytes, found.folder)


def _is_file(path: Place) -> bool:
    try:
        return path.is_file()
    except StorageError:
        # Of a disk neither "yes" nor "no", as of a name that is too long. Elsewhere nobody has answered.
        if path.store.scheme != "file":
            raise
        return False


def _listed(folder: Place) -> list[str]:
    """Names of what may be files of ours, sorted; hidden ones are other programs' (`._model.safetensors`)."""
    return [entry.name for entry in folder.entries() if entry.name[0] != "." and not entry.is_dir]


def _only(indexes: Sequence[str], folder: Place) -> str:
    if len(indexes) == 1:
        return indexes[0]
    raise FormatError(
        "more than one index in the directory",
        place=folder,
        got=", ".join(indexes),
        wanted="one",
        hint=f"name the one you mean: {folder / indexes[0]}",
    )


def _check_numbers(files: Iterable[str], folder: Place) -> None:
    """Without an index only the names (`model-00002-of-00003`) can tell that a file is missing."""
    groups: dict[tuple[str, str], set[str]] = defaultdict(set)
    for match in filter(None, map(_SHARD_NAME.fullmatch, files)):
        groups[match["stem"], match["count"]].add(match["number"])
    missing = [
        f"{stem}-{number}-of-{count}{_SUFFIX}"
        for (stem, count), numbers in groups.items()
        for number in _missing_numbers(numbers, count)
    ]
    if missing:
        _refuse_missing(missing, folder, "all files that the others' names count")


def _missing_numbers(numbers: set[str], count: str) -> list[str]:
    """Numbers without a file. Most count from one; a file with number zero shows that all count from zero."""
    width = len(next(iter(numbers)))
    first = 0 if any(int(number) == 0 for number in numbers) else 1
    # A count beyond any real one is somebody's own scheme of names.
    if int(count) > 100_000:
        return []
    wanted = (str(number).zfill(width) for number in range(first, first + int(count)))
    return [number for number in wanted if number not in numbers]


def _refuse_missing(missing: Sequence[str], place: Place, wanted: str) -> NoReturn:
    raise FormatError(
        f"{len(missing):,} of the weight files {'is' if len(missing) == 1 else 'are'} missing:"
        f"{listing(missing)}",
        place=place,
        wanted=wanted,
        hint="the download is not complete: fetch these files into the directory",
    )


def _json_file(path: Place, kind: type[CheckpointError], hint: str, unique: bool = True) -> dict[str, Any]:
    """The JSON object in a file; `unique` refuses an object that names a key twice."""
    raw = path.read_bytes()
    if not raw.lstrip().startswith((b"{", b"[")):
        refuse_disguise(raw[:1024], str(path), kind, "JSON")
    return json_object(raw, str(path), kind, hint, without_duplicates if unique else None)


def _weight_map(path: Place) -> dict[str, str]:
    """Tensor name to file name. The index's `metadata.total_size` is often wrong and not looked at."""
    found = _json_file(path, FormatError, _INDEX_HINT).get("weight_map")
    if isinstance(found, dict) and found and all(type(name) is str for name in found.values()):
        # Few files have many tensors.
        return {tensor: sys.intern(name) for tensor, name in found.items()}
    raise FormatError(
        "the index has no usable weight_map",
        place=path,
        got="none" if found is None else f"{type(found).__name__}, empty or with values that are not strings",
        wanted='{"weight_map": {tensor: file, …}, …}',
        hint=_INDEX_HINT,
    )


def _shards(found: _WeightsLocation, named: Mapping[str, str]) -> tuple[str, ...]:
    """The files that the index names, sorted, which is how they are numbered."""
    names = tuple(sorted(set(named.values())))
    index = found.folder / str(found.index)
    for name in names:
        _check_inside(name, index)
    # Symbolic links are followed: in the Hugging Face cache every file is one, to a blob elsewhere.
    there = at_once(found.folder.store, lambda name: _is_file(found.folder / name), names)
    missing = [name for name, is_there in zip(names, there, strict=True) if not is_there]
    if missing:
        _refuse_missing(missing, index, "all files that the index names")
    return names


def _check_inside(name: str, index: Place) -> None:
    if is_inside(name):
        return
    raise FormatError(
        f"the index names a file outside of its directory: {name!r}",
        place=index,
        got=repr(name),
        wanted="the name of a file beside the index",
        hint="do not trust this index; fetch the checkpoint from its source again",
    )


def _opened(folder: Place, name: str, options: ReadOptions) -> _WeightFile:
    source = (folder / name).open()
    try:
        header = parse_header(source, options.max_header_bytes)
        source.remember_head(header.data_start)
        return _WeightFile(name, source, header)
    finally:
        source.close()  # a checkpoint may have more shards than a process may have open files


def _check_once(files: Sequence[_WeightFile]) -> None:
    """Checks that no tensor is in two files."""
    names = [entry.name for file in files for entry in file.header.entries]
    # Counting takes ten times as long.
    if len({*names}) < len(names):
        twice = {name for name, count in Counter(names).items() if count > 1}
        places: dict[str, list[str]] = defaultdict(list)
        for file in files:
            for entry in file.header.entries:
                if entry.name in twice:
                    places[entry.name].append(str(file.source.path))
        raise FormatError(
            "the same tensor in two files:"
            + listing([f"{name}: {' and '.join(where)}" for name, where in places.items()]),
            wanted="each tensor in one file",
            hint="move files of another checkpoint out of the directory, or name one file",
        )


def _check_index(named: Mapping[str, str], files: Iterable[_WeightFile], index: Place) -> None:
    """Checks that the index and the shards, which have each tensor once, name the same, in the same files."""
    there = {entry.name: file.name for file in files for entry in file.header.entries}
    if there == named:
        return
    raise FormatError(
        "the index and its files do not hold the same tensors"
        + _differing("named by the index, not in the file", named.items() - there.items())
        + _differing("in the file, not named by the index", there.items() - named.items()),
        place=index,
        wanted="every tensor of the files in the index, with its file, and no other",
        hint=_INDEX_HINT,
    )


def _differing(what: str, pairs: Iterable[tuple[str, str]]) -> str:
    lines = [f"{tensor} ({file})" for tensor, file in sorted(pairs)]
    return f"\n  {what} ({len(lines)}):{listing(lines)}" if lines else ""


def _tree(path: Place, folder: Place, files: Sequence[_WeightFile]) -> Tree:
    leaves = dict(chain.from_iterable(map(_leaves, files)))
    custom = dict(chain.from_iterable(file.header.metadata.items() for file in files))
    described = custom.pop(flat.ENTRY, None)
    tree = Tree(leaves, Metadata(FORMAT.name, custom=custom, config=_config(folder), place=str(path)))
    # One shard of several has the description of all of them: its arrays go by their names alone.
    if described is None or _is_one_of_several(path):
        return tree
    return flat.restored(tree, described)


def _is_one_of_several(path: Place) -> bool:
    match = _SHARD_NAME.fullmatch(path.name)
    return match is not None and path.is_file() and int(match["count"]) > 1


def _leaves(file: _WeightFile) -> Iterator[tuple[TreePath, Stored]]:
    start = file.header.data_start
    for entry in file.header.entries:
        yield (entry.name,), Stored(entry.shape, entry.dtype, file.source, start + entry.begin)


def _config(folder: Place) -> dict[str, Any] | None:
    """The model's configuration beside the weights, or None where there is none.

    Raises:
        ConfigError: what is there is not a JSON object, or a link to nothing, as a cache leaves it.
        StorageError: it cannot be read.
    """
    path = folder / "config.json"
    if not path.lexists():
        return None
    hint = "correct the file, fetch it again, or move it away to do without"
    if path.is_link() and not _is_file(path):
        raise ConfigError(
            "the configuration is a link to nothing", place=path, got=path.readlink(), hint=hint
        )
    # Duplicate keys pass, as they do in transformers.
    return _json_file(path, ConfigError, hint, unique=False)
