"""A tree against what it should be, another tree or what a family's rows say: names, shapes and dtypes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ckpttools.errors import CheckpointError
from ckpttools.families.family import Family
from ckpttools.inspect.family import family_fits
from ckpttools.inspect.layer_rows import layer_rows
from ckpttools.ir.array import LazyArray
from ckpttools.ir.flavours import parameters
from ckpttools.ir.kinds import KindOfTree, kind_of
from ckpttools.ir.tree import Tree, dotted, spelled
from ckpttools.mapping.axes import Key
from ckpttools.mapping.coverage import Coverage, Misfit, NotCoveredError
from ckpttools.mapping.flags import Flag
from ckpttools.mapping.row import Row
from ckpttools.region import Shape


@dataclass(frozen=True, slots=True)
class Spec:
    """An array without its values; `shape` is None where it is not known, `dtype` where any will do."""

    path: str
    shape: Shape | None
    dtype: str | None


@dataclass(frozen=True, slots=True)
class Different:
    """An array that is there, but not as it should be; `why` says whose word it is, where that is known."""

    path: str
    got: Spec
    wanted: Spec
    why: str | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a tree lacks, has too much and has otherwise.

    Attributes:
        against: what it was compared with, in words.
        num_compared: arrays of the tree that took part.
        missing: arrays that should be there.
        extra: arrays that should not.
        different: arrays of another shape or dtype.
        reasons: sentences that say why some of them are wanted or not.
        shapes_compared: False where only names could be.
    """

    against: str
    num_compared: int
    missing: tuple[Spec, ...] = ()
    extra: tuple[Spec, ...] = ()
    different: tuple[Different, ...] = ()
    reasons: tuple[str, ...] = ()
    shapes_compared: bool = True

    @property
    def is_same(self) -> bool:
        return not (self.missing or self.extra or self.different)


def against_tree(tree: Tree, other: Tree) -> Comparison:
    """Whether two trees have arrays of the same names, shapes and dtypes."""
    mine = {spelled(path): array for path, array in tree.arrays.items()}
    theirs = {spelled(path): array for path, array in other.arrays.items()}
    pairs = ((_spec(name, mine[name]), _spec(name, theirs[name])) for name in mine if name in theirs)
    return Comparison(
        against=other.metadata.place,
        num_compared=len(mine),
        missing=tuple(_spec(name, array) for name, array in theirs.items() if name not in mine),
        extra=tuple(_spec(name, array) for name, array in mine.items() if name not in theirs),
        different=tuple(Different(got.path, got, wanted) for got, wanted in pairs if got != wanted),
    )


def _spec(name: str, array: LazyArray) -> Spec:
    return Spec(name, array.shape, array.dtype.name)


def against_family(
    tree: Tree, family: Family, config: Mapping[str, Any] | None = None, place: str = ""
) -> Comparison:
    """Whether a tree has the parameters of a model of a family.

    MaxText's names are expected of a tree that is one of MaxText's, else Hugging Face's. Optimizer state and
    what else is no parameter take no part.

    Args:
        tree: any checkpoint.
        family: its rows say what should be there.
        config: the model's configuration; without one the tree's own shapes and names tell sizes and flags,
            as far as they do.
        place: where the configuration lies.

    Raises:
        ConfigError: the configuration is not one.
    """
    compared = _FamilyCheck(tree, kind_of(tree), family, config, place)
    return compared.with_configuration() if config is not None else compared.without()


@dataclass(frozen=True)
class _FamilyCheck:
    """A tree, and what it should be; attributes as the arguments of `against_family`."""

    tree: Tree
    kind: KindOfTree
    family: Family
    config: Mapping[str, Any] | None
    place: str

    @cached_property
    def arrays(self) -> dict[str, LazyArray]:
        return {dotted(path): array for path, array in parameters(self.tree).items()}

    def with_configuration(self) -> Comparison:
        said = f"family {self.family.name} with {self.place}"
        try:
            self._map()
        except NotCoveredError as error:
            return self._listed(said, error.coverage)
        return Comparison(said, len(self.arrays))

    def without(self) -> Comparison:
        """What the rows say of shapes; of names only, where shapes and numbers in names do not tell sizes."""
        said = f"family {self.family.name}"
        fit = min(family_fits(self.tree, self.kind, [self.family]), key=lambda each: each.badness)
        others = {name for names in fit.others.values() for name in names}
        try:
            self._map()
        except NotCoveredError as error:
            lists = error.coverage
            # Layers that the rows have, but in numbers that only a configuration tells, are not too much.
            known = replace(lists, extra=tuple(key for key in lists.extra if key in others))
            if known.missing or known.misshapen or known.extra == lists.extra:
                return self._listed(said, known)
        except CheckpointError:
            pass
        else:
            return Comparison(said, len(self.arrays))
        return Comparison(
            said,
            len(self.arrays),
            missing=tuple(Spec(name, None, None) for name in (*fit.missing, *_gaps(self.tree))),
            extra=tuple(_spec(name, array) for name, array in self.arrays.items() if name in others),
            reasons=("Only names were compared: give the model's config.json to compare shapes, too.",),
            shapes_compared=False,
        )

    def _listed(self, said: str, coverage: Coverage) -> Comparison:
        return Comparison(
            against=said,
            num_compared=len(self.arrays),
            missing=tuple(Spec(key, shape, None) for key, shape in coverage.missing.items()),
            extra=tuple(_spec(key, self.arrays[key]) for key in coverage.extra),
            different=tuple(map(self._misfit, coverage.misshapen)),
            reasons=coverage.reasons,
        )

    def _misfit(self, each: Misfit) -> Different:
        got, wanted = _spec(each.key, self.arrays[each.key]), Spec(each.key, each.wanted, None)
        return Different(each.key, got, wanted, each.why)

    def _map(self) -> None:
        """Spells the arrays the other way, for what that says of them."""
        stacked = self.kind.kind and self.kind.kind.startswith("stacked")
        axis = (self.kind.scan_axis or 0) if stacked else None
        overrides = _without_names(self.family.spelled(axis)) if self.config is None else {}
        place = self.place or self.tree.metadata.place
        if self.kind.kind:
            table = self.family.table(self.config, place, scan_axis=axis, overrides=overrides)
            table.to_right(self.arrays)
        else:
            spelling = self.family.spelling_of(self.arrays)
            self.family.table(self.config, place, spelling=spelling, overrides=overrides).to_left(self.arrays)


def _gaps(tree: Tree) -> Iterator[str]:
    """Layers that no array is of, between two that have some: `model.layers.2.*`."""
    numbers: dict[str, set[int]] = defaultdict(set)
    for row in layer_rows(tree).values():
        before, star, _ = row.name.partition("*")
        if star and not row.axes:
            numbers[before].update(row.numbers)
    for before, found in numbers.items():
        yield from (f"{before}{number}.*" for number in range(min(found), max(found)) if number not in found)


def _without_names(rows: Sequence[Row]) -> dict[str, Flag]:
    """The flags that change values but no names: whatever they are, the same arrays are there."""
    names = {name for row in rows for name in row.flags}
    return {name: Flag(False, "") for name in names if _keys_with(name, rows) == _keys_without(name, rows)}


def _keys_with(flag: str, rows: Sequence[Row]) -> set[tuple[Key, Key]]:
    return {(row.left.key, row.right.key) for row in rows if flag in row.when.split()}


def _keys_without(flag: str, rows: Sequence[Row]) -> set[tuple[Key, Key]]:
    return {(row.left.key, row.right.key) for row in rows if flag in row.unless.split()}
