"""Files of each process of a mesh, such as `model_world_size_8_rank_3.pt`, which verl and SkyRL write."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, NoReturn

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Metadata, Tree, dotted
from ckpttools.array.tree import Path as TreePath
from ckpttools.core import message_terms as wording
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, UsageError, listing
from ckpttools.core.notes import Notes
from ckpttools.core.region import Region
from ckpttools.core.text import plural, sample_names
from ckpttools.formats.base import NOT_A_DIRECTORY, ReadOptions
from ckpttools.formats.pieced import Piece, assemble_boxes
from ckpttools.formats.read_only import ReadOnlyFormat, left_out
from ckpttools.formats.sidecar_files import sidecar_config
from ckpttools.formats.torch.archive import COPY_ALL, MAX_RANKS, SavedFile, checksums_in, open_saved_file
from ckpttools.formats.torch.pickled import Record
from ckpttools.formats.torch.replica_check import Twins
from ckpttools.formats.torch.state import LocalPart, State, is_distributed, local_part, state_of
from ckpttools.formats.torch.tensors import NotReadableError
from ckpttools.stores.checksums import ChecksummedRange
from ckpttools.stores.concurrency import map_concurrently
from ckpttools.stores.location import Location
from ckpttools.stores.registry import parse

_RANK = re.compile(r"model_world_size_(?P<count>\d+)_rank_(?P<rank>\d+)\.pt", re.DOTALL)
# Directory of verl's configuration and tokenizer.
_MODEL_DIRECTORY = "huggingface"
# Key of the learning-rate schedule, which records the step.
_EXTRA = "extra_state_world_size_{count}_rank_{rank}.pt"


@dataclass(frozen=True)
class RanksFormat(ReadOnlyFormat):
    """The `torch-ranks` format; implements `ckpttools.formats.base.Format`."""

    name: str = "torch-ranks"
    fault_summary: str = "files of PyTorch processes that are missing or inconsistent"
    rank_files: str = "model_world_size_N_rank_R.pt, as verl and SkyRL save them"

    def mismatch_reason(self, path: Location) -> str | None:
        if not path.is_dir():
            return NOT_A_DIRECTORY
        return None if _files(path) else "no model_world_size_N_rank_R.pt in it"

    def open(self, path: Location, options: ReadOptions) -> Tree:
        return _open(path, options)

    def checksums(self, path: Location, options: ReadOptions) -> Iterable[ChecksummedRange]:
        """See `ckpttools.formats.base.SupportsChecksums.checksums`."""
        return checksums_in(path.glob("*.pt"), options.max_header_bytes)

    def sidecars(self, tree: Tree) -> Location:
        model_directory = parse(tree.metadata.location) / _MODEL_DIRECTORY
        return model_directory if model_directory.is_dir() else super().sidecars(tree)


FORMAT = RanksFormat()


@dataclass
class _RankShards:
    """The parts of one tensor, by rank."""

    parts: dict[int, LocalPart] = field(default_factory=dict)

    @property
    def mesh(self) -> list[int]:
        """The lengths of the mesh, inferred from the coordinates."""
        coordinates = [part.coordinate for part in self.parts.values()]
        return [1 + max(column) for column in zip(*coordinates, strict=True)]

    @property
    def twins(self) -> Iterator[tuple[int, int]]:
        """Pairs of ranks that have the same part."""
        first: dict[Region, int] = {}
        mesh = self.mesh
        for rank, part in self.parts.items():
            known = first.setdefault(part.box(mesh), rank)
            if known != rank:
                yield known, rank

    def whole(self) -> LazyArray:
        """Assemble the tensor; raise ValueError or NotReadableError if the parts are incomplete."""
        kinds = {(part.shape, part.dtype, len(part.coordinate)) for part in self.parts.values()}
        if len(kinds) > 1:
            raise ValueError("processes do not agree on its shape, dtype or mesh")
        ((shape, dtype, _),) = kinds
        # If boxes are equal, the last one wins. The order is reversed so that the preferred process, which is
        # first in `parts`, wins.
        mesh = self.mesh
        pieces = [Piece(part.box(mesh), part.array) for part in reversed(self.parts.values())]
        return assemble_boxes(shape, dtype, pieces)


def _files(folder: Location) -> dict[int, tuple[str, int]]:
    """Map each rank to the name of its file and the number of ranks in that name."""
    matches = (_RANK.fullmatch(entry.name) for entry in folder.entries() if not entry.is_dir)
    return {int(match["rank"]): (match[0], int(match["count"])) for match in matches if match}


def _open(path: Location, options: ReadOptions) -> Tree:
    files = dict(sorted(_files(path).items()))
    counts = {count for _, count in files.values()}
    if len(counts) > 1:
        raise FormatError(
            "the directory has files of several saves",
            location=path,
            got=f"world sizes {', '.join(map(str, sorted(counts)))}",
            expected="files of one save",
            hint="move the others away",
        )
    count = counts.pop()
    if count > MAX_RANKS or max(files) >= count:
        raise FormatError(
            "the file names have an invalid number of processes", location=path, got=files[max(files)][0]
        )
    locations = [path / name for name, _ in files.values()]
    saved = map_concurrently(path.store, lambda location: open_saved_file(location, options), locations)
    missing_text = _describe_missing(count, sorted({*range(count)} - {*files}))
    _check_step(path, [_EXTRA.format(count=count, rank=rank) for rank in files], options)
    return _tree(
        path, _order_by_preference(dict(zip(files, saved, strict=True)), options), missing_text, options
    )


def _order_by_preference(saved: Mapping[int, SavedFile], options: ReadOptions) -> dict[int, SavedFile]:
    """Return the files in order of preference for replicated values."""
    unknown = sorted({*options.prefer_rank} - {*saved})
    if unknown:
        raise UsageError(
            f"process {unknown[0]} has no file",
            got=wording.option("prefer_rank", unknown[0]),
            expected=f"one of {sample_names(list(map(str, sorted(saved))))}",
        )
    return {rank: saved[rank] for rank in dict.fromkeys((*options.prefer_rank, *saved))}


def _check_step(path: Location, names: Sequence[str], options: ReadOptions) -> None:
    """Raise FormatError if the files record different step counts."""
    existing = [name for name in names if (path / name).is_file()]
    result = map_concurrently(path.store, lambda name: _step(path / name, options), existing)
    steps = {name: step for name, step in zip(existing, result, strict=True) if step is not None}
    if len({*steps.values()}) > 1:
        lines = [f"{name}: step {step}" for name, step in steps.items()]
        raise FormatError("files of several steps:" + listing(lines), location=path, hint=COPY_ALL)


def _step(location: Location, options: ReadOptions) -> int | None:
    """Return the step count of a process; None if it is unknown."""
    try:
        value = open_saved_file(location, options).value
    except FormatError:
        return None
    schedule = value.get("lr_scheduler") if isinstance(value, dict) else None
    step = schedule.get("last_epoch") if isinstance(schedule, dict) else None
    return step if type(step) is int else None


def _tree(
    path: Location, saved: Mapping[int, SavedFile], missing_text: str | None, options: ReadOptions
) -> Tree:
    spread: dict[TreePath, _RankShards] = {}
    plain: dict[int, State] = {}
    faults: list[str] = []
    for rank, file in saved.items():
        rest = {}
        for name, value in _state_dict(file).items():
            if is_distributed(value):
                _gather(spread, name, value, rank, file, faults)
            else:
                rest[name] = value
        plain[rank] = state_of(rest, file.nbytes, file.tensor, str(file.location))
    merged, duplicates = _merge_plain(plain)
    if len(saved) > 1 and not spread:
        raise FormatError(
            "no tensor in these files records its position in the complete tensor",
            location=path,
            expected="distributed tensors (DTensor) of torch 2.2 or later",
            hint="save a full state dict, or with torch.distributed.checkpoint",
        )
    for at, item in spread.items():
        if at in merged.leaves:
            faults.append(f"{dotted(at)}: some processes have a part of it, others the complete tensor")
        try:
            merged.leaves[at] = item.whole()
            arrays = {rank: part.array for rank, part in item.parts.items()}
            duplicates += [Twins(dotted(at), pair, (arrays[pair[0]], arrays[pair[1]])) for pair in item.twins]
        except (ValueError, NotReadableError) as error:
            faults.append(f"{dotted(at)}: {error}")
    unlike, decided = _replica_differences(path, duplicates, options)
    if faults and missing_text:
        raise _incomplete(path, missing_text, len(faults))
    if faults or unlike:
        _refuse(path, len(saved), _describe_duplicates(spread) if faults else "", faults, unlike)
    config = sidecar_config(path) or sidecar_config(path / _MODEL_DIRECTORY)
    notes, scalars = left_out(merged.others), frozenset(merged.scalars)
    metadata = Metadata(
        FORMAT.name, config=config, scalars=scalars, location=str(path), notes=notes + decided
    )
    return Tree({at: leaf for at, leaf in merged.leaves.items() if at != ()}, metadata)


def _replica_differences(
    path: Location, duplicates: Sequence[Twins], options: ReadOptions
) -> tuple[dict[str, int], Notes]:
    """Return the differences between replicas with a rank for each, and remarks about the user's choice."""
    problems = map_concurrently(path.store, Twins.problem, duplicates)
    result = [(item, problem) for item, problem in zip(duplicates, problems, strict=True) if problem]
    taken: dict[int, dict[str, None]] = {}
    for item, _ in result:
        taken.setdefault(item.ranks[0], {})[item.what] = None
    remarks = (
        f"process {rank} was preferred: its values of {plural(len(names), 'tensor')} are used where "
        f"other processes have different values ({sample_names(names)})"
        for rank, names in taken.items()
        if rank in options.prefer_rank
    )
    unlike = {problem: item.ranks[0] for item, problem in result if item.ranks[0] not in options.prefer_rank}
    return unlike, Notes(remarks=tuple(remarks))


