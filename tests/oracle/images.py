"""What models with towers see and hear: noise among tokens, laid out as each side takes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

_BEFORE, _AFTER = 12, 52


@dataclass(frozen=True)
class Sound:
    """What a model hears.

    Attributes:
        placeholder: the token that stands for a part of it.
        features: (1, mel bins, frames), float32.
    """

    placeholder: int
    features: np.ndarray


@dataclass(frozen=True)
class Prompt:
    """Tokens with an image among them.

    Attributes:
        tokens: all of them.
        placeholder: the token that stands for a part of the image.
        torch: what transformers takes beside tokens: name of the argument -> array.
        pixels: what MaxText's tower takes, float32.
        positions: (1, tokens) or, of three coordinates, (1, tokens, 3).
        sound: what is heard after the image; None where the model has no ears.
    """

    tokens: list[int]
    placeholder: int
    torch: Mapping[str, np.ndarray]
    pixels: np.ndarray
    positions: np.ndarray
    sound: Sound | None = None


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


def _gemma4(config: Mapping[str, Any]) -> Prompt:
    """Of the one size that MaxText makes all images: patches from left to right, with the place of each."""
    vision, placeholder = config["vision_config"], config["image_token_id"]
    patch, rows, columns = vision["patch_size"], 42, 60
    tokens = _tokens(placeholder, rows * columns // vision["pooling_kernel_size"] ** 2)
    image = _noise(1, rows, patch, columns, patch, 3)
    inputs = {
        "pixel_values": image.transpose(0, 1, 3, 2, 4, 5).reshape(1, rows * columns, -1),
        "image_position_ids": np.stack(np.divmod(np.arange(rows * columns), columns)[::-1], axis=-1)[None],
        "mm_token_type_ids": (tokens == placeholder).astype(np.int64)[None],
    }
    pixels = image.reshape(1, 1, rows * patch, columns * patch, 3)
    return Prompt(tokens.tolist(), placeholder, inputs, pixels, np.arange(len(tokens))[None])


def _llama4(config: Mapping[str, Any]) -> Prompt:
    """Tiles of an image."""
    vision, placeholder = config["vision_config"], config["image_token_index"]
    tiles, size = 4, vision["image_size"]
    across = int(size // vision["patch_size"] * vision["pixel_shuffle_ratio"])
    tokens = _tokens(placeholder, tiles * across**2)
    image = _noise(tiles, vision["num_channels"], size, size)
    positions = np.arange(len(tokens))[None]
    return Prompt(tokens.tolist(), placeholder, {"pixel_values": image}, image[None], positions)


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


def _omni(config: Mapping[str, Any]) -> Prompt:
    """An image, then two chunks of sound: of 100 frames, which are 13 tokens, as transformers counts them."""
    thinker = config["thinker_config"]
    seen, audio = _qwen3_vl(thinker), thinker["audio_config"]
    chunk, chunks, each = 2 * audio["n_window"], 2, 13
    sound = Sound(thinker["audio_token_id"], _noise(1, audio["num_mel_bins"], chunks * chunk))
    text = np.random.default_rng(2).integers(3, 86, _BEFORE).tolist()
    tokens = [*seen.tokens, *[sound.placeholder] * (chunks * each), *text]
    first = int(seen.positions.max()) + 1
    after = np.arange(first, first + len(tokens) - len(seen.tokens))
    positions = np.concatenate([seen.positions, np.tile(after[None, :, None], (1, 1, 3))], axis=1)
    inputs = {
        **{name: seen.torch[name] for name in ("pixel_values", "image_grid_thw")},
        "input_features": sound.features,
        "feature_attention_mask": np.ones((1, chunks * chunk), np.int64),
        "position_ids": positions.transpose(2, 0, 1),
    }
    return Prompt(tokens, seen.placeholder, inputs, seen.pixels, positions, sound)


def _of_three(across: int) -> np.ndarray:
    """Time, row and column of each token; text goes on after the largest of them."""
    rows, columns = np.divmod(np.arange(across**2), across)
    image = _BEFORE + np.stack([np.zeros_like(rows), rows, columns])
    before, after = np.arange(_BEFORE), _BEFORE + across + np.arange(_AFTER)
    parts = [np.tile(before, (3, 1)), image, np.tile(after, (3, 1))]
    return np.concatenate(parts, axis=1).T[None]


_PROMPTS: Mapping[str, Callable[[Mapping[str, Any]], Prompt]] = {
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "llama4": _llama4,
    "qwen3_5_moe": _qwen3_vl,
    "qwen3_omni_moe": _omni,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl,
}
