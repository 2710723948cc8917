"""Configurations of the models that the oracle compares: all golden models, and more."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.locations import FIXTURES

from oracle.images import prompt

LIMIT = 1e-4
SCANNED, UNSCANNED = LAYERS = ("scanned", "unscanned")


@dataclass(frozen=True)
class Deviation:
    """A model for which MaxText and transformers compute different logits with the same weights.

    Attributes:
        reason: The note in the table.
        config: Changes of config.json, by dotted path.
        steep: Whether rounding may move logits by more than `LIMIT`.
        tokens: The number of tokens to compare.
        mends: Changes of MaxText's code, by name, with their arguments (`mended`).
    """

    reason: str
    config: Mapping[str, Any] = field(default_factory=dict)
    steep: bool = False
    tokens: int = 32
    mends: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


TIES = (
    "16 index heads score tokens here, instead of 2. A score is 0 if all heads reject a token, and torch "
    "and MaxText choose different tokens among equal scores. If transformers chooses the first one, as "
    "MaxText does, logits are 1e-5 apart with 2 heads, too"
)
STEEP = (
    "the gated norms of linear attention divide by values near 0 if a head returns hardly anything, which"
    " magnifies rounding. The limit is 4 times the difference of transformers' own logits when weights "
    "move by half a unit in the last place"
)
DEEP = (
    "ten layers accumulate rounding: transformers' own logits move by 7e-5 when weights move by half a "
    "unit in the last place. The limit is 4 times as much"
)
# Windows of all sorts, and more compressed entries than are chosen.
COMPRESSED = {"index_n_heads": 16}
FLASH = (
    "like released models, this one stretches the positions of compressed layers (rope_scaling) and clips"
    " the SwiGLU of the shared expert. MaxText does neither, and its code is changed here to do both. "
    "Without the changes, logits are 5.1 apart; with stretched positions alone 4.8, with clipping alone "
    "3.3. Its limits are smaller than released ones, so that 288 tokens exceed them"
)
ONE_WINDOW = (
    "the hidden size is 64, whose square root bfloat16 represents exactly, and the window is larger than "
    "an image. In layers with a window, MaxText's parts of an image attend to all others, and "
    "transformers' only to those within the window (with a window of 16, logits of images of Gemma 3 are "
    "1.1 apart)"
)
PATCHES = (
    "MaxText rounds the positions of patches to bfloat16, and merges patches with the tanh approximation "
    "of GELU, where transformers uses exact GELU. MaxText's code is changed here to follow transformers: "
    "otherwise, logits of images of Qwen3-VL are 3e-3 apart"
)
CHUNK_BY_CHUNK = (
    f"{PATCHES}; a chunk of sound has 100 frames here (n_window_infer): MaxText's audio tower processes no"
    " more at once, whatever the model's configuration, and uses the tanh approximation as well"
)
YARN_WHERE_FULL = (
    "like released models, this one has YaRN only in layers with full attention. MaxText has one rotary "
    "embedding for all layers, and its code is changed here to have both. Otherwise, logits are 0.3 apart"
    " with rope_type=default, which ckpt prints, and 1.8 apart with rope_type=yarn"
)
LLAMA3_FACTORS = (
    "MaxText has the factors of Llama 3.1 in its code (factor 8, low_freq_factor 1, high_freq_factor 4). "
    "The code is changed here to use those of the released model: 32, 1 and 4 for Llama 3.2; 16, 1 and 1 "
    "for Llama 4 Scout"
)
BY_PATCH: Mapping[str, Mapping[str, float]] = {"unrounded": {}, "smooth": {}}
DEVIATIONS = {
    "deepseek4": Deviation(TIES, COMPRESSED, tokens=288),
    "deepseek4-flash": Deviation(
        FLASH,
        tokens=288,
        mends={"stretched": {"theta": 160000, "factor": 16, "original": 64}, "clipped": {"limit": 1}},
    ),
    "gemma3-vision": Deviation(
        ONE_WINDOW, {"text_config.hidden_size": 64, "text_config.sliding_window": 288}
    ),
    "llama3.2-tied": Deviation(
        LLAMA3_FACTORS, mends={"llama3_scaled": {"factor": 32.0, "low": 1.0, "high": 4.0}}
    ),
    "llama4-scout": Deviation(
        LLAMA3_FACTORS, mends={"llama3_scaled": {"factor": 16.0, "low": 1.0, "high": 1.0}}
    ),
    "deepseek3.2": Deviation(TIES, {"index_n_heads": 16}),
    "gemma4-e2b": Deviation(DEEP, steep=True),
    "gemma4-vision": Deviation(
        ONE_WINDOW,
        {
            "text_config.hidden_size": 64,
            "text_config.sliding_window": 512,
            "text_config.use_bidirectional_attention": "vision",
        },
    ),
    "qwen3-omni": Deviation(
        CHUNK_BY_CHUNK,
        {"thinker_config.audio_config.n_window": 50, "thinker_config.audio_config.n_window_infer": 100},
        mends=BY_PATCH,
    ),
    "olmo3-yarn": Deviation(YARN_WHERE_FULL, mends={"yarn_where_full": {}}),
    "qwen3-vl": Deviation(PATCHES, mends=BY_PATCH),
    "qwen3-vl-moe": Deviation(PATCHES, mends=BY_PATCH),
    "qwen3-next": Deviation(STEEP, steep=True),
    **dict.fromkeys(("qwen3.5", "qwen3.5-fp8"), Deviation(f"{STEEP}; {PATCHES}", steep=True, mends=BY_PATCH)),
}
NONE = Deviation("")
# Cases of models that MaxText knows by name.
NAMED = {
    "deepseek2": "deepseek2-16b",
    "deepseek3": "deepseek3-671b",
    "deepseek3.2": "deepseek3.2-671b",
    "deepseek4-flash": "deepseek4-284b",
    "gemma1": "gemma-7b",
    "gemma2": "gemma2-9b",
    "gemma3": "gemma3-4b",
    "gemma3-untied": "gemma3-4b",
    "gemma3-vision": "gemma3-4b",
    "gemma4-e2b": "gemma4-e2b",
    "gemma4-moe": "gemma4-26b",
    "gemma4-vision": "gemma4-31b",
    "gpt-oss": "gpt-oss-20b",
    "kimi-k2": "kimi-k2-1t",
    "llama3.1": "llama3.1-8b",
    "llama3.2-tied": "llama3.1-8b",
    "llama4-scout": "llama4-17b-16e",
    "mistral-7b": "mistral-7b",
    "mixtral-8x7b": "mixtral-8x7b",
    "olmo3": "olmo3-7b",
    "olmo3-yarn": "olmo3-7b",
    "qwen2.5": "qwen2.5-7b",
    "qwen2.5-tied": "qwen2.5-1.5b",
    "qwen3": "qwen3-8b",
    "qwen3-moe": "qwen3-30b-a3b",
    "qwen3-next": "qwen3-next-80b-a3b",
    "qwen3-omni": "qwen3-omni-30b-a3b",
    "qwen3-tied": "qwen3-0.6b",
    "qwen3-vl": "qwen3-vl-4b",
    "qwen3-vl-moe": "qwen3-vl-30b-a3b",
    "qwen3.5": "qwen3.5-35b-a3b",
    "qwen3.5-fp8": "qwen3.5-35b-a3b",
}
# Settings of released models that the golden configurations lack: values of config.json, by dotted path.
_MILLION = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}
_TEN_MILLION = {"text_config.rope_parameters.rope_theta": 10000000.0}
# Four experts in a group, of which there are 32 in DeepSeek V3.
_GROUPS = {"n_routed_experts": 32, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4}
# 4B, 12B and 27B stretch the positions of layers with full attention.
_STRETCHED = {
    "text_config.rope_parameters.full_attention": {
        "rope_type": "linear",
        "factor": 8.0,
        "rope_theta": 1000000.0,
    }
}
RELEASED: Mapping[str, Mapping[str, Any]] = {
    # V2-Lite.
    "deepseek2": {
        "max_position_embeddings": 163840,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        },
    },
    **dict.fromkeys(("deepseek3", "deepseek3.2"), _GROUPS),
    **dict.fromkeys(("gemma3", "gemma3-vision"), _STRETCHED),
    "llama4-scout": {
        "text_config.max_position_embeddings": 10485760,
        "text_config.rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "olmo3": {"rms_norm_eps": 1e-6},
    "qwen3-omni": {
        "thinker_config.position_id_per_seconds": 13,
        "thinker_config.text_config.rope_parameters.rope_theta": 1000000.0,
    },
    **dict.fromkeys(("qwen3.5", "qwen3.5-fp8"), _TEN_MILLION),
    "mistral-7b": {**_MILLION, "rms_norm_eps": 1e-5},
    **dict.fromkeys(("qwen2.5", "qwen2.5-tied", "qwen3", "qwen3-tied"), _MILLION),
    "qwen3-moe": {**_MILLION, "norm_topk_prob": True},
}
# MaxText scans no layers that take what a tower's inner blocks see: scanned, these are their text alone.
TEXT_WHERE_SCANNED = frozenset({"qwen3-omni", "qwen3-vl", "qwen3-vl-moe"})
# Models that see, and why MaxText is shown nothing.
BLIND = {
    "gemma3": "MaxText's tower returns 256 tokens for an image, and this model's 4; gemma3-vision has 256",
    "gemma4-e2b": "MaxText refuses use_multimodal for E2B and E4B: its tower lacks their clipped layers",
    "gemma4-moe": (
        "MaxText cuts every image into 42 by 60 patches, but this tower has 16 positions per side; "
        "gemma4-vision has 64"
    ),
    "kimi-k2.5": "MaxText and ckpt do not have Kimi's tower; ckpt carries its tensors",
}
# Layers share keys and values.
NEVER_SCANNED = frozenset({"gemma4-e2b"})


# Models of which single layers do not show how they are stacked: `ckpt stack` is told the family.
STACKED_AS = {"qwen3-next": "qwen3-next", **dict.fromkeys(("qwen3.5", "qwen3.5-fp8"), "qwen3.5-moe")}
# Families that are published in few bits -> how `ckpt quantize` calls that.
QUANTIZED = {
    **dict.fromkeys(("deepseek3", "deepseek3.2", "kimi-k2", "llama3.1"), "fp8-block128"),
    **dict.fromkeys(("qwen3", "qwen3-moe", "qwen3-next", "qwen3.5-fp8"), "fp8-block128"),
    "gpt-oss": "mxfp4",
}


def configurations() -> dict[str, Path]:
    """Case -> its config.json; of two of one name, that of the newer MaxText."""
    golden = {each.parents[1].name: each for each in sorted(FIXTURES.glob("golden*/*/hf/config.json"))}
    others = {each.parent.name: each for each in FIXTURES.glob("oracle/*/config.json")}
    return dict(sorted({**golden, **others}.items()))


def forms(case: str) -> tuple[str, ...]:
    """Those of its layers that MaxText has."""
    return (UNSCANNED,) if case in NEVER_SCANNED else LAYERS


def steps_of(case: str, layers: str) -> tuple[str, ...]:
    """Those that one form of a model has."""
    blind = case in BLIND or (layers == SCANNED and case in TEXT_WHERE_SCANNED)
    seen = not blind and prompt(configuration(case)) is not None
    some = (("images",) if seen else ()) + (("quantized",) if case in QUANTIZED else ())
    return ("convert", "load", "logits", *some, "train", "export", "resume")


def named(words: Sequence[str]) -> list[str]:
    """The cases that have these names or begin with them; all where nothing is asked for.

    Raises:
        KeyError: there is none of one of them.
    """
    cases = list(configurations())
    chosen = []
    for word in words:
        like = [word] if word in cases else [case for case in cases if case.startswith(word)]
        if not like:
            raise KeyError(word)
        chosen += like
    return list(dict.fromkeys(chosen)) or cases


def configuration(case: str) -> dict[str, Any]:
    """What its config.json says here: weights are made in full, and of few bits in a step of their own."""
    config = json.loads(configurations()[case].read_bytes())
    config.pop("quantization_config", None)
    changes = {**RELEASED.get(case, {}), **DEVIATIONS.get(case, NONE).config}
    for path, value in changes.items():
        *parents, last = path.split(".")
        inner = config
        for parent in parents:
            inner = inner[parent]
        inner[last] = value
    return config
