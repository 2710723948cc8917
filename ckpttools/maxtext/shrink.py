"""Reduce a model to fewer layers, experts or tokens, with unchanged weights.

Names and axes come from the model's family, so every layout can be reduced: Hugging Face models, and single
or stacked layers, with or without optimizer state.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from functools import cached_property
from itertools import chain
from math import prod
from typing import Any

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import window
from ckpttools.array.tree import Leaf, Path, Tree, by_name, dotted
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, ConfigError, CoverageError, UsageError, listing
from ckpttools.core.message_terms import action, option
from ckpttools.core.notes import Notes
from ckpttools.core.text import array_count, matches_any, sort_naturally
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.mapping.axes import Side
from ckpttools.mapping.keys import Coordinates, Field, longest_stride, parse_key
from ckpttools.mapping.row import Row
from ckpttools.mapping.sizes import lengths_of
from ckpttools.mapping.table import Table
from ckpttools.maxtext.cycles import Cycle, CycleNames
from ckpttools.maxtext.hub_names import with_family_names
from ckpttools.maxtext.model_files import ModelFiles
from ckpttools.maxtext.model_options import ModelOptions, family_for, require_config
from ckpttools.maxtext.smaller_config import KeptParts, SmallerConfig, smaller_config
from ckpttools.maxtext.source_checks import refuse_adapters
from ckpttools.maxtext.stacking import StackLayers, UnstackLayers, cycle_of
from ckpttools.maxtext.versions import (
    BLOCKS,
    DECODER,
    LAYER,
    LOCAL,
    NEWEST,
    REMAINDER,
    STEPS,
    VALUE,
    version_called,
)
from ckpttools.maxtext.view import view_of
from ckpttools.model_families.family import PLAIN, Family
from ckpttools.quantized.unsupported_errors import quantized_error, require_numbers
from ckpttools.quantized.view import quantized_view
from ckpttools.roles.of_tree import roles
from ckpttools.stores.registry import LocationLike
from ckpttools.transforms.base import Transformed
from ckpttools.transforms.cast import is_table

# Maximum number of layer counts that are tried to find the nearest valid one.
_MAX_TRIED = 16


@dataclass(frozen=True)
class Shrink:
    """A transform that keeps some layers, experts and tokens of a model.

    Attributes:
        how: The parts to keep.
        like: The model's directory or `config.json`, for MaxText checkpoints without a configuration.
        family: The name of the family, or a file that describes it; None follows the configuration.
    """

    how: KeptParts
    like: LocationLike | None = None
    family: str | None = None

    def __call__(self, tree: Tree) -> Transformed:
        """Return the smaller model with its own configuration.

        Raises:
            ConfigError: The configuration is missing, or its sizes do not fit the family with fewer layers.
            UsageError: The layers do not exist, or do not form a model in this order.
            CoverageError: Arrays match no row of the family, or cannot be reduced. The message lists them.
            FormatError: The tree is an adapter without its model, weights are quantized, or two arrays have
                the same dotted name.
        """
        refuse_adapters(tree)
        require_numbers(tree, "only plain weights can be cut")
        _refuse_quantized(tree)
        named = with_family_names(tree)
        tree = named.tree
        view, location = view_of(tree), tree.metadata.location
        files = ModelFiles.of(tree, self.like) if view.is_maxtext else ModelFiles(tree.metadata.config)
        hint = f"pass the original model with {option('like', 'HF_DIR')}" if view.is_maxtext else None
        config = require_config(files.config, location, hint)
        family = family_for(config, ModelOptions(self.family), location)
        small = smaller_config(config, family, self.how)
        _check_cycle(_family_cycle(family), small)
        plain = UnstackLayers()(tree).tree if view.is_stacked else tree
        scan_axis = view.scan_axis or 0 if view.is_stacked else None
        try:
            # If MaxText scans only complete cycles, a stacked model must have complete cycles.
            family.table(small.config, CONFIG, scan_axis=scan_axis)
            built = _ModelCutter.of(plain, family, config, small)
        except ConfigError as error:
            raise error.at(hint=_layer_counts_hint(config, family, self.how, scan_axis)) from error
        result = built.tree
        if view.is_stacked:
            cycle = _tree_cycle(tree)
            result = StackLayers(view.scan_axis or 0, cycle.length, cycle.names)(result).tree
        result = result.with_metadata(config=small.config, is_other_model=True)
        remarks = tuple(f"{CONFIG}: {change}" for change in small.changes)
        return Transformed(result, named.notes + Notes(dropped=built.dropped, remarks=remarks))


def _refuse_quantized(tree: Tree) -> None:
    """Raise an error if quantized weights remain, which cannot be reduced."""
    if result := quantized_view(tree).weights:
        raise quantized_error(result.values(), tree.metadata.config, tree.metadata.location, done="cut")


def _layer_counts_hint(
    config: Mapping[str, Any], family: Family, parts: KeptParts, scan_axis: int | None
) -> str | None:
    """Return a hint with the nearest valid numbers of layers."""
    if parts.layers is None:
        return None

    def fits(count: int) -> bool:
        try:
            small = smaller_config(config, family, replace(parts, layers=range(count)))
            family.table(small.config, CONFIG, scan_axis=scan_axis)
        except CheckpointError:
            return False
        return True

    expected = len(parts.layers)
    count_ranges = (range(expected - 1, 0, -1), range(expected + 1, expected + _MAX_TRIED))
    near = [item for item in (next(filter(fits, candidates), None) for candidates in count_ranges) if item]
    return f"{' or '.join(option('layers', item) for item in near)} fits" if near else None


def _family_cycle(family: Family) -> int:
    """Return the length of the layer cycle, in MaxText's stacks or Hugging Face's numbers (Gemma 2)."""
    strides = longest_stride(parse_key(group.right) for group in family.layers)
    try:
        return max(strides, cycle_of(family, version_called(NEWEST)).length)
    except CheckpointError:
        return strides


def _check_cycle(cycle: int, small: SmallerConfig) -> None:
    mismatched = [(a, b) for b, a in enumerate(small.layers) if a % cycle != b % cycle]
    if mismatched:
        raise UsageError(
            f"layers of this family repeat every {cycle} layers, and their kinds would change",
            got=f"layer {mismatched[0][0]} in place of layer {mismatched[0][1]}",
            expected=f"layers whose new indices have the same remainders modulo {cycle}",
            hint="keep the first layers, given as a number",
        )


def _tree_cycle(tree: Tree) -> Cycle:
    """Return the cycle in which the layers of a stacked tree repeat."""
    view = view_of(tree)
    keys = [key for key in view.stacked_keys if len(key) > 1 and not str(key[0]).endswith(REMAINDER)]
    if not keys:
        return Cycle(1, None)
    top, inner = keys[0][0], [str(key[1]) for key in keys]
    if LOCAL in inner:
        names: CycleNames = "local-global" if top == BLOCKS else "layers-local-global"
        local = next(stack for stack in view.stacks if stack.key == (top, LOCAL))
        return Cycle(local.shape[1] + 1, names)
    if top == BLOCKS:
        raise UsageError(
            "this model has stacked layers after single layers, and a smaller model would have other single "
            "layers",
            location=tree.metadata.location or None,
            hint=f"run {action('unstack')} first, and {action('stack')} on the result",
        )
    return Cycle(len(inner), "layer" if inner[0].startswith(f"{LAYER}_") else "layers")


@dataclass
class _ModelCutter:
    """Reduces a tree with single layers.

    Attributes:
        rows: The rows that map arrays.
        source: The tree to reduce.
        parts: Patterns of arrays that stay unchanged: towers and others without a counterpart in MaxText.
        tree: The remaining tree.
        dropped: Names of arrays that do not exist in the smaller model.
    """

    rows: SmallerRows
    source: Tree
    parts: tuple[str, ...] = ()
    tree: Tree = field(default_factory=lambda: Tree({}))
    dropped: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, source: Tree, family: Family, config: Mapping[str, Any], small: SmallerConfig
    ) -> _ModelCutter:
        is_left = view_of(source).is_maxtext
        names = by_name(source.arrays).keys()
        spelling = PLAIN if is_left else family.spelling_of(names)
        before, after = (family.table(item, CONFIG, spelling=spelling) for item in (config, small.config))
        layers = {number: new for new, number in enumerate(small.layers)}
        parts = tuple(key for part in family.parts.values() for key in part.keys)
        result = cls(SmallerRows(before, after, layers, is_left), source, parts)
        result._shrink_arrays()
        return result

    def _shrink_arrays(self) -> None:
        leaves: dict[Path, Leaf] = {}
        layers: dict[Path, Path | None] = {}
        rest: dict[Path, Leaf] = {}
        for path, leaf in self.source.items():
            head, name, tail = self._split_path(path)
            result = self.rows.of(name, leaf) if name and isinstance(leaf, LazyArray) else None
            if result is None:
                rest[path] = leaf
                continue
            new, array = result
            to = None if new is None else (*head, *(new.split(".") if self.rows.is_left else [new]), *tail)
            key = (DECODER, *name.split(".")[1:2])
            # A layer stays even if some of its separately named experts are removed.
            layers[key] = layers.get(key) or (to and to[len(head) : len(head) + 2])
            if to is not None:
                leaves[to] = array
        for path, leaf in self._other_leaves(rest).items():
            location = _shrunk_path(path, layers)
            if location is not None:
                leaves[location] = leaf
        metadata = self.source.metadata
        impls = {path: impl for path, impl in metadata.key_impls.items() if path in leaves}
        declared = replace(metadata, scalars=metadata.scalars & leaves.keys(), key_impls=impls)
        self.tree = Tree(leaves, declared)

    def _split_path(self, path: Path) -> tuple[Path, str, Path]:
        """Split a path into the part before the model's name, the name, and the rest."""
        if not self.rows.is_left:
            return (), dotted(path), ()
        tops = {str(row.left.key).partition(".")[0] for row in self.rows.before.rows}
        start = next((k for k, key in enumerate(path) if key in tops), None)
        if start is None:
            return path, "", ()
        end = len(path) - (path[-1] == VALUE)
        return path[:start], dotted(path[start:end]), path[end:]

    def _other_leaves(self, rest: Mapping[Path, Leaf]) -> Mapping[Path, Leaf]:
        """Return the leaves that no row describes, without MTP layers.

        Raises:
            CoverageError: A parameter has no row.
        """
        table, known = self.rows.before, roles(self.source)
        arrays = {
            dotted(path): item
            for path, item in rest.items()
            if isinstance(item, LazyArray) and known.of(path) == "parameter" and path not in STEPS
        }
        if not self.rows.is_left:
            stay = {name for name in arrays if matches_any(name, self.parts)}
            arrays = {name: item for name, item in arrays.items() if name not in stay}
        unmatched = set() if self.rows.is_left else {*table.unmatched_right(arrays)}
        unmatched |= {name for name in arrays if matches_any(name, table.dropped)}
        if unmapped := [name for name in arrays if name not in unmatched]:
            raise CoverageError(
                f"{array_count(unmapped)} have no row in the family:{listing(unmapped)}",
                location=self.source.metadata.location or None,
                hint=f"leave out arrays that are not part of the model: {action('select')}",
            )
        self.dropped = tuple(sort_naturally(unmatched))
        return {path: leaf for path, leaf in rest.items() if dotted(path) not in unmatched}


