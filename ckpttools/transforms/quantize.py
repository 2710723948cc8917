"""Quantization of the weights of a Hugging Face model, in the format of published models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from ckpttools.array.blockwise import block_codes
from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import relayout
from ckpttools.array.patterns import first_match, matches
from ckpttools.array.tree import Leaf, Path, Tree, by_name, dotted
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import FormatError, UnknownNameError, UsageError
from ckpttools.core.message_terms import action, option, repeated_option
from ckpttools.core.notes import Note, Notes
from ckpttools.core.text import array_count, sample_names, sort_naturally
from ckpttools.quantized.config import (
    EXPERTS,
    FIELD,
    MLP_EXPERTS,
    SEPARATE_EXPERTS,
    half_quantized_experts,
    is_fused,
    is_linear,
    is_out_first,
    single_matrices,
    unquantized_modules,
)
from ckpttools.quantized.dequantized_tree import unreadable_error
from ckpttools.quantized.encoders import GROUP, Fp8BlockEncoder, Mxfp4Encoder
from ckpttools.quantized.scales import BLOCK_SCALE, is_plain
from ckpttools.quantized.unsupported_errors import remedy
from ckpttools.quantized.view import quantized_view
from ckpttools.transforms.base import Transformed
from ckpttools.transforms.cast import cast, cast_notes, is_table
from ckpttools.transforms.select import require_matches

_FP8, _MXFP4 = "fp8-block128", "mxfp4"
_BLOCK = 128
# Bits per element of unquantized arrays in published models.
_PUBLISHED_BITS = 16
# Maximum number of patterns listed in a command.
_MAX_SUGGESTED = 4
_TEXT, _HIDDEN, _KIND, _GPT_OSS = "text_config", "hidden_size", "model_type", "gpt_oss"


@dataclass(frozen=True)
class Model:
    """Facts from a configuration that determine which arrays are quantized.

    Attributes:
        kind: The `model_type`, from the text model if there is one; empty if unknown.
        hidden: The hidden size.
    """

    kind: str
    hidden: int | None


@dataclass(frozen=True)
class TargetScheme:
    """The output of a quantization scheme for the weights of a model.

    Attributes:
        takes: Returns whether the scheme applies to an array.
        built: Returns the quantized arrays of an array, by name.
        declared: The `quantization_config`, without the list of unquantized modules.
        words: Description of the action, for notes.
        what: Description of the arrays, for messages.
    """

    takes: Callable[[str, LazyArray, Model], bool]
    built: Callable[[str, LazyArray], Mapping[str, LazyArray]]
    declared: Mapping[str, Any]
    words: str
    what: str


def _is_fp8(name: str, array: LazyArray, model: Model) -> bool:
    if is_linear(name, array):
        return True
    is_separate_expert = model.kind in SEPARATE_EXPERTS and MLP_EXPERTS in name
    return (
        is_separate_expert and is_fused(name, array) and is_out_first(name, array, model.hidden) is not False
    )


def _fp8(name: str, array: LazyArray) -> dict[str, LazyArray]:
    """Quantize to values and scales; fused experts are split into matrices, as in published models."""
    arrays: dict[str, LazyArray] = {}
    for item, matrix in single_matrices(name, array):
        arrays[item], arrays[item + BLOCK_SCALE] = block_codes(matrix, Fp8BlockEncoder(_BLOCK, _BLOCK), item)
    return arrays


def _is_mxfp4(name: str, array: LazyArray, model: Model) -> bool:
    if not is_fused(name, array) or model.kind not in ("", _GPT_OSS):
        return False
    return is_out_first(name, array, model.hidden) is not True and not array.shape[1] % GROUP


def _mxfp4(name: str, array: LazyArray) -> dict[str, LazyArray]:
    experts, into, out = array.shape
    swapped = relayout(array, ((experts,), (into,), (out,)), (0, 2, 1), (1, 1, 1))
    codes, scales = block_codes(swapped, Mxfp4Encoder(), name)
    groups = (into // GROUP, GROUP // codes.encoder.packed)
    return {
        f"{name}_blocks": relayout(codes, ((experts,), (out,), groups), (0, 1, 2, 3), (1, 1, 1, 1)),
        f"{name}_scales": scales,
    }


SCHEMES: Mapping[str, TargetScheme] = {
    _FP8: TargetScheme(
        _is_fp8,
        _fp8,
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [_BLOCK, _BLOCK],
        },
        f"quantized to FP8 (E4M3) in blocks of {_BLOCK} x {_BLOCK} with float32 scales: rounded",
        "the matrices of linear layers, `X.weight`, and fused experts of models that also load single "
        "experts",
    ),
    _MXFP4: TargetScheme(
        _is_mxfp4,
        _mxfp4,
        {"quant_method": "mxfp4"},
        "quantized to MXFP4 (E2M1 in groups of 32, exponents as scales): rounded",
        "the experts of gpt-oss, (expert, in, out) of `X.experts.gate_up_proj` and `down_proj`",
    ),
}


@dataclass(frozen=True)
class Quantize:
    """A transform that quantizes the weights of a Hugging Face model and updates `config.json`.

    Attributes:
        scheme: One of `SCHEMES`.
        exclude: Patterns (see `Select`) of arrays that are not quantized.
        dtype: Dtype of the floating-point arrays that are not quantized, except tables of integers; None to
            leave them unchanged. Weights are quantized from their original values, not from rounded ones.
    """

    scheme: str = _FP8
    exclude: Sequence[str] = ()
    dtype: DType | None = None

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise UnknownNameError(
                "unknown quantization scheme", got=self.scheme, expected=" or ".join(SCHEMES)
            )
        if self.dtype is not None and not is_plain(self.dtype):
            raise UsageError(
                "arrays that are not quantized need a dtype without scales",
                got=option("dtype", self.dtype),
                expected="bfloat16, float16 or float32",
            )

    def __call__(self, tree: Tree) -> Transformed:
        """Return the quantized tree.

        Values without a valid scale, such as NaN, raise an error when they are read.

        Raises:
            UsageError: A pattern matches nothing, or no array can be quantized.
            FormatError: Weights are already quantized.
        """
        refuse_quantized(tree, by_config=True)
        named = by_name(tree.arrays)
        scheme, paths = SCHEMES[self.scheme], self._chosen_paths(tree)
        unquantized = {path: item for path, item in tree.arrays.items() if path not in paths}
        leaves: dict[Path, Leaf] = {}
        for path, leaf in tree.items():
            if path in paths:
                leaves |= _quantized_paths(path, scheme.built(dotted(path), tree.arrays[path]))
            else:
                leaves[path] = self._cast_array(path, unquantized[path]) if path in unquantized else leaf
        config = _with_scheme(tree.metadata.config, named, {dotted(path) for path in paths}, scheme)
        quantized = Tree(leaves, tree.metadata).with_metadata(config=config)
        return Transformed(quantized, self._notes(tree, paths, unquantized))

    def _chosen_paths(self, tree: Tree) -> set[Path]:
        """Return the paths of the arrays to quantize."""
        require_matches(self.exclude, tree.arrays, tree.metadata.location)
        scheme, model = SCHEMES[self.scheme], _model(tree.metadata.config)
        paths = {
            path
            for path, array in tree.arrays.items()
            if scheme.takes(dotted(path), array, model) and not first_match(path, self.exclude)
        }
        if not paths:
            raise UsageError(
                "no array can be quantized",
                location=tree.metadata.location or None,
                expected=scheme.what,
                hint=f"{action('inspect.names', tree.metadata.location or 'SRC')} shows all names",
            )
        return paths

    def _cast_array(self, path: Path, array: LazyArray) -> LazyArray:
        return array if self.dtype is None or is_table(path) else cast(array, self.dtype)

    def _notes(self, tree: Tree, paths: Collection[Path], unquantized: Mapping[Path, LazyArray]) -> Notes:
        scheme = SCHEMES[self.scheme]
        inexact = [Note.of_arrays(len(paths), scheme.words)]
        if self.dtype is not None:
            floats = {dotted(path): item for path, item in unquantized.items() if not is_table(path)}
            inexact += cast_notes(floats, self.dtype)
        remarks = [*_remarks(tree, paths, scheme)]
        remarks += _wide(unquantized) if self.dtype is None else ()
        return Notes(tuple(inexact), remarks=tuple(remarks))


def refuse_quantized(tree: Tree, *, by_config: bool = False, hint: str | None = None) -> None:
    """Raise FormatError if weights are quantized.

    Args:
        tree: The weights.
        by_config: Whether a declaration in the configuration is sufficient.
        hint: Next step; None to suggest how to dequantize the weights.
    """
    view = quantized_view(tree)
    if view.weights or (by_config and view.declared is not None):
        if view.faults and not view.weights_from_headers.is_whole:
            raise unreadable_error(view.weights_from_headers, view.declared, tree.metadata.location)
        raise FormatError(
            "weights are already quantized",
            location=tree.metadata.location or None,
            got=f"{view.scheme} ({FIELD})" if view.declared else next(map(str, view.weights.values())),
            hint=hint or remedy(view.declared, location=tree.metadata.location or "SRC"),
        )


def _quantized_paths(path: Path, arrays: Mapping[str, LazyArray]) -> dict[Path, LazyArray]:
    """Return the quantized arrays by path. Names that are a single key remain a single key."""
    if len(path) == 1:
        return {(name,): item for name, item in arrays.items()}
    above = dotted(path[:-1]) + "."
    return {(*path[:-1], name.removeprefix(above)): item for name, item in arrays.items()}


def _model(config: Mapping[str, Any] | None) -> Model:
    text = (config or {}).get(_TEXT)
    locations = [location for location in (text, config) if isinstance(location, Mapping)]
    widths = (location.get(_HIDDEN) for location in locations)
    kinds = (location.get(_KIND) for location in locations)
    return Model(
        next((kind for kind in kinds if isinstance(kind, str)), ""),
        next((width for width in widths if isinstance(width, int)), None),
    )


def _with_scheme(
    config: Mapping[str, Any] | None,
    arrays: Mapping[str, LazyArray],
    names: Collection[str],
    scheme: TargetScheme,
) -> Mapping[str, Any] | None:
    if config is None:
        return None
    return {
        **config,
        FIELD: {**scheme.declared, "modules_to_not_convert": unquantized_modules(arrays, names)},
    }


def _wide(unquantized: Mapping[Path, LazyArray]) -> Iterator[str]:
    """Yield a warning if most unquantized values have more bits than in published models."""
    wide: list[Path] = []
    elements = 0
    for path, array in unquantized.items():
        if array.dtype.is_float:
            is_wide = array.dtype.bits > _PUBLISHED_BITS
            wide += [path] if is_wide else []
            elements += array.size if is_wide else -array.size
    if elements > 0:
        dtypes = ", ".join(sorted({unquantized[path].dtype.name for path in wide}))
        yield (
            f"{array_count(wide)} not quantized stay {dtypes}, so loaders compute in it or cast them; "
            f"{option('dtype', 'bfloat16')} writes the dtype of published models"
        )


def _remarks(tree: Tree, paths: Collection[Path], target_scheme: TargetScheme) -> Iterator[str]:
    if tree.metadata.config is None:
        yield f"there is no config.json, so loaders must be given {dict(target_scheme.declared)}"
    fused = [path for path, array in tree.arrays.items() if is_fused(dotted(path), array)]
    skipped = [path for path in fused if path not in paths]
    if skipped:
        other = _scheme_for(dotted(skipped[0]), tree.arrays[skipped[0]], tree.metadata.config)
        instead = f"; {option('scheme', other)} is for those" if other else ""
        yield (
            f"not quantized: {array_count(skipped)} of fused experts; "
            f"this scheme is for {target_scheme.what}{instead}"
        )
    yield from _partly_fused_warnings(tree, paths, target_scheme)
    block = target_scheme.declared.get("weight_block_size")
    uneven = [
        dotted(path)
        for path in sorted(paths)
        if block and any(_is_uneven(m, block) for _, m in single_matrices(dotted(path), tree.arrays[path]))
    ]
    if uneven:
        yield (
            f"the last blocks of {array_count(uneven)} are smaller than the others, as in DeepSeek V3: "
            f"vLLM and {action('cast')} read them; transformers up to 5.23, if it dequantizes, refuses them "
            f"or gives rows the scales of other rows, without an error; {option('exclude')} leaves arrays "
            f"out, such as {uneven[0]}"
        )


def _partly_fused_warnings(tree: Tree, paths: Collection[Path], scheme: TargetScheme) -> Iterator[str]:
    """Yield a warning about excluded matrices that vLLM fuses with quantized ones."""
    model, names = _model(tree.metadata.config), {dotted(path) for path in paths}
    quantizable = [
        dotted(path) for path, array in tree.arrays.items() if scheme.takes(dotted(path), array, model)
    ]
    half = half_quantized_experts(
        names.intersection(quantizable), (item for item in quantizable if item not in names)
    )
    if half:
        patterns = _patterns(sort_naturally(half), names)
        can_be_listed = len(patterns) <= _MAX_SUGGESTED
        options = (
            repeated_option("exclude", patterns)
            if can_be_listed
            else f"{option('exclude')} of {sample_names(patterns)}"
        )
        yield (
            "vLLM does not load this, but transformers does: q, k and v, gate and up, and the experts of a "
            "layer are one matrix in vLLM, and only parts of some matrices are quantized; "
            f"add {options} to leave out all of these"
        )


def _patterns(names: Sequence[str], quantized: Collection[str]) -> list[str]:
    """Shorten names to patterns: one per kind, if it matches no quantized name."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kind = f"*{EXPERTS}*" if EXPERTS in name else f"*.{'.'.join(name.rsplit('.', 2)[1:])}"
        kinds.setdefault(kind, []).append(name)
    other_names = {*quantized} - {*names}
    exclusive_kinds = {kind for kind in kinds if not any(matches(other, kind) for other in other_names)}
    return [item for kind, those in kinds.items() for item in ([kind] if kind in exclusive_kinds else those)]


def _scheme_for(name: str, array: LazyArray, config: Mapping[str, Any] | None) -> str | None:
    """Return the first scheme that applies to an array."""
    return next((item for item, scheme in SCHEMES.items() if scheme.takes(name, array, _model(config))), None)


def _is_uneven(array: LazyArray, block: Sequence[int]) -> bool:
    lengths = zip(array.shape[-2:], block, strict=True)
    return any(length > size and length % size for length, size in lengths)
