"""What is in a pickle, as inert values: classes and calls are records, and nothing is imported."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from ckpttools.core.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Global:
    """The name of a class or function: `torch.FloatStorage`."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, slots=True)
class Record:
    """What a class or function would have made, had it been called.

    Attributes:
        made_by: the class or function.
        args: what it would have been given.
        state: what the object would then have been told it is, or None.
        items: what would have been put into it.
    """

    made_by: Global
    args: tuple[Any, ...]
    state: Any = None
    items: list[Any] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The last word of what makes it: classes move from module to module between releases."""
        return self.made_by.name

    def attribute(self, name: str) -> Any:
        """What its state says under a name; None where that is not there."""
        states = self.state if isinstance(self.state, tuple) else (self.state,)
        result = (state[name] for state in states if isinstance(state, dict) and name in state)
        return next(result, None)


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """Something outside of the pickle, by what the pickle calls it."""

    key: Any


class DamagedPickleError(Exception):
    """The bytes are no pickle, are cut, or do what no pickle of data does."""


class NamelessCallError(DamagedPickleError):
    """What is called is itself made by a call, as a method of a class is by `getattr`."""


def in_few_words(value: Any) -> str:
    """What a value is, in a few words: what it holds may be endless."""
    if isinstance(value, Record):
        return str(value.made_by)
    if isinstance(value, Persistent):
        return "a storage without a tensor"
    return str(value) if isinstance(value, Global) else type(value).__name__
