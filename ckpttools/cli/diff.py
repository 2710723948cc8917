"""`ckpt diff`: compare two checkpoints and explain their differences."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from math import isfinite
from typing import TYPE_CHECKING, Any, Unpack

import click

from ckpttools.api.options import MAX_HEADER_BYTES, MAX_INDEX_BYTES, PREFER_RANK
from ckpttools.api.options.inspect import DIFF
from ckpttools.cli.command import BaseCommand
from ckpttools.cli.options import ANY_PATH, flags, json_option, progress_option, resource_options
from ckpttools.cli.output import exit_with_differences, format_labeled, print_json, print_lines, styled, width
from ckpttools.cli.progress import progress_events
from ckpttools.cli.table import Column, draw_table
from ckpttools.core.dtypes import DTYPES
from ckpttools.core.errors import CheckpointError, UsageError
from ckpttools.core.text import fold_lines, format_disk, format_type, plural, printable
from ckpttools.stores.location import Location

if TYPE_CHECKING:
    from ckpttools.api.diff import DiffReport, SideReport
    from ckpttools.api.sources import Scanning
    from ckpttools.compare.diff import ArrayDiff, ArrayType, Outcome
    from ckpttools.compare.groups import GroupDiff


@click.command(short_help="Compare two checkpoints: what differs, how much, and why.", cls=BaseCommand)
@click.argument("first", metavar="A", type=ANY_PATH)
@click.argument("second", metavar="B", type=ANY_PATH, required=False)
@flags(*DIFF)
@json_option
@resource_options
@progress_option
@flags(MAX_HEADER_BYTES, MAX_INDEX_BYTES, PREFER_RANK)
def diff(
    first: Location,
    second: Location | None,
    sort: str | None,
    top: int | None,
    summary: bool,
    atol: float,
    rtol: float,
    ulp: int,
    ignore_dtype: bool,
    filter: str,
    parameters: bool,
    everything: bool,
    explain: bool,
    like: Location | None,
    family: str | None,
    rope_layout: str | None,
    padding_rows: str | None,
    as_json: bool,
    progress: bool,
    **scanning: Unpack[Scanning],
) -> None:
    """Compare two checkpoints value by value: what differs, how much, and why.

    A and B may have any format and layout: Hugging Face or MaxText, scanned or not. If only one has training
    state, --parameters compares the rest. Layers are compared one by one, and Hugging Face arrays are matched
    to MaxText's by their family's mapping. For a run, pass the directory of a step. Without a tolerance, the
    sign of zero and NaN payloads count, as for ckpt verify.

    For arrays that differ, the command looks for a cause: transposed, RoPE halves or interleaved, gate and up
    swapped, a missing scale or norm offset, shifted layers, padded vocabulary, cast, and others.

    Exit codes: 0 equal, 1 different; 3 (bad input) and 5 (input/output) mean that no comparison was possible.

    \b
    Examples:
      $ ckpt diff ~/models/Llama-3.1-8B ~/maxtext/llama3.1-8b
      $ ckpt diff checkpoints/100 checkpoints/200 --rtol 1e-3 --filter '*norm*'
    """
    from ckpttools.api.diff import diff as compare

    if second is None:
        raise _missing_side(first)
    with progress_events(progress) as scanning["observe"]:
        report = compare(
            first,
            second,
            sort=sort,
            top=top,
            summary=summary,
            atol=atol,
            rtol=rtol,
            ulp=ulp,
            ignore_dtype=ignore_dtype,
            filter=filter,
            parameters=parameters,
            everything=everything,
            explain=explain,
            like=like,
            family=family,
            rope_layout=rope_layout,
            padding_rows=padding_rows,
            **scanning,
        )
    if as_json:
        texts = {"remarks": list(map(str, report.remarks)), "uncompared": list(map(str, report.uncompared))}
        print_json({**_to_plain(report), **texts})
    else:
        lines = _report_lines(report, one_by_one=sort is not None or top is not None, summary=summary)
        print_lines(lines, is_summary=True)
    if not report.equal:
        exit_with_differences()


def _missing_side(first: Location) -> UsageError:
    """Return the error about a missing B, which names two steps if A is a run."""
    from ckpttools.api.ls import ls
    from ckpttools.runs.listing import RunListing

    hint = "name the other checkpoint after it"
    try:
        run = ls(first)
    except CheckpointError:
        run = None
    if isinstance(run, RunListing):
        finished = [f"{run.path}/{step.name}" for step in run.steps if step.unfinished_reason is None]
        if len(finished) > 1:
            hint = f"compare two steps: ckpt diff {' '.join(map(shlex.quote, finished[-2:]))}"
    return UsageError("two checkpoints are needed, but only one is given", got=first, hint=hint)


def _to_plain(value: Any) -> Any:
    """Convert dataclasses to dicts, and infinities, which JSON lacks, to strings."""
    if hasattr(value, "__dataclass_fields__"):
        return {field.name: _to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: _to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_to_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value


# Paragraphs and rows of tables that are printed unless more are asked for.
_MAX_PARAGRAPHS, _MAX_ROWS, _MAX_LAYERS = 60, 60, 10
# If a smaller share of the elements differs, the report describes them one array at a time.
_FEW = 0.01
# Width of the label column.
_MARGIN = 13
# Texts of outcomes after an array count; arrays are listed in this order.
_OUTCOMES: dict[Outcome, str] = {
    "differs": "with different values",
    "shape": "of a different shape",
    "kind": "of a different kind",
    "dtype": "of a different dtype",
    "bits": "with different bits of zeros or NaN",
    "only in A": "only in A",
    "only in B": "only in B",
    "within": "within the tolerances",
    "equal": "equal",
}
_ROLES = {"parameter": "parameters", "optimizer": "optimizer", "other": "other state"}
_MEASURES = (
    Column("rel L2", right=True),
    Column("cosine", right=True, spare=2),
    Column("rms", right=True, spare=3),
    Column("max abs", right=True, spare=1),
)


def _report_lines(report: DiffReport, *, one_by_one: bool, summary: bool) -> Iterator[str]:
    """Yield both sides, how they were aligned, their differences, and a summary."""
    remarks = [*report.remarks, *report.uncompared]
    counts = Counter(remark.text for remark in remarks)
    for name, side in (("A", report.a), ("B", report.b)):
        yield from _side_line(name, side)
        for remark in remarks:
            if remark.side == name and counts[remark.text] == 1:
                yield from _indent(remark.text)
    for text in dict.fromkeys(item.text for item in remarks if item.side is None or counts[item.text] > 1):
        yield from _indent(text)
    folded = _folded_roles(report)
    arrays = [item for item in report.arrays if item.role not in folded]
    in_table = [item for item in arrays if item.distance and (one_by_one or _is_measured(item))]
    tabled = {item.name for item in in_table}
    paragraphs = list(_paragraphs([item for item in arrays if item.name not in tabled]))
    shown = len(paragraphs) if one_by_one else _MAX_PARAGRAPHS
    if not summary:
        for paragraph in paragraphs[:shown]:
            yield from ("", *paragraph)
        if len(paragraphs) > shown:
            more = plural(len(paragraphs) - shown, "more group")
            yield f"… and {more} of arrays; --json lists all"
        yield from _array_table(in_table, one_by_one)
    yield from _layer_table(report, one_by_one)
    yield ""
    for role in folded:
        yield from _role_line(role, report)
    yield from _verdict_lines(report)
    for hint in report.hints:
        yield from _indent(hint)


def _is_measured(item: ArrayDiff) -> bool:
    """Return whether a row of measures describes a difference: no known cause, and many elements differ."""
    deviation = item.deviation
    return (
        item.outcome == "differs"
        and item.cause is None
        and deviation is not None
        and not deviation.nan
        and item.a == item.b
        and deviation.num_differing >= max(_FEW * deviation.elements, 2)
    )


def _folded_roles(report: DiffReport) -> list[str]:
    """Return the roles that get one line: training state, if both sides have an optimizer and parameters."""
    roles = {item.name for item in report.roles}
    return ["optimizer", "other"] if {"parameter", "optimizer"} <= roles else []


def _array_table(items: Sequence[ArrayDiff], one_by_one: bool) -> Iterator[str]:
    """Yield a row for each array, or for all arrays whose names differ only in numbers."""
    groups: dict[object, list[ArrayDiff]] = {}
    for item in items:
        groups.setdefault(item.name if one_by_one else _without_digits(item.name), []).append(item)
    rows = [_array_row(members) for members in groups.values()]
    if not rows:
        return
    columns = [
        Column("array"),
        *_MEASURES,
        Column("max rel", right=True, spare=6),
        Column("max ulp", right=True, spare=5),
        Column("differ", right=True, spare=4),
        Column("cause", spare=3),
    ]
    yield ""
    shown = len(rows) if one_by_one else _MAX_ROWS
    yield from _fitting_table(columns, rows[:shown])
    if len(rows) > shown:
        yield f"… and {plural(len(rows) - shown, 'more row')}; --json lists all"


def _array_row(items: Sequence[ArrayDiff]) -> list[str]:
    parts = [item.deviation for item in items if item.deviation is not None]
    ulps = [part.max_ulp for part in parts]
    differing, elements = sum(part.num_differing for part in parts), sum(part.elements for part in parts)
    from ckpttools.compare.groups import grouped

    group = grouped("", items)
    return [
        ", ".join(fold_lines(printable(item.name) for item in items)),
        *_measures(group),
        f"{max(part.max_rel for part in parts):.3g}",
        "" if None in ulps else f"{max(ulp or 0 for ulp in ulps):,}",
        _share_text(differing, elements),
        items[0].cause.name if items[0].cause else "",
    ]


def _measures(group: GroupDiff) -> list[str]:
    """Return the cells of the columns `_MEASURES`."""
    distance = group.distance
    if distance is None:
        return ["", "", "", f"{group.max_abs:.3g}"]
    return [
        f"{group.rel_l2:.3g}",
        "" if distance.cosine is None else f"{distance.cosine:.6f}",
        f"{distance.rms:.3g}",
        f"{group.max_abs:.3g}",
    ]


def _layer_table(report: DiffReport, one_by_one: bool) -> Iterator[str]:
    """Yield the layers that differ most."""
    if report.num_layers < 2:
        return
    shown = report.layers if one_by_one else report.layers[:_MAX_LAYERS]
    rows = [
        [
            printable(item.name),
            *_measures(item),
            ""
            if item.most_different == item.name
            else printable((item.most_different or "")[len(item.name) + 1 :]),
        ]
        for item in shown
    ]
    yield ""
    yield from _fitting_table([Column("layer"), *_MEASURES, Column("most in", spare=4)], rows)
    if len(shown) < report.num_layers:
        yield f"… and {report.num_layers - len(shown):,} more; --top {report.num_layers} lists all"


def _fitting_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Draw a table without the columns for which the longest name leaves no room.

    A name that leaves no room for the first measure gets a line of its own.
    """
    room = width()
    kept = list(range(len(columns)))
    widths = [
        max(len(cell) for cell in (column.head, *cells))
        for column, cells in zip(columns, zip(*rows, strict=True), strict=True)
    ]
    while (
        room is not None
        and sum(widths[k] + 2 for k in kept) - 2 > room
        and columns[max(kept, key=lambda k: columns[k].spare)].spare > 1
    ):
        kept.remove(max(kept, key=lambda k: columns[k].spare))
    yield from draw_table([columns[k] for k in kept], [[row[k] for k in kept] for row in rows], room)


