"""MaxText's own sharding rules for weights: `logical_axis_rules` and `mesh_axes` of configs/base.yml, 0.2.5.

Rules for activations and caches are left out, because checkpoints do not have such axes.
"""

from __future__ import annotations

MESH_AXES = (
    "diloco",
    "data",
    "stage",
    "fsdp",
    "fsdp_transpose",
    "context",
    "context_usp_ulysses",
    "context_autoregressive",
    "tensor",
    "tensor_sequence",
    "expert",
    "autoregressive",
)

_FSDP = ("fsdp", "fsdp_transpose", "context", "context_usp_ulysses", "expert")
_FSDP_ALONE = ("fsdp", "context", "context_usp_ulysses", "expert")
_TENSOR = ("tensor", "tensor_sequence", "autoregressive")

LOGICAL_AXIS_RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("circular_repeats", ()),
    ("vocab", _TENSOR),
    ("embed_vocab", _FSDP),
    ("heads", _TENSOR),
    ("q_heads", _TENSOR),
    ("kv_heads", _TENSOR),
    ("qkv", ()),
    ("kv", ()),
    ("kv_head_dim", ()),
    ("q_lora", _FSDP),
    ("q_lora", _FSDP_ALONE),
    ("q_lora_up_proj", ()),
    ("kv_lora", _FSDP),
    ("kv_lora", _FSDP_ALONE),
    ("kv_lora_up_proj", ()),
    ("embed_attn", _FSDP),
    ("exp", ("expert",)),
    ("mlp_moe", ("fsdp_transpose", *_TENSOR)),
    ("embed_moe", ("fsdp", "fsdp_transpose", "context", "context_usp_ulysses")),
    ("embed_moe", ("fsdp", "context", "context_usp_ulysses")),
    ("embed_router", ("fsdp", "fsdp_transpose", "context", "context_usp_ulysses")),
    ("embed_router", ("fsdp", "context", "context_usp_ulysses")),
    ("mlp", ("fsdp_transpose", *_TENSOR)),
    ("gdn_head", ("fsdp_transpose", *_TENSOR)),
    ("embed", _FSDP),
    ("embed", _FSDP_ALONE),
    ("norm", ("tensor",)),
    ("layers", ("stage",)),
    ("diloco", ("diloco",)),
    ("engram_dim", ("tensor",)),
    ("dense_layers", ()),
    ("moe_layers", ()),
    ("local_layers", ()),
    ("mhc", ()),
    ("mlp_no_fsdp", _TENSOR),
    ("exp_with_fsdp", ("fsdp",)),
)
