"""Make a smaller model from parts of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from ckpttools.api.convert import ChangedRun, write_changed
from ckpttools.api.options.build import SHRINK
from ckpttools.api.options.convert import CHANGING
from ckpttools.api.prepared import Prepared, command
from ckpttools.api.sources import Source, float_dtype_of, text_of
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import option
from ckpttools.core.options import declare
from ckpttools.formats.registry import writer_options
from ckpttools.maxtext.shrink import Shrink
from ckpttools.maxtext.smaller_config import KeptParts
from ckpttools.stores.registry import LocationLike
from ckpttools.transforms.base import Transform
from ckpttools.transforms.cast import CastMap

# Small models are meant to be copied. Files that mostly contain the rest of the large model are not shared,
# because every copy would include that data.
_MIN_SHARE = 0.5


@command(ChangedRun, more=writer_options)
@declare(*SHRINK, *CHANGING)
def shrink(
    source: Source,
    destination: LocationLike,
    *,
    layers: int | Sequence[int] | None = None,
    experts: int | None = None,
    vocab: int | None = None,
    like: LocationLike | None = None,
    family: LocationLike | None = None,
    dtype: DType | str | None = None,
    **common: Unpack[ChangedRun],
) -> Prepared:
    """Write some layers, experts or tokens of a model, with a matching `config.json`.

    Values do not change. Full chunks are shared with source files if at least half of the file's bytes are
    kept. Optimizer moments and all other arrays with layers are cut like the weights.

    Args:
        source: A Hugging Face model, any MaxText checkpoint, or a tree.
        destination: The directory to create. It appears only when everything is written.

    Raises:
        UsageError: No reduction is requested, or the layers do not exist.
        CheckpointError: See `ckpttools.maxtext.shrink.Shrink` and `ckpttools.convert`.
    """
    if layers is None and experts is None and vocab is None:
        text = " or ".join(map(option, ("layers", "experts", "vocab")))
        raise UsageError("no option selects what to reduce", hint=f"give {text}")
    kept_layers = range(layers) if isinstance(layers, int) else layers
    change = Shrink(KeptParts(kept_layers, experts, vocab), like, text_of(family))
    casts: list[Transform] = [] if dtype is None else [CastMap({}, float_dtype_of(dtype))]
    return write_changed([*casts, change], source, destination, common, least_share=_MIN_SHARE)