def _role_line(role: str, report: DiffReport) -> Iterator[str]:
    """Yield the line of arrays that are not listed."""
    group = next((item for item in report.roles if item.name == role), None)
    if group is None or not group.num_differing:
        return
    names = [item.name for item in report.arrays if item.role == role and not item.is_equal]
    text = f"{group.num_differing:,} of {plural(group.arrays, 'array')} differ"
    if role == "optimizer" and group.distance is not None:
        text += f", rel L2 {group.rel_l2:.3g}, max abs {group.max_abs:.3g}"
    if len(names) == 1:
        text += f": {names[0]}"
    elif len(above := {name.partition("/")[0] for name in names}) == 1:
        text += f"; --filter '{above.pop()}/*' lists them"
    yield from format_labeled(_ROLES[role], printable(text), _MARGIN, width(), dim=True)


def _side_line(name: str, side: SideReport) -> Iterator[str]:
    step = f", step {side.step}" if side.step is not None else ""
    stored = f"{plural(side.stored_arrays, 'array')}, {format_disk(side.stored_nbytes)}"
    facts = f"{side.format or 'unknown'}{step}, {stored}"
    if side.arrays != side.stored_arrays:
        facts += f"; compared: {plural(side.arrays, 'array')}, {format_disk(side.nbytes)}"
    yield f"{name}  {styled(printable(side.path), bold=True)}"
    yield from _indent(facts)


