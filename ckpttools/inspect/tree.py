"""What a checkpoint holds: its kind, every array with shape, dtype and role, and warnings."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from math import prod
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ckpttools.adapters.described import AdapterReport, may_be_adapter
from ckpttools.array.lazy import LazyArray
from ckpttools.array.shardings import Sharding
from ckpttools.array.tree import Path, Text, Tree, dotted, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import listing
from ckpttools.core.notes import Notes
from ckpttools.families.family import Family
from ckpttools.inspect.filtering import filtered
from ckpttools.inspect.quantization import Quantization, quantization_of
from ckpttools.inspect.warnings import TreeWarning, warnings_of
from ckpttools.maxtext.layer_groups import LayerGroup
from ckpttools.maxtext.layout import FlavourName, Kind
from ckpttools.maxtext.optimizer import Optimizer
from ckpttools.maxtext.recognition import FamilyGuess, guess_families
from ckpttools.maxtext.variables import versions_of
from ckpttools.maxtext.versions import VERSIONS
from ckpttools.maxtext.view import view_of
from ckpttools.quantized.logical import Logical, logical
from ckpttools.quantized.readable import has_doubtful_shapes, shaped_weights_in, weights_in
from ckpttools.quantized.tree import quantized_in
from ckpttools.roles.of_tree import Role
from ckpttools.stores.costs import Traffic

if TYPE_CHECKING:
    from ckpttools.inspect.comparison import Comparison


@dataclass(frozen=True, slots=True)
class ArrayReport:
    """One array.

    Attributes:
        path: keys joined by "/"; in formats without a tree, such as safetensors, the name as it is.
        role: "parameter", "optimizer" or "other".
        sharding: how it was laid out on devices when saved; None if not stored or not asked for.
        quantized: how a quantised weight is stored, such as `fp8 128x128`; its shape and dtype are those of
            the numbers that it stands for, its bytes those of its codes. None for plain arrays.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    role: Role
    sharding: Sharding | None = None
    quantized: str | None = None


@dataclass(frozen=True, slots=True)
class Total:
    """Totals of several arrays."""

    num_arrays: int
    num_elements: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ItemReport:
    """One of the items that a tree was made of.

    Attributes:
        num_arrays, nbytes: of all its arrays, whatever the pattern.
        num_strings: of the leaves that are strings.
    """

    num_arrays: int
    nbytes: int
    num_strings: int


@dataclass(frozen=True, slots=True, repr=False)
class TreeReport:
    """A checkpoint without its numbers.

    Attributes:
        path: what was opened, down to the item.
        format: name of the format.
        kind, flavour, scan_axis: as in `ckpttools.maxtext.view.MaxTextView`; None for a checkpoint that is
            not MaxText's.
        step: training step, or None.
        num_arrays, num_parameters, nbytes: of `arrays`; `num_parameters` counts elements of parameters.
        custom_metadata: what the user stored beside the arrays.
        arrays: in the checkpoint's order; a quantised weight is one, whose scales are in `scales` alone.
        layers, optimizer, random_states: as in `ckpttools.maxtext.view.MaxTextView`.
        families: the model families that fit best, of those that were given.
        maxtext: the versions of MaxText that store such a model so, newest first; () where all do, or none.
        roles: role -> total of the arrays of that role; roles without arrays are left out.
        parameter_dtypes: dtype -> total of the parameters of that dtype, most bytes first.
        warnings: what to know before loading; of all arrays, whatever the pattern.
        companions: files and arrays of the model beside the weights or carried along, such as its
            configuration and tokenizer; relative to the directory.
        quantization: how weights are quantised; None if they are not.
        scales: scales and whatever else belongs to quantised weights, as far as those are among `arrays`;
            None where there is none.
        comparison: with what it should be; None if it was not compared.
        adapter: what it is as a low-rank adapter; None where it is none.
        traffic: what looking took of stores behind a network, by address: "gs://".
        items: name of an item -> what it holds, of a step with several items; else empty.
        num_strings: of the leaves that are strings.
    """

    path: str
    format: str | None
    kind: Kind | None
    flavour: FlavourName | None
    scan_axis: int | None
    step: int | None
    num_arrays: int
    num_parameters: int
    nbytes: int
    custom_metadata: Mapping[str, Any]
    arrays: tuple[ArrayReport, ...]
    layers: tuple[LayerGroup, ...]
    optimizer: Optimizer | None
    random_states: int
    families: tuple[FamilyGuess, ...]
    roles: Mapping[str, Total]
    parameter_dtypes: Mapping[str, Total]
    warnings: tuple[TreeWarning, ...]
    maxtext: tuple[str, ...] = ()
    companions: tuple[str, ...] = ()
    quantization: Quantization | None = None
    scales: Total | None = None
    comparison: Comparison | None = None
    adapter: AdapterReport | None = None
    traffic: Mapping[str, Traffic] = field(default_factory=dict)
    items: Mapping[str, ItemReport] = field(default_factory=dict)
    num_strings: int = 0

    def __repr__(self) -> str:
        """What it is, and its arrays; those whose names differ only in numbers share a line."""
        what = " ".join(filter(None, (self.format, self.kind, self.path)))
        held = f"{self.num_arrays:,} arrays, {self.num_parameters:,} parameters, {self.nbytes:,} bytes"
        lines = [f"{each.path}: {each.dtype}[{', '.join(map(str, each.shape))}]" for each in self.arrays]
        against = "" if self.comparison is None else f", {_verdict(self.comparison)}"
        return f"<TreeReport of {what}: {held}{against}{listing(lines)}>"


def _verdict(comparison: Comparison) -> str:
    return f"{'as' if comparison.is_same else 'not as'} {comparison.against}"


