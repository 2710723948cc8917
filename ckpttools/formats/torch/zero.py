"""DeepSpeed ZeRO checkpoints: float32 weights of stages 1, 2 and 3, from the files of all processes.

Neither torch nor DeepSpeed is needed, and nothing is executed. The optimizer's moments are read only on
request.

In stage 3, nothing in a file identifies its process, and all vectors have the same length. But torch
records the device of a storage, such as `cuda:3`, unless the optimizer was offloaded to the CPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Stored
from ckpttools.array.tree import Leaf, Metadata, Tree
from ckpttools.array.tree import Path as TreePath
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import FormatError, listing
from ckpttools.core.notes import Notes
from ckpttools.formats.base import NOT_A_DIRECTORY, ReadOptions
from ckpttools.formats.read_only import ReadOnlyFormat
from ckpttools.formats.sidecar_files import sidecar_config
from ckpttools.formats.torch.archive import COPY_ALL, MAX_RANKS, SavedFile, checksums_in, open_saved_file
from ckpttools.formats.torch.latest import LATEST, UNIVERSAL, missing_step, step_named
from ckpttools.formats.torch.pickled import Persistent, Record, describe_briefly
from ckpttools.formats.torch.replica_check import ProcessFile, refuse_copies
from ckpttools.formats.torch.tensors import NotReadableError
from ckpttools.formats.torch.zero_model import (
    Groups,
    ModelStates,
    Vector,
    cut_groups,
    cut_ranks,
    dictionary,
    flat_vector,
    groups_of,
    moment,
    moments_of,
    names_of_ranks,
    require_list,
    step_array,
    steps_taken,
)
from ckpttools.stores.checksums import ChecksummedRange
from ckpttools.stores.concurrency import map_concurrently
from ckpttools.stores.location import Location

_OPTIM = re.compile(
    r"(?:bf16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<model>\d+)_optim_states\.pt", re.DOTALL
)
_MODEL = "mp_rank_00_model_states.pt"
_MAX_STAGE = 3
# Keys of the vectors in stages 1 and 2, and in stage 3.
_STAGE_2, _STAGE_3 = "single_partition_of_fp32_groups", "fp32_flat_groups"
LEFT_OUT = Notes(remarks=("the optimizer's moments are left out: the weights are its float32 copies",))
# Key of the optimizer in the tree; no module of a model has this name.
STATE = "optimizer_state"


@dataclass(frozen=True)
class ZeroFormat(ReadOnlyFormat):
    """The `deepspeed-zero` format; implements `ckpttools.formats.base.Format`."""

    name: str = "deepspeed-zero"
    fault_summary: str = "DeepSpeed ZeRO checkpoints that are inconsistent or lack files of processes"

    def mismatch_reason(self, path: Location) -> str | None:
        if not path.is_dir():
            return NOT_A_DIRECTORY
        if _ranks(step_named(path, LATEST)):
            return None
        # If the step was converted to a universal checkpoint, that checkpoint is opened.
        if not (path / UNIVERSAL).is_file() and missing_step(path, LATEST, _ranks):
            return None
        return "no zero_pp_rank_N_mp_rank_00_optim_states.pt in it"

    def open(self, path: Location, options: ReadOptions) -> Tree:
        if error := missing_step(path, LATEST, _ranks):
            raise error
        try:
            return _open(path, step_named(path, LATEST), options)
        except (ValueError, NotReadableError) as error:
            raise _damaged_error(path, str(error)) from error

    def checksums(self, path: Location, options: ReadOptions) -> Iterable[ChecksummedRange]:
        """See `ckpttools.formats.base.SupportsChecksums.checksums`."""
        return checksums_in(step_named(path, LATEST).glob("*.pt"), options.max_header_bytes)

    def checkpoint_location(self, path: Location) -> Location:
        """See `ckpttools.formats.base.SupportsLocation.checkpoint_location`."""
        return path if missing_step(path, LATEST, _ranks) else step_named(path, LATEST)


def _damaged_error(path: Location, got: str) -> FormatError:
    return FormatError("the files of the processes are inconsistent", location=path, got=got, hint=COPY_ALL)


def _ranks(step: Location) -> dict[tuple[int, int], str]:
    """Map (rank, model-parallel rank) to the name of the file with the optimizer state."""
    if not step.is_dir():
        return {}
    result = [
        match for entry in step.entries() if not entry.is_dir and (match := _OPTIM.fullmatch(entry.name))
    ]
    names = {(int(match["rank"]), int(match["model"])): match[0] for match in result}
    if len(names) < len(result):
        duplicates = sorted({match[0] for match in result} - {*names.values()})
        raise FormatError(
            "the directory has files of two saves, one of them in bfloat16:" + listing(duplicates),
            location=step,
            expected="either all or no files with the prefix bf16_",
            hint=COPY_ALL,
        )
    return names


def _open(path: Location, step: Location, options: ReadOptions) -> Tree:
    names = _ranks(step)
    if any(model for _, model in names):
        raise FormatError(
            "the model is split over several processes by tensor or pipeline parallelism",
            location=step,
            expected="mp_rank_00 alone",
            hint="convert it to a universal checkpoint: python -m deepspeed.checkpoint.ds_to_universal",
        )
    ordered = [names[key] for key in sorted(names)]
    optim = map_concurrently(step.store, lambda name: open_saved_file(step / name, options), ordered)
    ranks = [_Rank.of(file) for file in optim]
    stage = _stage(ranks[0].state, step)
    _check_world(step, sorted(rank for rank, _ in names), ranks)
    _refuse_copies(step, {rank.file.location.name: rank.vectors for rank in ranks})
    model = ModelStates(_models(step, stage, len(optim), options), is_cut=stage == _MAX_STAGE)
    _refuse_copies(step, model.frozen_parts())
    model.check_step()
    # In stages 1 and 2, only the first process has a model file.
    refuse_other_devices(zip(optim, model.files, strict=False))
    done = step_array({rank.file.location.name: rank.step for rank in ranks})
    arrays: dict[TreePath, Leaf] = {(name,): array for name, array in _weights(stage, ranks, model).items()}
    mixed = disorder(optim)
    notes = Notes(remarks=(mixed,)) if mixed else Notes()
    if options.with_optimizer:
        moments, declared = _moments(stage, ranks, model)
        arrays |= moments
        notes += declared
        arrays |= {} if done is None else {(STATE, "step"): done}
    else:
        notes += LEFT_OUT
    config = sidecar_config(step) or sidecar_config(path)
    return Tree(arrays, Metadata("deepspeed-zero", config=config, location=str(path), notes=notes))


@dataclass(frozen=True)
class _Rank:
    """The optimizer state that one process saved.

    Attributes:
        file: The file of the process.
        state: The optimizer state.
        vectors: The float32 weights of each group.
    """

    file: SavedFile
    state: Mapping[Any, Any]

    @classmethod
    def of(cls, file: SavedFile) -> _Rank:
        return cls(file, dictionary(file, "optimizer_state_dict"))

    @cached_property
    def vectors(self) -> tuple[Stored, ...]:
        key = _STAGE_3 if _STAGE_3 in self.state else _STAGE_2
        return tuple(flat_vector(item, self.file) for item in require_list(self.state.get(key), key))

    @property
    def groups(self) -> Groups:
        return groups_of(self.state, len(self.vectors))

    @property
    def names(self) -> set[Any]:
        """Names of the parameters that the process records as its own; empty if none are recorded."""
        mappings = self.state.get("param_slice_mappings")
        groups = mappings if isinstance(mappings, list | tuple) else ()
        return {name for group in groups if isinstance(group, dict) for name in group}

    @property
    def step(self) -> Any:
        return steps_taken(self.state, self.groups, self.file)

    def moments(self, name: str) -> tuple[Stored, ...]:
        pairs = zip(self.groups, self.vectors, strict=True)
        return tuple(moment(name, group, vector, self.file) for group, vector in pairs)


def _stage(state: Mapping[Any, Any], step: Location) -> int:
    stage = state.get("zero_stage")
    stage = stage.args[0] if isinstance(stage, Record) and stage.args else stage
    if type(stage) is int and 0 < stage <= _MAX_STAGE:
        return stage
    got = stage if type(stage) is int else describe_briefly(stage)
    raise FormatError("the ZeRO stage is unknown", location=step, got=got, expected="1, 2 or 3")


def _check_world(step: Location, ranks: Sequence[int], saved: Sequence[_Rank]) -> None:
    declared = saved[0].state.get("partition_count")
    counts = declared if isinstance(declared, list) and declared else [declared]
    if any(type(count) is not int for count in counts) or not 0 < max(counts) <= MAX_RANKS:
        raise ValueError("the number of processes is not recorded")
    world = max(counts)
    if ranks != [*range(world)]:
        missing = sorted({*range(world)} - {*ranks})
        lines = [f"rank {rank} is missing" for rank in missing]
        lines += [f"rank {rank} is from another save" for rank in ranks if rank >= world]
        raise FormatError(
            f"{world} processes saved, but there are files of {len(ranks)}:" + listing(lines),
            location=step,
            expected="one file of each process, from one save",
            hint=COPY_ALL,
        )


def _refuse_copies(step: Location, vectors: Mapping[str, Sequence[Stored]]) -> None:
    """Raise an error if two processes have equal weights, since each must have different elements."""
    files: dict[str, ProcessFile] = {}
    for name, parts in vectors.items():
        largest = max(parts, key=lambda item: item.size, default=None)
        if largest is not None and largest.size:
            files[name] = ProcessFile({"": largest}, largest.source, partial(_spans, parts))
    refuse_copies(files, step, COPY_ALL)


def _spans(vectors: Sequence[Stored]) -> set[tuple[int, int]]:
    return {(vector.offset, vector.stored_nbytes) for vector in vectors}


def _models(step: Location, stage: int, world: int, options: ReadOptions) -> list[SavedFile]:
    """Return the files with names and shapes: the first process's, or all in stage 3 (frozen weights)."""
    ranks = range(world) if stage == _MAX_STAGE else ()
    names = [f"zero_pp_rank_{rank}_{_MODEL}" for rank in ranks] or [_MODEL]
    missing = [name for name in names if not (step / name).is_file()]
    if missing:
        raise FormatError(
            f"files with names and shapes are missing:{listing(missing)}", location=step, hint=COPY_ALL
        )
    return map_concurrently(step.store, lambda name: open_saved_file(step / name, options), names)


