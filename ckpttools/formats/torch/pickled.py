"""The contents of a pickle as inert values: classes and calls become records, and nothing is imported."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from ckpttools.core.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Global:
    """The name of a class or function, such as `torch.FloatStorage`."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, slots=True)
class Record:
    """An object that a class or function would have created.

    Attributes:
        made_by: The class or function.
        args: Arguments of the call.
        state: State that would have been set afterward, or None.
        items: Items that would have been added.
    """

    made_by: Global
    args: tuple[Any, ...]
    state: Any = None
    items: list[Any] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Last component of the name; classes move between modules from release to release."""
        return self.made_by.name

    def attribute(self, name: str) -> Any:
        """Return an attribute from the state; None if it does not exist."""
        states = self.state if isinstance(self.state, tuple) else (self.state,)
        result = (state[name] for state in states if isinstance(state, dict) and name in state)
        return next(result, None)


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """A reference by id to an object outside the pickle."""

    key: Any


class DamagedPickleError(Exception):
    """The bytes are not a pickle, are truncated, or have instructions that data pickles do not use."""


class NamelessCallError(DamagedPickleError):
    """The callee is itself the result of a call, such as a method from `getattr`."""


def in_few_words(value: Any) -> str:
    """Describe a value briefly, regardless of its size."""
    if isinstance(value, Record):
        return str(value.made_by)
    if isinstance(value, Persistent):
        return "a storage without a tensor"
    return str(value) if isinstance(value, Global) else type(value).__name__
