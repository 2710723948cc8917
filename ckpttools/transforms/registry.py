"""Transforms with a name, which make a command and a call: those of other packages, by entry points."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from inspect import cleandoc
from typing import Any

from ckpttools.core.errors import UnknownNameError, near_names
from ckpttools.core.options import Option, parsed
from ckpttools.core.plugins import load_group
from ckpttools.transforms.base import Transform

GROUP = "ckpttools.transforms"
Named = Callable[..., Transform]
"""What the entry point names: makes a transform of its options, which its attribute `options` declares."""


@cache
def transforms() -> Mapping[str, Named]:
    """All of them, by name."""
    return load_group(GROUP)


def transform_named(name: str, said: Mapping[str, Any]) -> Transform:
    """A transform with its options.

    Raises:
        UnknownNameError: there is no such transform.
        UsageError: an option that it does not have, or that cannot be meant.
    """
    make = _made_by(name)
    given = {key: value for key, value in said.items() if value is not None}
    return make(**parsed(options_of(name), given, tuple, f"{name} is not called"))


def options_of(name: str) -> Sequence[Option]:
    """What may be said of a transform."""
    return getattr(_made_by(name), "options", ())


def help_of(name: str) -> str:
    """What a transform does: its docstring."""
    return cleandoc(_made_by(name).__doc__ or name).partition("\n\nAttributes:")[0]


def _made_by(name: str) -> Named:
    if name not in transforms():
        near = near_names(name, transforms(), 1)
        raise UnknownNameError(
            f"there is no transform {name!r}",
            wanted=", ".join(transforms()) or "one of a package that announces some",
            hint=f"did you mean {near[0]!r}?"
            if near
            else f"packages announce them under the entry point {GROUP}",
        )
    return transforms()[name]
