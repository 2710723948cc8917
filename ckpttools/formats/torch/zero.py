"""DeepSpeed's ZeRO checkpoints: the float32 weights of stages 1, 2 and 3, from the files of all processes.

Neither torch nor DeepSpeed is needed, and nothing is executed. Moments of the optimizer are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Stored
from ckpttools.array.tree import Leaf, Metadata, Tree
from ckpttools.array.tree import Path as TreePath
from ckpttools.core.errors import FormatError, listing
from ckpttools.core.notes import Notes
from ckpttools.core.region import Shape
from ckpttools.formats.base import ReadOptions
from ckpttools.formats.torch.directories import DirectoryFormat
from ckpttools.formats.torch.pickled import Record, described
from ckpttools.formats.torch.saved import MOST_RANKS, SavedFile, saved_file
from ckpttools.formats.torch.tensors import NotReadableError, is_tensor, lengths_of
from ckpttools.formats.torch.zero_shards import Shapes, Vector, of_groups, of_ranks, shaped
from ckpttools.formats.weight_files import config_beside
from ckpttools.stores.at_once import at_once
from ckpttools.stores.place import Place

_OPTIM = re.compile(
    r"(?:bf16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<model>\d+)_optim_states\.pt", re.DOTALL
)
_MODEL = "mp_rank_00_model_states.pt"
_LATEST = "latest"
_MOST_STAGE = 3
# Where the vectors are, with stages 1 and 2, and with 3.
_STAGE_2, _STAGE_3 = "single_partition_of_fp32_groups", "fp32_flat_groups"
_HINT = "copy the files of all processes of one save into one directory"


@dataclass(frozen=True)
class ZeroFormat(DirectoryFormat):
    """The `deepspeed-zero` format, as `ckpttools.formats.base.Format` describes it."""

    name: str = "deepspeed-zero"
    looks_for: str = "ZeRO checkpoints of DeepSpeed that lack files of processes or do not add up"

    def why_not(self, path: Place) -> str | None:
        if not path.is_dir():
            return "not a directory"
        return None if _ranks(_step(path)) else "no zero_pp_rank_N_mp_rank_00_optim_states.pt in it"

    def open(self, path: Place, options: ReadOptions) -> Tree:
        try:
            return _opened(path, _step(path), options)
        except (ValueError, NotReadableError) as error:
            raise _damaged(path, str(error)) from error


FORMAT = ZeroFormat()


def _damaged(path: Place, got: str) -> FormatError:
    return FormatError("the files of the processes do not add up", place=path, got=got, hint=_HINT)


def _step(path: Place) -> Place:
    """The directory of the files: `path`, or what its `latest` names."""
    latest = path / _LATEST
    if not latest.is_file():
        return path
    tag = latest.read_bytes()[:4096].decode("utf-8", "replace").strip()
    return path / tag if tag and "/" not in tag and tag not in (".", "..") and "\0" not in tag else path


def _ranks(step: Place) -> dict[tuple[int, int], str]:
    """(rank, model-parallel rank) -> name of the file of its part of the optimizer's state."""
    if not step.is_dir():
        return {}
    found = [match for each in step.entries() if not each.is_dir and (match := _OPTIM.fullmatch(each.name))]
    names = {(int(match["rank"]), int(match["model"])): match[0] for match in found}
    if len(names) < len(found):
        twice = sorted({match[0] for match in found} - {*names.values()})
        raise FormatError(
            "files of two saves lie here, one of them in bfloat16:" + listing(twice),
            place=step,
            wanted="files that all begin with bf16_, or none",
            hint=_HINT,
        )
    return names