def _weights(stage: int, ranks: Sequence[_Rank], model: ModelStates) -> dict[str, LazyArray]:
    result = {**model.buffers_and_frozen(), **_cut(stage, ranks, model, [rank.vectors for rank in ranks])}
    result |= model.shared(result)
    return {**result, **model.others(result)} if stage < _MAX_STAGE else result


def _moments(stage: int, ranks: Sequence[_Rank], model: ModelStates) -> tuple[dict[TreePath, Leaf], Notes]:
    """Return each parameter's optimizer moments, and remarks about moments that only some parameters have."""
    names, moments = moments_of([rank.groups for rank in ranks], [rank.vectors for rank in ranks])
    left = f"left out, because only some parameters have it: {', '.join(moments)}"
    result: dict[TreePath, Leaf] = {
        (STATE, parameter, name): array
        for name in names
        for parameter, array in _cut(stage, ranks, model, [rank.moments(name) for rank in ranks]).items()
    }
    return result, Notes(remarks=(left,)) if moments else Notes()


def _cut(
    stage: int, ranks: Sequence[_Rank], model: ModelStates, vectors: Sequence[Sequence[Stored]]
) -> dict[str, LazyArray]:
    """Cut the array of each parameter from the vectors of each process, group by group."""
    if stage == _MAX_STAGE:
        return cut_ranks([Vector(tuple(vector)) for vector in vectors], model.shapes)
    if len({*map(len, vectors)}) > 1:
        raise ValueError("processes have different numbers of groups")
    groups = [Vector(column) for column in zip(*vectors, strict=True)]
    gaps = _gaps(ranks[0].state.get("param_alignment_paddings"))
    result = cut_groups(groups, model.shapes, len(ranks), gaps)
    _refuse_exchanged(ranks, names_of_ranks(groups, model.shapes, gaps))
    return result


