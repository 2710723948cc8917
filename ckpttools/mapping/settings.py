"""Rules that derive a framework's settings from a model's configuration, axes and flags.

base_emb_dim:   embed                                 the length of an axis, or a formula over lengths
head_dim:       head_dim | embed // heads             the first that is known
rope_type:      "yarn", if rope.type is "yarn"        JSON; the first line that applies counts
mlp_activation: config.hidden_act as {"silu": "silu"}   a field of the configuration, translated item by item
must rope.factor is 8, if rope.type is "llama3" -- it is 8 in the code
idle qk_head_dim, ep_size -- they repeat other fields
note if flag.indexer -- a note about such models
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import chain
from typing import Any, Literal, NamedTuple, Protocol

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import MappingError
from ckpttools.mapping.arithmetic import DoesNotDivideError, axes_in, value

FLAG = "flag."
Relation = Literal["is", "is not", "in", "not in"]


class Facts(Protocol):
    """The known facts about a model."""

    @property
    def lengths(self) -> Mapping[str, int]:
        """Return the lengths of axes."""

    @property
    def flags(self) -> Mapping[str, bool]:
        """Return the flags."""

    def field(self, name: str) -> Any:
        """Return a configuration field, such as `config.rms_norm_eps`; None if it does not exist."""


@dataclass(frozen=True, slots=True)
class Term:
    """A source of a value.

    Attributes:
        kind: "value" for a constant, "field" for a configuration field, "flag" for a boolean, or "formula"
            for a formula over lengths of axes.
        value: The constant, for kind "value".
        name: The name of the field or flag, or the formula.
        words: Field value as JSON -> its translation; None uses the value itself.
    """

    kind: Literal["value", "field", "flag", "formula"]
    value: Any = None
    name: str = ""
    words: Mapping[str, Any] | None = None

    def of(self, facts: Facts) -> Any:
        """Return the value for a model; None if unknown.

        Raises:
            KeyError: The translations do not include this value.
        """
        if self.kind == "value":
            return self.value
        if self.kind == "flag":
            return facts.flags.get(self.name, False)
        if self.kind == "formula":
            return _length(self.name, facts.lengths)
        field = facts.field(self.name)
        if self.words is None or field is None:
            return field
        if isinstance(field, list):
            return [self._word(item) for item in field]
        return self._word(field)

    def _word(self, field: Any) -> Any:
        assert self.words is not None
        return self.words[field if isinstance(field, str) else json.dumps(field)]

    def __str__(self) -> str:
        if self.kind == "value":
            return json.dumps(self.value)
        words = "" if self.words is None else f" as {json.dumps(self.words)}"
        return f"{FLAG if self.kind == 'flag' else ''}{self.name}{words}"


TRUE = Term("value", True)


@dataclass(frozen=True, slots=True)
class Condition:
    """A comparison of two terms."""

    left: Term
    relation: Relation
    right: Term

    def holds(self, facts: Facts) -> bool:
        """Return whether the condition holds for a model."""
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


FIELDS = ("config", "rope", "layer_types")
_MUST, _IDLE, _NOTE, _REASON = "must ", "idle ", "note if ", " -- "
_RELATIONS: Mapping[str, Relation] = {" is not ": "is not", " is ": "is", " not in ": "not in", " in ": "in"}
_CONTINUATION_MARKS = ("| ", "-- ")
_LONGEST = 100
_OPENING, _CLOSING = "[{(", "]})"


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting and the terms for its value.

    Attributes:
        name: The name of the setting.
        terms: The possible terms; the first known one gives the value.
        conditions: The conditions that must all hold for the setting to apply.
    """

    name: str
    terms: tuple[Term, ...]
    conditions: tuple[Condition, ...] = ()

    def applies(self, facts: Facts) -> bool:
        """Return whether the setting applies to a model."""
        return all(condition.holds(facts) for condition in self.conditions)

    def __str__(self) -> str:
        return f"{self.name}: {' | '.join(map(str, self.terms))}{_format_conditions(self.conditions)}"


@dataclass(frozen=True, slots=True)
class Limit:
    """A requirement on models that follows from a limit of the framework.

    Attributes:
        expected: The required condition, which is assumed to hold if the field is not stated.
        conditions: When the requirement applies.
        reason: The behavior of the framework.
    """

    expected: Condition
    conditions: tuple[Condition, ...]
    reason: str

    def holds(self, facts: Facts) -> bool:
        """Return whether a model meets the requirement."""
        if not all(condition.holds(facts) for condition in self.conditions):
            return True
        return self.expected.left.of(facts) is None or self.expected.holds(facts)

    def __str__(self) -> str:
        return f"{_MUST}{self.expected}{_format_conditions(self.conditions)}{_REASON}{self.reason}"