def _shrunk_path(path: Path, layers: Mapping[Path, Path | None]) -> Path | None:
    """Return the new path of a leaf that belongs to a layer; None if the layer is removed."""
    for k in range(len(path) - 1):
        if path[k] == DECODER and path[k : k + 2] in layers:
            to = layers[path[k : k + 2]]
            return None if to is None else (*path[:k], *to, *path[k + 2 :])
    return path


_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class SmallerRows:
    """The rows of a model before and after reduction, and the layers that stay.

    Attributes:
        before, after: The rows with the sizes of the larger and of the smaller model, with single layers.
        layers: Index of each kept layer -> its new index.
        is_left: Whether the names are MaxText's.
    """

    before: Table
    after: Table
    layers: Mapping[int, int]
    is_left: bool
    _known: dict[str, list[Row]] = field(default_factory=dict)

    @cached_property
    def _lengths(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        return lengths_of(self.before.sizes), lengths_of(self.after.sizes)

    def of(self, name: str, array: LazyArray) -> tuple[str | None, LazyArray] | None:
        """Return an array's new name and its remaining part; None if no row describes the array.

        Raises:
            UsageError: The layer has another kind than the one that it replaces, or the array is an expert
                table and some experts are removed.
            CoverageError: The array cannot be cut along an axis that becomes shorter.
        """
        # Large models have 100,000 names, most of them differing only in indices.
        known = self._known.setdefault(_NUMBER.sub("#", name), [])
        for row in chain(known, filter(self.before.has, self.before.rows)):
            index = self._side(row).key.match(name, self._lengths[0])
            if index is not None:
                if not any(row is item for item in known):
                    known.append(row)
                new = self._new_name(row, index)
                return (None, array) if new is None else (new, self._cut_array(name, row, array))
        return None

    def _side(self, row: Row) -> Side:
        return row.left if self.is_left else row.right

    def _new_name(self, row: Row, index: Coordinates) -> str | None:
        """Return the name in the smaller model; None if that has no such array."""
        before, after = self._lengths
        location = _layer_field(row)
        if location is None:
            return self._side(row).key.format(index, before)
        number = self.layers.get(location.number(index, before) + location.offset)
        others = {axis: at for axis, at in index.items() if axis not in location.axes}
        if number is None or any(at >= after.get(axis, at + 1) for axis, at in others.items()):
            return None
        for item in self._equivalent_rows(row):
            new = _layer_field(item) or location
            for result in new.indices(number - new.offset, after):
                return self._side(item).key.format({**others, **result}, after)
        raise UsageError(
            "the smaller model has another kind of layer at this position",
            got=str(row.right.key),
            expected=f"a layer of this kind in place of layer {number}",
            hint="keep the first layers, or layers whose kinds have the same order",
        )

    def _equivalent_rows(self, row: Row) -> Iterator[Row]:
        """Yield the row and the rows of other layer groups for the same array."""
        yield row
        parts = row.right.key.parts
        for item in filter(self.after.has, self.after.rows):
            others = item.right.key.parts
            if item is not row and _layer_field(item) and (others[:1], others[2:]) == (parts[:1], parts[2:]):
                yield item

    def _cut_array(self, name: str, row: Row, array: LazyArray) -> LazyArray:
        """Return the leading elements along axes that are shorter in the smaller model."""
        before, after = self._lengths
        side = self._side(row)
        changed = {axis for axis in side.array_axes if before.get(axis) != after.get(axis)}
        if is_table(tuple(row.left.key.first().split("."))) and before.get("expert") != after.get("expert"):
            raise UsageError(f"{name} contains expert indices, and some of these experts would be removed")
        if not changed:
            return array
        shape = list(array.shape)
        for at, group in enumerate(side.groups):
            if changed.isdisjoint(group):
                continue
            if len(shape) != len(side.groups) or side.join or not changed.isdisjoint(group[1:]):
                raise CoverageError(
                    f"{name} cannot be cut along {', '.join(sorted(changed))}",
                    got=f"{list(array.shape)} for {side}",
                    hint=f"factored optimizer state has other axes: run {action('strip_optimizer')} first",
                )
            shape[at] = after[group[0]] * prod(before[axis] for axis in group[1:])
        return window(array, (0,) * len(shape), tuple(shape))


def _layer_field(row: Row) -> Field | None:
    """Return the field of a Hugging Face key that has the layer number; None for other rows."""
    fields = row.right.key.fields
    is_layer = str(row.left.key).startswith(f"{DECODER}.") and fields
    return fields[0] if is_layer and set(fields[0].axes) <= set(row.left.key.axes) else None
