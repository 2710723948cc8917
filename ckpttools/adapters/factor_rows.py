"""Rows of a family for low-rank factors, derived from the rows for weights.

In `W = B A`, B has the output axes and A the input axes. Both keep the order, merging and rotary pairs of the
weight's row. Axes on which a weight is repeated, such as stacked layers, are in both factors. If the row
multiplies the weight, it multiplies B.

    query.kernel:        embed layer heads (pair half) <-> q_proj.weight:        (heads half pair) embed
    query.kernel_lora_a: embed layer rank              <-> q_proj.lora_A.weight: rank embed
    query.kernel_lora_b: rank layer (heads pair half)  <-> q_proj.lora_B.weight: (heads half pair) rank
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal

from ckpttools.adapters.bases import Base
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import ConfigError
from ckpttools.core.message_terms import action
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.mapping.axes import Side
from ckpttools.mapping.keys import AxisGroup, Key
from ckpttools.mapping.row import Row
from ckpttools.mapping.values import Scale
from ckpttools.maxtext.config_differences import require_own_rows
from ckpttools.maxtext.conversion_options import ToMaxText
from ckpttools.maxtext.to_maxtext import bind_family
from ckpttools.maxtext.versions import DECODER
from ckpttools.model_families.family import Family

A, B = "_lora_a", "_lora_b"
WEIGHT, _KERNEL = ".weight", ".kernel"
PARTS = (".lora_A.weight", ".lora_B.weight")

Style = Literal["flat", "kept", "first"]
STYLES: tuple[Style, ...] = ("flat", "kept", "first")
"""Layouts of the axes of a factor, the most likely first.

"flat" merges inputs and outputs into one axis each, with layers on the scan axis; "kept" has the axes of the
kernel; "first" is merged, with layers first.
"""


@dataclass(frozen=True)
class FactorRow:
    """The row of a weight and those of its factors.

    Attributes:
        row: The row of the weight.
        a, b: Rows of the two factors.
        rank: The name of the rank axis.
    """

    row: Row
    a: Row
    b: Row
    rank: str


@dataclass(frozen=True)
class ModelFactorRows:
    """The factor rows of one model.

    Attributes:
        rows: The rows of all weights.
        sizes: The length of each axis.
        scan_axis: The axis on which layers are stacked; None if they are numbered.
    """

    rows: tuple[Row, ...]
    sizes: Mapping[str, int]
    scan_axis: int | None

    def of(self, row: Row, number: int, style: Style = "flat") -> FactorRow:
        """Return the rows of a weight's factors, if `no_factors_reason` is None."""
        rank = f"rank_{number}"
        outs, ins = (set(group) for group in row.right.groups)
        right_a = Side(_with_suffix(row.right.key, WEIGHT, PARTS[0]), ((rank,), row.right.groups[1]))
        right_b = Side(_with_suffix(row.right.key, WEIGHT, PARTS[1]), (row.right.groups[0], (rank,)))
        prefix_a = Side(
            _with_suffix(row.left.key, "", A), self._groups(row.left, outs, rank, style, is_last=True)
        )
        prefix_b = Side(
            _with_suffix(row.left.key, "", B), self._groups(row.left, ins, rank, style, is_last=False)
        )
        return FactorRow(row, Row(prefix_a, right_a), Row(prefix_b, right_b, row.op), rank)

    def _groups(
        self, left: Side, excluded: set[str], rank: str, style: Style, *, is_last: bool
    ) -> tuple[AxisGroup, ...]:
        """Return a kernel's axes without those of the other factor, with the rank first or last."""
        if style == "kept":
            kept = tuple(group for group in left.groups if not set(group) & excluded)
            return (*kept, (rank,)) if is_last else ((rank,), *kept)
        repeated = self._repeated_axes(left, excluded)
        own = tuple(axis for axis in left.array_axes if axis not in excluded and axis not in repeated)
        groups: tuple[AxisGroup, ...] = (own, (rank,)) if is_last else ((rank,), own)
        at = 0 if style == "first" else self.scan_axis or 0
        return (*groups[:at], *((axis,) for axis in repeated), *groups[at:])

    def _repeated_axes(self, left: Side, without: set[str]) -> tuple[str, ...]:
        """Return the array axes that belong to neither factor."""
        weight_row = next(row for row in self.rows if row.left is left)
        factor_axes = {axis for group in weight_row.right.groups for axis in group}
        return tuple(axis for axis in left.array_axes if axis not in factor_axes)


