"""What towers share: parts of a model beside the text model, which MaxText never scans."""

from ckpttools.model_families.family import FlagRule

# A field of a configuration that has no tower is not there; some files state less of one than others.
VISION = FlagRule(
    ("vision_config.hidden_size", "vision_config.model_type"), remedy="{text_only} leaves the towers out"
)
AUDIO = FlagRule(
    ("thinker_config.audio_config.d_model", "audio_config.d_model", "thinker_config.audio_config.model_type"),
    remedy=VISION.remedy,
)
HEAD_DIM = {"vision_head_dim": "vision_embed / vision_heads"}
VISION_SIZES = {
    "vision_layer": ("vision_config.num_hidden_layers",),
    "vision_embed": ("vision_config.hidden_size",),
    "vision_heads": ("vision_config.num_attention_heads",),
    "vision_mlp": ("vision_config.intermediate_size",),
}
