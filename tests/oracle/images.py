"""What models with a tower are shown: noise among tokens, laid out as each side takes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

_BEFORE, _AFTER = 12, 52


@dataclass(frozen=True)
class Prompt:
    """Tokens with an image among them.

    Attributes:
        tokens: all of them.
        placeholder: the token that stands for a part of the image.
        torch: what transformers takes beside tokens: name of the argument -> array.
        pixels: what MaxText's tower takes, float32.
        positions: (1, tokens) or, of three coordinates, (1, tokens, 3).
    """

    tokens: list[int]
    placeholder: int
    torch: Mapping[str, np.ndarray]
    pixels: np.ndarray
    positions: np.ndarray


def prompt(config: Mapping[str, Any]) -> Prompt | None:
    """For one model; None where its images are not compared."""
    made = _PROMPTS.get(config["model_type"])
    return made(config) if made else None


def _tokens(placeholder: int, count: int) -> np.ndarray:
    text = np.random.default_rng(0).integers(3, 86, _BEFORE + _AFTER)
    return np.concatenate([text[:_BEFORE], np.full(count, placeholder), text[_BEFORE:]])


def _noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).uniform(-1, 1, shape).astype(np.float32)


def _gemma3(config: Mapping[str, Any]) -> Prompt:
    vision, placeholder = config["vision_config"], config["image_token_index"]
    tokens = _tokens(placeholder, config["mm_tokens_per_image"])
    image = _noise(1, vision["image_size"], vision["image_size"], vision["num_channels"])
    is_image = (tokens == placeholder).astype(np.int64)[None]
    inputs = {"pixel_values": image.transpose(0, 3, 1, 2), "token_type_ids": is_image}
    return Prompt(tokens.tolist(), placeholder, inputs, image[None], np.arange(len(tokens))[None])


def _qwen3_vl(config: Mapping[str, Any]) -> Prompt:
    """Patches of an image, one after the other, in the order in which they are merged."""
    vision, placeholder = config["vision_config"], config["image_token_id"]
    side, merged = 8, vision["spatial_merge_size"]
    across = side // merged
    tokens = _tokens(placeholder, across**2)
    patch, frames, channels = vision["patch_size"], vision["temporal_patch_size"], vision["in_channels"]
    patches = _noise(side**2, channels * frames * patch**2)
    inputs = {
        "pixel_values": patches,
        "image_grid_thw": np.array([[1, side, side]]),
        "mm_token_type_ids": (tokens == placeholder).astype(np.int64)[None],
    }
    pixels = patches.reshape(1, channels, frames, side * patch, side * patch)
    return Prompt(tokens.tolist(), placeholder, inputs, pixels, _of_three(across))


def _of_three(across: int) -> np.ndarray:
    """Time, row and column of each token; text goes on after the largest of them."""
    rows, columns = np.divmod(np.arange(across**2), across)
    image = _BEFORE + np.stack([np.zeros_like(rows), rows, columns])
    before, after = np.arange(_BEFORE), _BEFORE + across + np.arange(_AFTER)
    parts = [np.tile(before, (3, 1)), image, np.tile(after, (3, 1))]
    return np.concatenate(parts, axis=1).T[None]


_PROMPTS: Mapping[str, Callable[[Mapping[str, Any]], Prompt]] = {
    "gemma3": _gemma3,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl,
}
