"""Gemma 4 E2B and E4B: per-layer embeddings; the last layers reuse keys and values of earlier layers.

One layer of five (E2B) or six (E4B) is global. The layers that reuse keys and values do not follow this
cycle, so each group of layers describes a part of a layer, and a layer is in several groups.
"""

from ckpttools.mapping.row import rows
from ckpttools.mapping.settings import SettingRules
from ckpttools.model_families.decoder import MLP
from ckpttools.model_families.family import (
    Family,
    FlagRule,
    Spelling,
    UnsupportedPart,
    decoder_layers,
    nested_sizes,
)
from ckpttools.model_families.gemma import HEAD, INTERNAL, TEXT_SIZES, TIED_BY_DEFAULT
from ckpttools.model_families.gemma4 import EMBEDDING, FINAL_NORM, NORMS, SETTINGS_4

PER_LAYER = rows("""
    below decoder.per_layer_embedder <-> model
    embed_tokens_per_layer: layer_vocab layer_embeds
        <-> embed_tokens_per_layer.weight: layer_vocab layer_embeds
    per_layer_model_projection.kernel: embed layer_embeds
        <-> per_layer_model_projection.weight: layer_embeds embed
    per_layer_projection_norm.scale: layer_embed <-> per_layer_projection_norm.weight: layer_embed
""")
LAYER_INPUT = rows("""
    per_layer_input_gate.kernel:     embed layer_embed <-> per_layer_input_gate.weight: layer_embed embed
    per_layer_projection.kernel:     layer_embed embed <-> per_layer_projection.weight: embed layer_embed
    post_per_layer_input_norm.scale: embed             <-> post_per_layer_input_norm.weight: embed
""")
WIDE_MLP = rows("""
    below mlp <-> mlp
    wi_0.kernel: embed wide_mlp <-> gate_proj.weight: wide_mlp embed
    wi_1.kernel: embed wide_mlp <-> up_proj.weight:   wide_mlp embed
    wo.kernel:   wide_mlp embed <-> down_proj.weight: embed wide_mlp
""")
QUERY = rows("""
    below self_attention <-> self_attn
    query.kernel:     embed heads head_dim <-> q_proj.weight: (heads head_dim) embed
    out.kernel:       heads head_dim embed <-> o_proj.weight: embed (heads head_dim)
    query_norm.scale: head_dim             <-> q_norm.weight: head_dim
""")
KEY = rows("""
    below self_attention <-> self_attn
    key.kernel:     embed kv_heads head_dim <-> k_proj.weight: (kv_heads head_dim) embed
    value.kernel:   embed kv_heads head_dim <-> v_proj.weight: (kv_heads head_dim) embed
    key_norm.scale: head_dim                <-> k_norm.weight: head_dim
""")
GLOBAL_QUERY = rows("""
    below self_attention <-> self_attn
    query.kernel:     embed heads global_head_dim <-> q_proj.weight: (heads global_head_dim) embed
    out.kernel:       heads global_head_dim embed <-> o_proj.weight: embed (heads global_head_dim)
    query_norm.scale: global_head_dim             <-> q_norm.weight: global_head_dim
""")
GLOBAL_KEY = rows("""
    below self_attention <-> self_attn
    key.kernel:     embed kv_heads global_head_dim <-> k_proj.weight: (kv_heads global_head_dim) embed
    value.kernel:   embed kv_heads global_head_dim <-> v_proj.weight: (kv_heads global_head_dim) embed
    key_norm.scale: global_head_dim                <-> k_norm.weight: global_head_dim
""")
# Layers that reuse keys and values of earlier layers need none of their own; files may contain some that are
# never used.
UNREAD = (
    "model.language_model.layers.{shared+#own}.self_attn.k_proj.weight",
    "model.language_model.layers.{shared+#own}.self_attn.v_proj.weight",
    "model.language_model.layers.{shared+#own}.self_attn.k_norm.weight",
)
FIVE_LAYER_CYCLE = FlagRule(("text_config.layer_types.4", "layer_types.4"), ("full_attention",))
WIDE = FlagRule(("text_config.use_double_wide_mlp", "use_double_wide_mlp"))

# The head size of the first layer with full attention, as in larger Gemma 4 models.
GLOBAL_HEAD = nested_sizes(
    {
        "global_head_dim": (
            "global_head_dim",
            "per_layer_config.4.head_dim",
            "per_layer_config.04.head_dim",
            "per_layer_config.5.head_dim",
            "per_layer_config.05.head_dim",
        )
    },
    "text_config.",
    "",
)

