"""Adapters that trainers in JAX write for a MaxText model, as adapters of the Hugging Face model.

    params/params/decoder/layers/mlp/wi_0/kernel_lora_a         checkpoints of MaxText's own fine-tuning
    decoder/layers/mlp/wi_0/kernel_lora_a/value                 of Tunix, and for `lora_restore_path`
    params/params/decoder/layers/mlp/wi_0/kernel_lora_a/value   of MaxText's own converter
    decoder/layers/self_attention/query/lora_a.kernel           of the inference engine, attention alone

Ranks are those of shapes, and the base's sizes tell layers from inputs where both are of one length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckpttools.adapters.base_names import noted_base
from ckpttools.adapters.bases import Base, not_of_base
from ckpttools.adapters.config import PeftConfig, is_number
from ckpttools.adapters.factors import Adapter, FactorPair, finite
from ckpttools.adapters.rows import (
    PARTS,
    STYLES,
    WEIGHT,
    A,
    B,
    FactorRow,
    ModelFactorRows,
    required_family,
    rows_of_factors,
    why_no_factors,
)
from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Constant, distinct, inner
from ckpttools.array.tree import Path, Tree
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES
from ckpttools.core.errors import ConfigError, FormatError, UsageError
from ckpttools.core.wording import option
from ckpttools.formats.adapters import ADAPTER, BASE_NAME
from ckpttools.formats.json_file import read_json
from ckpttools.mapping.row import Row
from ckpttools.mapping.sizes import Size
from ckpttools.mapping.table import Table
from ckpttools.maxtext.family_layouts import layouts_of
from ckpttools.maxtext.layout import DECODER, LORA_KEY, VALUE
from ckpttools.maxtext.view import view_of
from ckpttools.stores.registry import parse
from ckpttools.transforms.cast import cast

_FLOAT32 = DTYPES["float32"]
_KERNEL = "kernel"
# The last key of a factor, by which of both it is: trainers', and that of the inference engine.
_ENDS = {"a": (A, "lora_a.kernel"), "b": (B, "lora_b.kernel")}


@dataclass(frozen=True)
class KernelFactors:
    """Both factors of a kernel, as they are stored."""

    a: LazyArray
    b: LazyArray

    @property
    def rank(self) -> int:
        """Of the product: the last axis of A in every layout."""
        return self.a.shape[-1] if self.a.shape else 0


def pairs_of(tree: Tree) -> dict[str, KernelFactors]:
    """The factors in a tree, by dotted names of kernels; empty where there are none.

    Raises:
        FormatError: one is there without the other.
    """
    roles = view_of(tree).roles
    halves: dict[str, dict[str, LazyArray]] = {}
    for path, array in tree.arrays.items():
        found = half_of(path) if roles.of(path) == "parameter" else None
        if found is not None:
            halves.setdefault(found[0], {})[found[1]] = array
    alone = [name for name, both in halves.items() if len(both) < 2]
    if alone:
        raise FormatError(
            "a factor of a product is not there",
            place=f"{tree.metadata.place}, {alone[0]}",
            wanted="both lora_a and lora_b",
            hint="check that the checkpoint is whole: `ckpt doctor`",
        )
    return {name: KernelFactors(both["a"], both["b"]) for name, both in halves.items()}


def half_of(path: Path) -> tuple[str, str] | None:
    """The kernel, and which factor of it lies at a path; None for what is none."""
    keys = [str(key) for key in (path[:-1] if path[-1:] == (VALUE,) else path)]
    if DECODER in keys:
        keys = keys[keys.index(DECODER) :]
    for which, (end, whole) in _ENDS.items():
        if keys and keys[-1] == whole:
            return ".".join((*keys[:-1], _KERNEL)), which
        if keys and keys[-1].endswith(end):
            return ".".join((*keys[:-1], keys[-1].removesuffix(end))), which
    return None


def said_of(tree: Tree) -> Mapping[str, object]:
    """What is noted of rank and alpha: in MaxText's metadata, or in a configuration of PEFT beside it.

    Raises:
        FormatError, ConfigError: that configuration is of another kind of adapter, or says several ranks.
    """
    said = tree.metadata.custom.get(LORA_KEY)
    if isinstance(said, Mapping):
        return said
    place = parse(tree.metadata.place) if tree.metadata.place else None
    for above in () if place is None else (place, *list(place.parents)[:3]):
        if (above / ADAPTER).is_file():
            return _said_beside(PeftConfig(read_json(above / ADAPTER), str(above / ADAPTER)))
    return {}


def _said_beside(config: PeftConfig) -> Mapping[str, object]:
    """Rank and alpha by a configuration of PEFT; of rsLoRA the alpha that gives its scale without it."""
    odd = [name for name in ("rank_pattern", "alpha_pattern") if config.said.get(name)]
    if odd:
        raise ConfigError(
            "modules of this adapter have ranks or alphas of their own, by names of PEFT's",
            place=config.place,
            got=", ".join(odd),
            wanted="one rank and one alpha",
            hint="convert the adapter of PEFT that it was made of",
        )
    noted = {"lora_rank": config.said.get("r"), "lora_alpha": config.said.get("lora_alpha")}
    if config.said.get("use_rslora") and None not in noted.values():
        noted["lora_alpha"] = config.scale("") * config.rank("")
    return noted


def adapter_of_maxtext(base: Base, tree: Tree, alpha: float | None = None) -> Adapter:
    """The adapter that a tree is, in the base's names.

    Args:
        base: the model that it is of.
        tree: an adapter in any of the layouts above, scanned or not.
        alpha: of the adapter; None for what is noted beside it.

    Raises:
        FormatError: there are no factors, or they are not of this base.
        ConfigError: nothing says alpha, or what is noted is not so.
        UsageError: `alpha` is NaN or infinite.
    """
    pairs, place = pairs_of(tree), tree.metadata.place
    known = _rows(base, pairs)
    by_kernel = {name: row for row in known.rows for name in _kernels(row, known.sizes)}
    if lacking := [name for name in pairs if name not in by_kernel or why_no_factors(by_kernel[name])]:
        raise not_of_base(place, base.tree.metadata.place, lacking, by_kernel)
    touched = dict.fromkeys(by_kernel[name] for name in pairs)
    said = said_of(tree)
    made: list[FactorPair] = []
    for number, row in enumerate(touched):
        own = {name: pairs[name] for name in _kernels(row, known.sizes) if name in pairs}
        fitting = _fitting(known, row, number, own, place)
        rank = next(iter(own.values())).rank
        made += _factors(fitting, known, rank, own, scale_of(said, rank, alpha, place), base)
    return Adapter(place, tuple(made), config={BASE_NAME: noted_base(tree)})


def _rows(base: Base, pairs: Mapping[str, KernelFactors]) -> ModelFactorRows:
    """The rows in the layout that has most of the names; on the base's scan axis, where it has one."""
    family = required_family(base)
    own = base.rows.scan_axis if base.rows is not None else None
    axes = (1 if own is None else own, None)
    all_rows = [rows_of_factors(base, axis, each) for each in layouts_of(family) for axis in axes]

    def met(rows: ModelFactorRows) -> int:
        names = {name for row in rows.rows for name in _kernels(row, rows.sizes)}
        return sum(name in names for name in pairs)

    return max(all_rows, key=met)


