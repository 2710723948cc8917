"""Cases where MaxText and transformers compute different results from the same weights.

`known_deviations` returns all cases; `deviations` returns those of one model. Conversions, `doctor`,
`maxtext-config` and docs/deviations.md use this table. The `must` rules of a family state configuration
values that are fixed in MaxText's code. A broken rule is also a deviation, and an entry for its field adds
the measured effect.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator

from ckpttools.core.dataclass import dataclass
from ckpttools.core.message_terms import action, option
from ckpttools.core.text import sample_names
from ckpttools.mapping.settings import Limit
from ckpttools.mapping.sizes import nested_value
from ckpttools.maxtext.config.model_facts import CYCLE, ModelFacts, Reading
from ckpttools.maxtext.config.report import Discrepancy
from ckpttools.maxtext.versions import NEWEST, VERSIONS
from ckpttools.model_families.family import Family

TIED_HEAD, VISION_TOWER = "the output head is the embedding", "the vision tower"
_MULTIMODAL = ("qwen3-vl", "qwen3-vl-moe", "qwen3-omni", "qwen3.5-moe")
_LATENT = ("deepseek", "kimi-k2.5")
_GEMMAS = ("gemma", "gemma2", "gemma4", "gemma4-small")


@dataclass(frozen=True)
class KnownDeviation:
    """A known difference between MaxText's computation and that of the original model.

    Attributes:
        name: The name of the entry.
        families: Names of the families whose models may be affected; empty for all.
        condition: A description of the affected models.
        what: The property of the model that MaxText does not follow.
        reason: What MaxText does instead.
        applies: Returns whether a model is affected; None if configuration and shapes do not show it.
        field: The field of the `must` rule that states the deviation, instead of `applies`.
        effect: The difference between the results, measured with tiny models unless stated otherwise.
        remedy: The action to take; empty if there is none. In both texts, {percent} stands for the excess of
            the rounded square root of hidden_size over the exact one, and {materialize} for the option.
        versions: The affected versions of MaxText.
    """

    name: str
    families: tuple[str, ...]
    condition: str
    what: str
    reason: str
    applies: Callable[[ModelFacts], bool] | None = None
    field: str = ""
    effect: str = ""
    remedy: str = ""
    versions: tuple[str, ...] = tuple(VERSIONS)


def rounded_root(width: int) -> float:
    """Return the square root of a width, rounded to the nearest bfloat16, ties to even."""
    mantissa, exponent = math.frexp(math.sqrt(width))
    return math.ldexp(round(mantissa * 256), exponent - 8)


def _has_rounded_root(facts: ModelFacts) -> bool:
    width = facts.lengths.get("embed")
    return width is not None and rounded_root(width) != math.sqrt(width)


def _is_tied(facts: ModelFacts) -> bool:
    return facts.flags.get("tied", False)


def _has_yarn_in_some_layers(facts: ModelFacts) -> bool:
    # OLMo 2 has one rotary embedding for all layers.
    full, local = (facts.field(name) == "yarn" for name in ("rope.type", "rope.local_type"))
    return bool(facts.field("config.model_type") == "olmo3") and full and not local


def _has_short_yarn(facts: ModelFacts) -> bool:
    length = facts.field("config.max_position_embeddings")
    original = facts.field("rope.original_max_position_embeddings") or length
    return _is_stretched(facts) and _scales_scores(facts) and (length or 0) <= (original or 0)


def _has_yarn_without_mscale(facts: ModelFacts) -> bool:
    is_plain = facts.field("rope.attention_factor") is None
    return _is_stretched(facts) and is_plain and not _scales_scores(facts)


def _is_stretched(facts: ModelFacts) -> bool:
    return facts.field("rope.type") == "yarn" and (facts.field("rope.factor") or 1) > 1


def _scales_scores(facts: ModelFacts) -> bool:
    return bool(facts.field("rope.mscale_all_dim"))


def _has_images_wider_than_windows(facts: ModelFacts) -> bool:
    tokens = facts.field("config.mm_tokens_per_image") or facts.field("config.vision_soft_tokens_per_image")
    window = facts.field("config.sliding_window")
    return facts.flags.get("vision", False) and isinstance(window, int) and window < (tokens or 256)


def _flag(name: str) -> Callable[[ModelFacts], bool]:
    return lambda facts: facts.flags.get(name, False)


def layers_with_other_kinds(family: Family, facts: ModelFacts) -> tuple[frozenset[int], str]:
    """Return the layers whose kind is fixed differently in MaxText's code, and the reason.

    Args:
        family: The model's family.
        facts: The configuration and flags of the model.
    """
    for limit in family.settings.limits:
        name = limit.expected.left.name
        if name.startswith(CYCLE) and not limit.holds(facts):
            layers = facts.layers_off_cycle(int(name.removeprefix(CYCLE)))
            return frozenset(layers), f"{sample_names(layers.values())}: {limit.reason}"
    return frozenset(), ""


def known_deviations() -> tuple[KnownDeviation, ...]:
    """Return all entries of the table."""
    return _KNOWN


_KNOWN = (
    KnownDeviation(
        "tied-head",
        (),
        TIED_HEAD,
        TIED_HEAD,
        "MaxText rounds it to bfloat16 for the logits, whatever its dtype setting",
        _is_tied,
        effect="none for embeddings stored in bfloat16",
        remedy="{materialize} stores a separate head, which is not rounded",
    ),
    KnownDeviation(
        "gemma3-tied-head",
        ("gemma3",),
        "the output head is the embedding, and bfloat16 cannot represent sqrt(hidden_size) (all released "
        "sizes)",
        "the embedding is stored multiplied by sqrt(hidden_size), rounded to bfloat16",
        "MaxText divides the logits of a tied head by the exact square root",
        lambda facts: _is_tied(facts) and _has_rounded_root(facts),
        effect="logits are off by {percent}; transformers rounds the root only in bfloat16, and only for its "
        "inputs",
        remedy="{materialize} stores a separate head: logits are then within 1e-5 of transformers with the "
        "rounded square root; no scale of a shared table is exact for both",
    ),
    KnownDeviation(
        "gemma-embedding-scale",
        _GEMMAS,
        "bfloat16 cannot represent sqrt(hidden_size)",
        "the embedding is stored multiplied by the exact sqrt(hidden_size)",
        "transformers multiplies its inputs by the rounded value in bfloat16, and the exact one in float32",
        _has_rounded_root,
        effect="in bfloat16 the embedded inputs differ by {percent}",
    ),
    KnownDeviation(
        "olmo3-yarn",
        ("olmo3",),
        "layers with full attention use YaRN (OLMo 3 7B and 32B)",
        "only the layers with full attention use YaRN",
        "MaxText uses one rotary embedding for all layers",
        _has_yarn_in_some_layers,
        effect="with rope_type=default, right for three of four layers, logits differ by 0.3 (of 3.6) "
        "after 32 tokens, 0.5 (of 4.5) after 1,024; with rope_type=yarn, as in MaxText's olmo3-7b, 1.8 and "
        "2.6",
        remedy=f"set rope_type=default, which {action('maxtext_config')} prints; no choice of weights helps, "
        "because the frequencies differ",
    ),
    KnownDeviation(
        "llama4-rope-factors",
        ("llama4",),
        "Llama 4 Scout, whose factor is 16 and whose high_freq_factor is 1",
        "the factors of the rotary embedding of type llama3",
        "MaxText hardcodes those of Llama 3.1: factor 8, high_freq_factor 4",
        field="rope.factor",
        effect="logits differ by 0.04 (of 5.2) after 32 tokens, by 2.0 after 512; with rope_use_scale=false, "
        "which does not scale frequencies, by 0.01 and 2.1",
    ),
    KnownDeviation(
        "llama3-rope-factor",
        (),
        "Llama 3.2 (1B, 3B), whose factor is 32",
        "the factor of the rotary embedding of type llama3",
        "MaxText hardcodes 8",
        field="rope.factor",
        effect="for a factor of 32, logits differ by 4e-3 (of 4) after 32 tokens, by 0.13 after 512",
    ),
    KnownDeviation(
        "expert-weights",
        (),
        "norm_topk_prob is false or not set (Qwen3-MoE sets true)",
        "the weights of the chosen experts",
        "MaxText always normalizes them to sum to 1",
        field="config.norm_topk_prob",
        effect="logits differ by 0.85 (of 3.8)",
    ),
    KnownDeviation(
        "sliding-window",
        (),
        "sliding_window is a number (Mistral 7B v0.1)",
        "layers with a sliding window",
        "MaxText's block has no sliding window",
        field="config.sliding_window",
        effect="none for sequences shorter than the window; for sequences of twice its length, "
        "logits differ by 3.7 (of 3.7)",
        remedy="train and decode with sequences shorter than the window",
    ),
    KnownDeviation(
        "deepseek4-yarn",
        ("deepseek4",),
        "compressed layers use YaRN (all released sizes)",
        "the rotary embedding of compressed layers",
        "MaxText does not apply YaRN to them",
        field="rope.type",
        effect="logits differ by 3.3",
    ),
    KnownDeviation(
        "deepseek4-shared-expert",
        ("deepseek4",),
        "swiglu_limit is a number (all released sizes)",
        "the SwiGLU of the shared expert",
        "MaxText clips only the chosen experts",
        field="config.swiglu_limit",
        effect="logits differ by 4.8 with a limit of 1; released models have 10",
    ),
    KnownDeviation(
        "deepseek4-repeated-experts",
        ("deepseek4",),
        "an expert table lists an expert twice for one token",
        "expert tables (tid2eid)",
        "transformers adds the output of an expert as often as it is listed, MaxText only once",
        effect="logits differ by 6 with the tables that transformers initializes",
    ),
    KnownDeviation(
        "deepseek-short-yarn",
        _LATENT,
        "YaRN has mscale_all_dim, and max_position_embeddings does not exceed "
        "original_max_position_embeddings (no released size)",
        "YaRN scales the attention scores (mscale_all_dim)",
        "MaxText scales them only if max_position_embeddings exceeds original_max_position_embeddings",
        _has_short_yarn,
        effect="logits differ by 2.2 (of 3.8)",
        remedy="set max_position_embeddings to a value that exceeds original_max_position_embeddings: logits "
        "are then within 1e-5",
    ),
    KnownDeviation(
        "deepseek-yarn-without-mscale",
        _LATENT,
        "YaRN has no mscale_all_dim (no released size)",
        "YaRN scales the rotary part of queries and keys, because mscale_all_dim is absent or 0",
        "MaxText scales the full attention scores instead",
        _has_yarn_without_mscale,
        effect="logits differ by 2.3 (of 3.9)",
        remedy="set mscale=0 and rope_attention_scaling=true: logits are then within 1e-5",
    ),
    KnownDeviation(
        "indexer-ties",
        ("deepseek",),
        "an indexer chooses tokens (DeepSeek V3.2), and sequences are longer than index_topk",
        "tokens with equal scores",
        "MaxText and torch choose different tokens among those that all index heads reject",
        _flag("indexer"),
        effect="logits differ by 7 with 2 index heads, by 6e-6 with 16; released models have 64",
    ),
    KnownDeviation(
        "patch-merger",
        _MULTIMODAL,
        "the model has its vision tower",
        VISION_TOWER,
        "MaxText rounds patch positions to bfloat16, and merges patches with the tanh approximation of GELU",
        _flag("vision"),
        effect="logits of images differ by 3e-3",
    ),
    KnownDeviation(
        "audio-chunks",
        ("qwen3-omni",),
        "the model has its audio tower",
        "the audio tower",
        "MaxText encodes each audio chunk (2 * n_window frames) by itself; transformers attends across "
        "chunks, over n_window_infer frames",
        _flag("audio"),
    ),
    KnownDeviation(
        "image-windows",
        ("gemma3", "gemma4"),
        "the window is shorter than an image",
        "images in layers with a window",
        "in MaxText all patches of an image attend to each other, in transformers only those in the window",
        _has_images_wider_than_windows,
        effect="logits of images differ by 1.1 with a window of 16",
    ),
)


def deviations(family: Family, facts: ModelFacts, maxtext: str = NEWEST) -> Iterator[Discrepancy]:
    """Yield the deviations of MaxText for one model.

    Args:
        family: The model's family.
        facts: The known facts about the model.
        maxtext: The version of MaxText.
    """
    known = [
        item
        for item in _KNOWN
        if family.name in (item.families or (family.name,)) and maxtext in item.versions
    ]
    reading = Reading(family, facts)
    broken = [limit for limit in family.settings.limits if not limit.holds(facts)]
    yield from dict.fromkeys(_limit_deviation(item, reading, known) for item in broken)
    for item in known:
        if item.applies is not None and item.applies(facts):
            effect, remedy = (_format_text(text, facts) for text in (item.effect, item.remedy))
            yield Discrepancy(item.what, item.reason, effect, remedy)


def _format_text(text: str, facts: ModelFacts) -> str:
    width = facts.lengths.get("embed", 1)
    percent = f"{100 * (rounded_root(width) / math.sqrt(width) - 1):+.2f}%"
    return text.format(percent=percent, materialize=option("tied", "materialize"))


def _limit_deviation(limit: Limit, reading: Reading, known: list[KnownDeviation]) -> Discrepancy:
    left, facts = limit.expected.left, reading.facts
    entry = next((item for item in known if item.field == left.name), None)
    measured = (entry.effect, entry.remedy) if entry else ("", "")
    called = reading.called(left)
    if left.name.startswith(CYCLE):
        names = sample_names(facts.layers_off_cycle(int(left.name.removeprefix(CYCLE))).values())
    elif left.kind == "field" and facts.location_of(left.name) is None:
        names = f"{called} is not set, so transformers uses {json.dumps(left.of(facts))}"
    else:
        stated = nested_value(facts.config, called)
        value = left.of(facts) if stated is None else stated
        is_whole = isinstance(value, float) and value.is_integer()
        names = f"{called} is {json.dumps(int(value) if is_whole else value)}"
    return Discrepancy(names, limit.reason, *measured)
