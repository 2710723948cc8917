"""Finding the family of a model: built-in ones and plug-ins come through the same entry points."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from ckpttools.entry_points import load_group
from ckpttools.errors import ConfigError, UnknownNameError, near_names
from ckpttools.families.family import Family


@cache
def families() -> Mapping[str, Family]:
    """All families by name, in alphabetical order."""
    return dict(sorted(load_group("ckpttools.families", Family).items()))


def family_named(name: str) -> Family:
    """The family that users call `name`.

    Raises:
        UnknownNameError: there is none; names those that there are.
    """
    if name in families():
        return families()[name]
    near = near_names(name, families())
    raise UnknownNameError(
        f"unknown family {name!r}",
        wanted="one of " + ", ".join(families()),
        hint=f"did you mean {near[0]}?" if near else "`ckpt families` lists what there is",
    )


def family_of(config: Mapping[str, Any], place: str) -> Family:
    """The family whose `model_type` a configuration states.

    Raises:
        ConfigError: it states none.
        UnknownNameError: no family has it; names those that there are.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError(
            "the configuration does not say which model it is of",
            place=place,
            got=f"model_type {model_type!r}",
            wanted="a string such as " + ", ".join(sorted(_by_model_type())),
            hint="name the family with --family",
        )
    if model_type in _by_model_type():
        return _by_model_type()[model_type]
    near = near_names(model_type, _by_model_type())
    raise UnknownNameError(
        f"no family has model_type {model_type!r}",
        place=place,
        wanted="one of " + ", ".join(sorted(_by_model_type())),
        hint=f"did you mean {near[0]}? --family {_by_model_type()[near[0]].name} uses its rows"
        if near
        else "`ckpt families` lists what there is; --family NAME uses another family's rows",
    )


def _by_model_type() -> dict[str, Family]:
    return {name: family for family in families().values() for name in family.model_types}
