"""What MaxText's named models have of towers, as `ckpttools.maxtext.config.models` reads it: facts of 0.2.5.

Sizes of the towers that see and hear, and whether they are built where nothing else is said.
"""

# Where a model leaves it as it is.
DEFAULTS = """
    conv_chunksize_for_audio=500 conv_stride_for_vit=14 d_model_for_audio=256
    deepstack_visual_indexes_for_vit=[] downsample_hidden_size_for_audio=256
    encoder_attention_heads_for_audio=4 encoder_ffn_dim_for_audio=512 encoder_layers_for_audio=2
    hidden_size_for_vit=1408 image_size_for_vit=896 intermediate_size_for_vit=5632
    max_source_positions_for_audio=1500 n_window_for_audio=50 n_window_infer_for_audio=800
    num_attention_heads_for_vit=16 num_channels_for_vit=3 num_hidden_layers_for_vit=34
    num_mel_bins_for_audio=128 num_position_embeddings_for_vit=1024 out_hidden_size_for_vit=512
    output_dim_for_audio=512 patch_size_for_vit=14 pixel_shuffle_ratio_for_vit=0.5
    position_id_per_seconds=25 projector_input_dim_for_vit=4096 projector_output_dim_for_vit=4096
    rope_theta_for_vit=10000 spatial_merge_size_for_vit=2 temporal_patch_size_for_vit=2
    tile_size_for_vit=336 vision_output_dim_for_vit=4096 vision_output_length=-1
    use_audio=false use_multimodal=false vision_encoder_block="none"
"""
# Models, then what they have otherwise.
MODELS = """
gemma3-4b gemma3-12b gemma3-27b
    hidden_size_for_vit=1152 intermediate_size_for_vit=4304 num_hidden_layers_for_vit=27
    vision_encoder_block="gemma3"
gemma4-26b gemma4-31b
    conv_stride_for_vit=16 hidden_size_for_vit=1152 image_size_for_vit=[672,960]
    intermediate_size_for_vit=4304 num_hidden_layers_for_vit=27
    num_position_embeddings_for_vit=10240 patch_size_for_vit=16 rope_theta_for_vit=100
    vision_encoder_block="gemma4" vision_output_length=280
llama4-17b-16e llama4-17b-128e
    image_size_for_vit=336 vision_encoder_block="llama4"
qwen3-omni-30b-a3b
    d_model_for_audio=1280 deepstack_visual_indexes_for_vit=[8,16,24]
    downsample_hidden_size_for_audio=480 encoder_attention_heads_for_audio=20
    encoder_ffn_dim_for_audio=5120 encoder_layers_for_audio=32 hidden_size_for_vit=1152
    image_size_for_vit=768 intermediate_size_for_vit=4304 n_window_infer_for_audio=400
    num_hidden_layers_for_vit=27 num_position_embeddings_for_vit=2304 out_hidden_size_for_vit=2048
    output_dim_for_audio=2048 patch_size_for_vit=16 position_id_per_seconds=13
    use_audio=true use_multimodal=true vision_encoder_block="qwen3_omni"
qwen3-vl-2b
    deepstack_visual_indexes_for_vit=[5,11,17] hidden_size_for_vit=1024 image_size_for_vit=768
    intermediate_size_for_vit=4096 num_hidden_layers_for_vit=24 num_position_embeddings_for_vit=2304
    out_hidden_size_for_vit=2048 patch_size_for_vit=16 vision_encoder_block="qwen3_vl"
    use_multimodal=true
qwen3-vl-4b
    deepstack_visual_indexes_for_vit=[5,11,17] hidden_size_for_vit=1024 image_size_for_vit=768
    intermediate_size_for_vit=4096 num_hidden_layers_for_vit=24 num_position_embeddings_for_vit=2304
    out_hidden_size_for_vit=2560 patch_size_for_vit=16 vision_encoder_block="qwen3_vl"
    use_multimodal=true
qwen3-vl-30b-a3b
    deepstack_visual_indexes_for_vit=[8,16,24] hidden_size_for_vit=1152 image_size_for_vit=768
    intermediate_size_for_vit=4304 num_hidden_layers_for_vit=27 num_position_embeddings_for_vit=2304
    out_hidden_size_for_vit=2048 patch_size_for_vit=16 vision_encoder_block="qwen3_vl"
    use_multimodal=true
qwen3.5-35b-a3b
    hidden_size_for_vit=1152 image_size_for_vit=768 intermediate_size_for_vit=4304
    num_hidden_layers_for_vit=27 num_position_embeddings_for_vit=2304 out_hidden_size_for_vit=2048
    patch_size_for_vit=16 vision_encoder_block="qwen3_5"
qwen3.5-397b-a17b
    hidden_size_for_vit=1152 image_size_for_vit=768 intermediate_size_for_vit=4304
    num_hidden_layers_for_vit=27 num_position_embeddings_for_vit=2304 out_hidden_size_for_vit=4096
    patch_size_for_vit=16 vision_encoder_block="qwen3_5"
"""
