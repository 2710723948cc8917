"""Convert adapters of JAX trainers to adapters of the Hugging Face model.

    params/params/decoder/layers/mlp/wi_0/kernel_lora_a         checkpoints of MaxText's own fine-tuning
    decoder/layers/mlp/wi_0/kernel_lora_a/value                 of Tunix, and for `lora_restore_path`
    params/params/decoder/layers/mlp/wi_0/kernel_lora_a/value   of MaxText's own converter
    decoder/layers/self_attention/query/lora_a.kernel           of the inference engine, attention alone

Ranks are determined by shapes. If layers and inputs have the same length, the base's sizes distinguish them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ckpttools.adapters.bases import Base, missing_weights_error, recorded_base
from ckpttools.adapters.config import PeftConfig, is_number
from ckpttools.adapters.factor_rows import (
    PARTS,
    STYLES,
    WEIGHT,
    A,
    B,
    FactorRow,
    ModelFactorRows,
    model_factor_rows,
    no_factors_reason,
    required_family,
)
from ckpttools.adapters.factors import Adapter, FactorPair, finite
from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Constant, distinct_arrays, relayout, source_arrays, swap_last_axes, take
from ckpttools.array.tree import Path, Tree
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES
from ckpttools.core.errors import ConfigError, FormatError, UsageError, listing
from ckpttools.core.message_terms import action, option
from ckpttools.formats.adapters import ADAPTER, BASE_NAME
from ckpttools.formats.json_file import read_json
from ckpttools.mapping.row import Row
from ckpttools.mapping.sizes import Size
from ckpttools.mapping.table import Table
from ckpttools.maxtext.family_layouts import layouts_of
from ckpttools.maxtext.versions import DECODER, LORA_KEY, VALUE
from ckpttools.maxtext.view import view_of
from ckpttools.stores.registry import parse
from ckpttools.transforms.cast import cast

_FLOAT32 = DTYPES["float32"]
_KERNEL = "kernel"
# The last key of a factor, for A and B: in trainers, and in the inference engine.
_ENDS = {"a": (A, "lora_a.kernel"), "b": (B, "lora_b.kernel")}


@dataclass(frozen=True)
class KernelFactors:
    """The two factors of a kernel, as stored."""

    a: LazyArray
    b: LazyArray

    @property
    def rank(self) -> int:
        """Return the rank, which is the last axis of A in every layout."""
        return self.a.shape[-1] if self.a.shape else 0


def factor_pairs(tree: Tree) -> dict[str, KernelFactors]:
    """Return the factors in a tree by dotted kernel names; empty if there are none.

    Raises:
        FormatError: A factor has no counterpart.
    """
    roles = view_of(tree).roles
    halves: dict[str, dict[str, LazyArray]] = {}
    for path, array in tree.arrays.items():
        half = factor_half(path) if roles.of(path) == "parameter" else None
        if half is not None:
            halves.setdefault(half[0], {})[half[1]] = array
    incomplete = [name for name, pair in halves.items() if len(pair) < 2]
    if incomplete:
        raise FormatError(
            "one of the two factors of a kernel is missing",
            location=f"{tree.metadata.location}, {incomplete[0]}",
            expected="both lora_a and lora_b",
            hint=f"check that the checkpoint is complete: {action('doctor')}",
        )
    return {name: KernelFactors(pair["a"], pair["b"]) for name, pair in halves.items()}


def factor_half(path: Path) -> tuple[str, str] | None:
    """Return the kernel and the factor (a or b) of a path; None for other paths."""
    keys = [str(key) for key in (path[:-1] if path[-1:] == (VALUE,) else path)]
    if DECODER in keys:
        keys = keys[keys.index(DECODER) :]
    for half, (end, suffix) in _ENDS.items():
        if keys and keys[-1] == suffix:
            return ".".join((*keys[:-1], _KERNEL)), half
        if keys and keys[-1].endswith(end):
            return ".".join((*keys[:-1], keys[-1].removesuffix(end))), half
    return None


def recorded_settings(tree: Tree) -> Mapping[str, object]:
    """Return the recorded rank and alpha, from MaxText's metadata or a PEFT configuration.

    Raises:
        FormatError, ConfigError: The configuration describes an unsupported adapter, or has several ranks.
    """
    settings = tree.metadata.custom.get(LORA_KEY)
    if isinstance(settings, Mapping):
        return settings
    location = parse(tree.metadata.location) if tree.metadata.location else None
    for above in () if location is None else (location, *list(location.parents)[:3]):
        if (above / ADAPTER).is_file():
            return _settings_from_peft(PeftConfig(read_json(above / ADAPTER), str(above / ADAPTER)))
    return {}


def _settings_from_peft(config: PeftConfig) -> Mapping[str, object]:
    """Return rank and alpha from a PEFT configuration. For rsLoRA, convert alpha."""
    unsupported = [name for name in ("rank_pattern", "alpha_pattern") if config.declared.get(name)]
    if unsupported:
        raise ConfigError(
            "this adapter has different ranks or alphas for some modules, which its configuration names as "
            "PEFT does",
            location=config.location,
            got=", ".join(unsupported),
            expected="one rank and one alpha",
            hint="convert the PEFT adapter that it was made from",
        )
    recorded = {"lora_rank": config.declared.get("r"), "lora_alpha": config.declared.get("lora_alpha")}
    if config.declared.get("use_rslora") and None not in recorded.values():
        recorded["lora_alpha"] = config.scale("") * config.rank("")
    return recorded


def adapter_of_maxtext(base: Base, tree: Tree, alpha: float | None = None) -> Adapter:
    """Return the adapter of a MaxText tree in the base's names.

    Args:
        base: The adapted model.
        tree: An adapter in any of the layouts above, scanned or not.
        alpha: The adapter's alpha; None to use the recorded one.

    Raises:
        FormatError: The tree has no factors, or they do not match the base.
        ConfigError: Alpha is unknown, or differs from the recorded one.
        UsageError: `alpha` is NaN or infinite.
    """
    pairs, location = factor_pairs(tree), tree.metadata.location
    known = _best_rows(base, pairs)
    by_kernel = {name: row for row in known.rows for name in _kernels(row, known.sizes)}
    if missing := [name for name in pairs if name not in by_kernel or no_factors_reason(by_kernel[name])]:
        raise missing_weights_error(location, base.tree.metadata.location, missing, by_kernel)
    touched = dict.fromkeys(by_kernel[name] for name in pairs)
    settings = recorded_settings(tree)
    factors: list[FactorPair] = []
    for number, row in enumerate(touched):
        own = {name: pairs[name] for name in _kernels(row, known.sizes) if name in pairs}
        matching_row = _matching_row(known, row, number, own, location)
        rank = next(iter(own.values())).rank
        factors += _factors(matching_row, known, rank, own, scale_of(settings, rank, alpha, location), base)
    return Adapter(location, tuple(factors), config={BASE_NAME: recorded_base(tree)})


def _best_rows(base: Base, pairs: Mapping[str, KernelFactors]) -> ModelFactorRows:
    """Return the rows in the layout that matches most names."""
    family = required_family(base)
    own = base.rows.scan_axis if base.rows is not None else None
    axes = (1 if own is None else own, None)
    all_rows = [model_factor_rows(base, axis, item) for item in layouts_of(family) for axis in axes]

    def count_matches(rows: ModelFactorRows) -> int:
        names = {name for row in rows.rows for name in _kernels(row, rows.sizes)}
        return sum(name in names for name in pairs)

    return max(all_rows, key=count_matches)


def _kernels(row: Row, sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield MaxText's kernel names of a row."""
    if row.left.key.needs <= sizes.keys() and all(sizes.get(axis) for axis in row.left.key.axes):
        yield from row.left.keys(sizes)


