"""`ckpt diff`: what is different between two checkpoints, how far, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from math import isfinite, isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckpttools.cli.options import (
    ANY_PATH,
    SOME_TEXT,
    bundled,
    json_option,
    max_header_option,
    max_index_option,
    resource_options,
)
from ckpttools.cli.output import print_json
from ckpttools.cli.scanning import progress_option, watching
from ckpttools.cli.wording import padding_rows_option
from ckpttools.core.errors import FormatError, UsageError

if TYPE_CHECKING:
    from ckpttools.api.conversion import Resources
    from ckpttools.array.lazy import LazyArray
    from ckpttools.array.tree import Tree
    from ckpttools.compare.alignment import Aligned, AlignOptions
    from ckpttools.compare.deviation import Tolerances
    from ckpttools.compare.diff import ArrayDiff

_DIFFERENT = 1


@dataclass(frozen=True, slots=True)
class SideReport:
    """One of the checkpoints."""

    path: str
    format: str | None
    step: int | None
    arrays: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class DiffReport:
    """What `ckpt diff` found.

    Attributes:
        a, b: the checkpoints, with the number of arrays that took part.
        equal: whether nothing differs beyond the tolerances.
        remarks: how names were brought together, and what took no part.
        outcomes: how many arrays have which outcome, see `ckpttools.compare.diff.OUTCOMES`.
        arrays: those that differ; all where asked for.
        hints: which options leave all that differs out of account.
    """

    a: SideReport
    b: SideReport
    equal: bool
    remarks: tuple[str, ...]
    outcomes: Mapping[str, int]
    arrays: tuple[ArrayDiff, ...]
    hints: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Looking:
    """What counts and what is shown."""

    atol: float
    rtol: float
    ulp: int
    ignore_dtypes: bool
    pattern: str
    everything: bool
    why: bool

    @property
    def tolerances(self) -> Tolerances:
        from ckpttools.compare.deviation import Tolerances

        return Tolerances(self.atol, self.rtol, self.ulp)


def _no_nan(context: click.Context, option: click.Parameter, value: float) -> float:
    """Nothing is up to NaN, and nothing beyond it."""
    if isnan(value):
        raise click.BadParameter("NaN is no bound", context, option)
    return value


_looking_options = bundled(
    "looking",
    _Looking,
    click.option(
        "--atol",
        type=click.FloatRange(min=0),
        callback=_no_nan,
        default=0.0,
        metavar="X",
        help="Up to so much elements are equal: |a-b| <= atol + rtol * max(|a|,|b|).",
    ),
    click.option(
        "--rtol",
        type=click.FloatRange(min=0),
        callback=_no_nan,
        default=0.0,
        metavar="X",
        help="The part in proportion.",
    ),
    click.option(
        "--ulp",
        type=click.IntRange(min=0),
        default=0,
        metavar="N",
        help="Or up to N units in the last place, of the coarser dtype.",
    ),
    click.option(
        "--ignore-dtype", "ignore_dtypes", is_flag=True, help="Equal numbers in another dtype are equal."
    ),
    click.option(
        "--filter",
        "pattern",
        metavar="GLOB",
        default="*",
        help="Only arrays whose whole name matches, such as '*/mlp/*'; no other is read.",
    ),
    click.option("--all", "everything", is_flag=True, help="List the arrays that are equal, too."),
    click.option("--explain/--no-explain", "why", default=True, help="Find out why arrays differ."),
)


def _align_options(
    like: Path | None, family: str | None, rope_layout: str | None, padding_rows: str | None
) -> AlignOptions:
    from ckpttools.compare.alignment import AlignOptions
    from ckpttools.maxtext.model import ModelOptions

    return AlignOptions(ModelOptions(family, rope_layout), like, padding_rows)


_alignment_options = bundled(
    "alignment",
    _align_options,
    click.option(
        "--like",
        type=ANY_PATH,
        metavar="HF_DIR|CONFIG",
        help="A model's directory or config.json, where none lies beside the arrays.",
    ),
    click.option(
        "--family",
        type=SOME_TEXT,
        metavar="NAME|FILE",
        help="Map names by the rows of this family, whatever model_type says.",
    ),
    click.option(
        "--rope-layout",
        type=click.Choice(("halves", "interleaved")),
        help="Order of rotary pairs in MaxText's query and key; without it as config.json implies.",
    ),
    padding_rows_option,
)


@click.command(short_help="What differs between two checkpoints, how far, and why.")
@click.argument("first", metavar="A", type=ANY_PATH)
@click.argument("second", metavar="B", type=ANY_PATH)
@_looking_options
@_alignment_options
@json_option
@resource_options
@progress_option
@max_header_option
@max_index_option
def diff(
    first: Path,
    second: Path,
    looking: _Looking,
    alignment: AlignOptions,
    as_json: bool,
    resources: Resources,
    progress: bool,
    max_header_bytes: int,
    max_index_bytes: int,
) -> None:
    """Compare two checkpoints number by number: what is equal, what differs and how far, and why.

    A and B may be of any format and layout: Hugging Face or MaxText, scanned or not, with training state or
    without. Layers are compared one by one, Hugging Face arrays against MaxText's by the rows of their
    family. Of a run, give the directory of a step. NaN equals NaN, and 0 equals -0.

    Where arrays differ, causes are looked for: transposed, RoPE halves or interleaved, gate and up swapped,
    a scale or a norm's 1 left out, layers shifted, vocabulary padded, cast, and others.

    Exit codes: 0 equal, 1 different; with 3 (bad input) and 5 (input/output) it cannot be told.

    \b
    Example:
      ckpt diff ~/models/Llama-3.1-8B ~/maxtext/llama3.1-8b
      ckpt diff checkpoints/100 checkpoints/200 --rtol 1e-3 --filter '*norm*'
    """
    from ckpttools.cli.diff_text import print_diff
    from ckpttools.compare.alignment import aligned, less_padding
    from ckpttools.formats.base import ReadOptions
    from ckpttools.formats.registry import open_tree

    read = ReadOptions(max_header_bytes=max_header_bytes, max_index_bytes=max_index_bytes)
    trees = open_tree(first, read), open_tree(second, read)
    both = aligned(*trees, alignment)
    chosen = replace(both, a=_chosen(both.a, looking.pattern), b=_chosen(both.b, looking.pattern))
    if not chosen.a and not chosen.b:
        raise (UsageError if both.a or both.b else FormatError)(
            "none of the arrays is meant",
            got=f"{len(both.a)} and {len(both.b)} arrays",
            wanted=f"names that match {looking.pattern!r}",
            hint="names are those that --all lists",
        )
    chosen = less_padding(chosen, alignment.padding_rows, resources.memory)
    found = _compared(chosen, both, looking, resources, progress)
    report = _report(trees, chosen, found, looking.everything)
    if as_json:
        print_json(_plain(report))
    else:
        print_diff(report)
    if not report.equal:
        click.get_current_context().exit(_DIFFERENT)


def _chosen(arrays: Mapping[str, LazyArray], pattern: str) -> dict[str, LazyArray]:
    return {name: array for name, array in arrays.items() if fnmatchcase(name, pattern)}


def _compared(
    chosen: Aligned,
    both: Aligned,
    looking: _Looking,
    resources: Resources,
    progress: bool,
) -> tuple[ArrayDiff, ...]:
    from ckpttools.compare.diff import diff as compare
    from ckpttools.compare.explain import explain

    a, b = chosen.a, chosen.b
    limits: dict[str, Any] = {"memory": resources.memory, "jobs": resources.readers}
    same = [name for name in a.keys() & b.keys() if a[name].shape == b[name].shape]
    with watching(progress, sum(a[name].nbytes + b[name].nbytes for name in same)) as observe:
        found = compare(
            a,
            b,
            looking.tolerances,
            ignore_dtypes=looking.ignore_dtypes,
            observe=observe,
            **limits,
        )
    if looking.why and not all(each.is_equal for each in found):
        # Causes may lie in arrays that are not asked for: what was renamed is elsewhere.
        return explain(found, {**both.a, **a}, {**both.b, **b}, both.sizes, **limits)
    return found


def _report(
    trees: tuple[Tree, Tree],
    chosen: Aligned,
    found: tuple[ArrayDiff, ...],
    everything: bool,
) -> DiffReport:
    from ckpttools.compare.hints import after_diff

    a, b = (
        SideReport(
            tree.metadata.place,
            tree.metadata.format,
            tree.metadata.step,
            len(arrays),
            sum(each.nbytes for each in arrays.values()),
        )
        for tree, arrays in zip(trees, (chosen.a, chosen.b), strict=True)
    )
    return DiffReport(
        a,
        b,
        all(each.is_equal for each in found),
        chosen.remarks,
        dict(Counter(each.outcome for each in found)),
        tuple(each for each in found if everything or each.outcome != "equal"),
        after_diff(found, {**chosen.a, **chosen.b}, a.path, b.path),
    )


def _plain(value: Any) -> Any:
    """Dataclasses as objects; what is infinite, for which JSON has no number, as a string."""
    if hasattr(value, "__dataclass_fields__"):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value
