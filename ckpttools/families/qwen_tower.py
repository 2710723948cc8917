"""The vision tower of Qwen3-VL, Qwen3-Omni and Qwen3.5: one tower, under three names in MaxText."""

from __future__ import annotations

from dataclasses import dataclass

from ckpttools.families.family import within
from ckpttools.families.tower import HEAD_DIM, tower_blocks
from ckpttools.mapping.layers import Layers
from ckpttools.mapping.row import Row, rows

_BLOCK = rows("""
    ln{norm+1}.scale: vision_embed <-> norm{norm+1}.weight: vision_embed
    ln{norm+1}.bias:  vision_embed <-> norm{norm+1}.bias:   vision_embed

    below attn.attn <-> attn
    {qkv:query,key,value}.kernel: vision_embed vision_heads vision_head_dim
        <-> qkv.weight: (qkv vision_heads vision_head_dim) vision_embed
    {qkv:query,key,value}.bias: vision_heads vision_head_dim <-> qkv.bias: (qkv vision_heads vision_head_dim)
    out.kernel: vision_heads vision_head_dim vision_embed
        <-> proj.weight: vision_embed (vision_heads vision_head_dim)
    out.bias: vision_embed <-> proj.bias: vision_embed

    below <-> mlp
    mlp.kernel:     vision_embed vision_mlp <-> linear_fc1.weight: vision_mlp vision_embed
    mlp.bias:       vision_mlp              <-> linear_fc1.bias:   vision_mlp
    mlp_out.kernel: vision_mlp vision_embed <-> linear_fc2.weight: vision_embed vision_mlp
    mlp_out.bias:   vision_embed            <-> linear_fc2.bias:   vision_embed
""")


def _merger(norm: str, fc1: str, fc2: str, normed: str) -> tuple[Row, ...]:
    """What makes one token of several patches; `normed` is the axis of its norm."""
    return rows(f"""
        ln_q.scale:   {normed}            <-> {norm}.weight: {normed}
        ln_q.bias:    {normed}            <-> {norm}.bias:   {normed}
        mlp_0.kernel: patches merged      <-> {fc1}.weight:  merged patches
        mlp_0.bias:   merged              <-> {fc1}.bias:    merged
        mlp_2.kernel: merged embed        <-> {fc2}.weight:  embed merged
        mlp_2.bias:   embed               <-> {fc2}.bias:    embed
    """)


@dataclass(frozen=True, slots=True)
class QwenTower:
    """The names that one of these models has.

    Attributes:
        left: what MaxText's modules begin with, such as "Qwen3VL".
        deep: Hugging Face's name for the mergers within the tower; "" for a tower without.
        merger: Hugging Face's names for what a merger consists of.
    """

    left: str
    deep: str = ""
    merger: tuple[str, str, str] = ("norm", "linear_fc1", "linear_fc2")

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows outside of blocks."""
        return rows(f"""
            below vision_encoder.{self.left}VisionEncoder_0 <-> visual, when vision
            patch_embed.proj.kernel: frame patch_height patch_width channel vision_embed
                <-> patch_embed.proj.weight: vision_embed channel frame patch_height patch_width
            patch_embed.proj.bias: vision_embed <-> patch_embed.proj.bias: vision_embed
            pos_embed_interpolate.pos_embed: vision_position vision_embed
                <-> pos_embed.weight: vision_position vision_embed
        """)

    @property
    def layers(self) -> tuple[Layers, ...]:
        """The blocks and the mergers, which have prefixes of their own."""
        root = f"vision_encoder.{self.left}Vision"
        encoder = f"{root}Encoder_0"
        blocks = tower_blocks("visual.blocks.{vision_layer}", encoder + ".blocks_{vision_layer}", _BLOCK)
        last = tower_blocks(
            "visual.merger", f"{root}Projector_0.merger", _merger(*self.merger, "vision_embed")
        )
        if not self.deep:
            return blocks, last
        deep = _merger(*self.merger, "patches")
        return blocks, tower_blocks(f"visual.{self.deep}.{{deep}}", encoder + ".merger_{deep}", deep), last

    def sizes(self, *prefixes: str) -> dict[str, tuple[str | int, ...]]:
        """Lengths of axes, by what may stand before the fields that describe the tower."""
        fields: dict[str, tuple[str | int, ...]] = {
            "vision_layer": ("depth",),
            "vision_embed": ("hidden_size",),
            "vision_heads": ("num_heads",),
            "vision_mlp": ("intermediate_size",),
            "vision_position": ("num_position_embeddings",),
            "channel": ("in_channels",),
            "frame": ("temporal_patch_size",),
            "patch_height": ("patch_size",),
            "patch_width": ("patch_size",),
            "merge": ("spatial_merge_size",),
        }
        deep = {"deep": ("deepstack_visual_indexes",)} if self.deep else {}
        return within({**fields, **deep}, *prefixes)


CONSTANTS = {"norm": 2}
_PATCHES = "vision_embed * merge * merge"
DERIVED = {**HEAD_DIM, "patches": _PATCHES, "merged": _PATCHES}
