"""A model in DeepSpeed's files: shapes, buffers, shared weights, and what its flat vectors contain.

ZeRO stores the float32 weights of a group of parameters in one vector that is split across the processes.
In stages 1 and 2, the vector of a group is split as a unit. In stage 3, each parameter is split
separately and padded to equal parts. The layout is that of DeepSpeed 0.19,
`deepspeed/utils/zero_to_fp32.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import prod
from typing import Any

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Constant, Stored
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES
from ckpttools.core.errors import FormatError
from ckpttools.core.region import Shape, ceil_div
from ckpttools.formats.pieced import reshape_pieces
from ckpttools.formats.torch.archive import SavedFile
from ckpttools.formats.torch.pickled import Record
from ckpttools.formats.torch.tensors import is_tensor, torch_lengths


@dataclass(frozen=True)
class ModelStates:
    """The model states that are stored next to the optimizer's vectors.

    Attributes:
        files: The files of all processes if frozen weights are split, otherwise only of the first process.
        is_cut: Whether frozen weights are split across the processes (stage 3).
    """

    files: Sequence[SavedFile]
    is_cut: bool

    @property
    def _state(self) -> dict[Any, Any]:
        return dictionary(self.files[0])

    @property
    def shapes(self) -> list[Shapes]:
        """Shapes of the parameters of each group, in the order of the group's vector."""
        return [_shapes(group) for group in require_list(self._state.get("param_shapes"), "param_shapes")]

    def buffers_and_frozen(self) -> dict[str, LazyArray]:
        """Return buffers and untrained weights in their own dtypes."""
        self._refuse_experts()
        return {**self._buffers(), **self._frozen()}

    @property
    def names(self) -> set[Any]:
        """Names of all weights of the model."""
        mappings = (self._state.get(item) for item in ("module", "frozen_param_shapes", "shared_params"))
        named = (*self.shapes, *(item for item in mappings if isinstance(item, dict)))
        return {name for item in named for name in item}

    def frozen_parts(self) -> dict[str, list[Stored]]:
        """Return each file's parts of frozen weights by file name, if frozen weights are split."""
        return {
            file.location.name: [
                flat_vector(item, file) for item in fragments.values() if isinstance(item, Record)
            ]
            for file in (self.files if self.is_cut else ())
            if isinstance(fragments := dictionary(file).get("frozen_param_fragments"), dict)
        }

    def shared(self, arrays: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
        """Return parameters that share the values of others, under their own names."""
        declared = self._state.get("shared_params")
        aliases = declared.items() if isinstance(declared, dict) else ()
        return {
            alias: arrays[name]
            for alias, name in aliases
            if type(alias) is str and type(name) is str and name in arrays
        }

    def others(self, arrays: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
        """Return the model's untrained tensors that older releases do not list."""
        module = self._state.get("module")
        entries = module.items() if isinstance(module, dict) else ()
        return {
            name: self.files[0].tensor(value)
            for name, value in entries
            if type(name) is str and name not in arrays and is_tensor(value)
        }

    def check_step(self) -> None:
        """Raise ValueError if the processes saved after different step counts."""
        steps = {file.location.name: dictionary(file).get("global_steps") for file in self.files}
        check_one_step({name: step if type(step) is int else None for name, step in steps.items()})

    def _buffers(self) -> dict[str, LazyArray]:
        """Return the model's buffers, unchanged."""
        module, names = self._state.get("module"), self._state.get("buffer_names")
        file = self.files[0]
        if not isinstance(names, list | tuple | set):
            raise ValueError(f"{file.location.name} lists no buffers: it is not a model state file")
        entries = module if isinstance(module, dict) else {}
        return {
            name: file.tensor(entries[name])
            for name in names
            if type(name) is str and is_tensor(entries.get(name))
        }

    def _frozen(self) -> dict[str, LazyArray]:
        """Return untrained weights in their own dtypes: complete or, in stage 3, split into equal parts."""
        result: dict[str, LazyArray] = {}
        for name, shape in _shapes(self._state.get("frozen_param_shapes") or {}).items():
            fragments = [dictionary(file, "frozen_param_fragments").get(name) for file in self.files]
            records = [fragment for fragment in fragments if isinstance(fragment, Record)]
            if len(records) < len(self.files):
                raise ValueError(f"{name} is frozen, but some of its parts are missing")
            if not self.is_cut:
                result[name] = self.files[0].tensor(records[0])
                continue
            vector = Vector(
                tuple(flat_vector(item, file) for item, file in zip(records, self.files, strict=True))
            )
            result[name] = reshape_pieces([*vector.stretch(0, _count(shape, vector, name))], shape)
        return result

    def _refuse_experts(self) -> None:
        layers = self._state.get("ds_autoep_layers") or self._state.get("autoep_layers") or ()
        entries = layers if isinstance(layers, list) else ()
        forms = [entry.get("checkpoint_format") for entry in entries if isinstance(entry, dict)]
        if "zero3_partitioned" in forms:
            raise FormatError(
                "experts are split over separate process groups (AutoEP), which no file records",
                location=self.files[0].location,
                hint="convert it to a universal checkpoint: python -m deepspeed.checkpoint.ds_to_universal",
            )


def check_one_step(steps: Mapping[str, int | None]) -> None:
    """Raise ValueError if files have different step counts, given by file name."""
    (first, expected), *_ = steps.items()
    other = next((name for name, step in steps.items() if step != expected), None)
    if other is not None:
        raise ValueError(f"{first} is from step {expected}, but {other} from step {steps[other]}")


def dictionary(file: SavedFile, key: str | None = None) -> dict[Any, Any]:
    """Return a dictionary in a file: the full content, or the value of a key.

    Raises:
        FormatError: The value is not a dictionary.
    """
    value = file.value.get(key) if key is not None and isinstance(file.value, dict) else file.value
    if not isinstance(value, dict):
        raise FormatError(
            f"the file has no {key or 'dictionary'}",
            location=file.location,
            hint="the file is not from DeepSpeed",
        )
    return value


def require_list(value: Any, name: str) -> Sequence[Any]:
    """Check that a value is a non-empty list and return it; raise ValueError otherwise."""
    if isinstance(value, list | tuple) and value:
        return value
    raise ValueError(f"there is no {name}")


def flat_vector(value: Any, file: SavedFile) -> Stored:
    """Return the vector that a record in a file describes; raise ValueError if it is not a vector."""
    array = file.tensor(value) if isinstance(value, Record) and is_tensor(value) else None
    if isinstance(array, Stored) and array.ndim == 1:
        return array
    if array is not None and not array.size:
        return Stored((0,), array.dtype, next(iter(file.storages.values())).file, 0)
    raise ValueError(f"{file.location.name}: not a flat vector")


def _shapes(group: Any) -> Shapes:
    named = group.items() if isinstance(group, dict) else ()
    shapes = {name: torch_lengths(size) for name, size in named if type(name) is str}
    known_sizes: dict[str, Shape] = {name: size for name, size in shapes.items() if size is not None}
    if not isinstance(group, dict) or len(known_sizes) < len(group):
        raise ValueError("the shapes of parameters are damaged")
    return known_sizes


def _count(shape: Shape, vector: Vector, name: str) -> int:
    count = prod(shape)
    if not 0 < count <= vector.size:
        raise ValueError(f"{name} has {count:,} elements, but its parts {vector.size:,}")
    return count


_STEP = "step"
_MAX_STEPS = 1 << 62
_BASE, _INNER = "base_optimizer_state", "optimizer_state_dict"

Groups = Sequence[Mapping[Any, Any]]
"""The moments of each group of a process, in order."""


def groups_of(state: Mapping[Any, Any], count: int) -> Groups:
    """Return the moments of each of a process's `count` groups, which are empty before the first step.

    Stages 1 and 2 use one key, and stage 3 another. "Elastic" checkpoints have a list instead of the state of
    `torch.optim`.
    """
    base_state = state.get(_BASE, state.get(_INNER))
    result = base_state.get("state") if isinstance(base_state, dict) else base_state
    numbered = dict(enumerate(result)) if isinstance(result, list | tuple) else result
    groups = numbered if isinstance(numbered, dict) else {}
    ordered_groups = [groups.get(number) for number in range(count)]
    return [one if isinstance(one, dict) else {} for one in ordered_groups]


def moments_of(ranks: Sequence[Groups], weights: Sequence[Sequence[Stored]]) -> tuple[list[str], list[str]]:
    """Return the names of moments that all parameters have, and the names that only some have.

    Args:
        ranks: The moments of each group, by process.
        weights: The weight vector of each group, by process.
    """
    pairs = [item for one in zip(ranks, weights, strict=True) for item in zip(*one, strict=True)]
    moment_names = dict.fromkeys(
        name for group, vector in pairs if vector.size for name in group if name != _STEP
    )
    names = [name for name in moment_names if type(name) is str]
    complete = [name for name in names if all(_may_be(group.get(name), vector) for group, vector in pairs)]
    kept_names = [name for name in names if any(_is_kept(group.get(name)) for group, _ in pairs)]
    return complete, [name for name in kept_names if name not in complete]


def _may_be(value: Any, vector: Stored) -> bool:
    return not vector.size or _is_kept(value)


def _is_kept(value: Any) -> bool:
    return isinstance(value, Record) and is_tensor(value)


def moment(name: str, group: Mapping[Any, Any], vector: Stored, file: SavedFile) -> Stored:
    """Return the vector of a moment, cut to the length of the weights because the rest is padding.

    Raises:
        ValueError: The vector is shorter than the weights.
    """
    if not vector.size:
        return vector
    result = flat_vector(group.get(name), file)
    if result.size < vector.size:
        raise ValueError(
            f"{file.location.name}: {name} has {result.size:,} elements, weights {vector.size:,}"
        )
    return replace(result, shape=vector.shape)


def steps_taken(state: Mapping[Any, Any], groups: Groups, file: SavedFile) -> int | None:
    """Return the step count of an optimizer; None if it is unknown.

    The count is taken from the first group that has one, because optimizers count all groups equally.
    """
    base_state = state.get(_BASE, state.get(_INNER))
    settings = base_state.get("param_groups") if isinstance(base_state, dict) else None
    values = [*groups, *(settings if isinstance(settings, list | tuple) else ())]
    steps = [item[_STEP] for item in values if isinstance(item, dict) and item.get(_STEP) is not None]
    return as_step(steps[0] if steps else state.get("base_optimizer_state_step"), file)


def as_step(value: Any, file: SavedFile) -> int | None:
    """Convert a number or a tensor to a step count; return None for other values."""
    if isinstance(value, Record) and is_tensor(value):
        array = file.tensor(value)
        value = array.read().item() if array.size == 1 else None
    return int(value) if type(value) in (int, float) and 0 <= value < _MAX_STEPS else None


def step_array(steps: Mapping[str, int | None]) -> LazyArray | None:
    """Return the step count as an array; None if it is unknown.

    Args:
        steps: The results of `as_step` by name of the process's or parameter's file.

    Raises:
        ValueError: The step counts differ.
    """
    check_one_step(steps)
    step = next(iter(steps.values()))
    return None if step is None else Constant((), DTYPES["int64"], step.to_bytes(8, "little"))


Shapes = Mapping[str, Shape]


@dataclass(frozen=True, slots=True)
class Vector:
    """Consecutive stored vectors viewed as one; ranges are read from the files that contain them."""

    parts: tuple[Stored, ...]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    def stretch(self, start: int, count: int) -> Iterator[Stored]:
        """Yield `count` elements from `start`, in one piece per file."""
        ends = accumulate(part.size for part in self.parts)
        for part, end in zip(self.parts, ends, strict=True):
            a, b = max(start, end - part.size), min(start + count, end)
            if b > a:
                at = part.offset + (a - (end - part.size)) * part.dtype.itemsize
                yield replace(part, shape=(b - a,), offset=at)


def cut_groups(
    groups: Sequence[Vector], shapes: Sequence[Shapes], world: int, gaps: Sequence[Sequence[int]] | None
) -> dict[str, LazyArray]:
    """Return the parameters of stages 1 and 2, which are consecutive in the vector of their group.

    Args:
        groups: The complete vector of each group.
        shapes: Shapes of the parameters of each group, in order.
        world: Number of processes.
        gaps: The padding after each parameter of each group, if recorded.

    Raises:
        ValueError: A vector and its parameters have different numbers of elements.
    """
    if len(groups) != len(shapes) or (gaps is not None and [*map(len, gaps)] != [*map(len, shapes)]):
        raise ValueError(f"{len(groups)} vectors for {len(shapes)} groups of parameters")
    result: dict[str, LazyArray] = {}
    for number, (vector, named) in enumerate(zip(groups, shapes, strict=True)):
        padding = gaps[number] if gaps is not None else [0] * len(named)
        at = 0
        for (name, shape), gap in zip(named.items(), padding, strict=True):
            result[name] = _taken(vector, at, shape, name)
            at += prod(shape) + gap
        # Vectors are padded to a multiple of twice the number of processes.
        if ceil_div(at, 2 * world) != ceil_div(vector.size, 2 * world):
            raise ValueError(f"group {number} has {vector.size:,} elements, but its parameters {at:,}")
    return result


def names_of_ranks(
    groups: Sequence[Vector], shapes: Sequence[Shapes], gaps: Sequence[Sequence[int]] | None
) -> list[set[str]]:
    """Return the names of the parameters that the parts of each process overlap.

    Args:
        groups: As for `cut_groups`, with a part for each process.
        shapes, gaps: As for `cut_groups`.
    """
    names_by_rank: list[set[str]] = [set() for _ in groups[0].parts]
    for number, (vector, named) in enumerate(zip(groups, shapes, strict=True)):
        ends = [0, *accumulate(part.size for part in vector.parts)]
        padding = gaps[number] if gaps is not None else [0] * len(named)
        at = 0
        for (name, shape), gap in zip(named.items(), padding, strict=True):
            for rank, (start, stop) in enumerate(pairwise(ends)):
                if max(at, start) < min(at + prod(shape), stop):
                    names_by_rank[rank].add(name)
            at += prod(shape) + gap
    return names_by_rank


def cut_ranks(ranks: Sequence[Vector], shapes: Sequence[Shapes]) -> dict[str, LazyArray]:
    """Return the parameters of stage 3: equal parts of each on all processes, the last one padded.

    Args:
        ranks: The complete vector of each process.
        shapes: Shapes of the parameters of each group, in order.

    Raises:
        ValueError: As for `cut_groups`.
    """
    world, at = len(ranks), 0
    result: dict[str, LazyArray] = {}
    for named in shapes:
        for name, shape in named.items():
            result[name] = _gather(ranks, at, shape, name)
            at += ceil_div(prod(shape), world)
    wrong = [number for number, vector in enumerate(ranks) if vector.size != at]
    if wrong:
        raise ValueError(
            f"rank {wrong[0]} has {ranks[wrong[0]].size:,} elements, but its parts of the parameters {at:,}"
        )
    return result


def _taken(vector: Vector, at: int, shape: Shape, name: str) -> LazyArray:
    count = prod(shape)
    if at + count > vector.size:
        raise ValueError(f"{name} ends at element {at + count:,} of a vector of {vector.size:,}")
    if not count:
        return Constant(shape, vector.parts[0].dtype, bytes(vector.parts[0].dtype.itemsize))
    return reshape_pieces([*vector.stretch(at, count)], shape)


def _gather(ranks: Sequence[Vector], at: int, shape: Shape, name: str) -> LazyArray:
    count = prod(shape)
    part = ceil_div(count, len(ranks))
    if not count:
        return Constant(shape, ranks[0].parts[0].dtype, bytes(ranks[0].parts[0].dtype.itemsize))
    pieces: list[Stored] = []
    for rank, vector in enumerate(ranks):
        own = min(part, max(0, count - rank * part))
        if at + own > vector.size:
            raise ValueError(f"{name} ends at element {at + own:,} of rank {rank}'s {vector.size:,}")
        pieces += vector.stretch(at, own)
    return reshape_pieces(pieces, shape)
