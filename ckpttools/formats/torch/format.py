"""Reading what `torch.save` wrote: one file, numbered ones with an index, or a directory that holds either.

torch is not needed, and nothing in a file is ever executed: see `ckpttools.formats.torch.pickled`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Leaf, Metadata, Tree, dotted
from ckpttools.array.tree import Path as TreePath
from ckpttools.core.budget import require_room
from ckpttools.core.errors import CheckpointError, FormatError, StorageError
from ckpttools.core.notes import Notes
from ckpttools.formats.base import COMPANIONS, ReadOptions
from ckpttools.formats.torch import archive
from ckpttools.formats.torch.names import is_of_training
from ckpttools.formats.torch.pickled import Record, unpickled
from ckpttools.formats.torch.state import State, state_of
from ckpttools.formats.torch.tensors import StorageRange, lazy_tensor
from ckpttools.formats.weight_files import (
    WeightNames,
    check_index,
    check_once,
    config_beside,
    files_of_index,
    weight_map,
)
from ckpttools.stores.at_once import at_once
from ckpttools.stores.place import Place
from ckpttools.stores.registry import parse

# `optimizer.bin`, `training_args.bin` and others lie beside weights; named by themselves they are read, too.
_NAMES = WeightNames(".bin", "pytorch_model.bin", "*model*.bin", (".pt", ".pth", ".ckpt"))
# Of what a pickle says a Python object is made that takes about so many times its bytes.
_OBJECTS = 12
_MOST_NAMED = 5


@dataclass(frozen=True)
class TorchFormat:
    """The `torch` format, as `ckpttools.formats.base.Format` describes it."""

    name: str = "torch"
    looks_for: str = "files of torch.save that are cut or damaged, or that no program should load"

    def why_not(self, path: Place) -> str | None:
        try:
            found = _NAMES.find(path)
            return _why_no_archive(path) if found.index is None and found.folder != path else None
        except CheckpointError as error:
            if isinstance(error, StorageError) and path.exists():
                raise  # nobody has told what is there
            return error.message

    def open(self, path: Place, options: ReadOptions) -> Tree:
        found = _NAMES.find(path)
        index = found.folder / found.index if found.index is not None else None
        named = weight_map(index) if index is not None else None
        names = files_of_index(found.folder, index, named) if index is not None and named else found.files
        files = [_opened(found.folder / name, options) for name in names]
        check_once([(dotted(at), str(file.place)) for file in files for at in file.state.leaves])
        if index is not None and named is not None:
            there = {dotted(at): file.place.name for file in files for at in file.state.leaves}
            check_index(named, there, index)
        return _tree(path, found.folder, files)

    def companions(self, tree: Tree) -> Place:
        """Beside the weights of a model; of other trees in a directory of their own."""
        place = parse(tree.metadata.place)
        folder = place if place.is_dir() else place.parent
        return folder / COMPANIONS if tree.metadata.config is None else folder

    def faults(self, path: Place, options: ReadOptions) -> Iterable[CheckpointError]:
        for file in _files_below(path):
            try:
                _opened(file, options)
            except CheckpointError as error:
                yield error


FORMAT = TorchFormat()


@dataclass(frozen=True)
class _StateFile:
    """One file with what it holds."""

    place: Place
    state: State


def _why_no_archive(path: Place) -> str | None:
    """Why a file is none of torch.save, in a few words; files of old ones are, and cannot be read."""
    with path.open() as file:
        head = file.read(0, min(len(archive.OLD_MAGIC), file.size))
    if head.startswith(archive.MAGIC) or head == archive.OLD_MAGIC:
        return None
    return "it does not begin as files of torch.save do"


def _files_below(path: Place) -> Sequence[Place]:
    try:
        found = _NAMES.find(path)
        names = found.files or sorted({*weight_map(found.folder / str(found.index)).values()})
    except CheckpointError:
        return ()  # `open` says it
    return [found.folder / name for name in names if (found.folder / name).is_file()]


def _opened(place: Place, options: ReadOptions) -> _StateFile:
    file = place.open()
    try:
        if file.read(0, min(len(archive.OLD_MAGIC), file.size)) == archive.OLD_MAGIC:
            raise FormatError(
                "the file is of torch.save before version 1.6, a row of pickles without an index",
                place=place,
                hint="where you trust who wrote it, load it with torch.load and save it again",
            )
        found = archive.opened(file, options.max_header_bytes)
        require_room(len(found.storages), _OBJECTS * len(found.pickled), place)
        names = list(found.storages)
        spans = at_once(place.store, found.range_of, names)
    finally:
        file.close()
    ranges = {name: StorageRange(file, *span) for name, span in zip(names, spans, strict=True)}
    value = unpickled(found.pickled, is_of_training, f"{place}: {found.root}/data.pkl")

    def tensor(record: Record) -> LazyArray:
        return lazy_tensor(record, ranges)

    return _StateFile(place, state_of(value, len(found.pickled), tensor, str(place)))


def _tree(path: Place, folder: Place, files: Sequence[_StateFile]) -> Tree:
    leaves: dict[TreePath, Leaf] = {}
    scalars: set[TreePath] = set()
    others: dict[TreePath, str] = {}
    for file in files:
        leaves |= file.state.leaves
        scalars |= file.state.scalars
        others |= file.state.others
    config = config_beside(folder)
    metadata = Metadata(
        FORMAT.name, config=config, scalars=frozenset(scalars), place=str(path), notes=left_out(others)
    )
    return Tree(leaves, metadata)


def left_out(others: Mapping[TreePath, str]) -> Notes:
    """What is said of objects that are neither arrays nor numbers nor texts: path -> what it is."""
    if not others:
        return Notes()
    named = [f"{dotted(path)} ({kind})" for path, kind in list(others.items())[:_MOST_NAMED]]
    more = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
    return Notes(remarks=(f"left out, as they are neither arrays nor numbers: {', '.join(named)}{more}",))