@dataclass(frozen=True, slots=True)
class Idle:
    """Configuration fields that do not affect the framework's computation.

    Attributes:
        fields: Patterns of field names; nested fields include the parent, such as `vision_config.hidden_act`.
        reason: Why the fields have no effect.
    """

    fields: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        return f"{_IDLE}{', '.join(self.fields)}{_REASON}{self.reason}"


@dataclass(frozen=True, slots=True)
class SettingNote:
    """A note that applies to models that meet its conditions.

    Attributes:
        conditions: When the note applies.
        text: The text of the note.
    """

    conditions: tuple[Condition, ...]
    text: str

    def applies(self, facts: Facts) -> bool:
        """Return whether the note applies to a model."""
        return all(condition.holds(facts) for condition in self.conditions)

    def __str__(self) -> str:
        return f"{_NOTE}{' and '.join(map(str, self.conditions))}{_REASON}{self.text}"


class _RuleLines(NamedTuple):
    """Parsed rules by kind. If several rules for a name apply, the first one counts."""

    settings: tuple[Setting, ...]
    limits: tuple[Limit, ...]
    idle: tuple[Idle, ...]
    notes: tuple[SettingNote, ...]


class SettingRules:
    """The rules in a text, which are equal to rules parsed from an equivalent text.

    The text is parsed on first use, because that takes 15 ms for all families and most commands need only
    array names.
    """

    def __init__(self, text: str = "") -> None:
        """Store the text; errors in it are raised on first use, or immediately by `setting_rules`.

        Args:
            text: One rule per line, continued on lines that begin with ` | ` or ` -- `; `# …` is a comment.
        """
        self._text = text

    @cached_property
    def _lines(self) -> _RuleLines:
        return _read(self._text)

    @property
    def settings(self) -> tuple[Setting, ...]:
        return self._lines.settings

    @property
    def limits(self) -> tuple[Limit, ...]:
        return self._lines.limits

    @property
    def idle(self) -> tuple[Idle, ...]:
        return self._lines.idle

    @property
    def notes(self) -> tuple[SettingNote, ...]:
        return self._lines.notes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SettingRules) and self._lines == other._lines

    def __hash__(self) -> int:
        return hash(self._lines)

    def __repr__(self) -> str:
        return f"SettingRules({str(self)!r})"

    def __add__(self, other: SettingRules) -> SettingRules:
        """Concatenate these rules and others."""
        return SettingRules(f"{self._text}\n{other._text}")

    def terms(self) -> Iterator[Term]:
        """Return all terms of all rules."""
        for setting in self.settings:
            yield from setting.terms
        conditions = [limit.expected for limit in self.limits]
        conditions += chain(*(item.conditions for item in self.settings))
        conditions += chain(*(limit.conditions for limit in self.limits))
        conditions += chain(*(note.conditions for note in self.notes))
        for condition in conditions:
            yield from (condition.left, condition.right)

    def chosen(self, facts: Facts) -> Mapping[str, Setting]:
        """Return the settings of a model: for each name, the first setting that applies."""
        settings: dict[str, Setting] = {}
        for setting in self.settings:
            if setting.name not in settings and setting.applies(facts):
                settings[setting.name] = setting
        return settings

    def mentions(self, flag: str) -> bool:
        """Return whether a rule depends only on a flag."""
        terms = (condition.left for setting in self.settings for condition in setting.conditions)
        return any(item.kind == "flag" and item.name == flag for item in terms)

    def __str__(self) -> str:
        return "\n".join(
            map(_join_continuations, map(str, (*self.settings, *self.limits, *self.idle, *self.notes)))
        )


def _format_conditions(conditions: Sequence[Condition]) -> str:
    return f", if {' and '.join(map(str, conditions))}" if conditions else ""


def setting_rules(text: str) -> SettingRules:
    """Parse rules immediately.

    Raises:
        MappingError: A line is not a rule. The message names the line.
    """
    rules = SettingRules(text)
    _ = rules.settings
    return rules


