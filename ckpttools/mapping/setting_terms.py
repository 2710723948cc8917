"""Terms of rules for settings: values, fields of a configuration, flags, sums over lengths."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, Protocol

from ckpttools.core.dataclass import dataclass
from ckpttools.mapping.arithmetic import DoesNotDivideError, axes_in, value

FLAG = "flag."
Relation = Literal["is", "is not", "in", "not in"]


class Facts(Protocol):
    """What is known of one model."""

    @property
    def lengths(self) -> Mapping[str, int]:
        """Of axes."""

    @property
    def flags(self) -> Mapping[str, bool]:
        """Yes and no."""

    def field(self, name: str) -> Any:
        """A field of the configuration, such as `config.rms_norm_eps`; None where there is none."""


@dataclass(frozen=True, slots=True)
class Term:
    """What a value is.

    Attributes:
        kind: "value" is there as it is, "field" in the configuration, "flag" is a yes or no, "formula" a sum
            over lengths of axes.
        value: of kind "value".
        name: of the field or flag, or the formula.
        words: value of the field as JSON -> what stands for it; None for the value itself.
    """

    kind: Literal["value", "field", "flag", "formula"]
    value: Any = None
    name: str = ""
    words: Mapping[str, Any] | None = None

    def of(self, facts: Facts) -> Any:
        """The value for one model; None where nothing is known.

        Raises:
            KeyError: there are words, but none for this value.
        """
        if self.kind == "value":
            return self.value
        if self.kind == "flag":
            return facts.flags.get(self.name, False)
        if self.kind == "formula":
            return _length(self.name, facts.lengths)
        result = facts.field(self.name)
        if self.words is None or result is None:
            return result
        if isinstance(result, list):
            return [self._word(item) for item in result]
        return self._word(result)

    def _word(self, declared: Any) -> Any:
        assert self.words is not None
        return self.words[declared if isinstance(declared, str) else json.dumps(declared)]

    def __str__(self) -> str:
        if self.kind == "value":
            return json.dumps(self.value)
        words = "" if self.words is None else f" as {json.dumps(self.words)}"
        return f"{FLAG if self.kind == 'flag' else ''}{self.name}{words}"


TRUE = Term("value", True)


@dataclass(frozen=True, slots=True)
class Condition:
    """Two terms and how they are to each other."""

    left: Term
    relation: Relation
    right: Term

    def holds(self, facts: Facts) -> bool:
        """Whether it is so of one model."""
        left, right = self.left.of(facts), self.right.of(facts)
        if self.relation in ("in", "not in"):
            return (left in right) == (self.relation == "in")
        return bool(left == right) == (self.relation == "is")

    def __str__(self) -> str:
        if (self.relation, self.right) == ("is", TRUE):
            return str(self.left)
        return f"{self.left} {self.relation} {self.right}"


def _length(formula: str, lengths: Mapping[str, int]) -> int | None:
    if not axes_in(formula) <= lengths.keys():
        return None
    try:
        return value(formula, lengths)
    except DoesNotDivideError:
        return None