def _matching_row(
    model_rows: ModelFactorRows, row: Row, number: int, pairs: Mapping[str, KernelFactors], location: str
) -> FactorRow:
    """Return the factor row in the style of the stored factors.

    Raises:
        FormatError: The factors do not match, or two rows would give different products.
    """
    styles = {style: model_rows.of(row, number, style) for style in STYLES}
    candidates = {
        style: item
        for style, item in styles.items()
        if all(_fits(item, model_rows.sizes, pair) for pair in pairs.values())
    }
    name, pair = next(iter(pairs.items()))
    first = next(iter(candidates.values()), None)
    if any(item != first for item in candidates.values()):
        raise FormatError(
            "the shapes of these factors do not show which axes are layers, inputs and ranks",
            location=f"{location}, {name}",
            got=f"A {list(pair.a.shape)} and B {list(pair.b.shape)}",
            expected="unstacked factors",
            hint=f"unstack them: {action('unstack', 'ADAPTER', 'DST', scan_axis='N')}",
        )
    if first is not None:
        return first
    sizes = {**model_rows.sizes, f"rank_{number}": pair.rank}
    expected = model_rows.of(row, number)
    raise FormatError(
        "these factors do not fit the base's kernel",
        location=f"{location}, {name}",
        got=f"A {list(pair.a.shape)} and B {list(pair.b.shape)}",
        expected=f"A {list(expected.a.left.shape(sizes))} and B {list(expected.b.left.shape(sizes))}",
        hint="check that this is the adapted model",
    )


