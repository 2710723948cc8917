"""A row: an array or a group of arrays in two frameworks, from which both directions follow.

    mlp.wi_0.kernel: embed mlp <-> mlp.gate_proj.weight: mlp embed

Each side has a name, a colon and the axes of its array, in the notation of `ckpttools.mapping.axes`. Options
follow after commas:

    scale head_dim -0.5   a value op from right to left, in the notation of `ckpttools.mapping.row_text`
    when tied             the row exists if the flag is set; spaces separate several flags
    unless tied           the row exists if the flag is not set
    above kind            only one side names this axis; the other has it in the prefix of its layers
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import MappingError
from ckpttools.mapping.axes import Side
from ckpttools.mapping.keys import Key, parse_key
from ckpttools.mapping.row_text import (
    ARROW,
    EMPTY_KEYS,
    aligned_texts,
    is_heading,
    op_to_json,
    read_heading,
    read_row,
    single_spaced,
    split_rows,
)
from ckpttools.mapping.values import ValueOp


@dataclass(frozen=True, slots=True)
class Row:
    """The same values under two names and in two layouts.

    Attributes:
        left, right: The two sides, which name the same axes.
        op: The value op from right to left, or None.
        when: Space-separated flags that must all be set for the row to exist.
        unless: Space-separated flags that must not be set.
        above: Space-separated axes that one side names and the other has in the prefix of its layers.
    """

    left: Side
    right: Side
    op: ValueOp | None = None
    when: str = ""
    unless: str = ""
    above: str = ""

    def __post_init__(self) -> None:
        unmatched_axes = set(self.left.axes) ^ set(self.right.axes)
        if unmatched_axes != set(self.above.split()):
            raise MappingError(
                "the two sides of a row name different axes",
                location=self,
                got=", ".join(sorted(unmatched_axes)),
                hint="every axis occurs once on each side, in the key or in the array",
            )

    @property
    def flags(self) -> frozenset[str]:
        """Return the flags that decide whether the row exists."""
        return frozenset(self.when.split()) | frozenset(self.unless.split())

    def applies(self, flags: Collection[str]) -> bool:
        """Return whether a model in which these flags are set has this row."""
        return set(self.when.split()) <= set(flags) and not set(self.unless.split()) & set(flags)

    def __str__(self) -> str:
        """Return the text for `row`, if the names and the op can be written as text."""
        words = [f"{self.left} {ARROW} {self.right}"]
        if self.op is not None:
            words.append(op_to_json(self.op))
        flags = {"when": self.when, "unless": self.unless, "above": self.above}
        return ", ".join([*words, *(f"{word} {names}" for word, names in flags.items() if names)])


def row(text: str, *, op: ValueOp | None = None) -> Row:
    """Parse a row.

    Args:
        text: The text, in the notation of this module; words are separated by any whitespace.
        op: An op that cannot be written as text.

    Raises:
        MappingError: The text is invalid, or the sides name different axes.
    """
    left, right, options = read_row(text)
    if op is not None and "op" in options:
        raise MappingError("the text of a row already has an op", location=text, got=repr(op))
    return Row(left, right, **{"op": op, **options})


def rows(text: str) -> tuple[Row, ...]:
    """Parse rows from a text with one row per line.

    A line that begins with `<->` continues the line before; `# ...` is a comment. A heading has flags, or
    common prefixes of the names, that apply to all rows below it until the next heading.

        below self_attention <-> self_attn, unless fused

    Raises:
        MappingError: As for `row`, for the first invalid line.
    """
    common: Mapping[str, Any] = {}
    parsed: list[Row] = []
    for item in split_rows(text):
        if is_heading(item):
            common = read_heading(item)
        else:
            parsed.append(_row(*read_row(item), **common))
    return tuple(parsed)


def _row(
    left: Side, right: Side, options: Mapping[str, Any], below: tuple[Key, Key] = EMPTY_KEYS, **flags: str
) -> Row:
    """Create a row whose keys are below the keys of a heading."""
    names = {word: single_spaced(names, options.get(word, "")) for word, names in flags.items()}
    return Row(left.below(below[0]), right.below(below[1]), **{**options, **names})


def rows_text(rows: Iterable[Row], width: int) -> str:
    """Format rows as the text for `rows`: a table in which rows longer than `width` take two lines."""
    texts = list(map(str, rows))
    short = [text for text in texts if len(text) <= width]
    tables = (aligned_texts(short, 3), aligned_texts(short, 2), short)
    table = next(item for item in tables if max(map(len, item), default=0) <= width)
    lines = dict(zip(short, table, strict=True))
    return "\n".join(lines.get(text) or text.replace(f" {ARROW} ", f"\n    {ARROW} ") for text in texts)


# Layers: rows that repeat under a numbered prefix, and how scanning stacks them. A scanned model stores the
# layers of a group in one array, stacked on additional axes that start at the scan axis. An unscanned model
# stores each layer under its own number.


@dataclass(frozen=True, slots=True)
class Layers:
    """A group of layers that have the same rows.

    Attributes:
        right: Prefix of right keys, such as `model.layers.{layer}`.
        left: Prefix of left keys in an unscanned model, such as `decoder.layers_{layer}`.
        scanned: Prefix of left keys in a scanned model, such as `decoder.layers`; empty for layers of an
            incomplete cycle if only complete cycles are scanned.
        stacked: Axes in the arrays of a scanned model, from the scan axis on.
        rows: The rows below these prefixes.
        when, unless: Flags that decide whether the group exists, as for a row.
    """

    right: str
    left: str
    scanned: str
    stacked: tuple[str, ...]
    rows: tuple[Row, ...]
    when: str = ""
    unless: str = ""

    def all_rows(self, scan_axis: int | None) -> Iterator[Row]:
        """Yield the rows with their prefixes, for layers stacked on `scan_axis` or for unscanned layers."""
        if scan_axis is not None and not self.scanned:
            return
        above = parse_key(self.right)
        left = parse_key(self.left if scan_axis is None else self.scanned)
        stacked = () if scan_axis is None else self.stacked
        for row in self.rows:
            yield replace(
                row,
                left=row.left.below(left, stacked, scan_axis or 0),
                right=row.right.below(above),
                when=f"{self.when} {row.when}".strip(),
                unless=f"{self.unless} {row.unless}".strip(),
                above="",
            )
