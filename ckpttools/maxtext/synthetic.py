"""A model of nothing but its configuration: the arrays that its family's rows ask for, filled with noise."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ckpttools.array.lazy import LazyArray
from ckpttools.array.nodes import Constant, elementwise, seeded
from ckpttools.array.tree import Leaf, Metadata, Path, Tree
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.errors import ShapeError
from ckpttools.core.notes import Notes
from ckpttools.core.region import Shape
from ckpttools.core.text import in_natural_order
from ckpttools.families.family import Family
from ckpttools.families.registry import family_of
from ckpttools.mapping.row import Row
from ckpttools.mapping.shapes import right_shapes
from ckpttools.mapping.sizes import nested
from ckpttools.mapping.table import Table
from ckpttools.mapping.values import Shift
from ckpttools.mapping.whole_numbers import Whole
from ckpttools.maxtext.model import CONFIG
from ckpttools.quantized.config import without_quantization
from ckpttools.transforms.conversion import Convert

# What transformers takes where a configuration does not say it.
_RANGE = 0.02
_FIELD = "initializer_range"


def shapes_of(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Names and shapes of a model's tensors, layer by layer.

    Raises:
        ConfigError, ShapeError: no family is of its type, or the configuration lacks a size.
    """
    return _in_order(right_shapes(_table(config, family_of(config, CONFIG))))


def _in_order(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    return {name: shapes[name] for name in in_natural_order(shapes)}


def synthetic(config: Mapping[str, Any], seed: int = 0, dtype: DType | None = None, place: str = "") -> Tree:
    """A Hugging Face model with weights as before training: noise, norms that do nothing, biases of zero.

    Args:
        config: the model's `config.json`; says all of its sizes.
        seed: the same gives the same model.
        dtype: of the weights; None for bfloat16.
        place: where the configuration lies.

    Towers of which no configuration says all sizes, as of Gemma 3, are left out, and the notes say so.

    Raises:
        ConfigError, ShapeError: as `shapes_of`.
    """
    plain = dict(config)
    without_quantization(plain)
    table, shapes, notes = _known(plain, family_of(plain, CONFIG))
    scale = next(
        (v for v in (nested(plain, name) for name in (_FIELD, f"text_config.{_FIELD}")) if v), _RANGE
    )
    dtype = dtype or DTYPES["bfloat16"]
    leaves: dict[Path, Leaf] = {}
    for name, shape in _in_order(shapes).items():
        leaves[name,] = _array(name, shape, _row(name, table), (seed, float(scale)), dtype)
    metadata = Metadata("safetensors", config=plain, place=place, notes=notes, is_other_model=True)
    return Tree(leaves, metadata)


def _known(config: Mapping[str, Any], family: Family) -> tuple[Table, dict[str, Shape], Notes]:
    """The rows and the shapes that the configuration tells, of the text alone where it tells no more."""
    table = _table(config, family)
    try:
        return table, right_shapes(table), Notes()
    except ShapeError as error:
        text = _table(config, family, without=family.towers)
        if not family.towers or not any(table.flags[each].value for each in family.towers):
            raise
        remark = f"towers are left out: {error.message} from the configuration"
        return text, right_shapes(text), Notes(remarks=(remark,))


def _table(config: Mapping[str, Any], family: Family, without: Collection[str] = ()) -> Table:
    spelling = family.spelling_for(config["model_type"])
    return family.table(config, CONFIG, spelling=spelling, without=without)


def _row(name: str, table: Table) -> Row | None:
    return next((row for row in table.rows if row.right.key.numbers(name) is not None), None)


def _array(name: str, shape: Shape, row: Row | None, noise: tuple[int, float], dtype: DType) -> LazyArray:
    """An array as `transformers` begins it."""
    op = row.op if row else None
    if isinstance(op, Whole):
        return Constant(shape, DTYPES["int64"], bytes(8))
    last = name.rpartition(".")[2]
    if len(shape) == 1 and ("norm" in name or last == "layer_scalar") and last != "bias":
        # A norm that MaxText has one more of is one of 1 + weight.
        return _full(shape, 0.0 if isinstance(op, Shift) else 1.0, dtype)
    if last == "bias" or last.endswith("_bias"):
        return _full(shape, 0.0, dtype)
    array = seeded(shape, noise[0], name, noise[1])
    return array if dtype == array.dtype else elementwise(array, Convert(dtype))


def _full(shape: Shape, number: float, dtype: DType) -> LazyArray:
    import numpy as np

    return Constant(shape, dtype, np.array(number, np.float32).astype(dtype.numpy).tobytes())