def _kernels(row: Row, sizes: Mapping[str, int]) -> Iterator[str]:
    """MaxText's names of a row's kernels."""
    if row.left.key.needs <= sizes.keys() and all(sizes.get(axis) for axis in row.left.key.axes):
        yield from row.left.keys(sizes)


def _fitting(
    known: ModelFactorRows, row: Row, number: int, pairs: Mapping[str, KernelFactors], place: str
) -> FactorRow:
    """The rows of the style that all these factors have.

    Raises:
        FormatError: they have none, or two of which each would make another product.
    """
    styles = {style: known.of(row, number, style) for style in STYLES}
    made = {
        style: each
        for style, each in styles.items()
        if all(_fits(each, known.sizes, pair) for pair in pairs.values())
    }
    name, pair = next(iter(pairs.items()))
    first = next(iter(made.values()), None)
    if any(each != first for each in made.values()):
        raise FormatError(
            "shapes do not show which axis of these factors is that of layers, inputs or ranks",
            place=f"{place}, {name}",
            got=f"A {list(pair.a.shape)} and B {list(pair.b.shape)}",
            wanted="factors of layers one by one",
            hint="unstack them: ckpt unstack ADAPTER DST --scan-axis N",
        )
    if first is not None:
        return first
    sizes = {**known.sizes, f"rank_{number}": pair.rank}
    wanted = known.of(row, number)
    raise FormatError(
        "these factors are not those of the base's kernel",
        place=f"{place}, {name}",
        got=f"A {list(pair.a.shape)} and B {list(pair.b.shape)}",
        wanted=f"A {list(wanted.a.left.shape(sizes))} and B {list(wanted.b.left.shape(sizes))}",
        hint="check that this is the model that was adapted",
    )