def _fits(row: FactorRow, sizes: Mapping[str, int], pair: KernelFactors) -> bool:
    own = {**sizes, row.rank: pair.rank}
    return pair.rank > 0 and row.a.left.shape(own) == pair.a.shape and row.b.left.shape(own) == pair.b.shape


def _factors(
    row: FactorRow,
    model_rows: ModelFactorRows,
    rank: int,
    pairs: Mapping[str, KernelFactors],
    scale: float,
    base: Base,
) -> Iterator[FactorPair]:
    """Yield the factors of a row's weights."""
    sizes = {**model_rows.sizes, row.rank: rank}
    arrays: dict[str, LazyArray] = {}
    for name in row.row.left.keys(model_rows.sizes):
        pair = pairs.get(name)
        a, b = (None, None) if pair is None else (pair.a, pair.b)
        # If the conversion divides values, it must do so before they are rounded to fewer bits.
        b = cast(b, _FLOAT32) if b is not None and row.row.op is not None and b.dtype.bits < 32 else b
        arrays[name + A] = _zeros(row.a.left.shape(sizes), pairs, "a") if a is None else a
        arrays[name + B] = _zeros(row.b.left.shape(sizes), pairs, "b") if b is None else b
    lengths = {axis: Size(length, "the base") for axis, length in sizes.items()}
    converted = Table((row.a, row.b), lengths, location=base.tree.metadata.location).to_right(arrays).arrays
    for weight in row.row.right.keys(model_rows.sizes):
        a, b = (converted[weight.removesuffix(WEIGHT) + end] for end in PARTS)
        if not all(isinstance(item, Constant) for item in distinct_arrays([b]) if not source_arrays(item)):
            yield FactorPair(weight, a, b, scale, rank)


def _zeros(shape: tuple[int, ...], pairs: Mapping[str, KernelFactors], half: str) -> Constant:
    dtype = getattr(next(iter(pairs.values())), half).dtype
    return Constant(shape, dtype, bytes(dtype.itemsize))


def scale_of(settings: Mapping[str, object], rank: int, alpha: float | None, location: str) -> float:
    """Return the scale of the product of both factors; see `adapter_of_maxtext` for arguments and errors."""
    recorded_alpha, recorded_rank = settings.get("lora_alpha"), settings.get("lora_rank")
    if isinstance(recorded_rank, int | float) and recorded_rank not in (0, rank):
        raise ConfigError(
            "the recorded rank is not the rank of the factors",
            location=location,
            got=f"rank {rank}",
            expected=f"{recorded_rank:g} (lora_rank in the metadata)",
        )
    if alpha is not None and is_number(recorded_alpha) and recorded_alpha not in (0, alpha):
        raise UsageError(
            "the adapter was trained with a different alpha",
            location=location,
            got=option("alpha", finite("alpha", alpha)),
            expected=f"{recorded_alpha:g} (lora_alpha in the metadata)",
            hint=f"leave it out; {option('scale', 'X')} multiplies what the adapter changes",
        )
    if alpha is not None:
        return finite("alpha", alpha) / rank
    if not is_number(recorded_alpha):
        raise ConfigError(
            "this adapter does not record its alpha, which gives its scale",
            location=location,
            expected="the alpha of the training",
            hint=f"pass it: {option('alpha', 'X')}",
        )
    return recorded_alpha / rank


# Adapters of Tunix's own models.
#
# layers/0/attn/q_proj/w_lora_a (embed, rank)          w_lora_b (rank, heads, head)       Llama, Qwen
# layers/0/attn/o_proj/w_lora_a (heads, head, rank)    w_lora_b (rank, embed)
# layers/0/mlp/up_proj/kernel_lora_a (in, rank)        kernel_lora_b (rank, out)
# layers/0/attn/q_einsum/w_lora_a (embed, rank)        w_lora_b (rank, heads, head)       Gemma
# layers/0/attn/kv_einsum/w_lora_a (embed, rank)       w_lora_b (rank, 2, heads, head)
#
# Tunix multiplies A, with all axes but the last merged, by B, with all axes but the first merged. Rotary
# pairs are in Hugging Face's order.

