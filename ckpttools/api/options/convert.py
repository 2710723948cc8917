"""Options of conversions, of storing a converted checkpoint, and of its MaxText configuration."""

from __future__ import annotations

from shlex import split

from ckpttools.api.options import (
    DEQUANTIZE_LIKE,
    DTYPE,
    FAMILY,
    LIKE,
    MAX_HEADER_BYTES,
    MAX_INDEX_BYTES,
    MAXTEXT,
    MODEL,
    OPENING,
    PREFER_RANK,
    REQUESTS,
    STEP,
    WRITING_OPTIONS,
    patterns,
    with_help,
)
from ckpttools.api.options.edit import DTYPE_MAP, FORCE, MAP, RENAME, SCAN_AXIS, SELECT, STRICT
from ckpttools.core.errors import UsageError
from ckpttools.core.memory_limit import parse_size
from ckpttools.core.message_terms import action
from ckpttools.core.options import Option, any_text, shared, switch, variant
from ckpttools.formats.orbax.options import OPTIONS, STORAGE
from ckpttools.formats.safetensors.format import MAX_SHARD


def parse_format(name: str) -> str:
    """Return the name of a writable format.

    Raises:
        UsageError: No writable format has this name.
    """
    names = format_names()
    if name not in names:
        other = _FRAMEWORKS.get(name.lower())
        instead = f" To convert to {other[0]}, use {action(other[1])}." if other else ""
        raise UsageError(f"{name!r} is not one of {', '.join(names)}.{instead}")
    return name


# Frameworks, which are not formats: their usual names, and the functions that convert to them.
_FRAMEWORKS = {
    "maxtext": ("MaxText", "hf_to_maxtext"),
    **dict.fromkeys(("hf", "huggingface", "hugging-face", "transformers"), ("Hugging Face", "maxtext_to_hf")),
}


def format_names() -> list[str]:
    """Return the names of the writable formats. Plug-ins are loaded only now."""
    from ckpttools.formats.known_formats import writable

    return list(writable())