def _fits(row: FactorRow, sizes: Mapping[str, int], pair: KernelFactors) -> bool:
    own = {**sizes, row.rank: pair.rank}
    return pair.rank > 0 and row.a.left.shape(own) == pair.a.shape and row.b.left.shape(own) == pair.b.shape


def _factors(
    row: FactorRow,
    known: ModelFactorRows,
    rank: int,
    pairs: Mapping[str, KernelFactors],
    scale: float,
    base: Base,
) -> Iterator[FactorPair]:
    """The factors of a row's weights; none of layers that have none."""
    sizes = {**known.sizes, row.rank: rank}
    arrays: dict[str, LazyArray] = {}
    for name in row.row.left.keys(known.sizes):
        pair = pairs.get(name)
        a, b = (None, None) if pair is None else (pair.a, pair.b)
        # What is divided on the way back is so before it is rounded to few bits.
        b = cast(b, _FLOAT32) if b is not None and row.row.op is not None and b.dtype.bits < 32 else b
        arrays[name + A] = _nothing(row.a.left.shape(sizes), pairs, "a") if a is None else a
        arrays[name + B] = _nothing(row.b.left.shape(sizes), pairs, "b") if b is None else b
    lengths = {axis: Size(length, "the base") for axis, length in sizes.items()}
    made = Table((row.a, row.b), lengths, place=base.tree.metadata.place).to_right(arrays).arrays
    for weight in row.row.right.keys(known.sizes):
        a, b = (made[weight.removesuffix(WEIGHT) + end] for end in PARTS)
        if not all(isinstance(each, Constant) for each in distinct([b]) if not inner(each)):
            yield FactorPair(weight, a, b, scale, rank)


def _nothing(shape: tuple[int, ...], pairs: Mapping[str, KernelFactors], which: str) -> Constant:
    dtype = getattr(next(iter(pairs.values())), which).dtype
    return Constant(shape, dtype, bytes(dtype.itemsize))


def scale_of(said: Mapping[str, object], rank: int, alpha: float | None, place: str) -> float:
    """Return the scale of the product of both factors; arguments and errors as `adapter_of_maxtext`."""
    noted, ranked = said.get("lora_alpha"), said.get("lora_rank")
    if isinstance(ranked, int | float) and ranked not in (0, rank):
        raise ConfigError(
            "another rank is noted than the factors have",
            place=place,
            got=f"rank {rank}",
            wanted=f"{ranked:g} (lora_rank in the metadata)",
        )
    if alpha is not None and is_number(noted) and noted not in (0, alpha):
        raise UsageError(
            "the adapter was trained with another alpha",
            place=place,
            got=option("alpha", finite("alpha", alpha)),
            wanted=f"{noted:g} (lora_alpha in the metadata)",
            hint=f"leave it out; {option('scale', 'X')} multiplies what the adapter changes",
        )
    if alpha is not None:
        return finite("alpha", alpha) / rank
    if not is_number(noted):
        raise ConfigError(
            "nothing says the alpha of this adapter, by which it is scaled",
            place=place,
            wanted="what it was trained with",
            hint=f"say it: {option('alpha', 'X')}",
        )
    return noted / rank