def _opened(path: Place, step: Place, options: ReadOptions) -> Tree:
    names = _ranks(step)
    if any(model for _, model in names):
        raise FormatError(
            "the model is cut over several processes by tensor or pipeline parallelism",
            place=step,
            wanted="mp_rank_00 alone",
            hint="make a universal checkpoint of it: python -m deepspeed.checkpoint.ds_to_universal",
        )
    ordered = [names[key] for key in sorted(names)]
    optim = at_once(step.store, lambda name: saved_file(step / name, options), ordered)
    states = [_dictionary(file, "optimizer_state_dict") for file in optim]
    stage = states[0].get("zero_stage")
    stage = stage.args[0] if isinstance(stage, Record) and stage.args else stage
    if type(stage) is not int or not 0 < stage <= _MOST_STAGE:
        got = stage if type(stage) is int else described(stage)
        raise FormatError("the stage of ZeRO is not known", place=step, got=got, wanted="1, 2 or 3")
    _check_world(step, sorted(rank for rank, _ in names), states)
    models = _models(step, stage, len(optim), options)
    leaves = _weights(stage, optim, states, models)
    arrays: dict[TreePath, Leaf] = {(name,): array for name, array in leaves.items()}
    config = config_beside(step) or config_beside(path)
    notes = Notes(remarks=("the optimizer's moments are left out: the weights are its float32 copies",))
    return Tree(arrays, Metadata("deepspeed-zero", config=config, place=str(path), notes=notes))


def _dictionary(file: SavedFile, key: str | None = None) -> dict[Any, Any]:
    value = file.value.get(key) if key is not None and isinstance(file.value, dict) else file.value
    if not isinstance(value, dict):
        raise FormatError(
            f"there is no {key or 'dictionary'} in the file", place=file.place, hint="it is not DeepSpeed's"
        )
    return value


def _check_world(step: Place, ranks: Sequence[int], states: Sequence[Mapping[Any, Any]]) -> None:
    counts = states[0].get("partition_count")
    world = max(counts) if isinstance(counts, list) and counts else counts
    if type(world) is not int or not 0 < world <= MOST_RANKS:
        raise ValueError("how many processes saved is not said")
    if ranks != [*range(world)]:
        missing = sorted({*range(world)} - {*ranks})
        lines = [f"rank {rank} is missing" for rank in missing]
        lines += [f"rank {rank} is of another save" for rank in ranks if rank >= world]
        raise FormatError(
            f"{world} processes saved, and files of {len(ranks)} are here:" + listing(lines),
            place=step,
            wanted="one of each process, and of no other save",
            hint=_HINT,
        )


def _models(step: Place, stage: int, world: int, options: ReadOptions) -> list[SavedFile]:
    """What says names and shapes: of the first process; with stage 3 all, as frozen weights are cut, too."""
    ranks = range(world) if stage == _MOST_STAGE else ()
    names = [f"zero_pp_rank_{rank}_{_MODEL}" for rank in ranks] or [_MODEL]
    missing = [name for name in names if not (step / name).is_file()]
    if missing:
        raise FormatError(
            f"files that say names and shapes are missing:{listing(missing)}", place=step, hint=_HINT
        )
    return at_once(step.store, lambda name: saved_file(step / name, options), names)


def _weights(
    stage: int, optim: Sequence[SavedFile], states: Sequence[Mapping[Any, Any]], models: Sequence[SavedFile]
) -> dict[str, LazyArray]:
    said = _dictionary(models[0])
    _refuse_experts(said, models[0].place)
    shapes = [_shapes(group) for group in _listed(said.get("param_shapes"), "param_shapes")]
    found = {**_buffers(said, models[0]), **_frozen(stage, models)}
    if stage == _MOST_STAGE:
        found |= of_ranks([_vector(*each) for each in zip(states, optim, strict=True)], shapes)
    else:
        gaps = _gaps(states[0].get("param_alignment_paddings"))
        found |= of_groups(_group_vectors(states, optim), shapes, len(optim), gaps)
    shared = said.get("shared_params")
    for alias, name in shared.items() if isinstance(shared, dict) else ():
        if type(alias) is str and type(name) is str and name in found:
            found[alias] = found[name]
    return {**found, **_others(said, models[0], found)} if stage < _MOST_STAGE else found


