"""Merge an adapter into the weights of its base."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ckpttools.adapters.bases import Base, other_base_remarks
from ckpttools.adapters.config import unknown_settings
from ckpttools.adapters.factors import Adapter, FactorPair, finite, require_finite
from ckpttools.adapters.fitting import HEAD, TABLE, fit_adapter
from ckpttools.adapters.peft import skip_remarks
from ckpttools.array.lazy import LazyArray
from ckpttools.array.lowrank import add_arrays
from ckpttools.array.tree import Leaf, Path, Tree
from ckpttools.core.dtypes import DTYPES
from ckpttools.core.errors import ShapeError, UsageError
from ckpttools.core.message_terms import option
from ckpttools.core.notes import Note, Notes
from ckpttools.core.text import array_count, fold_lines, sample_names
from ckpttools.formats.adapters import ADAPTER
from ckpttools.maxtext.view import view_of
from ckpttools.transforms.base import Transformed
from ckpttools.transforms.cast import cast

_FLOAT32 = DTYPES["float32"]
_NUMBER = re.compile(r"\d+")


def merge_into_base(base: Base, adapter: Adapter, scale: float = 1.0) -> Transformed:
    """Return the base's tree with `scale` times the adapter's changes added.

    Products are summed in float64, rounded to float32, added in float32, and rounded once to the dtype of the
    base.

    Raises:
        FormatError: The adapter does not belong to this base, or its factors do not match it or contain NaN
            or infinity.
        UsageError: The scale is NaN or infinite, or would scale an adapter with magnitudes (DoRA).
    """
    fit = fit_adapter(base, adapter)
    require_finite(adapter)
    factors = [replace(factor, scale=finite("scale", scale, factor.scale * scale)) for factor in fit.factors]
    if scale != 1 and any(factor.magnitude is not None for factor in factors):
        raise UsageError(
            "an adapter that sets row norms (DoRA) cannot be scaled",
            location=adapter.location,
            got=option("scale", scale),
            hint="leave it out",
        )
    deltas = {factor.name: factor.change(_weight(base, fit, factor)) for factor in factors}
    # An embedding may be replaced first and then changed.
    replaced = _replaced_arrays(base, fit)
    leaves: dict[Path, Leaf] = {**base.tree.leaves, **replaced}
    for path, delta in base.moved(deltas).items():
        leaves[path] = add_arrays(replaced.get(path, base.tree.arrays[path]), delta)
    added = Note.of_arrays(len(deltas), _merge_text(fit, scale))
    notes = Notes((added,), remarks=tuple(_merge_remarks(base, fit, scale)))
    return Transformed(Tree(leaves, base.tree.metadata), notes)


def _weight(base: Base, adapter: Adapter, factor: FactorPair) -> LazyArray:
    """Return the weight to which factors are added, in float32 if its values are read (DoRA)."""
    if factor.magnitude is None:
        return base.weights[factor.name]
    own = adapter.replaced.get(factor.name)
    return base.float32_weights[factor.name] if own is None else cast(own, _FLOAT32)


def _replaced_arrays(base: Base, adapter: Adapter) -> Mapping[Path, LazyArray]:
    """Return the adapter's replaced arrays in the base's dtypes."""
    for name, array in adapter.replaced.items():
        expected = base.weights[name].shape
        if array.shape != expected:
            raise ShapeError(
                "an array that the adapter replaces has another shape in its base",
                location=f"{adapter.location}, {name}",
                got=list(array.shape),
                expected=f"{list(expected)} ({base.tree.metadata.location})",
                hint="if the vocabulary was resized, save the base with the new size first",
            )
    return base.replacements_at_paths(adapter.replaced)


def _merge_text(adapter: Adapter, scale: float) -> str:
    ranks = sorted({factor.rank for factor in adapter.factors})
    ranked = f" of rank {' and '.join(map(str, ranks))}" if ranks else ""
    times = "" if scale == 1 else f"{scale:g} times "
    return (
        f"{times}the adapter{ranked} is added: summed in float64, added in float32, rounded once to the "
        "dtype of the base"
    )


def _merge_remarks(base: Base, adapter: Adapter, scale: float) -> Iterator[str]:
    yield from other_base_remarks(base, adapter, "merged into")
    if unknown := unknown_settings(adapter.config):
        yield f"{ADAPTER} has unknown settings, assumed to have no effect: {sample_names(unknown)}"
    yield from skip_remarks(adapter)
    if adapter.replaced:
        yield f"replaced with arrays of the adapter: {array_count(adapter.replaced)}"
    names = [*(factor.name for factor in adapter.factors), *adapter.replaced]
    if any(name.endswith(TABLE) for name in names) and not any(HEAD in name for name in base.weights):
        yield (
            "the embedding table is the output head, and the adapter changes it: both change, in "
            "training only where PEFT was set to tie them (ensure_weight_tying)"
        )
    if base.rows is not None and view_of(base.tree).optimizer is not None:
        yield "the optimizer state of the base is kept"
    if left := _unchanged_siblings(base, adapter):
        names_text = ", ".join(fold_lines(left))
        yield (
            f"the adapter has no factors for {array_count(left)}, although it has factors for the same "
            f"modules "
            f"of other layers: {names_text}"
        )


def _unchanged_siblings(base: Base, adapter: Adapter) -> list[str]:
    """Return unchanged weights whose names differ from changed ones only in their indices."""
    changed = {factor.name for factor in adapter.factors}
    kinds = {_NUMBER.sub("#", name) for name in changed}
    return [name for name in base.weights if name not in changed and _NUMBER.sub("#", name) in kinds]
