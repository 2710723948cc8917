"""Model types that no family can take, and why: MaxText alone has them, or no decoder of its fits.

Compared with the decoders of MaxText 0.2.5 and the models of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping

# MaxText's own models, which have no weights on the hub and no class in transformers.
OF_MAXTEXT: Mapping[str, str] = {
    "envy": "its weights are trained with MaxText, and no names on the hub are known for them",
    "gpt3": "MaxText has it as a benchmark, and no weights are published",
    "weaver": "its weights have names of their own, and none are published",
}
_DENSE_3_5 = "MaxText 0.2.5's qwen3_5 decoder has experts in every layer, and this model has none"
_TEXT_OF_2 = "its text is Qwen 2's, but MaxText 0.2.5 has no tower that sees or hears as this one's"
_FACTORS = (
    "it scales embeddings, residuals and scores by factors of its own, which MaxText 0.2.5 does nowhere"
)
_PIXTRAL = "its text is Mistral's, but MaxText 0.2.5 has no tower as Pixtral's"
# Near a family by name or shape.
UNFIT: Mapping[str, str] = {
    "cohere": "its layers attend and feed forward side by side, which no decoder of MaxText 0.2.5 does",
    "cohere2": "its layers attend and feed forward side by side, which no decoder of MaxText 0.2.5 does",
    "gemma3n": "MaxText 0.2.5 has none of its alternating updates (AltUp) and low-rank branches (LAuReL)",
    "granite": _FACTORS,
    "granitemoe": _FACTORS,
    "kimi_linear": "MaxText 0.2.5 has no linear attention with a gate for each channel (KDA)",
    "mistral3": _PIXTRAL,
    "pixtral": _PIXTRAL,
    "mllama": "MaxText 0.2.5 has no layers that attend to images (Llama 3.2 Vision)",
    "olmo": "its norms have no weights; MaxText 0.2.5 has OLMo 2 and 3 alone",
    "olmoe": "MaxText 0.2.5's OLMo decoder has no experts",
    "qwen2_5_omni": _TEXT_OF_2,
    "qwen2_5_vl": _TEXT_OF_2,
    "qwen2_audio": _TEXT_OF_2,
    "qwen2_vl": _TEXT_OF_2,
    "qwen2_moe": "MaxText 0.2.5 has no decoder with both Qwen 2's attention and experts",
    "qwen3_5": _DENSE_3_5,
    "qwen3_5_text": _DENSE_3_5,
    "smollm3": "some of its layers have no rotary embedding: MaxText 0.2.5 has that in Llama 4 alone",
}
