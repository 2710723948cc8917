"""The contents of a checkpoint: kind, arrays with shape, dtype and role, and warnings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from math import prod
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ckpttools.adapters.summary import AdapterReport, may_be_adapter, unmerged_weights
from ckpttools.array.gaps import missing_chunks
from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Chunked
from ckpttools.array.patterns import filter_items
from ckpttools.array.storage import Sharding, has_giant_chunks, has_tiny_chunks
from ckpttools.array.tree import Path, Text, Tree, dotted, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import listing
from ckpttools.core.message_terms import action
from ckpttools.core.region import grid_shape
from ckpttools.core.tabular import Tabular
from ckpttools.core.text import plural
from ckpttools.maxtext.layers import LayerGroup
from ckpttools.maxtext.recognition import FamilyGuess, guess_families
from ckpttools.maxtext.scan_axis import scan_axis_remarks
from ckpttools.maxtext.variables import matching_versions
from ckpttools.maxtext.versions import SCAN_LAYERS, VERSIONS, FlavorName, Kind
from ckpttools.maxtext.view import Optimizer, view_of
from ckpttools.quantized.view import DequantizedTree, Quantization, quantized_view
from ckpttools.quantized.weights import is_scale
from ckpttools.roles.of_tree import ROLES, Role
from ckpttools.stores.costs import Traffic

if TYPE_CHECKING:
    from ckpttools.inspection.comparison import Comparison


@dataclass(frozen=True, slots=True)
class ArrayReport:
    """An array.

    Attributes:
        path: Keys joined by "/"; in formats without a tree, such as safetensors, the unchanged name.
        role: "parameter", "optimizer" or "other".
        sharding: Sharding at the time of saving; None if not stored or not requested.
        quantized: Storage of a quantized weight, such as `fp8 128x128`; None for plain arrays. Shape and
            dtype are those of the dequantized weight, and the size is that of the quantized values.
        is_random: Whether the array is the state of a random number generator, which has role "other".
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    role: Role
    sharding: Sharding | None = None
    quantized: str | None = None
    is_random: bool = False


@dataclass(frozen=True, slots=True)
class Total:
    """Totals of several arrays."""

    num_arrays: int
    num_elements: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ItemReport:
    """One of the items from which a tree was built.

    Attributes:
        num_arrays, nbytes: Totals of all arrays, regardless of the pattern.
        num_strings: Number of leaves that are strings.
    """

    num_arrays: int
    nbytes: int
    num_strings: int


@dataclass(frozen=True, slots=True, repr=False)
class TreeReport(Tabular):
    """A checkpoint without its values.

    Attributes:
        path: Location of the opened item.
        format: Name of the format.
        kind, flavor, scan_axis: See `ckpttools.maxtext.view.MaxTextView`; None if the checkpoint is not a
            MaxText checkpoint.
        step: Training step, or None.
        num_arrays, num_parameters, nbytes: Totals of `arrays`; `num_parameters` counts elements of
            parameters.
        custom_metadata: User metadata in the checkpoint.
        arrays: Parameters, then optimizer state, then others; each in the order of the checkpoint. A
            quantized weight is one array, and its scales are only in `scales`.
        layers, optimizer: See `ckpttools.maxtext.view.MaxTextView`.
        random_states: Number of `arrays` that are the state of a random number generator.
        families: The best matching model families, if families were compared.
        maxtext: MaxText versions that store such a model in this way, newest first; () if all or none do.
        roles: Totals of the arrays by role; roles without arrays are left out.
        parameter_dtypes: Totals of the parameters by dtype, most bytes first.
        warnings: Warnings for users who load the checkpoint; they cover all arrays, regardless of the
            pattern.
        sidecars: Files and arrays of the model that are next to the weights or carried along, such as its
            configuration and tokenizer, relative to the directory.
        quantization: Quantization of the weights; None if they are not quantized.
        scales: Totals of scales and other auxiliary arrays of the quantized weights in `arrays`; None if
            there are none.
        comparison: Comparison with a reference; None if it was not requested.
        adapter: Description of a low-rank adapter; None for other checkpoints.
        traffic: Network requests of the inspection, by address such as "gs://".
        items: Contents of each item by name, for a step with several items; otherwise empty.
        num_strings: Number of leaves that are strings.
    """

    path: str
    format: str | None
    kind: Kind | None
    flavor: FlavorName | None
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
    sidecars: tuple[str, ...] = ()
    quantization: Quantization | None = None
    scales: Total | None = None
    comparison: Comparison | None = None
    adapter: AdapterReport | None = None
    traffic: Mapping[str, Traffic] = field(default_factory=dict)
    items: Mapping[str, ItemReport] = field(default_factory=dict)
    num_strings: int = 0

    def __repr__(self) -> str:
        """Return the kind and the arrays as text. Arrays whose names differ only in numbers share a line."""
        description = " ".join(filter(None, (self.format, self.kind, self.path)))
        text = f"{self.num_arrays:,} arrays, {self.num_parameters:,} parameters, {self.nbytes:,} bytes"
        lines = [f"{array.path}: {array.dtype}[{', '.join(map(str, array.shape))}]" for array in self.arrays]
        against = "" if self.comparison is None else f", {_verdict(self.comparison)}"
        return f"<TreeReport of {description}: {text}{against}{listing(lines)}>"


