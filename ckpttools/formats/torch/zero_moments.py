"""The optimizer's moments in DeepSpeed checkpoints, in vectors that are split like the weights."""

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
"""The moments of each group of a process, in order."""


def groups_of(state: Mapping[Any, Any], count: int) -> Groups:
    """Return the moments of each of a process's `count` groups, which are empty before the first step.

    Stages 1 and 2 use one key, and stage 3 another. "Elastic" checkpoints have a list instead of the state of
    `torch.optim`.
    """
    kept = state.get(_BASE, state.get(_INNER))
    result = kept.get("state") if isinstance(kept, dict) else kept
    numbered = dict(enumerate(result)) if isinstance(result, list | tuple) else result
    groups = numbered if isinstance(numbered, dict) else {}
    each = [groups.get(number) for number in range(count)]
    return [one if isinstance(one, dict) else {} for one in each]


def moments_of(ranks: Sequence[Groups], weights: Sequence[Sequence[Stored]]) -> tuple[list[str], list[str]]:
    """Return the names of moments that all parameters have, and the names that only some have.

    Args:
        ranks: The moments of each group, by process.
        weights: The weight vector of each group, by process.
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
    kept = state.get(_BASE, state.get(_INNER))
    settings = kept.get("param_groups") if isinstance(kept, dict) else None
    declared = [*groups, *(settings if isinstance(settings, list | tuple) else ())]
    steps = [item[_STEP] for item in declared if isinstance(item, dict) and item.get(_STEP) is not None]
    return as_step(steps[0] if steps else state.get("base_optimizer_state_step"), file)


def as_step(value: Any, file: SavedFile) -> int | None:
    """Convert a number or a tensor to a step count; return None for other values."""
    if isinstance(value, Record) and is_tensor(value):
        array = file.tensor(value)
        value = array.read().item() if array.size == 1 else None
    return int(value) if type(value) in (int, float) and 0 <= value < _MOST_STEPS else None


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
