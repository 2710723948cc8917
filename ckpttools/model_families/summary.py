"""Summaries of families without a model, for listings and the documentation."""

from __future__ import annotations

from ckpttools.core.dataclass import dataclass
from ckpttools.mapping.row_text import exactness_of, op_to_json
from ckpttools.mapping.values import ValueOp
from ckpttools.model_families.family import Family

DIRECTIONS = ("hf-to-maxtext", "maxtext-to-hf")


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """A group of layers and its names.

    Attributes:
        right: Prefix of the Hugging Face keys.
        unscanned, scanned: Prefixes of the MaxText keys; `scanned` may be empty as in `Layers`.
        stacked: Axes of the layers in the arrays of a scanned model.
    """

    right: str
    unscanned: str
    scanned: str
    stacked: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ValueSummary:
    """A value op and the rows that apply it.

    Attributes:
        op: The op as text, such as "scale head_dim -0.5".
        is_exact: Whether the reverse conversion restores the bits of bfloat16 values for all model sizes.
        reason: When bits are not restored, or for which values they are.
        rows: Names in MaxText, below the prefix of the layers.
    """

    op: str
    is_exact: bool
    reason: str
    rows: tuple[str, ...]


@dataclass(frozen=True, slots=True, repr=False)
class FamilySummary:
    """A summary of a family.

    Attributes:
        name, model_types, models: As for `Family`.
        directions: Commands that convert such models.
        layers: Groups of layers; each may be scanned on axis 0 or 1, or unscanned.
        no_scan_reason: As for `Family`.
        values: Ops that change values; without any, the round trip is exact.
    """

    name: str
    model_types: tuple[str, ...]
    models: tuple[str, ...]
    directions: tuple[str, ...]
    layers: tuple[GroupSummary, ...]
    values: tuple[ValueSummary, ...]
    no_scan_reason: str

    def __repr__(self) -> str:
        return f"<FamilySummary {self.name}: {', '.join(self.model_types)}>"


def summary(family: Family) -> FamilySummary:
    """Return the summary of a family."""
    groups = tuple(
        GroupSummary(layer.right, layer.left, layer.scanned, layer.stacked) for layer in family.layers
    )
    identity = family.name, family.model_types, family.models
    return FamilySummary(*identity, DIRECTIONS, groups, _values(family), family.no_scan_reason)


def _values(family: Family) -> tuple[ValueSummary, ...]:
    rows_by_op: dict[ValueOp, list[str]] = {}
    for row in (*family.rows, *(row for group in family.layers for row in group.rows)):
        if row.op is not None:
            rows_by_op.setdefault(row.op, []).append(str(row.left.key))
    return tuple(_value(op, tuple(dict.fromkeys(rows))) for op, rows in rows_by_op.items())


def _value(op: ValueOp, rows: tuple[str, ...]) -> ValueSummary:
    exactness = exactness_of(op)
    return ValueSummary(op_to_json(op), exactness.exact, exactness.reason, rows)
