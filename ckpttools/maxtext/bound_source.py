"""A MaxText tree on the way to Hugging Face: which model it is of, and what of it is converted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Tree, dotted
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DTYPES
from ckpttools.core.wording import option
from ckpttools.mapping.sizes import Size
from ckpttools.maxtext import tying
from ckpttools.maxtext.bound_model import BoundModel, UnboundModel, unwanted_towers
from ckpttools.maxtext.from_native import Native, native_of
from ckpttools.maxtext.layout import EMBEDDING, VOCAB
from ckpttools.maxtext.model_files import ModelFiles
from ckpttools.maxtext.named_parameters import named_parameters
from ckpttools.maxtext.stacked_on import with_scan_axis
from ckpttools.maxtext.stored_head import StoredHead
from ckpttools.maxtext.to_hf_options import ToHuggingFace
from ckpttools.quantized.readable import weights_in
from ckpttools.quantized.refusals import refuse_quantized
from ckpttools.quantized.stored_values import check_values
from ckpttools.transforms.dequantize import refuse_few_bits


@dataclass(frozen=True)
class BoundSource:
    """A MaxText tree on the way to Hugging Face, and the rows of the model that it is of.

    Attributes:
        tree: with its layers on the axis that the user names.
        native: its parameters, with the scales of those that stay quantised.
        unbound: its parameters, with what the user, the model's files and the arrays themselves say of them.
        bound: the rows.
        head, towers: names of parameters that are not wanted: the output head, and towers.
    """

    tree: Tree
    native: Native
    unbound: UnboundModel
    bound: BoundModel
    head: frozenset[str]
    towers: frozenset[str]

    @property
    def place(self) -> str:
        return self.tree.metadata.place

    @property
    def options(self) -> ToHuggingFace:
        return self.unbound.options

    @property
    def files(self) -> ModelFiles:
        return self.unbound.files

    @property
    def lost_head(self) -> StoredHead | None:
        """The output head that the user leaves out, if there is one."""
        arrays, table = self.unbound.arrays, dotted(EMBEDDING)
        for name in self.head:
            if table in arrays:
                return StoredHead(tying.Head(table, name), arrays[name], arrays[table], is_transposed=True)
        return None

    @cached_property
    def wanted(self) -> dict[str, LazyArray]:
        """The parameters that are converted."""
        unwanted = self.head | self.towers
        return {key: array for key, array in self.unbound.arrays.items() if key not in unwanted}


def maxtext_source(tree: Tree, options: ToHuggingFace, files: ModelFiles) -> BoundSource:
    """Finds out which model a tree is of; errors as of `ckpttools.maxtext.to_hf.to_huggingface`."""
    tree = with_scan_axis(tree, options.scan_axis)
    arrays = named_parameters(tree, options.prefix)
    numbers = options.dtype or DTYPES["bfloat16"] if options.dequantizes else None
    native = native_of(arrays, files.config, tree.metadata.place, numbers)
    if native.scales:
        refuse_few_bits(options.dtype, tree.metadata.place)
        said = check_values(tree, weights_in(tree).readable.values())
        native = replace(native, notes=native.notes + said)
    arrays = dict(native.arrays)
    plain = {key: array for key, array in arrays.items() if key not in native.scales}
    refuse_quantized(plain, tree.metadata.config, tree.metadata.place)
    unbound = UnboundModel.of(tree, arrays, options, files)
    bound, options = unbound.bound(), unbound.options
    head = _unwanted_head(bound, arrays, options.model.tied)
    towers = frozenset(unwanted_towers(bound.family, arrays, options))
    source = BoundSource(tree, native, unbound, bound, head, towers)
    if options.padding_rows == "keep":
        return replace(source, bound=_with_all_rows(bound, source.wanted))
    return source


def _with_all_rows(bound: BoundModel, arrays: Mapping[str, LazyArray]) -> BoundModel:
    """A table with a vocabulary of all the rows that are there."""
    there = [length for length, _ in bound.table.to_right(arrays, (VOCAB,)).cut.values()]
    if not there:
        return bound
    sizes = {**bound.table.sizes, VOCAB: Size(max(there), option("padding_rows", "keep"))}
    return replace(bound, table=replace(bound.table, sizes=sizes))


def _unwanted_head(bound: BoundModel, arrays: Mapping[str, LazyArray], way: str | None) -> frozenset[str]:
    """The output head that the user leaves out, where there is one."""
    head = tying.left_head(bound.family)
    return frozenset((head,) if way == "drop" and head is not None and head in arrays else ())