def _others(said: Mapping[Any, Any], file: SavedFile, found: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    """Tensors of the model that no process trained, which older releases list nowhere: as they are."""
    module = said.get("module")
    kept = module.items() if isinstance(module, dict) else ()
    return {
        name: file.tensor(value)
        for name, value in kept
        if type(name) is str and name not in found and is_tensor(value)
    }


def _refuse_experts(said: Mapping[Any, Any], place: Place) -> None:
    layers = said.get("ds_autoep_layers") or said.get("autoep_layers") or ()
    listed = layers if isinstance(layers, list) else ()
    forms = [each.get("checkpoint_format") for each in listed if isinstance(each, dict)]
    if "zero3_partitioned" in forms:
        raise FormatError(
            "experts are cut over groups of processes of their own (AutoEP), which no file here says",
            place=place,
            hint="make a universal checkpoint of it: python -m deepspeed.checkpoint.ds_to_universal",
        )


def _listed(value: Any, name: str) -> Sequence[Any]:
    if isinstance(value, list | tuple) and value:
        return value
    raise ValueError(f"there is no {name}")


def _shapes(group: Any) -> Shapes:
    named = group.items() if isinstance(group, dict) else ()
    shapes = {name: lengths_of(size) for name, size in named if type(name) is str}
    sound: dict[str, Shape] = {name: size for name, size in shapes.items() if size is not None}
    if not isinstance(group, dict) or len(sound) < len(group):
        raise ValueError("the shapes of parameters are damaged")
    return sound


def _gaps(value: Any) -> list[list[int]] | None:
    if value is None:
        return None
    groups = value if isinstance(value, list | tuple) else ()
    gaps = [list(each) for each in groups if isinstance(each, list | tuple)]
    if not gaps or any(type(each) is not int or each < 0 for group in gaps for each in group):
        raise ValueError("the paddings of parameters are damaged")
    return gaps


def _flat(value: Any, file: SavedFile) -> Stored:
    array = file.tensor(value) if isinstance(value, Record) and is_tensor(value) else None
    if isinstance(array, Stored) and array.ndim == 1:
        return array
    if array is not None and not array.size:
        return Stored((0,), array.dtype, next(iter(file.storages.values())).file, 0)
    raise ValueError(f"{file.place.name}: no flat vector")


def _vector(state: Mapping[Any, Any], file: SavedFile) -> Vector:
    """All that a process has with stage 3: its groups one after the other."""
    groups = _listed(state.get(_STAGE_3), _STAGE_3)
    return Vector(tuple(_flat(each, file) for each in groups))


def _group_vectors(states: Sequence[Mapping[Any, Any]], optim: Sequence[SavedFile]) -> list[Vector]:
    """The vector of each group with stages 1 and 2: the processes' parts one after the other."""
    groups = [_listed(state.get(_STAGE_2), _STAGE_2) for state in states]
    if len({*map(len, groups)}) > 1:
        raise ValueError("processes have other numbers of groups")
    parts = [[_flat(each, file) for each in group] for group, file in zip(groups, optim, strict=True)]
    return [Vector(tuple(column)) for column in zip(*parts, strict=True)]


def _buffers(said: Mapping[Any, Any], file: SavedFile) -> dict[str, LazyArray]:
    """What the model keeps beside its parameters, as it is."""
    module, names = said.get("module"), said.get("buffer_names")
    if not isinstance(names, list | tuple | set):
        _no_model(file)
    kept = module if isinstance(module, dict) else {}
    return {
        name: file.tensor(kept[name]) for name in names if type(name) is str and is_tensor(kept.get(name))
    }


def _no_model(file: SavedFile) -> NoReturn:
    raise ValueError(f"{file.place.name} names no buffers: it is no file of a model's state")


def _frozen(stage: int, models: Sequence[SavedFile]) -> dict[str, LazyArray]:
    """Weights that are not trained, in their own dtype: whole, or with stage 3 cut in equal parts."""
    found: dict[str, LazyArray] = {}
    for name, size in (_dictionary(models[0]).get("frozen_param_shapes") or {}).items():
        shape = lengths_of(size)
        fragments = [_dictionary(file, "frozen_param_fragments").get(name) for file in models]
        records = [each for each in fragments if isinstance(each, Record)]
        if shape is None or len(records) < len(models):
            raise ValueError(f"{name} is frozen, and not all of its parts are here")
        if stage < _MOST_STAGE:
            found[name] = models[0].tensor(records[0])
            continue
        vector = Vector(tuple(_flat(each, file) for each, file in zip(records, models, strict=True)))
        found[name] = shaped([*vector.stretch(0, _count(shape, vector, name))], shape)
    return found


def _count(shape: Shape, vector: Vector, name: str) -> int:
    count = prod(shape)
    if not 0 < count <= vector.size:
        raise ValueError(f"{name} has {count:,} elements, and its parts {vector.size:,}")
    return count
