"""Names in Meta's own Llama code and torchtitan, and the corresponding Hub names.

In Meta's files, the elements of a rotary pair are adjacent; Hub files have them in two halves (torchtitan,
`models/llama3/state_dict_adapter.py`, `_permute`).
"""

LAYER, HUB = "layers.{layer}", "model.layers.{layer}"

# Name template, name template on the Hub, axes, and axes on the Hub.
REARRANGED = (
    (
        f"{LAYER}.attention.wq.weight",
        f"{HUB}.self_attn.q_proj.weight",
        "(heads pair half) embed",
        "(heads half pair) embed",
    ),
    (
        f"{LAYER}.attention.wk.weight",
        f"{HUB}.self_attn.k_proj.weight",
        "(groups pair half) embed",
        "(groups half pair) embed",
    ),
)
RENAMED = (
    (f"{LAYER}.attention.{{part:wv,wo}}.weight", f"{HUB}.self_attn.{{part:v_proj,o_proj}}.weight"),
    (
        f"{LAYER}.feed_forward.{{part:w1,w2,w3}}.weight",
        f"{HUB}.mlp.{{part:gate_proj,down_proj,up_proj}}.weight",
    ),
    (
        f"{LAYER}.{{part:attention_norm,ffn_norm}}.weight",
        f"{HUB}.{{part:input_layernorm,post_attention_layernorm}}.weight",
    ),
    ("tok_embeddings.weight", "model.embed_tokens.weight"),
    ("norm.weight", "model.norm.weight"),
)
# A tied model lacks the first array; the second is computed from the configuration.
OPTIONAL = (("output.weight", "lm_head.weight"), ("rope.freqs", None))
# Names that identify such files, and the model types with adjacent pairs.
IDENTIFYING_NAMES = ("tok_embeddings.weight", "layers.0.attention.wq.weight")
MODEL_TYPES = ("llama",)