def _refuse_exchanged(ranks: Sequence[_Rank], recorded_names_by_rank: Sequence[set[str]]) -> None:
    """Raise ValueError if a process records parameters that belong to another rank."""
    for rank, recorded_names in enumerate(item.names for item in ranks):
        other = next(
            (number for number, names in enumerate(recorded_names_by_rank) if recorded_names == names), rank
        )
        if recorded_names and recorded_names != recorded_names_by_rank[rank] and other != rank:
            raise ValueError(
                f"{ranks[rank].file.location.name} is rank {other}'s file, according to its weights"
            )


def _gaps(value: Any) -> list[list[int]] | None:
    if value is None:
        return None
    groups = value if isinstance(value, list | tuple) else ()
    gaps = [list(item) for item in groups if isinstance(item, list | tuple)]
    if not gaps or any(type(item) is not int or item < 0 for group in gaps for item in group):
        raise ValueError("the paddings of parameters are damaged")
    return gaps


_ACCELERATOR = re.compile(r"(?!cpu)[a-z]+:(?P<index>\d{1,4})")


def device_of(file: SavedFile) -> str | None:
    """Return the only accelerator device of the tensors in a file; None if there are none or several."""
    result = {match[0] for location in _locations(file.value) if (match := _ACCELERATOR.fullmatch(location))}
    return result.pop() if len(result) == 1 else None