def _verdict(comparison: Comparison) -> str:
    return f"{'as' if comparison.is_same else 'not as'} {comparison.against}"


def inspect_tree(
    tree: Tree,
    pattern: str = "*",
    *,
    shardings: Mapping[Path, Sharding] = MappingProxyType({}),
    unfinished: Mapping[str, str] = MappingProxyType({}),
    damaged: Mapping[str, str] = MappingProxyType({}),
    with_families: bool = False,
    or_none: bool = False,
    sidecars: Sequence[str] = (),
) -> TreeReport:
    """Describe a tree without reading any array.

    Args:
        tree: Any checkpoint.
        pattern: Shell pattern of the paths to report. Kind and warnings cover all paths.
        shardings: Shardings of the arrays at the time of saving.
        unfinished: Later steps of the run whose save did not finish, by directory name, with a description of
            what is missing.
        damaged: Later steps that were finished and have lost data since.
        with_families: Whether to compare the names with those of all families.
        or_none: Whether the pattern may match nothing.
        sidecars: Names of the files next to the arrays.

    Raises:
        UsageError: No array matches the pattern.
    """
    quantized = quantized_view(tree)
    dequantized = quantized.shown()
    reports = sorted(_reports(dequantized, shardings), key=lambda array: ROLES.index(array.role))
    arrays = filter_items(reports, attrgetter("path"), pattern, or_none=or_none)
    scales = _scales(tree, dequantized, {array.path for array in arrays})
    parameters = [array for array in arrays if array.role == "parameter"]
    view, metadata = view_of(tree), tree.metadata
    guesses = guess_families(_hide_scales(dequantized.tree)) if with_families else ()
    versions = matching_versions(view, [guess.name for guess in guesses])
    return TreeReport(
        path=metadata.location,
        format=metadata.format,
        kind=view.kind,
        flavor=view.flavor.name if view.is_maxtext else None,
        scan_axis=view.scan_axis,
        step=metadata.step,
        num_arrays=len(arrays),
        num_parameters=sum(prod(parameter.shape) for parameter in parameters),
        nbytes=sum(array.nbytes for array in arrays) + (scales.nbytes if scales else 0),
        custom_metadata=dict(metadata.custom),
        arrays=arrays,
        layers=view.layers,
        optimizer=view.optimizer if view.is_maxtext else None,
        random_states=sum(array.is_random for array in arrays),
        families=guesses,
        maxtext=versions if len(versions) < len(VERSIONS) else (),
        roles=_totals((array.role, array) for array in arrays),
        parameter_dtypes=_totals(
            (parameter.quantized or parameter.dtype, parameter) for parameter in parameters
        ),
        warnings=warnings_of(tree, unfinished, damaged),
        sidecars=tuple(sidecars),
        quantization=quantized.summary,
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
    """Describe an adapter. For other checkpoints, numpy and the families are not imported."""
    if not may_be_adapter(tree):
        return None
    from ckpttools.adapters.report import adapter_report

    return adapter_report(tree)


def _hide_scales(tree: Tree) -> Tree:
    """Return a tree without scales, whose names identify the family even if weights are shown as stored."""
    weights = quantized_view(tree).weights.values()
    auxiliary = {name for weight in weights if weight.dtype.is_float for name in weight.sides}
    if not auxiliary:
        return tree
    leaves = {path: leaf for path, leaf in tree.items() if dotted(path) not in auxiliary}
    return Tree(leaves, tree.metadata)


def _scales(tree: Tree, dequantized: DequantizedTree, names: Collection[str]) -> Total | None:
    """Return the totals of the auxiliary arrays of the quantized weights with these names."""
    weights = [item for path, item in dequantized.weights.items() if keystr(path) in names]
    auxiliary = {name for weight in weights for name in weight.stored if name != weight.codes}
    arrays = [array for path, array in tree.arrays.items() if dotted(path) in auxiliary]
    if not arrays:
        return None
    return Total(len(arrays), sum(item.size for item in arrays), sum(item.nbytes for item in arrays))


def _reports(dequantized: DequantizedTree, shardings: Mapping[Path, Sharding]) -> Iterator[ArrayReport]:
    known = view_of(dequantized.tree).roles
    for path, array in dequantized.tree.arrays.items():
        # A constant, which is not stored, counts with its size in memory.
        nbytes = -(-array.size * (array.stored_bits or 8 * array.dtype.itemsize) // 8)
        name, sharding = keystr(path), shardings.get(path)
        weight = dequantized.weights.get(path)
        quantized = weight.scheme if weight else None
        role = known.of(path)
        is_random = role == "other" and known.is_random(path)
        yield ArrayReport(name, array.shape, array.dtype.name, nbytes, role, sharding, quantized, is_random)


def _totals(arrays: Iterable[tuple[str, ArrayReport]]) -> dict[str, Total]:
    """Return the totals of arrays by their words, most bytes first."""
    groups: dict[str, list[ArrayReport]] = {}
    for word, array in arrays:
        groups.setdefault(word, []).append(array)
    totals = {
        word: Total(
            len(group), sum(prod(entry.shape) for entry in group), sum(entry.nbytes for entry in group)
        )
        for word, group in groups.items()
    }
    return dict(sorted(totals.items(), key=lambda item: -item[1].nbytes))


@dataclass(frozen=True, slots=True)
class TreeWarning:
    """A warning for users who load the checkpoint.

    Attributes:
        name: "missing-chunks", "damaged-step", "unfinished-step", "contradiction", "no-scan-layers",
            "open-scan-axis", "giant-chunk", "fine-chunks", "mixed-dtypes", "quantized", "unclear-state",
            "unmerged" or "remark".
        text: The complete sentence.
        arrays: Paths of the affected arrays; empty if the warning concerns the complete checkpoint.
    """

    name: str
    text: str
    arrays: tuple[str, ...] = ()


def warnings_of(
    tree: Tree, unfinished: Mapping[str, str], damaged: Mapping[str, str] = MappingProxyType({})
) -> tuple[TreeWarning, ...]:
    """Return all warnings about a tree, most serious first.

    Args:
        tree: Any checkpoint.
        unfinished: Later steps of the run whose save did not finish, by directory name, with a description of
            what is missing.
        damaged: Later steps that were finished and have lost data since.
    """
    return (
        *_missing_chunks(tree),
        *_other_steps(tree, "damaged-step", "is damaged", damaged),
        *_other_steps(tree, "unfinished-step", "is an unfinished save", unfinished),
        *(TreeWarning("contradiction", text) for text in view_of(tree).contradictions),
        *_no_scan_layers(tree),
        *(TreeWarning("open-scan-axis", text) for text in scan_axis_remarks(tree)),
        *_giant_chunks(tree),
        *_fine_chunks(tree),
        *_mixed_dtypes(tree),
        *_unreadable(tree),
        *_unclear_state(tree),
        *_unmerged_warnings(tree),
        *(TreeWarning("remark", text) for text in tree.metadata.notes.remarks),
    )


def _missing_chunks(tree: Tree) -> Iterator[TreeWarning]:
    missing = missing_chunks(tree.arrays.values())
    if missing is not None:
        names = tuple(array.array for array in missing.arrays)
        yield TreeWarning("missing-chunks", f"{missing.summary}: {missing.hint}", names)


def _other_steps(tree: Tree, name: str, problem: str, steps: Mapping[str, str]) -> Iterator[TreeWarning]:
    for directory, reason in steps.items():
        yield TreeWarning(name, f"{directory}, next to step {tree.metadata.step}, {problem}: {reason}")


def _no_scan_layers(tree: Tree) -> Iterator[TreeWarning]:
    view = view_of(tree)
    if view.is_maxtext and tree.metadata.format == "orbax" and SCAN_LAYERS not in tree.metadata.custom:
        value = "true" if view.is_stacked else "false"
        text = f"the metadata has no {SCAN_LAYERS}: pass {SCAN_LAYERS}={value} to MaxText"
        yield TreeWarning("no-scan-layers", text)


def _giant_chunks(tree: Tree) -> Iterator[TreeWarning]:
    result = _select_by_chunks(tree, has_giant_chunks)
    if result:
        largest = max(result, key=lambda path: result[path].nbytes)
        are = "1 array is one chunk" if len(result) == 1 else f"{len(result):,} arrays are one chunk each"
        size = f"{result[largest].nbytes / 1e9:.1f} GB"
        text = f"{are}, {keystr(largest)} {size}: loading a part of it reads all of it"
        yield TreeWarning("giant-chunk", text, tuple(map(keystr, result)))


def _fine_chunks(tree: Tree) -> Iterator[TreeWarning]:
    result = _select_by_chunks(tree, has_tiny_chunks)
    if result:
        counts = {path: _chunks(array) for path, array in result.items()}
        limit = max(counts, key=lambda path: counts[path])
        size = f"{result[limit].nbytes / counts[limit] / 1e3:.1f} kB"
        are = "1 array is" if len(result) == 1 else f"{len(result):,} arrays are"
        text = f"{are} cut very finely, {keystr(limit)} into {counts[limit]:,} chunks of {size}: slow to load"
        yield TreeWarning("fine-chunks", text, tuple(map(keystr, result)))


def _select_by_chunks(tree: Tree, rule: Callable[[int, int], bool]) -> dict[Path, Chunked]:
    """Return the arrays in a grid of chunks for which a rule applies to the number and size of chunks."""
    return {path: array for path, array, chunks, nbytes in tree.once(_grids) if rule(chunks, nbytes)}


def _grids(tree: Tree) -> list[tuple[Path, Chunked, int, int]]:
    """Return the arrays that are stored in a grid, with the number of chunks and the bytes of one."""
    stored = ((path, array) for path, array in tree.arrays.items() if isinstance(array, Chunked))
    return [(path, item, _chunks(item), prod(item.chunk) * item.dtype.itemsize) for path, item in stored]


def _chunks(array: Chunked) -> int:
    return prod(grid_shape(array.shape, array.chunk))


def _unclear_state(tree: Tree) -> Iterator[TreeWarning]:
    known = view_of(tree).roles
    if known.unclear:
        heads = ", ".join(map(keystr, known.unclear))
        text = f"{heads}: counted as parameters, but may be state of an optimizer or an average of parameters"
        arrays = tuple(keystr(path) for path in tree.arrays if known.unclear_of(path))
        yield TreeWarning("unclear-state", text, arrays)


def _unmerged_warnings(tree: Tree) -> Iterator[TreeWarning]:
    """Warn about a model in PEFT training: its modules are wrapped, with factors next to their weights."""
    if wrapped := unmerged_weights(tree):
        text = f"{plural(len(wrapped), 'array')} of the model have adapters that are not merged into them"
        yield TreeWarning("unmerged", text, tuple(wrapped))


def _mixed_dtypes(tree: Tree) -> Iterator[TreeWarning]:
    """Warn about parameters of several float dtypes, naming all arrays except those of the most common dtype.

    Quantized values and scales do not count, because their dtypes always differ from the rest.
    """
    view = quantized_view(tree)
    scaled = {view.paths[name] for name in view.members}
    by_dtype: dict[str, list[Path]] = {}
    for path in view_of(tree).of_role("parameter"):
        array = tree.arrays.get(path)
        is_scaling = path in scaled or (bool(scaled) and is_scale(dotted(path)))
        if array is not None and array.dtype.is_float and not is_scaling:
            by_dtype.setdefault(array.dtype.name, []).append(path)
    ordered = sorted(by_dtype.items(), key=lambda item: -len(item[1]))
    if len(ordered) > 1:
        counts = ", ".join(f"{len(paths):,} in {name}" for name, paths in ordered)
        minority = tuple(keystr(path) for _, paths in ordered[1:] for path in paths)
        yield TreeWarning("mixed-dtypes", f"parameters have mixed dtypes: {counts}", minority)


def _unreadable(tree: Tree) -> Iterator[TreeWarning]:
    """Warn about quantized weights that are shown as stored, because some cannot be dequantized."""
    result = quantized_view(tree).weights_from_headers
    if not result.faults:
        return
    more = f", and {len(result.faults) - 1} more" if len(result.faults) > 1 else ""
    reason = (
        "conversions do not support this scheme, and the quantized values are counted here"
        if result.is_whole
        else f"{result.faults[0]}{more}"
    )
    text = f"the quantized weights cannot be dequantized: {reason}; {action('doctor')} suggests what to do"
    yield TreeWarning("quantized", text)