_TUNIX_LAYERS = "layers"
# Names of each Tunix module's kernel, and of its module in transformers.
_TUNIX_MODULES = {"attn": ("w", "self_attn"), "mlp": ("kernel", "mlp")}
# Layers in transformers for each Tunix layer. B has an additional axis if there are several.
_TUNIX_PROJECTIONS = {
    **{name: (name,) for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
    **{name: (name,) for name in ("gate_proj", "up_proj", "down_proj")},
    "q_einsum": ("q_proj",),
    "kv_einsum": ("k_proj", "v_proj"),
    "attn_vec_einsum": ("o_proj",),
}


def tunix_kernels(paths: Iterable[Path]) -> list[str]:
    """Return the dotted names of Tunix kernels for which a tree has factors.

    Args:
        paths: Paths of parameters.
    """
    halves = filter(None, map(factor_half, paths))
    return [name for name in dict.fromkeys(name for name, _ in halves) if _tunix_weights(name)]


def adapter_of_jax(base: Base, tree: Tree, alpha: float | None = None) -> Adapter:
    """Return the adapter that a JAX trainer wrote, in the base's names.

    Args:
        base: The adapted model.
        tree: An adapter of a MaxText model, in any layout, or of a Tunix model.
        alpha: The adapter's alpha; None to use the recorded one.

    Raises:
        FormatError: The tree has no factors, or they do not match the base.
        ConfigError: Alpha is unknown, or differs from the recorded one.
        UsageError: `alpha` is NaN or infinite.
    """
    pairs = factor_pairs(tree)
    if not any(map(_tunix_weights, pairs)):
        return adapter_of_maxtext(base, tree, alpha)
    location = tree.metadata.location
    if unknown := [name for name in pairs if not _tunix_weights(name)]:
        raise FormatError(
            "these Tunix factors have no known counterpart in the Hugging Face model" + listing(unknown),
            location=location,
            expected=f"factors of {', '.join(_TUNIX_PROJECTIONS)}",
            hint="merge them in Tunix (save_lora_merged_model_as_safetensors), and convert the merged model",
        )
    names = {weight: base.named(weight) for name in pairs for weight in _tunix_weights(name)}
    if missing := [weight for weight, own in names.items() if own is None]:
        raise missing_weights_error(location, base.tree.metadata.location, missing, base.weights)
    settings = recorded_settings(tree)
    factors: list[FactorPair] = []
    for name, pair in pairs.items():
        scale = scale_of(settings, pair.rank, alpha, location)
        factors += _tunix_factors(location, name, pair, scale, names)
    for factor in factors:
        factor.require_fit(base.weights[factor.name].shape)
    return Adapter(location, tuple(factors), config={BASE_NAME: recorded_base(tree)})


def _tunix_weights(kernel: str) -> tuple[str, ...]:
    """Return the names of the weights in a Tunix kernel; () for other kernels."""
    keys = kernel.split(".")[-5:]
    if len(keys) < 5 or keys[0] != _TUNIX_LAYERS or not keys[1].isdecimal():
        return ()
    own, hf_name = _TUNIX_MODULES.get(keys[2], (None, ""))
    if keys[4] != own:
        return ()
    layer = f"model.{_TUNIX_LAYERS}.{keys[1]}.{hf_name}"
    return tuple(f"{layer}.{name}.weight" for name in _TUNIX_PROJECTIONS.get(keys[3], ()))


def _tunix_factors(
    location: str, kernel: str, pair: KernelFactors, scale: float, names: Mapping[str, str | None]
) -> Iterator[FactorPair]:
    """Yield the factors of each weight in a kernel."""
    weights = _tunix_weights(kernel)
    is_grouped = len(weights) > 1
    has_axes = pair.a.ndim > 1 and pair.b.ndim > 1 + is_grouped
    if not has_axes or pair.b.shape[0] != pair.rank or (is_grouped and pair.b.shape[1] != len(weights)):
        rank = pair.rank
        parts = (rank, len(weights), "outputs") if is_grouped else (rank, "outputs")
        raise FormatError(
            "these factors do not have Tunix's layout",
            location=f"{location}, {kernel}",
            got=f"A {list(pair.a.shape)} and B {list(pair.b.shape)}",
            expected=f"A [inputs, {rank}] and B [{', '.join(map(str, parts))}]",
        )
    a = swap_last_axes(_as_matrix(pair.a, pair.a.ndim - 1))
    for number, weight in enumerate(weights):
        b = swap_last_axes(_as_matrix(take(pair.b, 1, number) if is_grouped else pair.b, 1))
        yield FactorPair(names[weight] or weight, a, b, scale, pair.rank)


def _as_matrix(array: LazyArray, rows: int) -> LazyArray:
    """Merge the first axes of an array into one, and the others into another."""
    split = tuple((length,) for length in array.shape)
    return relayout(array, split, range(array.ndim), (rows, array.ndim - rows))
