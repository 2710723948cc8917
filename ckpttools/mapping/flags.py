"""Flags: the yes and no that decide which rows a model has."""

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
    """A yes or no that decides which rows a model has.

    Attributes:
        value: whether it is set.
        source: who says so.
        remedy: what a user can do where the arrays are not as it says.
        open_key: a key that is there whether it is set or not, where nothing else decides; else None.
        by_arrays: whether Hugging Face arrays decide, where they show it, and not who says so: it is of their
            files, not of the model.
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
    """The flags that no configuration decides, inferred from the keys that are there.

    A flag is open, `open_key` of it, where rows with and without it have the same keys.

    Args:
        names: of the flags.
        sides: each row with the side whose keys are looked for.
        keys: what is there.
        sizes: axis -> length, of those that are known.
    """
    return {name: _inferred(name, sides, keys, sizes) for name in names}


def _inferred(
    name: str,
    sides: Sequence[tuple[Row, Side]],
    keys: Collection[str],
    sizes: Mapping[str, int] | None,
) -> Flag:
    having = {side.key.first(sizes) for row, side in sides if name in row.when.split()}
    lacking = {side.key.first(sizes) for row, side in sides if name in row.unless.split()}
    if not (having or lacking):
        return Flag(False, "")
    common = sorted(having & lacking & set(keys))
    if common and not (having ^ lacking) & set(keys):
        return Flag(False, "", open_key=common[0])
    for candidates, there in ((having - lacking, True), (lacking - having, False)):
        result = sorted(candidates & set(keys))
        if result:
            return Flag(there, f"{result[0]}, which is there")
    return Flag(not having, f"{sorted(having or lacking)[0]}, which is not there")


def observed_flags(
    names: Sequence[str],
    sides: Sequence[tuple[Row, Side]],
    arrays: Mapping[str, LazyArray],
    sizes: Mapping[str, int],
) -> dict[str, Flag]:
    """The flags that arrays show by their names or, where those are the same either way, by their shapes.

    Args:
        names: of the flags.
        sides: each row with the side whose keys are looked for.
        arrays: what is there.
        sizes: axis -> length, of those that are known.
    """
    result = inferred_flags(names, sides, arrays, sizes)
    shown = {name: flag for name, flag in result.items() if flag.open_key is None}
    return {**shown, **_by_shapes(result.keys() - shown.keys(), sides, arrays, sizes)}


def _by_shapes(
    names: Collection[str],
    sides: Sequence[tuple[Row, Side]],
    arrays: Mapping[str, LazyArray],
    sizes: Mapping[str, int],
) -> dict[str, Flag]:
    """Each flag of which an array has the shape of a row with it and of none without it, or the reverse."""
    flags = {}
    for name in sorted(names):
        fitting: dict[str, set[bool]] = {}
        for row, side in sides:
            key = side.key.first(sizes)
            if name in row.flags and key in arrays and _fits(side, arrays[key], sizes):
                fitting.setdefault(key, set()).add(name in row.when.split())
        shown = (key for key, values in sorted(fitting.items()) if len(values) == 1)
        for key in islice(shown, 1):
            flags[name] = Flag(fitting[key].pop(), f"{key}, which is {list(arrays[key].shape)}")
    return flags


def _fits(side: Side, array: LazyArray, sizes: Mapping[str, int]) -> bool:
    known = sizes.keys() | set(side.key.axes)
    return set(side.axes) <= known and side.shape(sizes) == array.shape


def refuse_open(flags: Mapping[str, Flag], location: str) -> None:
    """Refuses a model of which a flag is open.

    Raises:
        ConfigError: a flag is open.
    """
    for name, flag in flags.items():
        if flag.open_key is not None:
            like = option("like", "HF_DIR")
            raise ConfigError(
                f"the arrays do not show whether {_WORDS.get(name, f'the model is {name}')}",
                location=location,
                got=f"{flag.open_key}, which is there either way",
                expected="the model's config.json",
                hint=f"name the directory of the model it came from, which has it: {like}{_or_say(name)}",
            )


# What a flag is called where a user is asked.
_WORDS = {"interleaved": "rotary pairs are interleaved or in halves"}


def _or_say(name: str) -> str:
    """The option that says what a flag is; "" where there is none."""
    if name != "interleaved":
        return ""
    return (
        f"; or say how they lie: {option('rope_layout', 'interleaved')}, or {option('rope_layout', 'halves')}"
    )