def inspect_tree(
    tree: Tree,
    pattern: str = "*",
    *,
    shardings: Mapping[Path, Sharding] = MappingProxyType({}),
    unfinished: Mapping[str, str] = MappingProxyType({}),
    damaged: Mapping[str, str] = MappingProxyType({}),
    families: Iterable[Family] = (),
    or_none: bool = False,
    companions: Sequence[str] = (),
) -> TreeReport:
    """Describes a tree without reading any array.

    Args:
        tree: any checkpoint.
        pattern: shell pattern of the paths to report; kind and warnings are about all of them.
        shardings: how arrays were laid out on devices when they were saved.
        unfinished: later steps of its run whose save did not finish: directory name -> what is missing.
        damaged: later steps that finished and have lost something since.
        families: candidates for its family.
        or_none: whether the pattern may match nothing.
        companions: names of what lies beside the arrays.

    Raises:
        UsageError: there are arrays, and none matches the pattern.
    """
    shown = _logical(tree)
    arrays = filtered(_reports(shown, shardings), attrgetter("path"), pattern, or_none=or_none)
    scales = _scales(tree, shown, {each.path for each in arrays})
    parameters = [each for each in arrays if each.role == "parameter"]
    view, metadata = view_of(tree), tree.metadata
    guesses = guess_families(_without_scales(shown.tree), families)
    written = versions_of(view, [each.name for each in guesses])
    return TreeReport(
        path=metadata.place,
        format=metadata.format,
        kind=view.kind,
        flavour=view.flavour.name if view.is_maxtext else None,
        scan_axis=view.scan_axis,
        step=metadata.step,
        num_arrays=len(arrays),
        num_parameters=sum(prod(each.shape) for each in parameters),
        nbytes=sum(each.nbytes for each in arrays) + (scales.nbytes if scales else 0),
        custom_metadata=dict(metadata.custom),
        arrays=arrays,
        layers=view.layers,
        optimizer=view.optimizer if view.is_maxtext else None,
        random_states=view.random_states if view.is_maxtext else 0,
        families=guesses,
        maxtext=written if len(written) < len(VERSIONS) else (),
        roles=_totals((each.role, each) for each in arrays),
        parameter_dtypes=_totals((each.quantized or each.dtype, each) for each in parameters),
        warnings=warnings_of(tree, unfinished, damaged),
        companions=tuple(companions),
        quantization=quantization_of(tree),
        scales=scales,
        adapter=_adapter(tree),
        items={name: _item(tree, name) for name in metadata.items},
        num_strings=sum(isinstance(leaf, Text) for leaf in tree.values()),
    )


def _item(tree: Tree, name: str) -> ItemReport:
    leaves = [leaf for path, leaf in tree.items() if path[0] == name]
    sizes = [leaf.nbytes for leaf in leaves if isinstance(leaf, LazyArray)]
    return ItemReport(len(sizes), sum(sizes), sum(isinstance(leaf, Text) for leaf in leaves))


def _adapter(tree: Tree) -> AdapterReport | None:
    """What it is as an adapter; numpy and all families are not imported for what is none."""
    if not may_be_adapter(tree):
        return None
    from ckpttools.adapters.report import adapter_report

    return adapter_report(tree)


def _logical(tree: Tree) -> Logical:
    """The tree with quantised weights as one array each, where all of them are of a scheme that is read."""
    found = weights_in(tree)
    if has_doubtful_shapes(found):
        found = shaped_weights_in(tree)
    readable = found.readable and not found.faults
    return logical(tree, weights=found) if readable else Logical(tree, Notes(), {})


def _without_scales(tree: Tree) -> Tree:
    """A tree whose names tell the family, also where weights are shown as they are stored."""
    weights = quantized_in(tree).weights.values()
    beside = {name for each in weights if each.dtype.is_float for name in each.sides}
    if not beside:
        return tree
    leaves = {path: leaf for path, leaf in tree.items() if dotted(path) not in beside}
    return Tree(leaves, tree.metadata)


def _scales(tree: Tree, shown: Logical, names: Collection[str]) -> Total | None:
    """What belongs to the quantised weights of these names."""
    weights = [each for path, each in shown.weights.items() if keystr(path) in names]
    beside = {name for each in weights for name in each.stored if name != each.codes}
    arrays = [array for path, array in tree.arrays.items() if dotted(path) in beside]
    if not arrays:
        return None
    return Total(len(arrays), sum(each.size for each in arrays), sum(each.nbytes for each in arrays))


def _reports(shown: Logical, shardings: Mapping[Path, Sharding]) -> Iterator[ArrayReport]:
    known = view_of(shown.tree).roles
    for path, array in shown.tree.arrays.items():
        # A constant, which is not stored, counts as in memory.
        nbytes = -(-array.size * (array.stored_bits or 8 * array.dtype.itemsize) // 8)
        name, sharding = keystr(path), shardings.get(path)
        weight = shown.weights.get(path)
        quantized = weight.scheme if weight else None
        yield ArrayReport(name, array.shape, array.dtype.name, nbytes, known.of(path), sharding, quantized)


def _totals(arrays: Iterable[tuple[str, ArrayReport]]) -> dict[str, Total]:
    """Totals of arrays by a word for each, most bytes first."""
    groups: dict[str, list[ArrayReport]] = {}
    for word, array in arrays:
        groups.setdefault(word, []).append(array)
    totals = {
        word: Total(len(group), sum(prod(each.shape) for each in group), sum(each.nbytes for each in group))
        for word, group in groups.items()
    }
    return dict(sorted(totals.items(), key=lambda item: -item[1].nbytes))