def _state_dict(file: SavedFile) -> dict[Any, Any]:
    if isinstance(file.value, dict):
        return file.value
    raise FormatError(
        "the file holds no tensors by name",
        location=file.location,
        got=type(file.value).__name__,
        hint="save model.state_dict() on each process",
    )


def _gather(
    spread: dict[TreePath, _RankShards],
    name: Any,
    value: Record,
    rank: int,
    file: SavedFile,
    faults: list[str],
) -> None:
    try:
        part = local_part(value, file.storages)
    except NotReadableError as error:
        faults.append(f"{name}, rank {rank}: {error}")
        return
    spread.setdefault((name,), _RankShards()).parts[rank] = part


def _merge_plain(plain: Mapping[int, State]) -> tuple[State, list[Twins]]:
    """Return unsharded values from the first process, and their replicas on other processes."""
    merged, owners, duplicates = State(), dict[TreePath, int](), list[Twins]()
    for rank, one in plain.items():
        for at, leaf in one.leaves.items():
            known, owner = merged.leaves.setdefault(at, leaf), owners.setdefault(at, rank)
            if owner != rank and isinstance(leaf, LazyArray) and isinstance(known, LazyArray):
                duplicates.append(Twins(dotted(at), (owner, rank), (known, leaf)))
        merged.scalars |= one.scalars
        merged.others |= one.others
    return merged, duplicates


