"""`ckpt diff`: what is different between two checkpoints, how far, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from math import isfinite, isnan
from typing import Any

import click

from ckpttools.cli.maxtext_options import like_option
from ckpttools.cli.models import family_option, rope_layout_option
from ckpttools.cli.options import (
    ANY_PATH,
    filter_option,
    json_option,
    max_header_option,
    max_index_option,
    prefer_rank_option,
    resource_options,
    together,
)
from ckpttools.cli.output import end_as_different, print_json
from ckpttools.cli.progress import progress_option, watching
from ckpttools.cli.wording import padding_rows_option
from ckpttools.stores.place import Place


def _no_nan(context: click.Context, option: click.Parameter, value: float) -> float:
    """No difference is within NaN, and none is beyond it."""
    if isnan(value):
        raise click.BadParameter("NaN is no bound", context, option)
    return value


_comparing_options = together(
    click.option(
        "--atol",
        type=click.FloatRange(min=0),
        callback=_no_nan,
        default=0.0,
        metavar="X",
        help="Elements are equal if |a-b| <= atol + rtol * max(|a|,|b|).",
    ),
    click.option(
        "--rtol",
        type=click.FloatRange(min=0),
        callback=_no_nan,
        default=0.0,
        metavar="X",
        help="The relative part of that tolerance.",
    ),
    click.option(
        "--ulp",
        type=click.IntRange(min=0),
        default=0,
        metavar="N",
        help="Or if they are at most N units in the last place apart, in the coarser dtype.",
    ),
    click.option("--ignore-dtype", is_flag=True, help="Treat equal numbers in different dtypes as equal."),
    filter_option("; no other is read"),
    click.option("--parameters", is_flag=True, help="Leave out optimizer state, step and random states."),
    click.option("--all", "everything", is_flag=True, help="Also list the arrays that are equal."),
    click.option("--explain/--no-explain", default=True, help="Find out why arrays differ."),
)


_alignment_options = together(
    like_option("A model's directory or config.json, if there is none beside the arrays."),
    family_option,
    rope_layout_option,
    padding_rows_option,
)


@click.command(short_help="What differs between two checkpoints, how far, and why.")
@click.argument("first", metavar="A", type=ANY_PATH)
@click.argument("second", metavar="B", type=ANY_PATH)
@_comparing_options
@_alignment_options
@json_option
@resource_options
@progress_option
@max_header_option
@max_index_option
@prefer_rank_option
def diff(first: Place, second: Place, as_json: bool, progress: bool, **options: Any) -> None:
    """Compare two checkpoints number by number: what is equal, what differs and how far, and why.

    A and B may have any format and layout: Hugging Face or MaxText, scanned or not. If only one has training
    state, --parameters compares the rest. Layers are compared one by one, Hugging Face arrays against
    MaxText's by the rows of their family. For a run, give the directory of a step. Without a tolerance, the
    sign of a zero and the payload of a NaN count, as for ckpt verify.

    For arrays that differ, the command looks for a cause: transposed, RoPE halves or interleaved, gate and up
    swapped, a scale or a norm's 1 left out, layers shifted, vocabulary padded, cast, and others.

    Exit codes: 0 equal, 1 different; 3 (bad input) and 5 (input/output) mean that no comparison was possible.

    \b
    Example:
      ckpt diff ~/models/Llama-3.1-8B ~/maxtext/llama3.1-8b
      ckpt diff checkpoints/100 checkpoints/200 --rtol 1e-3 --filter '*norm*'
    """
    from ckpttools.api.differing import diff as compare
    from ckpttools.cli.diff_text import print_diff

    with watching(progress) as observe:
        report = compare(first, second, observe=observe, **options)
    if as_json:
        texts = {"remarks": list(map(str, report.remarks)), "uncompared": list(map(str, report.uncompared))}
        print_json({**_plain(report), **texts})
    else:
        print_diff(report)
    if not report.equal:
        end_as_different()


def _plain(value: Any) -> Any:
    """Dataclasses as objects; what is infinite, for which JSON has no number, as a string."""
    if hasattr(value, "__dataclass_fields__"):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value
