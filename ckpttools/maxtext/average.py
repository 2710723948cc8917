"""Average the parameters of several checkpoints of one model, or add them up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property

from ckpttools.array.lazy import LazyArray
from ckpttools.array.mean import mean
from ckpttools.array.nodes import elementwise
from ckpttools.array.tree import Leaf, Path, Tree, by_name, dotted, keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.errors import ConfigError, CoverageError, FormatError, MappingError, UsageError, listing
from ckpttools.core.message_terms import action, option
from ckpttools.core.notes import Note, Notes
from ckpttools.core.region import Region, split_evenly
from ckpttools.core.text import array_count
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.maxtext.config_differences import ConfigDifference, config_differences, config_of
from ckpttools.maxtext.scan_axis import KeepScanAxis
from ckpttools.maxtext.strip import StripOptimizer
from ckpttools.maxtext.versions import FACTOR, STEPS
from ckpttools.quantized.config import DEFAULT_DTYPE
from ckpttools.quantized.unsupported_errors import refuse_few_bits
from ckpttools.quantized.view import quantized_view
from ckpttools.roles.names import is_average
from ckpttools.roles.of_tree import roles
from ckpttools.transforms.base import Transformed
from ckpttools.transforms.cast import Convert, is_table, with_notes
from ckpttools.transforms.mean_weights import MeanWeights, WeightedMean

# Number of integers that are compared at a time.
_COMPARED_ELEMENTS = 1 << 18
# Models in this format have a configuration file next to their arrays.
_MODEL_FORMAT = "safetensors"
# Maximum number of weights that a message lists.
_MAX_LISTED = 8
# In every library, names of low-rank adapter factors contain this.


@dataclass(frozen=True)
class Average:
    """Options for averaging checkpoints.

    Attributes:
        weights: The weight of each checkpoint.
        dtype: The dtype of the result; None keeps the dtype of the arrays, or the widest one if they differ.
        parameters: The key of a stored average that replaces the parameters of a state, as in
            `StoredAverage`; None averages the parameters themselves.
        force: Whether to average models whose configurations describe different computations.
    """

    weights: MeanWeights = field(default_factory=MeanWeights)
    dtype: DType | None = None
    parameters: str | None = None
    force: bool = False

    def __call__(self, trees: Sequence[Tree]) -> Tree:
        """Return the mean of checkpoints of one model, with the metadata and other arrays of the last one.

        Only the parameters of training states are averaged, because averaged moments are meaningless.
        Quantized weights are dequantized, and count as bfloat16 in the choice of the dtype. Integer
        parameters must be equal.

        Raises:
            ConfigError: The configurations describe different computations.
            UsageError: `MeanWeights.of` refuses the weights, or the chosen dtype has too few bits for
                dequantized values.
            CoverageError: Names or shapes of arrays differ; the error lists all differences.
            FormatError: Two arrays of a checkpoint have the same name.
            MappingError: Integers differ, or values with few bits may have lost their scales.
            CheckpointError: See `StripOptimizer`, `StoredAverage` and
                `ckpttools.quantized.view.QuantizedView.plain`.
        """
        weights = self.weights.of(len(trees))
        differing = _check_configs(trees, force=self.force)
        counted = [self._with_plain_parameters(tree) for tree in trees]
        plain = [item.tree for item in counted]
        last, named = plain[-1], [item.named for item in counted]
        _check_layouts(named, plain)
        parts = {path: [item[dotted(path)] for item in named] for path in last.arrays}
        averaged = {path for path in parts if _is_averaged(last, path)}
        _check_integers({path: item for path, item in parts.items() if path not in averaged}, plain)
        leaves: dict[Path, Leaf] = {
            path: self._mean(parts[path], [item.dtype_of(path) for item in counted], weights)
            if path in averaged
            else leaf
            for path, leaf in last.items()
        }
        result = Tree(leaves, _config_source(plain).metadata)
        notes = self._notes(result, averaged, plain, weights) + _quantized_notes(counted[:-1])
        return result.with_metadata(notes=last.metadata.notes + notes + differing)

    def _with_plain_parameters(self, tree: Tree) -> _PlainParameters:
        if self.parameters is not None:
            tree = tree.pipe(StoredAverage(self.parameters))
        known = roles(tree)
        if any(known.of(path) == "optimizer" or known.unclear_of(path) for path in tree.arrays):
            tree = _without_training_state(tree)
        # Compute in float32, so that the result is rounded only once.
        result = quantized_view(tree).plain(DTYPES["float32"])
        if result.weights:
            refuse_few_bits(
                self.dtype,
                tree.metadata.location,
                f"{action('quantize', 'MEAN', 'DST')} quantizes the mean",
            )
        tree = tree.pipe(lambda given: with_notes(result, given))
        view = quantized_view(tree)
        if ambiguous := [*view.weights, *view.unclear]:
            raise MappingError(
                f"values with few bits may have scales, without which their mean is "
                f"meaningless{listing(ambiguous)}",
                location=tree.metadata.location or None,
                hint=f"cast the checkpoint first; {option('force', True)} there takes the values literally",
            )
        return _PlainParameters(tree, frozenset(map(dotted, result.weights)), result.of_scales)

    def _mean(self, parts: Sequence[LazyArray], dtypes: Sequence[DType], weights: WeightedMean) -> LazyArray:
        pairs = zip(parts, weights.weights, strict=True)
        # Arrays with weight zero are not read: 0 times NaN would be NaN.
        counted = [(part, weight) for part, weight in pairs if weight]
        to = self.dtype or _widest(dtypes)
        (first, weight), *rest = counted
        if not rest and weight == weights.total and first.dtype == to:
            return first
        is_narrow = max(to.bits, *(part.dtype.bits for part, _ in counted)) <= 16
        sums = DTYPES["float32" if is_narrow and not weights.is_far_from_one else "float64"]
        result = mean([part for part, _ in counted], [item for _, item in counted], weights.total, sums)
        return result if to == sums else elementwise(result, Convert(to))

    def _notes(self, built: Tree, averaged: set[Path], trees: Sequence[Tree], weights: WeightedMean) -> Notes:
        """Return notes about rounding and about the weight of each checkpoint."""
        stored = {id(array) for tree in trees for array in tree.arrays.values()}
        rounded = [path for path in averaged if id(built.arrays[path]) not in stored]
        dtypes = ", ".join(sorted({built.arrays[path].dtype.name for path in rounded}))
        kind = "mean" if self.weights.normalize else "sum"
        note = Note.of_arrays(len(rounded), f"{kind} of {len(trees)}, rounded once to {dtypes}")
        pairs = zip(trees, weights.weights, strict=True)
        shares = [f"{_location_text(tree)}: {weight / weights.total:.4g}" for tree, weight in pairs]
        more = f", and {len(shares) - _MAX_LISTED} more" if len(shares) > _MAX_LISTED else ""
        locations = Counter(tree.metadata.location for tree in trees if tree.metadata.location)
        duplicates = [f"{location} counts {n} times" for location, n in locations.items() if n > 1]
        return Notes(
            (note,) if rounded else (),
            remarks=(
                f"weights: {', '.join(shares[:_MAX_LISTED])}{more}",
                *duplicates,
                *_adapter_remarks(averaged),
            ),
        )


@dataclass(frozen=True)
class _PlainParameters:
    """The dequantized parameters of a checkpoint.

    Attributes:
        tree: The parameters.
        dequantized: Dotted names of the weights that were quantized.
        of_scales: Remarks about the values of the scales.
    """

    tree: Tree
    dequantized: Collection[str]
    of_scales: Sequence[str]

    def dtype_of(self, path: Path) -> DType:
        """Return the dtype of a mean of arrays like the one at a path."""
        name = dotted(path)
        return DEFAULT_DTYPE if name in self.dequantized else self.named[name].dtype

    @cached_property
    def named(self) -> Mapping[str, LazyArray]:
        """Return the arrays by their dotted names."""
        return by_name(self.tree.arrays)


def _adapter_remarks(averaged: Collection[Path]) -> Iterator[str]:
    """Yield a remark if adapters are averaged, because products of their factors are added to weights."""
    if any(FACTOR in dotted(path).lower() for path in averaged):
        merge_action = action("merge_adapter")
        yield (
            "factors of adapters are averaged separately, and alpha is that of the last adapter, so the "
            "result "
            f"is not the mean of what the adapters add; for that, merge each adapter into its base "
            f"({merge_action}), and "
            "average the models"
        )


def _quantized_notes(counted: Sequence[_PlainParameters]) -> Notes:
    """Return remarks about the quantized weights of checkpoints whose own notes are dropped."""
    return Notes(
        remarks=tuple(
            f"{_location_text(item.tree)}: {declared}"
            for item in counted
            if item.dequantized
            for declared in (f"{array_count(item.dequantized)} dequantized", *item.of_scales)
        )
    )


def _without_training_state(tree: Tree) -> Tree:
    """Return only the parameters and the step of a training state."""
    try:
        return tree.pipe(KeepScanAxis(StripOptimizer(keep_step=any(step in tree.arrays for step in STEPS))))
    except FormatError as error:
        own = option("parameters", "KEY")
        raise error.at(
            hint=f"{own} averages the arrays below a key; otherwise, run {action('strip_optimizer')} on each "
            "checkpoint first"
        ) from error


def _is_averaged(tree: Tree, path: Path) -> bool:
    """Return whether an array is a learned float array; tables of expert indices are not."""
    array = tree.arrays[path]
    learned = roles(tree).of(path) == "parameter" and path not in STEPS
    return learned and array.dtype.is_float and not is_table(path)


def _widest(dtypes: Sequence[DType]) -> DType:
    """Return the dtype with the most bits; float32 if several dtypes tie."""
    limit = max(dtype.bits for dtype in dtypes)
    result = {dtype for dtype in dtypes if dtype.bits == limit}
    return result.pop() if len(result) == 1 else DTYPES["float32"]


def _check_layouts(named: Sequence[Mapping[str, LazyArray]], trees: Sequence[Tree]) -> None:
    """Raise CoverageError if names or shapes differ from those of the last tree."""
    *others, expected = named
    for arrays, tree in zip(others, trees, strict=False):
        mismatches = [f"{name}: missing" for name in expected if name not in arrays]
        mismatches += [f"{name}: extra" for name in arrays if name not in expected]
        mismatches += [
            f"{name}: {list(array.shape)}, expected {list(expected[name].shape)}"
            for name, array in arrays.items()
            if name in expected and array.shape != expected[name].shape
        ]
        if mismatches:
            raise CoverageError(
                "only checkpoints with the same layout can be averaged; this one differs from the last:"
                + listing(mismatches),
                location=_location_text(tree),
                expected=f"the names and shapes of {_location_text(trees[-1])}",
                hint=f"convert it first: {action('stack')} and {action('unstack')} for layers, "
                f"{action('convert')} for names",
            )


def _config_source(trees: Sequence[Tree]) -> Tree:
    """Return the tree whose files the result gets: the last one, or the last model with a configuration."""
    last = trees[-1]
    if last.metadata.format != _MODEL_FORMAT or config_of(last) is not None:
        return last
    configured = (
        tree for tree in reversed(trees) if tree.metadata.format == _MODEL_FORMAT and config_of(tree)
    )
    return next(configured, last)


def _check_configs(trees: Sequence[Tree], *, force: bool) -> Notes:
    """Compare the configurations of models with that of the last model, which is written.

    Yields:
        A remark for each model with differences if `force` accepts them, and for each model whose
        configuration cannot be compared.

    Raises:
        ConfigError: The configurations describe different computations, and `force` is not set.
    """
    *others, last = trees
    last_config, remarks = config_of(last), []
    for tree in others:
        config = config_of(tree)
        if (config is None) != (last_config is None):
            unconfigured, other = (tree, last) if config is None else (last, tree)
            remarks.append(
                f"{_location_text(unconfigured)} has no {CONFIG}, so its configuration was not compared "
                "with that of "
                f"{_location_text(other)}"
            )
        differences = [] if config is None or last_config is None else config_differences(config, last_config)
        if differences and not force:
            raise _differing_configs_error(tree, last, differences)
        if differences:
            listed = "; ".join(map(str, differences))
            remarks.append(
                f"{CONFIG} is that of {_location_text(last)}; {_location_text(tree)} differs: {listed}"
            )
    return Notes(remarks=tuple(remarks))


def _differing_configs_error(tree: Tree, last: Tree, differences: Sequence[ConfigDifference]) -> ConfigError:
    force = f"{option('force', True)} averages them anyway, and the result has the configuration of the last"
    if any(difference.is_known for difference in differences):
        message = "these models compute different functions, so a mean of their weights belongs to neither:"
        hint = f"average checkpoints of one model; {force}"
    else:
        message = f"{CONFIG} differs in unknown fields, which may change what the models compute:"
        hint = f"if these fields do not affect the computation, {force}"
    expected = f"the same configuration as {_location_text(last)}"
    return ConfigError(
        message + listing([*map(str, differences)]),
        location=_location_text(tree),
        expected=expected,
        hint=hint,
    )


def _check_integers(parts: Mapping[Path, Sequence[LazyArray]], trees: Sequence[Tree]) -> None:
    """Raise MappingError if integer parameters differ between trees."""
    known = roles(trees[-1])
    unequal_integers = []
    for path, arrays in parts.items():
        if path in STEPS or known.of(path) != "parameter":
            continue
        unequal = [k for k, array in enumerate(arrays[:-1]) if not _is_equal(array, arrays[-1])]
        unequal_integers += [f"{keystr(path)}: not as in {_location_text(trees[k])}" for k in unequal]
    if unequal_integers:
        raise MappingError(
            "only floating-point arrays are averaged; these differ between the "
            f"checkpoints:{listing(unequal_integers)}",
            location=_location_text(trees[-1]),
            hint=f"leave them out with {action('select')}, or average checkpoints of one model",
        )


def _is_equal(a: LazyArray, b: LazyArray) -> bool:
    import numpy as np

    pieces = split_evenly(Region.whole(b.shape), _COMPARED_ELEMENTS)
    return a is b or all(np.array_equal(a.read(piece), b.read(piece)) for piece in pieces)


def _location_text(tree: Tree) -> str:
    return tree.metadata.location or "a tree"


# Training states may store an average of the parameters, which can replace them:
#
# opt_state/1/ema/params/decoder/…    of optax.ema      replaces    params/params/decoder/…
# ema_params/decoder/…                of flax recipes

ANY = "ema"
"""A value in place of a path that selects the only average in the state."""


@dataclass(frozen=True)
class StoredAverage:
    """A transform that replaces the parameters with their average in the same training state.

    Attributes:
        below: The key of the average, such as "opt_state/1/ema"; "ema" if there is only one.
    """

    below: str = ANY

    def __call__(self, tree: Tree) -> Transformed:
        """Return the tree with the averaged parameters and without the stored average.

        Raises:
            UsageError: The average does not exist, or there are several.
            CoverageError: The names or shapes below the key differ from those of the parameters.
        """
        head = self._head(tree)
        locations = _average_paths(tree, head)
        leaves: dict[Path, Leaf] = {}
        for path, leaf in tree.items():
            if path[: len(head)] != head:
                leaves[path] = tree.arrays[locations[path]] if path in locations else leaf
        remark = f"the parameters are those of {keystr(head)}, the average that training kept"
        return Transformed(Tree(leaves, tree.metadata), Notes(remarks=(remark,)))

    def _head(self, tree: Tree) -> Path:
        heads = {path[:k]: None for path in tree.arrays for k in range(1, len(path))}
        named = [head for head in heads if keystr(head) == self.below]
        averages = [head for head in heads if is_average(head[-1])]
        outer = [head for head in averages if not any(head[:k] in averages for k in range(1, len(head)))]
        result = named or (outer if self.below == ANY else [])
        if len(result) == 1:
            return result[0]
        raise UsageError(
            f"{self.below} does not exist in the state"
            if not result
            else "the state contains several averages",
            location=tree.metadata.location or None,
            got=", ".join(map(keystr, outer)) or "no average of parameters with a known name",
            hint=f"name the key above it, such as {option('parameters', 'opt_state/1/ema')}",
        )


def _average_paths(tree: Tree, head: Path) -> Mapping[Path, Path]:
    """Return the path of the average of each parameter.

    Raises:
        CoverageError: Names or shapes differ.
    """
    known = roles(tree)
    own = [path for path in tree.arrays if path[: len(head)] != head and known.of(path) == "parameter"]
    floats = [path for path in own if tree.arrays[path].dtype.is_float]
    below = {path[len(head) :]: path for path in tree.arrays if path[: len(head)] == head}
    for cut in range(max(map(len, floats), default=0)):
        tails = {path[cut:]: path for path in floats}
        if len(tails) == len(floats) and tails.keys() == below.keys():
            unmatched = _shape_differences(tree.arrays, {path: below[tail] for tail, path in tails.items()})
            if unmatched:
                break
            return {path: below[tail] for tail, path in tails.items()}
    else:
        unmatched = [keystr(path) for path in _unmatched_parameters(floats, below)]
    raise CoverageError(
        f"the arrays below {keystr(head)} are not the parameters{listing(unmatched)}",
        location=tree.metadata.location or None,
        got=f"{len(below)} arrays",
        expected=f"the names and shapes of {len(floats)} parameters",
    )


def _shape_differences(arrays: Mapping[Path, LazyArray], locations: Mapping[Path, Path]) -> list[str]:
    return [
        f"{keystr(path)}: {list(arrays[path].shape)}, stored {list(arrays[location].shape)}"
        for path, location in locations.items()
        if arrays[path].shape != arrays[location].shape
    ]


def _unmatched_parameters(parameters: Iterable[Path], below: Mapping[Path, Path]) -> list[Path]:
    """Return the parameters whose path has no suffix that matches an array.

    If every parameter matches, return all parameters.
    """
    ends = {tail[k:] for tail in below for k in range(len(tail))}
    paths = list(parameters)
    return [path for path in paths if not any(path[k:] in ends for k in range(len(path)))] or paths
