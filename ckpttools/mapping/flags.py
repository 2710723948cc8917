"""Flags: booleans that decide which rows a model has."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import islice

from ckpttools.array.lazy import LazyArray
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import ConfigError
from ckpttools.core.message_terms import option
from ckpttools.mapping.axes import Side
from ckpttools.mapping.row import Row


@dataclass(frozen=True, slots=True)
class Flag:
    """A boolean that decides which rows a model has.

    Attributes:
        value: Whether the flag is set.
        source: The origin of the value.
        remedy: What the user can do if the arrays contradict the flag.
        open_key: A key that exists in both cases, if no other key decides; else None.
        by_arrays: Whether Hugging Face arrays that show the flag override the source, because the flag then
            describes their files, not the model.
    """

    value: bool
    source: str
    remedy: str = ""
    open_key: str | None = None
    by_arrays: bool = False


def inferred_flags(
    names: Sequence[str],
    sides: Sequence[tuple[Row, Side]],
    keys: Collection[str],
    sizes: Mapping[str, int] | None = None,
) -> dict[str, Flag]:
    """Infer flags that the configuration does not decide from the existing keys.

    A flag is open (see `Flag.open_key`) if rows with and without it have the same keys.

    Args:
        names: The names of the flags.
        sides: Each row with the side whose keys are looked up.
        keys: The existing keys.
        sizes: Axis -> length, for known axes.
    """
    return {name: _infer_flag(name, sides, keys, sizes) for name in names}


def _infer_flag(
    name: str,
    sides: Sequence[tuple[Row, Side]],
    keys: Collection[str],
    sizes: Mapping[str, int] | None,
) -> Flag:
    having = {side.key.first(sizes) for row, side in sides if name in row.when.split()}
    without_flag = {side.key.first(sizes) for row, side in sides if name in row.unless.split()}
    if not (having or without_flag):
        return Flag(False, "")
    common = sorted(having & without_flag & set(keys))
    if common and not (having ^ without_flag) & set(keys):
        return Flag(False, "", open_key=common[0])
    for candidates, is_set in ((having - without_flag, True), (without_flag - having, False)):
        present = sorted(candidates & set(keys))
        if present:
            return Flag(is_set, f"{present[0]}, which exists")
    return Flag(not having, f"{sorted(having or without_flag)[0]}, which does not exist")


def observed_flags(
    names: Sequence[str],
    sides: Sequence[tuple[Row, Side]],
    arrays: Mapping[str, LazyArray],
    sizes: Mapping[str, int],
) -> dict[str, Flag]:
    """Infer flags from array names or, if names do not differ, from array shapes.

    Args:
        names: The names of the flags.
        sides: Each row with the side whose keys are looked up.
        arrays: The existing arrays.
        sizes: Axis -> length, for known axes.
    """
    by_names = inferred_flags(names, sides, arrays, sizes)
    decided = {name: flag for name, flag in by_names.items() if flag.open_key is None}
    return {**decided, **_infer_from_shapes(by_names.keys() - decided.keys(), sides, arrays, sizes)}


def _infer_from_shapes(
    names: Collection[str],
    sides: Sequence[tuple[Row, Side]],
    arrays: Mapping[str, LazyArray],
    sizes: Mapping[str, int],
) -> dict[str, Flag]:
    """Infer each flag for which an array's shape fits only rows with it or only rows without it."""
    flags = {}
    for name in sorted(names):
        possible: dict[str, set[bool]] = {}
        for row, side in sides:
            key = side.key.first(sizes)
            if name in row.flags and key in arrays and _fits(side, arrays[key], sizes):
                possible.setdefault(key, set()).add(name in row.when.split())
        decided = (key for key, values in sorted(possible.items()) if len(values) == 1)
        for key in islice(decided, 1):
            flags[name] = Flag(possible[key].pop(), f"{key}, which is {list(arrays[key].shape)}")
    return flags


def _fits(side: Side, array: LazyArray, sizes: Mapping[str, int]) -> bool:
    known = sizes.keys() | set(side.key.axes)
    return set(side.axes) <= known and side.shape(sizes) == array.shape


def refuse_open(flags: Mapping[str, Flag], location: str) -> None:
    """Refuse a model with an open flag.

    Raises:
        ConfigError: A flag is open.
    """
    for name, flag in flags.items():
        if flag.open_key is not None:
            like = option("like", "HF_DIR")
            raise ConfigError(
                f"the arrays do not show whether {_FLAG_DESCRIPTIONS.get(name, f'the model is {name}')}",
                location=location,
                got=f"{flag.open_key}, which exists in both cases",
                expected="the model's config.json",
                hint=f"pass the directory of the original model with {like}{_option_hint(name)}",
            )


# Descriptions of flags for messages to the user.
_FLAG_DESCRIPTIONS = {"interleaved": "rotary pairs are interleaved or in halves"}


def _option_hint(name: str) -> str:
    """Return the option that sets a flag; "" if there is none."""
    if name != "interleaved":
        return ""
    return (
        f"; or set the layout with {option('rope_layout', 'interleaved')}, or "
        f"{option('rope_layout', 'halves')}"
    )
