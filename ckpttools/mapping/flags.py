"""Flags: the yes and no that decide which rows a model has."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ckpttools.core.errors import ConfigError
from ckpttools.core.wording import option
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
    """

    value: bool
    source: str
    remedy: str = ""
    open_key: str | None = None


def inferred_flags(
    names: Sequence[str], sides: Sequence[tuple[Row, Side]], keys: Collection[str]
) -> dict[str, Flag]:
    """The flags that no configuration decides, inferred from the keys that are there.

    A flag is open, `open_key` of it, where rows with and without it have the same keys.

    Args:
        names: of the flags.
        sides: each row with the side whose keys are looked for.
        keys: what is there.
    """
    return {name: _inferred(name, sides, keys) for name in names}


def _inferred(name: str, sides: Sequence[tuple[Row, Side]], keys: Collection[str]) -> Flag:
    having = {side.key.first() for row, side in sides if name in row.when.split()}
    lacking = {side.key.first() for row, side in sides if name in row.unless.split()}
    common = sorted(having & lacking & set(keys))
    if common and not (having ^ lacking) & set(keys):
        return Flag(False, "", open_key=common[0])
    for candidates, there in ((having - lacking, True), (lacking - having, False)):
        found = sorted(candidates & set(keys))
        if found:
            return Flag(there, f"{found[0]}, which is there")
    return Flag(not having, f"{sorted(having or lacking)[0]}, which is not there")


def refuse_open(flags: Mapping[str, Flag], place: str) -> None:
    """Refuses a model of which a flag is open.

    Raises:
        ConfigError: a flag is open.
    """
    for name, flag in flags.items():
        if flag.open_key is not None:
            like = option("like", "HF_DIR")
            raise ConfigError(
                f"the arrays do not show whether {_WORDS.get(name, f'the model is {name}')}",
                place=place,
                got=f"{flag.open_key}, which is there either way",
                wanted="the model's config.json",
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
