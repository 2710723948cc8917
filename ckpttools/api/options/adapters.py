"""Options of functions that merge, extract and convert LoRA adapters."""

from __future__ import annotations

from ckpttools.adapters.to_maxtext import LORA_LAYOUTS
from ckpttools.api.options import (
    DTYPE,
    FAMILY,
    LIKE,
    MAX_INDEX_BYTES,
    MAXTEXT,
    ROPE_LAYOUT,
    STEP,
    count,
    with_help,
)
from ckpttools.api.options.convert import SCAN
from ckpttools.api.options.edit import SCAN_AXIS
from ckpttools.core.message_terms import action
from ckpttools.core.options import Option, any_text, variant
from ckpttools.stores.web.hub_name import model_at

SCALE = Option(
    "scale", float, 1.0, "Extra scale of the adapter's changes; -1 subtracts them.", "X", least=None
)
ALPHA = Option(
    "alpha",
    float,
    None,
    "Alpha of a MaxText adapter whose files do not state it, such as Tunix's.",
    "X",
    least=None,
)
BASE_NAME = Option(
    "base_name",
    any_text,
    None,
    "Name of the base model in adapter_config.json. Default: its Hub name if known, else its path.",
    "NAME",
)
_LIKE_OPTION = with_help(LIKE, "The original model of a MaxText {base}. Default: the one stored in it.")
BASE = (
    Option("base", model_at, None, "The model that the adapter belongs to.", "BASE", is_required=True),
    _LIKE_OPTION,
    FAMILY,
    ROPE_LAYOUT,
)
MERGE_ADAPTER = (
    SCALE,
    ALPHA,
    with_help(
        DTYPE, f"Cast {{base}} before the merge, like {action('cast')}. Dequantizes quantized weights."
    ),
    _LIKE_OPTION,
    FAMILY,
)
EXTRACT_ADAPTER = (
    count("rank", "Rank of the factors; with {error}, the maximum rank."),
    Option(
        "error",
        float,
        None,
        "Largest remaining error of each matrix, relative to the Frobenius norm of its difference: 0.1 is "
        "a tenth.",
        "X",
        below=1,
    ),
    variant(DTYPE, default="float32", help="Dtype of the factors."),
    BASE_NAME,
    _LIKE_OPTION,
    FAMILY,
)
ADAPTER_TO_MAXTEXT = (
    *BASE,
    variant(
        SCAN,
        default=None,
        help="Stack the layers, as in the model that will use the adapter. Default: as in a MaxText {base}.",
    ),
    variant(
        SCAN_AXIS, help="Axis on which layers are stacked. Default: as in a MaxText {base}, else 1.", most=1
    ),
    with_help(MAXTEXT, "MaxText version that will load it."),
    Option(
        "layout",
        LORA_LAYOUTS,
        "restore",
        "Write what MaxText's lora.lora_restore_path reads, the layout of its fine-tuning checkpoints, or "
        "that of its converter.",
    ),
    SCALE,
)
ADAPTER_TO_PEFT = (*BASE, ALPHA, SCALE, BASE_NAME, STEP, MAX_INDEX_BYTES)