def _locations(value: Any) -> Iterator[str]:
    """Yield the devices of all tensors in a value."""
    rest, seen = [value], set[int]()
    while rest:
        each = rest.pop()
        if isinstance(each, Persistent):
            location = each.key[3] if isinstance(each.key, tuple) and len(each.key) > 3 else None
            yield from [location] if isinstance(location, str) else []
        elif isinstance(each, dict | list | tuple | Record) and id(each) not in seen:
            seen.add(id(each))
            inner = each.args if isinstance(each, Record) else each
            rest.extend(inner.values() if isinstance(inner, dict) else inner)


def refuse_other_devices(pairs: Iterable[tuple[SavedFile, SavedFile]]) -> None:
    """Raise ValueError if two files of one process were saved on different devices."""
    for pair in pairs:
        (one, first), (other, second) = ((file.location.name, device_of(file)) for file in pair)
        if first and second and first != second:
            raise ValueError(
                f"{one} was saved on {first} and {other} on {second}: one is the file of another process"
            )


def disorder(files: Sequence[SavedFile]) -> str | None:
    """Describe how devices differ from the order of the processes; None if they match or are unknown.

    Launchers number processes machine by machine or round-robin across machines.
    """
    devices = [device_of(file) for file in files]
    matches = [_ACCELERATOR.fullmatch(device) for device in devices if device]
    order = [int(match["index"]) for match in matches if match]
    machine = 1 + max(order, default=0)
    by_machine = [rank % machine for rank in range(len(files))]
    if len(order) < len(files) or sorted(order) != sorted(by_machine) or order in (by_machine, sorted(order)):
        return None
    first = next(rank for rank, index in enumerate(order) if index != by_machine[rank])
    return (
        f"{files[first].location.name} was saved on {devices[first]}, but processes usually have the order "
        "of their "
        "devices: if files were renamed or exchanged, the weights are mixed up"
    )


FORMAT = ZeroFormat()
