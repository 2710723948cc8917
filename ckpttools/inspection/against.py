"""Compare a tree with another tree or with a family's rows: names, shapes and dtypes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

from ckpttools.adapters.bases import Base
from ckpttools.adapters.factors import Adapter
from ckpttools.adapters.fitting import match_base_layout
from ckpttools.adapters.peft import skip_remarks
from ckpttools.array.lazy import LazyArray
from ckpttools.array.patterns import filter_items
from ckpttools.array.tree import Tree, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, FormatError, UsageError
from ckpttools.digest.pairing import Pairing
from ckpttools.inspection.comparison import ArraySpec, Comparison, Different
from ckpttools.mapping.coverage import Coverage, NotCoveredError, ShapeMismatch
from ckpttools.mapping.flags import Flag
from ckpttools.mapping.keys import Key
from ckpttools.mapping.row import Row
from ckpttools.mapping.sizes import max_coordinate
from ckpttools.maxtext.family_layouts import family_as_stored
from ckpttools.maxtext.layers import split_layer_number
from ckpttools.maxtext.recognition import FamilyKeys, family_fits
from ckpttools.maxtext.view import MaxTextView, view_of
from ckpttools.model_families.family import Family


def compare_with_tree(tree: Tree, other: Tree, pattern: str = "*") -> Comparison:
    """Compare the names, shapes and dtypes of the arrays in two trees.

    Args:
        tree: Any checkpoint.
        other: The reference.
        pattern: Shell pattern of the paths to compare.

    Raises:
        UsageError: No array matches the pattern.
    """
    both = Pairing(_arrays_by_name(tree), _arrays_by_name(other))
    selected = frozenset(filter_items({**both.a, **both.b}, str, pattern))
    pairs = ((_spec(name, a), _spec(name, b)) for name, a, b in both.pairs)
    return Comparison(
        against=other.metadata.location,
        num_compared=len(both.a.keys() & selected),
        missing=tuple(_spec(name, array) for name, array in both.only_b.items()),
        extra=tuple(_spec(name, array) for name, array in both.only_a.items()),
        different=tuple(Different(got.path, got, expected) for got, expected in pairs if got != expected),
    ).of(selected)


def _arrays_by_name(tree: Tree) -> dict[str, LazyArray]:
    return {keystr(path): array for path, array in tree.arrays.items()}


def _spec(name: str, array: LazyArray) -> ArraySpec:
    return ArraySpec(name, array.shape, array.dtype.name)


def compare_with_family(
    tree: Tree,
    family: Family,
    config: Mapping[str, Any] | None = None,
    location: str = "",
    pattern: str = "*",
) -> Comparison:
    """Compare a tree with the parameters of a model of a family.

    A MaxText tree is expected to have MaxText names, and other trees Hugging Face names. Optimizer state and
    other arrays that are not parameters are ignored.

    Args:
        tree: Any checkpoint.
        family: Family whose rows describe the expected arrays.
        config: Configuration of the model. Without one, sizes and flags are inferred from the tree's own
            shapes and names, as far as possible.
        location: Location of the configuration.
        pattern: Shell pattern of the paths to compare, as they are or should be in the tree.

    Raises:
        ConfigError: The configuration is invalid.
        UsageError: No path matches, or only names can be compared and some of them stand for several arrays.
    """
    check = _FamilyComparison(tree, family, config, location)
    result = check.with_configuration() if config is not None else check.without()
    if pattern != "*":
        result = check.restrict(result, pattern)
    unknown = () if config is not None else check.unknown_layers()
    return replace(result, reasons=(*result.reasons, *unknown))


@dataclass(frozen=True)
class _FamilyComparison:
    """A tree and its expected arrays. Attributes are the arguments of `compare_with_family`."""

    tree: Tree
    family: Family
    config: Mapping[str, Any] | None
    location: str

    @property
    def view(self) -> MaxTextView:
        return view_of(self.tree)

    @property
    def arrays(self) -> Mapping[str, LazyArray]:
        return self.view.named

    def restrict(self, result: Comparison, pattern: str) -> Comparison:
        """Restrict a comparison to names that match a pattern."""
        if not result.shapes_compared:
            raise UsageError(
                "only names can be compared, and a name may stand for all layers: a pattern cannot select",
                got=pattern,
                hint="compare with the model's config.json, or leave the pattern out",
            )
        names = dict.fromkeys((*self.arrays, *(item.path for item in result.missing)))
        selected = frozenset(filter_items(names, self._tree_name, pattern))
        left = result.of(selected)
        return replace(
            left,
            num_compared=len(selected & self.arrays.keys()),
            reasons=() if left.is_same else result.reasons,
        )

    def _tree_name(self, name: str) -> str:
        """Return the path that a parameter has, or would have, in the tree."""
        return keystr(self.view.flavor.wrapped(tuple(name.split(".")))) if self._is_nested else name

    @cached_property
    def _is_nested(self) -> bool:
        return any(len(path) > 1 for path in self.view.parameters)

    def with_configuration(self) -> Comparison:
        text = f"family {self.family.name} with {self.location}"
        try:
            self._map()
        except NotCoveredError as error:
            return self._build_comparison(text, error.coverage)
        return Comparison(text, len(self.arrays))

    def without(self) -> Comparison:
        """Compare without a configuration: by shapes, or only by names if sizes remain unknown."""
        text = f"family {self.family.name}"
        fit = min(family_fits(self.tree, [self.family]), key=lambda item: item.penalty)
        others = {name for names in fit.others.values() for name in names}
        try:
            self._map()
        except NotCoveredError as error:
            lists = error.coverage
            # Layers in rows whose number only a configuration determines are not unexpected.
            known = replace(lists, extra=tuple(key for key in lists.extra if key in others))
            if known.missing or known.misshapen or known.extra == lists.extra:
                return self._build_comparison(text, known)
        except CheckpointError:
            pass
        else:
            return Comparison(text, len(self.arrays))
        return Comparison(
            text,
            len(self.arrays),
            missing=tuple(
                ArraySpec(name, None, None) for name in (*fit.missing, *_gaps(self.arrays, fit.keys))
            ),
            extra=tuple(_spec(name, array) for name, array in self.arrays.items() if name in others),
            reasons=("Only names were compared: give the model's config.json to compare shapes, too.",),
            shapes_compared=False,
        )

    def unknown_layers(self) -> tuple[str, ...]:
        """Return a note that there may be more layers than those in the tree."""
        counts = {layer.path: layer.length for layer in self.view.layers}
        for before, numbers in _layers(self.arrays).items() if not counts else ():
            counts[before.rstrip("._")] = len(numbers)
        result = " and ".join(f"{number:,} in {location}" for location, number in counts.items())
        text = f"Layers found: {result}. Only the model's config.json shows whether there should be more."
        return (text,) if counts else ()

    def _build_comparison(self, declared: str, coverage: Coverage) -> Comparison:
        return Comparison(
            against=declared,
            num_compared=len(self.arrays),
            missing=tuple(ArraySpec(key, shape, None) for key, shape in coverage.missing.items()),
            extra=tuple(_spec(key, self.arrays[key]) for key in coverage.extra),
            different=tuple(map(self._describe_mismatch, coverage.misshapen)),
            reasons=coverage.reasons,
        )

    def _describe_mismatch(self, mismatch: ShapeMismatch) -> Different:
        got, expected = (
            _spec(mismatch.key, self.arrays[mismatch.key]),
            ArraySpec(mismatch.key, mismatch.expected, None),
        )
        return Different(mismatch.key, got, expected, mismatch.why)

    def _map(self) -> None:
        """Map the arrays to the other side, to raise the errors that this reveals."""
        axis = (self.view.scan_axis or 0) if self.view.is_stacked else None
        overrides = _nameless_flags(self.family.all_rows(axis)) if self.config is None else {}
        location = self.location or self.tree.metadata.location
        if self.view.is_maxtext:
            without = self.family.towers_not_in(self.arrays)
            stored = family_as_stored(self.family, self.arrays)
            table = stored.table(self.config, location, scan_axis=axis, overrides=overrides, without=without)
            table.to_right(self.arrays)
        else:
            spelling = self.family.spelling_of(self.arrays)
            self.family.table(self.config, location, spelling=spelling, overrides=overrides).to_left(
                self.arrays
            )


def _layers(names: Iterable[str]) -> dict[str, set[int]]:
    """Return the layer numbers in names, by the text before them."""
    numbers: dict[str, set[int]] = defaultdict(set)
    for name in names:
        if result := split_layer_number(name):
            before, number = result
            numbers[before].add(number)
    return numbers


def _gaps(names: Collection[str], keys: FamilyKeys) -> Iterator[str]:
    """Yield layers without arrays that precede layers with arrays: `model.layers.2.*`."""
    for before, result in _layers(names).items():
        first = min(keys.first_numbers(before), default=min(result))
        last = max((number for number in result if number < max_coordinate(len(names))), default=0)
        yield from (f"{before}{number}.*" for number in range(first, last) if number not in result)


def _nameless_flags(rows: Sequence[Row]) -> dict[str, Flag]:
    """Return the flags that change values but not names, so that any setting expects the same arrays."""
    names = {name for row in rows for name in row.flags}
    return {
        name: Flag(False, "")
        for name in names
        if _keys(row for row in rows if name in row.when.split())
        == _keys(row for row in rows if name in row.unless.split())
    }


def _keys(rows: Iterable[Row]) -> set[tuple[Key, Key]]:
    return {(row.left.key, row.right.key) for row in rows}


def compare_with_base(adapter: Adapter, base: Base) -> Comparison:
    """Compare the weights that an adapter changes, and their shapes, with the arrays of a model."""
    # If the number of experts differs, all experts are reported as missing.
    with suppress(FormatError):
        adapter = match_base_layout(base, adapter)
    shapes = {factor.name: factor.shape for factor in adapter.factors}
    shapes |= {name: array.shape for name, array in adapter.replaced.items()}
    names = {name: base.named(name) for name in shapes}
    extra = [ArraySpec(name, shapes[name], None) for name, result in names.items() if result is None]
    return Comparison(
        against=base.tree.metadata.location,
        num_compared=len(shapes),
        extra=tuple(extra),
        different=tuple(_different(adapter, base)),
        reasons=tuple(skip_remarks(adapter)),
    )


def _different(adapter: Adapter, base: Base) -> Iterator[Different]:
    for factor in adapter.factors:
        name = base.named(factor.name)
        if name is not None and not factor.fits(base.weights[name].shape):
            reason = f"A {list(factor.a.shape)}, B {list(factor.b.shape)}"
            expected = ArraySpec(name, base.weights[name].shape, None)
            yield Different(factor.name, ArraySpec(factor.name, factor.shape, None), expected, reason)
    for own, array in adapter.replaced.items():
        name = base.named(own)
        if name is not None and base.weights[name].shape != array.shape:
            expected = ArraySpec(name, base.weights[name].shape, None)
            yield Different(own, ArraySpec(own, array.shape, None), expected)