FAMILY = Family(
    name="gemma4-small",
    model_types=("gemma4", "gemma4_text"),
    models=("Gemma 4 E2B", "Gemma 4 E4B"),
    rows=(EMBEDDING, FINAL_NORM, HEAD, *PER_LAYER),
    layers=(
        decoder_layers("layer", "layers_{layer}", (), (*NORMS, *LAYER_INPUT)),
        decoder_layers("own", "layers_{own}", (), MLP),
        decoder_layers("shared+#own", "layers_{shared+#own}", (), MLP, unless="wide"),
        decoder_layers("shared+#own", "layers_{shared+#own}", (), WIDE_MLP, when="wide"),
        decoder_layers("5*five+in_five", "layers_{5*five+in_five}", (), QUERY, when="fives"),
        decoder_layers("5*five+4", "layers_{5*five+4}", (), GLOBAL_QUERY, when="fives"),
        decoder_layers("5*own_five+in_five", "layers_{5*own_five+in_five}", (), KEY, when="fives"),
        decoder_layers("5*own_five+4", "layers_{5*own_five+4}", (), GLOBAL_KEY, when="fives"),
        decoder_layers("rest_five+#fived", "layers_{rest_five+#fived}", (), KEY, when="fives"),
        decoder_layers("6*six+in_six", "layers_{6*six+in_six}", (), QUERY, unless="fives"),
        decoder_layers("6*six+5", "layers_{6*six+5}", (), GLOBAL_QUERY, unless="fives"),
        decoder_layers("6*own_six+in_six", "layers_{6*own_six+in_six}", (), KEY, unless="fives"),
        decoder_layers("6*own_six+5", "layers_{6*own_six+5}", (), GLOBAL_KEY, unless="fives"),
        decoder_layers("rest_six+#sixed", "layers_{rest_six+#sixed}", (), KEY, unless="fives"),
    ),
    sizes={
        **TEXT_SIZES,
        "layer": TEXT_SIZES["layers"],
        "shared": ("text_config.num_kv_shared_layers", "num_kv_shared_layers", 0),
        "layer_embed": ("text_config.hidden_size_per_layer_input", "hidden_size_per_layer_input"),
        "layer_vocab": ("text_config.vocab_size_per_layer_input", "vocab_size_per_layer_input"),
        **GLOBAL_HEAD,
    },
    constants={"one": 1, "in_five": 4, "in_six": 5},
    derived={
        "own": "layers - shared",
        "wide_mlp": "2 * mlp",
        "layer_embeds": "layers * layer_embed",
        "five": "layers // 5",
        "own_five": "own // 5",
        "rest_five": "own % 5",
        "fived": "5 * own_five",
        "six": "layers // 6",
        "own_six": "own // 6",
        "rest_six": "own % 6",
        "sixed": "6 * own_six",
    },
    flags={"tied": TIED_BY_DEFAULT, "fives": FIVE_LAYER_CYCLE, "wide": WIDE},
    left_out=UNREAD,
    parts={
        "vision": UnsupportedPart(("model.vision_tower.*", "model.embed_vision.*")),
        "audio": UnsupportedPart(("model.audio_tower.*", "model.embed_audio.*")),
    },
    spellings=(Spelling(INTERNAL, name="transformers"), Spelling(model_types=("gemma4_text",), name="text")),
    no_scan_reason="layers share keys and values across the blocks that a scan would merge",
    settings=SettingRules(
        """
    model_name:                  "gemma4-e2b", if flag.fives
    model_name:                  "gemma4-e4b"
    decoder_block:               "gemma4_small"
    global_head_dim:             global_head_dim
    num_kv_shared_layers:        shared
    hidden_size_per_layer_input: layer_embed
    vocab_size_per_layer_input:  layer_vocab
    use_double_wide_mlp:         flag.wide
    must config.enable_moe_block is false -- MaxText's block has no experts
    must config.attention_k_eq_v is false -- MaxText's block has a separate value projection
    idle vision_soft_tokens_per_image -- MaxText does not have the tower of this model
    must layer_types.full_every_5, if flag.fives
        -- only every fifth MaxText layer uses full attention
    must layer_types.full_every_6, if flag.fives is false
        -- only every sixth MaxText layer uses full attention
    """
        + SETTINGS_4
    ),
)
