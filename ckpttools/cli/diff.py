"""`ckpt diff`: compare two checkpoints and explain their differences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from math import isfinite
from typing import TYPE_CHECKING, Any, Unpack

import click

from ckpttools.api.options import MAX_HEADER_BYTES, MAX_INDEX_BYTES, PREFER_RANK
from ckpttools.api.options.inspect import DIFF
from ckpttools.cli.command import BaseCommand
from ckpttools.cli.options import ANY_PATH, flags, json_option, progress_option, resource_options
from ckpttools.cli.output import exit_with_differences, labeled_lines, print_json, print_lines, styled, width
from ckpttools.cli.progress import progress_events
from ckpttools.core.dtypes import DTYPES
from ckpttools.core.text import fold_lines, format_type, plural, printable
from ckpttools.core.units import format_disk
from ckpttools.stores.location import Location

if TYPE_CHECKING:
    from ckpttools.api.diff import DiffReport, SideReport
    from ckpttools.api.sources import Scanning
    from ckpttools.compare.diff import ArrayDiff, ArrayType, Outcome
    from ckpttools.digest.pairing import Remark


@click.command(short_help="Compare two checkpoints: what differs, how much, and why.", cls=BaseCommand)
@click.argument("first", metavar="A", type=ANY_PATH)
@click.argument("second", metavar="B", type=ANY_PATH)
@flags(*DIFF)
@json_option
@resource_options
@progress_option
@flags(MAX_HEADER_BYTES, MAX_INDEX_BYTES, PREFER_RANK)
def diff(
    first: Location,
    second: Location,
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

    with progress_events(progress) as scanning["observe"]:
        report = compare(
            first,
            second,
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
        print_diff(report)
    if not report.equal:
        exit_with_differences()


def _to_plain(value: Any) -> Any:
    """Convert dataclasses to dicts, and infinities, which JSON lacks, to strings."""
    if hasattr(value, "__dataclass_fields__"):
        return {field.name: _to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: _to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_to_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value


_MAX_PARAGRAPHS = 60
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


def print_diff(report: DiffReport) -> None:
    """Print both sides, how they were aligned, their differences, and a summary."""
    print_lines(_report_lines(report), is_summary=True)


def _report_lines(report: DiffReport) -> Iterator[str]:
    for name, side in (("A", report.a), ("B", report.b)):
        yield from _side_line(name, side, (*report.remarks, *report.uncompared))
    for remark in report.remarks:
        if remark.side is None:
            yield from _indent(remark.text)
    yield ""
    paragraphs = list(_paragraphs(report.arrays))
    for paragraph in paragraphs[:_MAX_PARAGRAPHS]:
        yield from paragraph
    if len(paragraphs) > _MAX_PARAGRAPHS:
        yield f"… and {plural(len(paragraphs) - _MAX_PARAGRAPHS, 'more group')} of arrays; --json lists all"
    if paragraphs:
        yield ""
    yield from _verdict_lines(report)
    for hint in report.hints:
        yield from _indent(hint)


def _side_line(name: str, side: SideReport, remarks: Sequence[Remark]) -> Iterator[str]:
    step = f", step {side.step}" if side.step is not None else ""
    facts = f"{side.format or 'unknown'}{step}, {plural(side.arrays, 'array')}, {format_disk(side.nbytes)}"
    yield f"{name}  {styled(printable(side.path), bold=True)}"
    yield from _indent(facts)
    for remark in remarks:
        if remark.side == name:
            yield from _indent(remark.text)


def _indent(text: str) -> list[str]:
    return labeled_lines("", printable(text), 2, width())


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
                    (outcome, array.a, array.b, array.cause, _outcome_text(array.name)), []
                ).append(array)
    return (list(_paragraph(group)) for group in groups.values())


def _outcome_text(name: str) -> str:
    """Return a text without its digits."""
    return "".join(character for character in name if not character.isdecimal())


def _paragraph(group: Sequence[ArrayDiff]) -> Iterator[str]:
    first = group[0]
    for name in fold_lines(printable(item.name) for item in group):
        yield styled(name, bold=True)
    for label, text in _fact_lines(first, group):
        yield from labeled_lines(f"  {label}", printable(text), _MARGIN, width(), dim=True)


def _fact_lines(first: ArrayDiff, group: Sequence[ArrayDiff]) -> Iterator[tuple[str, str]]:
    yield first.outcome, _type_text(first.a, first.b)
    yield from (("", text) for text in _measure_text(group))
    if first.cause is not None:
        yield "because", first.cause.text
        if first.cause.advice:
            yield "next", first.cause.advice


def _type_text(a: ArrayType | None, b: ArrayType | None) -> str:
    # Leaves without arrays have a description instead of a dtype.
    shown = [
        format_type(item.dtype, item.shape) if item.dtype in DTYPES else item.dtype
        for item in (a, b)
        if item is not None
    ]
    if a is None or b is None or a == b:
        return shown[0]
    return f"{shown[0]} in A, {shown[1]} in B"


def _measure_text(group: Sequence[ArrayDiff]) -> Iterator[str]:
    """Yield the combined distance of all these arrays."""
    parts = [item.deviation for item in group if item.deviation is not None]
    if not parts:
        return
    elements, differing = (
        sum(part) for part in zip(*((p.elements, p.differing) for p in parts), strict=True)
    )
    if differing:
        yield f"{_share_text(differing, elements)} of {plural(elements, 'element')}{_position_text(group)}"
        yield ", ".join(
            [
                f"max abs {max(part.max_abs for part in parts):.3g}",
                f"max rel {max(part.max_rel for part in parts):.3g}",
                *_ulp_text([part.max_ulp for part in parts]),
                *([f"{nan:,} NaN on one side"] if (nan := sum(part.nan for part in parts)) else []),
            ]
        )
        beyond = sum(part.beyond for part in parts)
        if beyond != differing:
            yield f"{beyond:,} of them beyond the tolerances" if beyond else "all within the tolerances"
    elif group[0].outcome == "dtype":
        yield "the same numbers"
    other = sum(part.other_bits for part in parts)
    if other:
        yield f"{plural(other, 'element')} equal but for the sign of zero or the bits of NaN"


def _share_text(part: int, whole: int) -> str:
    """Return `97.3 %`, or the count itself if that is clearer."""
    if part == whole:
        return "all"
    # A share that rounds to 100 % would look like all elements.
    share = min(part / whole, 0.999)
    return f"{share:.1%}".replace("%", " %") if part * 1000 >= whole else f"{part:,}"


def _position_text(group: Sequence[ArrayDiff]) -> str:
    first = next(item for item in group if item.deviation and item.deviation.first is not None)
    assert first.deviation is not None and first.deviation.first is not None
    from ckpttools.compare.renames import indices

    numbers = ", ".join(f"{word} {number}" for word, number in indices(first.name))
    which = f" in {numbers}" if len(group) > 1 and numbers else ""
    index = ", ".join(map(str, first.deviation.first))
    return f", the first at [{index}]{which}"


def _ulp_text(ulps: Sequence[int | None]) -> list[str]:
    known = [ulp for ulp in ulps if ulp is not None]
    return [f"max ulp {max(known):,}"] if known else []