@cache
def _read(text: str) -> _RuleLines:
    settings: list[Setting] = []
    limits: list[Limit] = []
    idle: list[Idle] = []
    notes: list[SettingNote] = []
    for line in _joined_lines(text):
        if line.startswith(_MUST):
            limits.append(_limit(line))
        elif line.startswith(_IDLE):
            idle.append(_idle(line))
        elif line.startswith(_NOTE):
            notes.append(_note(line))
        else:
            settings.append(_setting(line))
    return _RuleLines(tuple(settings), tuple(limits), tuple(idle), tuple(notes))


def _joined_lines(text: str) -> list[str]:
    lines: list[str] = []
    for line in filter(None, (line.partition("#")[0].strip() for line in text.splitlines())):
        if lines and line.startswith(_CONTINUATION_MARKS):
            lines[-1] += f" {line}"
        else:
            lines.append(line)
    return lines


def _join_continuations(line: str) -> str:
    """Join a line with its continuation lines."""
    if len(line) <= _LONGEST:
        return line
    for word in (_REASON, " | "):
        line = line.replace(word, f"\n    {word.lstrip()}")
    return line


def _setting(line: str) -> Setting:
    name, colon, rest = line.partition(":")
    if not colon or not name.replace("_", "").replace(".", "").isalnum():
        raise _wrong(line, "NAME: TERM, such as `base_emb_dim: embed`")
    terms_text, conditions = _conditions(rest, line)
    return Setting(name, tuple(_term(part, line) for part in _split(terms_text, " | ")), conditions)


def _limit(line: str) -> Limit:
    condition, dashes, reason = line.removeprefix(_MUST).partition(_REASON)
    if not dashes:
        raise _wrong(line, "must TERM is TERM -- REASON")
    expected, conditions = _conditions(condition, line)
    return Limit(_condition(expected, line), conditions, reason.strip())


def _idle(line: str) -> Idle:
    names, dashes, reason = line.removeprefix(_IDLE).partition(_REASON)
    fields = tuple(item.strip() for item in names.split(","))
    if not dashes or not all(fields):
        raise _wrong(line, "idle FIELD, FIELD -- REASON")
    return Idle(fields, reason.strip())


def _note(line: str) -> SettingNote:
    condition, dashes, text = line.removeprefix(_NOTE).partition(_REASON)
    if not dashes:
        raise _wrong(line, "note if CONDITION -- TEXT")
    text = text.replace(_REASON, " ").strip()
    return SettingNote(tuple(_condition(item, line) for item in _split(condition, " and ")), text)


def _conditions(text: str, line: str) -> tuple[str, tuple[Condition, ...]]:
    head, *clauses = _split(text, ", if ")
    return head, tuple(_condition(item, line) for other in clauses for item in _split(other, " and "))


def _condition(text: str, line: str) -> Condition:
    for word, relation in _RELATIONS.items():
        sides = _split(text, word)
        if len(sides) == 2:
            return Condition(_term(sides[0], line), relation, _term(sides[1], line))
    return Condition(_term(text, line), "is", TRUE)


def _term(text: str, line: str) -> Term:
    text = text.strip()
    if text.startswith(FLAG):
        return Term("flag", name=text.removeprefix(FLAG))
    if "." in text and text.split(".")[0] in FIELDS:
        name, _, words = text.partition(" as ")
        return Term("field", name=name.strip(), words=_json(words, line) if words else None)
    try:
        return Term("value", json.loads(text))
    except ValueError:
        pass
    try:
        axes_in(text)
    except MappingError:
        raise _wrong(line, f"JSON, a field ({', '.join(FIELDS)}), a flag or axes; not {text!r}") from None
    return Term("formula", name=text)


def _json(text: str, line: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise _wrong(line, f"JSON after `as`: {error}") from None


def _wrong(line: str, expected: str) -> MappingError:
    return MappingError("not a rule for a setting", got=line, expected=expected)


def _split(text: str, separator: str) -> list[str]:
    """Split a text at separators outside of quotes and brackets."""
    if separator not in text:
        return [text]
    parts, start = [], 0
    for at in _unquoted_positions(text):
        if at >= start and text.startswith(separator, at):
            parts.append(text[start:at])
            start = at + len(separator)
    return [*parts, text[start:]]


def _unquoted_positions(text: str) -> Iterator[int]:
    depth, quoted = 0, False
    for at, letter in enumerate(text):
        quoted ^= letter == '"'
        depth += 0 if quoted else (letter in _OPENING) - (letter in _CLOSING)
        if not quoted and depth == 0:
            yield at