def split_words(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Split texts with several settings into single settings."""
    return tuple(word for text in texts for word in split(text))


(FORMAT,) = shared(
    "Destination",
    Option(
        "format",
        parse_format,
        None,
        "Format of {destination}. Default: that of {source}. Orbax gets <step>/<item>, both named as in "
        "{source}.",
        complete=format_names,
    ),
)
TARGET = (FORMAT, *STORAGE)
"""Options of the output format, and of storing Orbax output."""
NEW_TARGET = (
    with_help(FORMAT, "Format of {destination}. Default: that of the framework whose names it has."),
    *(item for item in STORAGE if item.name != "reference"),
)
"""The same options, for functions that do not read a checkpoint."""
CHANGING = (*TARGET, *OPENING, *WRITING_OPTIONS)
"""Options of all functions that change and write a tree."""

CONVERT = (
    switch("strip_optimizer", "Drop the optimizer state, before anything else."),
    *SELECT[:2],
    Option(
        "names",
        ("hub",),
        None,
        "Name a model's arrays as the Hub does: without the prefixes of PyTorch trainers, and for Llama "
        "also from the names of torchtitan and Meta's code.",
        flag="--names",
    ),
    RENAME,
    MAP,
    STRICT,
    DTYPE,
    DTYPE_MAP,
    FORCE,
)

SCAN = Option("scan", bool, True, "Stack layers for MaxText's scan_layers=true, or keep one array per layer.")
CARRY = switch("carry", "Take missing arrays (towers, MTP layers) from {like}.")
HF_TO_MAXTEXT = (
    SCAN,
    variant(
        SCAN_AXIS, default=1, help="Axis on which layers are stacked, 0 or 1 (MaxText's param_scan_axis)."
    ),
    MAXTEXT,
    DTYPE,
    DEQUANTIZE_LIKE,
    switch("exact", "Store arrays in float32 if their values would otherwise not round-trip bit for bit."),
    Option(
        "pad_vocab",
        int,
        None,
        "Pad the vocabulary to N rows with zeros; the reverse conversion drops them.",
        "N",
        least=1,
    ),
    switch(
        "text_only",
        "Leave out the vision and audio towers of a multimodal model, which are converted by default.",
    ),
    with_help(
        CARRY,
        "Store unconverted arrays (MTP layers, omitted towers) alongside, for the reverse conversion. By "
        "default they are left out and listed.",
    ),
    *MODEL,
    Option(
        "quantized",
        ("dequantize", "keep"),
        "dequantize",
        "Dequantize weights to {dtype} (default: bfloat16), or keep FP8 with its scales; "
        f"{action('maxtext_config', 'DST')} reports how MaxText uses them.",
    ),
    patterns(
        "drop",
        "Leave out source arrays whose names match, such as '*.rotary_emb.*', or a key and all below it.",
    ),
    MAX_HEADER_BYTES,
    PREFER_RANK,
)
MAXTEXT_TO_HF = (
    Option(
        "maxtext_config",
        any_text,
        (),
        "Without a stored config.json, create one from the run's settings: CONFIG.yml first, then "
        "NAME=VALUE, also several in one text. Sizes are checked against the arrays.",
        "WORDS",
        many=split_words,
    ),
    LIKE,
    DTYPE,
    Option(
        "prefix",
        any_text,
        None,
        "Write only the model below this path of a composite one, and strip the path from its names.",
        "NAME",
    ),
    Option(
        "names",
        ("hub", "transformers", "text"),
        None,
        "Tensor names where the Hub and transformers differ. Default: as in the original model. 'text' "
        "writes the text model of a multimodal one, with its own config.json.",
        flag="--names",
    ),
    variant(
        SCAN_AXIS, help="Axis on which layers are stacked, 0 or 1, if the arrays do not show it.", most=1
    ),
    CARRY,
    Option(
        "padding_rows",
        ("keep", "drop"),
        None,
        "Rows beyond the vocabulary: keep them, with a matching vocab_size, or drop them. Default: drop "
        "zero rows, refuse others.",
    ),
    Option(
        "quantized",
        ("dequantize", "keep"),
        None,
        "Dequantize FP8 weights, or write them with their scales. Default: keep them, unless {dtype} is "
        "given.",
    ),
    *MODEL,
    STEP,
    MAX_INDEX_BYTES,
)
SHARDS = (MAX_SHARD,)

QUANTIZE = (
    Option(
        "scheme",
        ("fp8-block128", "mxfp4"),
        "fp8-block128",
        "FP8 in blocks of 128 x 128 with float32 scales, as in DeepSeek V3 and Qwen; or MXFP4 for experts "
        "in gpt-oss's layout.",
    ),
    patterns(
        "exclude", "Don't quantize matching arrays (embeddings, norms, heads, routers and towers never are)."
    ),
    with_help(DTYPE, "Cast floating-point arrays that are not quantized. Default: keep their dtypes."),
    with_help(LIKE, "The original model of a MaxText checkpoint, as for maxtext-to-hf."),
    with_help(CARRY, "For a MaxText checkpoint: take missing arrays (towers, MTP layers) from {like}."),
)
QUANTIZE_READING = (STEP, MAX_HEADER_BYTES, MAX_INDEX_BYTES, PREFER_RANK)

RULES = Option(
    "rules",
    str,
    "maxtext",
    "Sharding rules: maxtext (its logical_axis_rules), or a TOML or JSON file.",
    "maxtext|FILE",
    complete=lambda: ("maxtext",),
)
RESHARD = (
    Option(
        "mesh", str, None, "Axes of the devices and their sizes: fsdp=16,tensor=2.", "MESH", is_required=True
    ),
    RULES,
    Option(
        "subchunks",
        parse_size,
        None,
        "Largest chunk, such as 8MiB; smaller chunks also suit larger meshes. Default: 64 MiB.",
        "SIZE",
    ),
)
RESHARD_STORAGE = tuple(item for item in OPTIONS if item.name not in ("chunks", "reference"))
MAXTEXT_CONFIG = (
    Option(
        "scan",
        bool,
        None,
        "Settings for this layout of a Hugging Face model; a MaxText checkpoint has its own.",
    ),
    with_help(LIKE, "The original model. Default: the one stored in the checkpoint."),
    FAMILY,
    with_help(MAXTEXT, "MaxText version: a release, or a commit of its main branch."),
    STEP,
    REQUESTS,
)
