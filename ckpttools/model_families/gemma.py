"""Shared data of the Gemma families: norms stored as weight + 1, and the names in their files."""

from ckpttools.mapping.row import row
from ckpttools.model_families.decoder import TIED
from ckpttools.model_families.family import FlagRule

# Gemma's norm multiplies by 1 + weight. MaxText stores this sum, always in float32.
FINAL_NORM = row("decoder.decoder_norm.scale: embed <-> model.norm.weight: embed, shift 1")
HEAD = row("decoder.logits_dense.kernel: embed vocab <-> lm_head.weight: vocab embed, unless tied")

# By default, Gemma's classes tie the embeddings.
TIED_BY_DEFAULT = FlagRule(TIED.field, default=True, remedy=TIED.remedy)

# Prefixes in the rows -> prefixes in files: the text model in a multimodal model, and in transformers.
NESTED = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
INTERNAL = {"model.": "model.language_model."}

# Text models state these fields at the top level of their configuration; multimodal models state them in a
# section.
TEXT_SIZES = {
    "layers": ("text_config.num_hidden_layers", "num_hidden_layers"),
    "embed": ("text_config.hidden_size", "hidden_size"),
    "vocab": ("text_config.vocab_size", "vocab_size"),
    "mlp": ("text_config.intermediate_size", "intermediate_size"),
    "heads": ("text_config.num_attention_heads", "num_attention_heads"),
    "kv_heads": ("text_config.num_key_value_heads", "num_key_value_heads"),
    "head_dim": ("text_config.head_dim", "head_dim"),
}

# Gemma multiplies embeddings by the square root of their length, so logits of tied embeddings are divided by
# it.
FIRST_SETTINGS = """
    normalize_embedding_logits: true
    mlp_activations:            config.hidden_activation as {"gelu_pytorch_tanh": ["gelu", "linear"]}
                              | config.hidden_act as {"gelu_pytorch_tanh": ["gelu", "linear"]}
    rope_max_timescale:         rope.theta | 10000
    rope_type:                  "default"
    head_dim:                   head_dim | embed // heads
    must config.attention_bias is false -- MaxText's block has no attention biases
    idle hidden_act -- hidden_activation states it
"""
SETTINGS = (
    """
    use_post_attn_norm:    true
    use_post_ffw_norm:     true
    sliding_window_size:   config.sliding_window
    final_logits_soft_cap: config.final_logit_softcapping | 0
    """
    + FIRST_SETTINGS
)
