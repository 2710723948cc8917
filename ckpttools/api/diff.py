"""Compare two checkpoints: what differs, how much, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Unpack

from ckpttools.api.options import SCANNING
from ckpttools.api.options.inspect import DIFF, DIFF_SORTS
from ckpttools.api.sources import (
    Scanning,
    ScanSettings,
    Source,
    open_both,
    scanning,
)
from ckpttools.api.step_files import with_step_files
from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Tree
from ckpttools.compare.align import AlignOptions, align
from ckpttools.compare.diff import OUTCOMES, ArrayDiff, Outcome, leaf_diff
from ckpttools.compare.diff import diff as compare
from ckpttools.compare.groups import GroupDiff, by_layer, by_role, sorted_by, with_roles
from ckpttools.compare.hints import hints_after_diff
from ckpttools.compare.measure import Tolerances
from ckpttools.compare.padding import drop_implied
from ckpttools.core.argument_checks import validate_arguments
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, DamagedScalesError, FormatError, UsageError, listing
from ckpttools.core.message_terms import option
from ckpttools.core.options import declare, refuse
from ckpttools.core.tabular import Tabular
from ckpttools.core.text import plural
from ckpttools.digest.canonical import Selection, parameters_among
from ckpttools.digest.pairing import Pairing, Remark, Side
from ckpttools.maxtext.model_options import ModelOptions
from ckpttools.quantized.view import NumericTree, is_dequantized, make_comparable
from ckpttools.stores.registry import LocationLike
from ckpttools.stores.web.hub_name import model_at

_MAX_SHOWN = 8


@dataclass(frozen=True, slots=True)
class SideReport:
    """One of the checkpoints of a comparison.

    Attributes:
        path, format, step: Location, format and step of the checkpoint.
        arrays, nbytes: Number and bytes of the compared arrays, with layers one by one.
        stored_arrays, stored_nbytes: Number and bytes of the arrays in the checkpoint.
    """

    path: str
    format: str | None
    step: int | None
    arrays: int
    nbytes: int
    stored_arrays: int
    stored_nbytes: int

    @classmethod
    def of(cls, tree: Tree, arrays: Mapping[str, LazyArray]) -> SideReport:
        return cls(
            tree.metadata.location,
            tree.metadata.format,
            tree.metadata.step,
            len(arrays),
            sum(array.nbytes for array in arrays.values()),
            len(tree.arrays),
            tree.nbytes,
        )


@dataclass(frozen=True, slots=True, repr=False)
class DiffReport(Tabular):
    """The result of a comparison.

    Attributes:
        a, b: The checkpoints, with the number of compared arrays.
        equal: Whether nothing differs beyond the tolerances.
        remarks: How names were matched, and which arrays were left out.
        uncompared: Groups of arrays that only one side has and that were not compared one by one. If there
            are any, the checkpoints are different.
        outcomes: Number of arrays by outcome; see `ckpttools.compare.diff.OUTCOMES`.
        arrays: Arrays that differ, or all arrays if requested; none in a summary.
        hints: Options that would ignore all differences, and notes on arrays that represent equal values with
            different bits or that were rounded by quantization.
        layers: Layers, and arrays outside of layers, whose parameters differ in values, with the largest
            differences first.
        num_layers: Number of these before `top` was applied.
        roles: Parameters, optimizer state and other state, each as one group; none if all arrays are equal.
    """

    a: SideReport
    b: SideReport
    equal: bool
    remarks: tuple[Remark, ...]
    outcomes: Mapping[Outcome, int]
    arrays: tuple[ArrayDiff, ...]
    hints: tuple[str, ...] = ()
    uncompared: tuple[Remark, ...] = ()
    layers: tuple[GroupDiff, ...] = ()
    num_layers: int = 0
    roles: tuple[GroupDiff, ...] = ()

    def __repr__(self) -> str:
        """Return the verdict and the differing arrays.

        Arrays whose names differ only in numbers share a line.
        """
        counts = [f"{self.outcomes[outcome]:,} {outcome}" for outcome in OUTCOMES if outcome in self.outcomes]
        farthest = max((array.deviation.max_abs for array in self.arrays if array.deviation), default=0)
        most = [f"{item.name} moved most ({item.rel_l2:.2g})" for item in self.layers[:1] if item.distance]
        head = ", ".join([*counts, *([f"max abs {farthest:.3g}"] if farthest else []), *most])
        lines = [f"{array.name}: {_describe(array)}" for array in self.arrays if not array.is_equal]
        verdict = "equal" if self.equal else "different"
        return (
            f"<DiffReport of {self.a.path} and {self.b.path}: {verdict}: {head}{listing(lines, _MAX_SHOWN)}>"
        )


def _describe(diff: ArrayDiff) -> str:
    return diff.outcome if diff.cause is None else f"{diff.outcome} ({diff.cause.name})"


@validate_arguments
@declare(*DIFF, *SCANNING)
def diff(
    a: Source,
    b: Source,
    *,
    sort: str | None = None,
    top: int | None = None,
    summary: bool = False,
    atol: float = 0.0,
    rtol: float = 0.0,
    ulp: int = 0,
    ignore_dtype: bool = False,
    filter: str = "*",
    parameters: bool = False,
    everything: bool = False,
    explain: bool = True,
    like: LocationLike | None = None,
    family: str | None = None,
    rope_layout: str | None = None,
    padding_rows: str | None = None,
    **common: Unpack[Scanning],
) -> DiffReport:
    """Compare two checkpoints of any format and layout value by value.

    Layers are compared one by one, and Hugging Face arrays with those of MaxText by the mapping rows of their
    family. Without a tolerance, the sign of a zero and the payload of a NaN count, as in `verify`. The report
    has the distance of each array that differs (relative L2, RMS, cosine), and of each layer.

    Args:
        a, b: Files, items, steps or run directories, or trees.

    Raises:
        CheckpointError: A checkpoint cannot be read, the memory is too small, or no array matches.
    """
    _check_sort(sort)
    options = AlignOptions(
        ModelOptions(family, rope_layout), None if like is None else model_at(like), padding_rows, parameters
    )
    with scanning(common) as scan:
        trees = open_both(a, b, scan.read, scan.read)
        scan.fetch(*trees)
        of_a, of_b = make_comparable(*trees, is_read=filter == "*")
        both = align(of_a.tree, of_b.tree, options)
        both = replace(both, remarks=(*_dequantize_both(of_a, of_b), *both.naming, *both.remarks))
        chosen = drop_implied(_select_matching(both, filter), padding_rows, scan.memory)
        is_complete = filter == "*" and not parameters
        chosen = with_step_files(chosen, (a, trees[0]), (b, trees[1])) if is_complete else chosen
        measure = partial(
            _compare_arrays, scan=scan, tolerances=Tolerances(atol, rtol, ulp), ignore_dtypes=ignore_dtype
        )
        result = measure(chosen)
        if filter == "*" and _may_be_rounded(chosen, result):
            back = _as_huggingface(of_a.tree, of_b.tree, chosen, options, scan.memory)
            apart = result if back is None else measure(back)
            if back is not None and all(item.is_equal for item in apart):
                chosen, result = back, apart
        more: tuple[Remark, ...] = ()
        if explain and not all(item.is_equal for item in result):
            result, more = _explain(result, chosen, both, scan)
        result = (*result, *map(leaf_diff, chosen.leaves))
        alike = _equal_values_hint(result, chosen, of_a.tree, of_b.tree, scan)
        rounded = tuple(_one_sided_quantization_hint(result, chosen))
    first, second = SideReport.of(trees[0], chosen.a), SideReport.of(trees[1], chosen.b)
    hints = hints_after_diff(result, {**chosen.a, **chosen.b}, first.path, second.path)
    report = DiffReport(
        first,
        second,
        equal=all(item.is_equal for item in result) and not chosen.uncompared,
        remarks=(*chosen.remarks, *more),
        outcomes=dict(Counter(item.outcome for item in result)),
        arrays=result,
        hints=alike or (*_training_state_hints(chosen), *hints, *rounded, *_use_common_names(trees, chosen)),
        uncompared=tuple(item.remark for item in chosen.uncompared),
    )
    report = _with_groups(report, both, sort, top)
    return replace(report, arrays=() if summary else _listed(report.arrays, everything, top))


def _check_sort(sort: str | None) -> None:
    if sort is not None and sort not in DIFF_SORTS:
        refuse("sort", sort, f"one of {', '.join(DIFF_SORTS)}")


def _with_groups(
    report: DiffReport, both: Pairing[LazyArray], sort: str | None, top: int | None
) -> DiffReport:
    """Add roles and layers, and sort arrays and layers. All layers are counted, but only `top` are kept."""
    if all(item.is_equal for item in report.arrays):
        return report
    arrays = with_roles(report.arrays, {**both.a, **both.b})
    layers, order = by_layer(arrays), sort or ("rel-l2" if top else None)
    num_layers, roles = len(layers), by_role(arrays)
    if order:
        arrays, layers = sorted_by(arrays, order), sorted_by(layers, order)
    return replace(report, arrays=arrays, layers=layers[:top], num_layers=num_layers, roles=roles)


def _listed(arrays: Sequence[ArrayDiff], everything: bool, top: int | None) -> tuple[ArrayDiff, ...]:
    """Return arrays that are not equal, or all, and at most `top` of each role."""
    counts: Counter[str] = Counter()
    kept: list[ArrayDiff] = []
    for item in arrays:
        if everything or item.outcome != "equal":
            counts[item.role] += 1
            if top is None or counts[item.role] <= top:
                kept.append(item)
    return tuple(kept)


def _training_state_hints(both: Pairing[LazyArray]) -> Iterator[str]:
    """Suggest comparing only the parameters if only one side has training state."""
    if both.uncompared:
        yield f"{option('parameters', True)} compares only the parameters"


def _use_common_names(trees: Sequence[Tree], both: Pairing[LazyArray]) -> Iterator[str]:
    """Rename both sides to common names if they share none."""
    if not both.a or not both.b or both.a.keys() & both.b.keys():
        return
    from ckpttools.api.trainer_hints import merge_command_hint, names_of_hub

    if hint := merge_command_hint(*trees) or names_of_hub(*trees):
        yield f"no array has the same name on both sides: {hint}"


def _dequantize_both(a: NumericTree, b: NumericTree) -> Iterator[Remark]:
    sides: tuple[tuple[Side, NumericTree], ...] = ("A", a), ("B", b)
    yield from (Remark(item.remark, side) for side, item in sides if item.remark)


def _select_matching(both: Pairing[LazyArray], pattern: str) -> Pairing[LazyArray]:
    """Return the arrays whose names match.

    Raises:
        UsageError: No array matches.
        FormatError: There are no arrays.
    """
    matching = both.matching(pattern)
    if not matching.a and not matching.b:
        raise (UsageError if both.a or both.b else FormatError)(
            "no array is selected",
            got=f"{len(both.a)} and {len(both.b)} arrays",
            expected=f"names that match {pattern!r}",
            hint=f"names are those that {option('everything', True)} lists",
        )
    return matching


def _compare_arrays(
    pairing: Pairing[LazyArray], scan: ScanSettings, tolerances: Tolerances, ignore_dtypes: bool
) -> tuple[ArrayDiff, ...]:
    total = sum(a.nbytes + b.nbytes for _, a, b in pairing.pairs if a.shape == b.shape)
    return compare(
        pairing,
        tolerances,
        ignore_dtypes=ignore_dtypes,
        memory=scan.memory,
        jobs=scan.jobs,
        observe=scan.observer(total),
    )


def _may_be_rounded(pairing: Pairing[LazyArray], result: Sequence[ArrayDiff]) -> bool:
    """Return whether only values differ, between a Hugging Face and a MaxText checkpoint."""
    differing = [item for item in result if not item.is_equal]
    if pairing.maxtext is None or pairing.uncompared or pairing.leaves:
        return False
    parameters = parameters_among({**pairing.a, **pairing.b})
    names = pairing.a.keys() & pairing.b.keys() & parameters
    return bool(differing) and all(item.name in names for item in differing)


def _as_huggingface(
    a: Tree, b: Tree, pairing: Pairing[LazyArray], options: AlignOptions, memory: int
) -> Pairing[LazyArray] | None:
    """Return both sides as a conversion from MaxText writes them; None if the conversion is not possible."""
    from ckpttools.compare.conversion import ConversionOptions, as_huggingface

    hub, maxtext = (b, a) if pairing.maxtext == "A" else (a, b)
    try:
        back = as_huggingface(hub, maxtext, Selection(), ConversionOptions(options.model))
    except CheckpointError:
        return None
    remark = Remark("compared under Hugging Face names, because the conversion from MaxText rounds")
    return drop_implied(replace(back, remarks=(remark, *back.remarks)), options.padding_rows, memory)


def _equal_values_hint(
    result: tuple[ArrayDiff, ...], pairing: Pairing[LazyArray], a: Tree, b: Tree, scan: ScanSettings
) -> tuple[str, ...]:
    """Return a hint if all differing quantized values and scales represent the same values."""
    differing = [item for item in result if not item.is_equal]
    if not differing or any(item.outcome != "differs" for item in differing):
        return ()
    from ckpttools.api.verify import equal_values_hint

    arrays = [pairing.a[item.name] for item in differing]
    return equal_values_hint(a, b, arrays, memory=scan.memory, jobs=scan.jobs)


def _one_sided_quantization_hint(result: tuple[ArrayDiff, ...], pairing: Pairing[LazyArray]) -> Iterator[str]:
    """Yield a hint if values may differ because one side was quantized."""
    every = sum(item.outcome == "differs" for item in result)
    differing = [item.name for item in result if item.outcome == "differs" and item.cause is None]
    of_a, of_b = ([is_dequantized(own[name]) for name in differing] for own in (pairing.a, pairing.b))
    for name, side, opposite in (("A", of_a, of_b), ("B", of_b, of_a)):
        count = sum(one and not other for one, other in zip(side, opposite, strict=True))
        if count:
            yield (
                f"{count:,} of {plural(every, 'array')} with different values are quantized in {name} "
                "alone, which rounds them: normally distributed weights by about 2.7 % of their rms in FP8, "
                "by 12 % in MXFP4"
            )


def _explain(
    result: tuple[ArrayDiff, ...], pairing: Pairing[LazyArray], both: Pairing[LazyArray], scan: ScanSettings
) -> tuple[tuple[ArrayDiff, ...], tuple[Remark, ...]]:
    """Add causes, and a hint if no cause was found."""
    from ckpttools.compare.explain import explain

    # Causes may involve arrays outside the selection, such as renamed ones.
    every = replace(both, a={**both.a, **pairing.a}, b={**both.b, **pairing.b})
    parameters = [item for item in with_roles(result, {**every.a, **every.b}) if item.role == "parameter"]
    # If training has changed the weights, the search in optimizer state would take most of the time.
    names = {item.name for item in (result if all(item.is_equal for item in parameters) else parameters)}
    searched = [item for item in result if item.name in names]
    try:
        causes = {item.name: item for item in explain(searched, every, memory=scan.memory, jobs=scan.jobs)}
        return tuple(causes.get(item.name, item) for item in result), ()
    except DamagedScalesError as error:
        scales = error.location or "scales of a weight"
        reason = f"causes were not searched, because of non-finite values from {scales}"
        return result, (Remark(reason),)