def _indent(text: str) -> list[str]:
    return format_labeled("", printable(text), 2, width())


def _verdict_lines(report: DiffReport) -> Iterator[str]:
    counts = [f"{plural(n, 'array')} {_OUTCOMES[o]}" for o in _OUTCOMES if (n := report.outcomes.get(o, 0))]
    if report.uncompared:
        counts.append("others not compared")
    verdict, color = ("Equal", "green") if report.equal else ("Different", "red")
    first, *rest = _indent(f"{verdict}: {', '.join(counts)}")
    yield first[2:].replace(verdict, styled(verdict, fg=color, bold=True), 1)
    yield from rest


def _paragraphs(arrays: Sequence[ArrayDiff]) -> Iterator[list[str]]:
    groups: dict[tuple[object, ...], list[ArrayDiff]] = {}
    for outcome in _OUTCOMES:
        for array in arrays:
            if array.outcome == outcome:
                groups.setdefault(
                    (outcome, array.a, array.b, array.cause, _without_digits(array.name)), []
                ).append(array)
    return (list(_paragraph(group)) for group in groups.values())


def _without_digits(name: str) -> str:
    """Return a text without its digits."""
    return "".join(character for character in name if not character.isdecimal())


def _paragraph(group: Sequence[ArrayDiff]) -> Iterator[str]:
    first = group[0]
    for name in fold_lines(printable(item.name) for item in group):
        yield styled(name, bold=True)
    for label, text in _fact_lines(first, group):
        yield from format_labeled(f"  {label}", printable(text), _MARGIN, width(), dim=True)


