"""The parameters of a MaxText tree, and the rows of the model that they are of."""

from __future__ import annotations

from collections.abc import Mapping

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Tree
from ckpttools.core.dataclass import dataclass
from ckpttools.mapping.mapped import Mapped
from ckpttools.mapping.table import Table
from ckpttools.maxtext.bound_model import UnboundModel
from ckpttools.maxtext.layout import VOCAB
from ckpttools.maxtext.model_files import ModelFiles
from ckpttools.maxtext.named_parameters import named_parameters
from ckpttools.maxtext.stacked_on import stored_scan_axis, with_scan_axis
from ckpttools.maxtext.to_hf_options import ToHuggingFace
from ckpttools.model_families.family import Family, Spelling
from ckpttools.quantized.unsupported_errors import refuse_quantized


@dataclass(frozen=True)
class ModelRows:
    """The parameters of a MaxText tree, and the rows of the model that they are of.

    Attributes:
        arrays: by dotted names.
        family, table, spelling: of the model; the rows are those of the layout that the tree has.
        scan_axis: the axis on which layers are stacked; None where none are.
        config: what the model's `config.json` says, None where none is known.
    """

    arrays: Mapping[str, LazyArray]
    family: Family
    table: Table
    spelling: Spelling
    scan_axis: int | None
    config: Mapping[str, object] | None

    def as_huggingface(self) -> Mapped:
        """The arrays under their Hugging Face names; raises CoverageError where they are not the model's."""
        return self.table.to_right(self.arrays, (VOCAB,))


def rows_of(tree: Tree, options: ToHuggingFace, files: ModelFiles) -> ModelRows:
    """The rows of the model that a MaxText tree is of; errors as of `to_huggingface`."""
    tree = with_scan_axis(tree, options.scan_axis)
    arrays = named_parameters(tree, options.prefix)
    refuse_quantized(arrays, tree.metadata.config, tree.metadata.location)
    unbound = UnboundModel.of(tree, arrays, options, files)
    bound, options = unbound.bound(), unbound.options
    unbound.require_agreement(bound, arrays)
    axis = stored_scan_axis(bound.family, arrays, options.scan_axis)
    return ModelRows(arrays, bound.family, bound.table, bound.spelling, axis, unbound.files.config)