def _describe_missing(count: int, missing: Sequence[int]) -> str | None:
    """Describe the missing files, judged by the names of the others."""
    if not missing:
        return None
    ranks = sample_names(list(map(str, missing)))
    those = f"those of ranks {ranks} are" if len(missing) > 1 else f"that of rank {ranks} is"
    return f"{count:,} processes saved, and of their files {those} missing"


def _incomplete(path: Location, missing_text: str, tensors: int) -> FormatError:
    message = f"{missing_text}: {plural(tensors, 'tensor')} cannot be assembled"
    return FormatError(message, location=path, expected="one file of each process", hint=COPY_ALL)


def _describe_duplicates(spread: Mapping[TreePath, _RankShards]) -> str:
    """Describe the files that are duplicates, if they can be recognized."""
    try:
        # Replicas share their part of some tensors; copied files share all of them.
        duplicates = [{*item.twins} for item in spread.values()]
    except (ValueError, NotReadableError):
        return ""
    pairs = set.intersection(*duplicates) if duplicates else set()
    return f"; those of ranks {min(pairs)[0]} and {min(pairs)[1]} have the same parts" if pairs else ""


def _refuse(
    path: Location, count: int, missing_text: str, faults: Sequence[str], unlike: Mapping[str, int]
) -> NoReturn:
    owner = next(iter(unlike.values()), 0)
    preferred = wording.option("prefer_rank", owner)
    converted = wording.action("convert", "SRC", "DST", format="safetensors", prefer_rank=owner)
    hint = (
        f"; if process {owner} is known to be right, {preferred} uses its values: "
        f"run {converted} first if a command lacks this option"
    )
    raise FormatError(
        f"tensors cannot be assembled from the files of {count} processes{missing_text}:"
        + listing([*faults, *unlike]),
        location=path,
        expected="complete parts of each tensor, and equal values in replicas",
        hint=COPY_ALL + (hint if unlike and not faults else ""),
    )
