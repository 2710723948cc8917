"""Adapters and the models that they are of: merge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpttools.adapters.bases import base_of
from ckpttools.adapters.factors import Adapter
from ckpttools.adapters.merge import merged
from ckpttools.adapters.peft import is_peft, open_peft
from ckpttools.api.arguments import text_of
from ckpttools.api.convert import Changing, write_changed
from ckpttools.api.prepared import Prepared, command
from ckpttools.api.sources import Source
from ckpttools.array.tree import Tree
from ckpttools.core.errors import FormatError
from ckpttools.core.wording import option
from ckpttools.formats.registry import writer_options
from ckpttools.maxtext.model import ModelOptions
from ckpttools.run.apart import check_apart
from ckpttools.stores.registry import Where, parse
from ckpttools.transforms.base import Transformed

if TYPE_CHECKING:
    from typing import Unpack


@command(Changing, more=writer_options)
def merge_adapter(
    source: Source,
    destination: Where,
    *,
    adapter: Where,
    scale: float = 1.0,
    like: Where | None = None,
    family: Where | None = None,
    **common: Unpack[Changing],
) -> Prepared:
    """Writes a model with a LoRA adapter merged into its weights: same format, names, shapes and dtypes.

    Products of factors are summed in float64 and rounded to float32, added in float32, and the sum is rounded
    once to the dtype of the base. Arrays that the adapter does not change stay as they are, to the bit.

    Args:
        source: the model that was adapted: a Hugging Face model, or a MaxText checkpoint.
        destination: directory that appears when everything is written.
        adapter: directory that PEFT saved, or its file of weights.
        scale: of the adapter's changes, besides the adapter's own scale; -1 takes them away again.
        like: of a MaxText checkpoint, as of `ckpttools.maxtext_to_hf`.
        family: name of the family whose rows are used for a MaxText checkpoint, or a file that describes one.
        common: `ckpttools.api.convert.Changing`.

    Raises:
        FormatError: the adapter is of another kind, or not of this model; weights of the model are quantised.
        CheckpointError: as `ckpttools.convert`.
    """
    check_apart(adapter, parse(destination, is_written=True), option("adapter"))
    change = _Merge(adapter, scale, ModelOptions(text_of(family)), like)
    return write_changed([change], source, destination, common)


@dataclass(frozen=True)
class _Merge:
    """A transform: a model to the same with an adapter merged; attributes as of `merge_adapter`."""

    adapter: Where
    scale: float
    model: ModelOptions
    like: Where | None

    def __call__(self, tree: Tree) -> Transformed:
        return merged(base_of(tree, self.model, self.like), opened_adapter(self.adapter), self.scale)


def opened_adapter(where: Where) -> Adapter:
    """The adapter at a place.

    Raises:
        FormatError: there is none.
    """
    place = parse(where)
    if is_peft(place):
        return open_peft(place)
    raise FormatError(
        "this is no adapter",
        place=place,
        wanted="a directory with adapter_config.json and adapter_model.safetensors, as PEFT saves it",
        hint="`ckpt inspect tree` says what it is",
    )