def no_factors_reason(row: Row) -> str | None:
    """Return why MaxText has no factors for a weight; None if it has factors."""
    left, right = str(row.left.key), str(row.right.key)
    if not left.endswith(_KERNEL):
        return f"MaxText has factors only for dense layers, not for {left.rpartition('.')[2]}"
    if not left.startswith(f"{DECODER}."):
        return f"MaxText only looks for factors below {DECODER}"
    if row.left.join is not None or row.right.join is not None:
        return "several weights are one array in MaxText"
    if not right.endswith(WEIGHT) or len(row.right.groups) != 2:
        return "it is not the matrix of a linear layer"
    outs, ins = row.right.groups
    own = [axis for axis in row.left.array_axes if axis in (*outs, *ins)]
    if set(own) != {*outs, *ins}:
        return "one weight is several arrays in MaxText"
    # Hugging Face has an axis in names in addition to those of a matrix: Qwen3.5's in_proj_b and in_proj_a.
    if any(0 < len({*group} & {*own}) < len(group) for group in row.left.groups):
        return "several weights are one array in MaxText"
    if set(own[: len(ins)]) != set(ins):
        return "the kernel does not have its inputs first"
    if row.op is not None and not isinstance(row.op, Scale):
        return "the conversion does more than multiply its values"
    return None


def model_factor_rows(base: Base, scan_axis: int | None, family: Family) -> ModelFactorRows:
    """Return the rows of a base's model.

    Args:
        base: The model.
        scan_axis: The axis on which the adapter's layers are stacked; None if they are numbered.
        family: The base's family, in the layout of the version that stores the adapter.

    Raises:
        ConfigError: The configuration contradicts itself, or the family that the user selects computes other
            values than that of the configuration.
    """
    _require_own_rows(base)
    spelling = family.spelling_of(base.weights)
    known = base.rows.table.flags if base.rows is not None else base.user_flags
    table = family.table(base.config, CONFIG, scan_axis=scan_axis, spelling=spelling, overrides=known)
    sizes, flags = table.infer_known(base.weights)
    set_flags = {name for name, value in flags.items() if value}
    rows = tuple(row for row in table.rows if row.applies(set_flags))
    return ModelFactorRows(tuple(replace(row, when="", unless="") for row in rows), sizes, scan_axis)


def _require_own_rows(base: Base) -> None:
    """Raise the errors of `model_factor_rows`. MaxText bases are checked when opened."""
    if base.rows is None and base.config is not None:
        options = ToMaxText(scan=False, model=base.model)
        require_own_rows(
            base.model.family,
            base.config,
            base.tree.metadata.location,
            lambda item: bind_family(item, base.tree, base.weights, options)[1].to_left(base.weights).arrays,
        )


def required_family(base: Base) -> Family:
    """Return the base's family. Raise ConfigError if it has none."""
    if base.family is None:
        raise ConfigError(
            "the family of the base is unknown",
            location=base.tree.metadata.location,
            expected=f"a {CONFIG} of a model that {action('families')} lists",
            hint=f"copy {CONFIG} of the base model there",
        )
    return base.family


def _with_suffix(key: Key, old: str, new: str) -> Key:
    """Return a key template with another suffix."""
    *parts, last = key.parts
    assert isinstance(last, str) and last.endswith(old)
    return Key((*parts, last.removesuffix(old) + new))


def weight_names(row: Row, sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield the Hugging Face names of a row's weights."""
    if all(sizes.get(axis, 0) for axis in row.right.key.axes) and row.right.key.needs <= sizes.keys():
        yield from row.right.keys(sizes)