def _fact_lines(first: ArrayDiff, group: Sequence[ArrayDiff]) -> Iterator[tuple[str, str]]:
    yield first.outcome, _type_text(first.a, first.b)
    yield from (("", text) for text in _measure_text(group))
    if first.cause is not None:
        yield "because", first.cause.text
        if first.cause.advice:
            yield "next", first.cause.advice


def _type_text(a: ArrayType | None, b: ArrayType | None) -> str:
    # Leaves without arrays have a description instead of a dtype.
    types = [
        format_type(item.dtype, item.shape) if item.dtype in DTYPES else item.dtype
        for item in (a, b)
        if item is not None
    ]
    if a is None or b is None or a == b:
        return types[0]
    return f"{types[0]} in A, {types[1]} in B"


def _measure_text(members: Sequence[ArrayDiff]) -> Iterator[str]:
    """Yield the combined distance of all these arrays."""
    parts = [item.deviation for item in members if item.deviation is not None]
    if not parts:
        return
    elements, differing = (
        sum(part) for part in zip(*((p.elements, p.num_differing) for p in parts), strict=True)
    )
    if differing:
        yield f"{_share_text(differing, elements)} of {plural(elements, 'element')}{_position_text(members)}"
        from ckpttools.compare.groups import grouped

        group = grouped("", members)
        distance = group.distance
        yield ", ".join(
            [
                *([f"rel L2 {group.rel_l2:.3g}", f"rms {distance.rms:.3g}"] if distance else []),
                f"max abs {group.max_abs:.3g}",
                f"max rel {max(part.max_rel for part in parts):.3g}",
                *_ulp_text([part.max_ulp for part in parts]),
                *([f"{nan:,} NaN on one side"] if (nan := sum(part.nan for part in parts)) else []),
            ]
        )
        num_exceeding = sum(part.num_exceeding for part in parts)
        if num_exceeding != differing:
            yield (
                f"{num_exceeding:,} of them beyond the tolerances"
                if num_exceeding
                else "all within the tolerances"
            )
    elif members[0].outcome == "dtype":
        yield "the same numbers"
    other = sum(part.other_bits for part in parts)
    if other:
        yield f"{plural(other, 'element')} equal but for the sign of zero or the bits of NaN"


def _share_text(part: int, total: int) -> str:
    """Return `97.3 %`, or the count itself if that is clearer."""
    if part == total:
        return "all"
    # A share that rounds to 100 % would look like all elements.
    share = min(part / total, 0.999)
    return f"{share:.1%}".replace("%", " %") if part * 1000 >= total else f"{part:,}"


def _position_text(group: Sequence[ArrayDiff]) -> str:
    first = next(item for item in group if item.deviation and item.deviation.first is not None)
    assert first.deviation is not None and first.deviation.first is not None
    from ckpttools.compare.renames import indices

    numbers = ", ".join(f"{word} {number}" for word, number in indices(first.name))
    layers_text = f" in {numbers}" if len(group) > 1 and numbers else ""
    index = ", ".join(map(str, first.deviation.first))
    return f", the first at [{index}]{layers_text}"


def _ulp_text(ulps: Sequence[int | None]) -> list[str]:
    """Return the steps between two representable numbers, unless they are too many to count."""
    return [] if None in ulps else [f"max ulp {max(ulp or 0 for ulp in ulps):,}"]
