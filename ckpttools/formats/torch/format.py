"""Read `torch.save` files: one file, numbered files with an index, or a directory of either.

torch is not needed, and nothing in a file is ever executed; see `ckpttools.formats.torch.unpickling`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ckpttools.array.tree import Leaf, Metadata, Tree, dotted
from ckpttools.array.tree import Path as TreePath
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, FormatError, listing
from ckpttools.core.notes import Notes
from ckpttools.formats.base import ReadOptions
from ckpttools.formats.read_only import ReadOnlyFormat, left_out
from ckpttools.formats.sidecar_files import sidecar_config
from ckpttools.formats.torch import archive
from ckpttools.formats.torch.archive import open_saved_file
from ckpttools.formats.torch.state import State, state_of
from ckpttools.formats.weight_files import WeightNames, reason
from ckpttools.stores.checksums import ChecksummedRange
from ckpttools.stores.location import Location, require_file_error

# `optimizer.bin`, `training_args.bin` and similar files are next to weights; they are read only if passed by
# name.
_NAMES = WeightNames(".bin", "pytorch_model.bin", "*model*.bin", (".pt", ".pth", ".ckpt"))


@dataclass(frozen=True)
class TorchFormat(ReadOnlyFormat):
    """The `torch` format; implements `ckpttools.formats.base.Format`."""

    name: str = "torch"
    fault_summary: str = "torch.save files that are truncated, damaged or unsafe to load"

    def mismatch_reason(self, path: Location) -> str | None:
        try:
            result = _NAMES.find(path)
            return _archive_mismatch(path) if result.index is None and result.folder != path else None
        except CheckpointError as error:
            return reason(error, path)

    def open(self, path: Location, options: ReadOptions) -> Tree:
        result = _NAMES.find(path)
        files = [_open_state_file(result.folder / name, options) for name in result.names]
        for file in files:
            _check_names(file)
        # As in transformers, tensors in later files replace those in earlier ones.
        notes = result.check_as_loaded(
            [
                (dotted(at), name)
                for name, file in zip(result.names, files, strict=True)
                for at in file.state.leaves
            ],
            lambda name: map(dotted, _open_state_file(result.folder / name, options).state.leaves),
        )
        return _build_tree(path, result.folder, files, notes)

    def faults(self, path: Location, options: ReadOptions) -> Iterable[CheckpointError]:
        for file in _files_below(path):
            try:
                _open_state_file(file, options)
            except CheckpointError as error:
                yield error

    def checksums(self, path: Location, options: ReadOptions) -> Iterable[ChecksummedRange]:
        """See `ckpttools.formats.base.SupportsChecksums.checksums`."""
        return archive.checksums_in(_files_below(path), options.max_header_bytes)


FORMAT = TorchFormat()


@dataclass(frozen=True)
class _StateFile:
    """A torch.save file with its contents."""

    location: Location
    state: State


def _archive_mismatch(path: Location) -> str | None:
    """Return why a file is not from torch.save; None if it is, even if it is too old to be read."""
    with path.open() as file:
        known = archive.archive_kind(file)
    return None if known else "it does not start like a torch.save file"


def _files_below(path: Location) -> Sequence[Location]:
    try:
        result = _NAMES.find(path)
        names = result.files or sorted({*(result.named or {}).values()})
    except CheckpointError as error:
        require_file_error(error, path)
        return ()  # `open` reports the error.
    return [result.folder / name for name in names if (result.folder / name).is_file()]


def _open_state_file(location: Location, options: ReadOptions) -> _StateFile:
    saved = open_saved_file(location, options)
    return _StateFile(location, state_of(saved.value, saved.nbytes, saved.tensor, str(location)))


def _check_names(file: _StateFile) -> None:
    """Reject keys that become equal when joined by dots: `{"a": {"b": …}, "a.b": …}`."""
    counts = Counter(dotted(at) for at in file.state.leaves)
    duplicates = [name for name, count in counts.items() if count > 1]
    if duplicates:
        raise FormatError(
            f"two values of the file have the same name:{listing(duplicates)}",
            location=file.location,
            expected="names that are unique after joining keys by dots",
            hint="if you trust its author, save only the weights: torch.save(model.state_dict(), FILE)",
        )


def _build_tree(
    path: Location, folder: Location, files: Sequence[_StateFile], remarks: tuple[str, ...]
) -> Tree:
    leaves: dict[TreePath, Leaf] = {}
    scalars: set[TreePath] = set()
    others: dict[TreePath, str] = {}
    for file in files:
        # A nested key and a dotted key can have the same name.
        names = {dotted(at) for at in file.state.leaves}
        leaves = {at: leaf for at, leaf in leaves.items() if dotted(at) not in names} | file.state.leaves
        scalars |= file.state.scalars
        others |= file.state.others
    config = sidecar_config(folder)
    notes = left_out(others) + Notes(remarks=remarks)
    metadata = Metadata(
        FORMAT.name, config=config, scalars=frozenset(scalars), location=str(path), notes=notes
    )
    return Tree(leaves, metadata)
