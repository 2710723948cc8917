"""What DeepSpeed's optimizer keeps of each parameter, in vectors that are cut as those of the weights are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Constant, Stored
from ckpttools.core.dtypes import DTYPES
from ckpttools.formats.torch.pickled import Record
from ckpttools.formats.torch.saved import SavedFile
from ckpttools.formats.torch.tensors import is_tensor
from ckpttools.formats.torch.zero_model import check_one_step, flat_vector

_STEP = "step"
_MOST_STEPS = 1 << 62
_BASE, _INNER = "base_optimizer_state", "optimizer_state_dict"

Groups = Sequence[Mapping[Any, Any]]
"""What an optimizer keeps of each group of a process, in order."""


def groups_of(state: Mapping[Any, Any], count: int) -> Groups:
    """What the optimizer of a process keeps of each of its `count` groups; empty ones before the first step.

    Stages 1 and 2 have it under one name, stage 3 under another; checkpoints that are called elastic have a
    list instead of what `torch.optim` calls its state.
    """
    kept = state.get(_BASE, state.get(_INNER))
    result = kept.get("state") if isinstance(kept, dict) else kept
    numbered = dict(enumerate(result)) if isinstance(result, list | tuple) else result
    groups = numbered if isinstance(numbered, dict) else {}
    each = [groups.get(number) for number in range(count)]
    return [one if isinstance(one, dict) else {} for one in each]


def moments_of(ranks: Sequence[Groups], weights: Sequence[Sequence[Stored]]) -> tuple[list[str], list[str]]:
    """Return names of what is kept of all parameters, and of what is kept of some alone.

    Args:
        ranks: of each process what it keeps of each group.
        weights: of each process the vector of each group.
    """
    pairs = [item for one in zip(ranks, weights, strict=True) for item in zip(*one, strict=True)]
    kept = dict.fromkeys(name for group, vector in pairs if vector.size for name in group if name != _STEP)
    names = [name for name in kept if type(name) is str]
    whole = [name for name in names if all(_may_be(group.get(name), vector) for group, vector in pairs)]
    some = [name for name in names if any(_is_kept(group.get(name)) for group, _ in pairs)]
    return whole, [name for name in some if name not in whole]


def _may_be(value: Any, vector: Stored) -> bool:
    return not vector.size or _is_kept(value)


def _is_kept(value: Any) -> bool:
    return isinstance(value, Record) and is_tensor(value)


def moment(name: str, group: Mapping[Any, Any], vector: Stored, file: SavedFile) -> Stored:
    """Return the vector of a moment, as long as that of the weights: what is behind is padding.

    Raises:
        ValueError: it is shorter.
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
    """Return the number of steps that an optimizer has taken; None where it says nothing.

    That of the first group that has one: optimizers keep one of each, and count all alike.
    """
    kept = state.get(_BASE, state.get(_INNER))
    settings = kept.get("param_groups") if isinstance(kept, dict) else None
    declared = [*groups, *(settings if isinstance(settings, list | tuple) else ())]
    steps = [item[_STEP] for item in declared if isinstance(item, dict) and item.get(_STEP) is not None]
    return as_step(steps[0] if steps else state.get("base_optimizer_state_step"), file)


def as_step(value: Any, file: SavedFile) -> int | None:
    """Return the number of steps that a value in a file is, a number or a tensor of one; None for others."""
    if isinstance(value, Record) and is_tensor(value):
        array = file.tensor(value)
        value = array.read().item() if array.size == 1 else None
    return int(value) if type(value) in (int, float) and 0 <= value < _MOST_STEPS else None


def step_array(steps: Mapping[str, int | None]) -> LazyArray | None:
    """Return the number of steps as an array; None where nothing is said.

    Args:
        steps: name of the file of each process or parameter -> what `as_step` says.

    Raises:
        ValueError: they differ.
    """
    check_one_step(steps)
    step = next(iter(steps.values()))
    return None if step is None else Constant((), DTYPES["int64"], step.to_bytes(8, "little"))
