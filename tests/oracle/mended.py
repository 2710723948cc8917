"""Changes of MaxText's code that follow transformers, to show that nothing else differs."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

with contextlib.redirect_stdout(sys.stderr):
    from maxtext.common.common_types import AttentionType
    from maxtext.layers import attentions, embeddings, linears, nnx_decoders
    from maxtext.models import qwen3
    from maxtext.multimodal import processor


def _attend(query: Any, table: Any, *_: Any, **__: Any) -> Any:
    return jnp.dot(query, jnp.asarray(table, jnp.float32).T, preferred_element_type=jnp.float32)


def tied_embeddings() -> None:
    """Multiplies them in float32, in every model: MaxText does in bfloat16, whatever `dtype` says."""
    embeddings.attend_on_embedding = _attend
    nnx_decoders.attend_on_embedding = _attend


@contextlib.contextmanager
def placeholders(image: int | None, sound: int | None) -> Iterator[None]:
    """The tokens that stand for parts: MaxText knows those of released vocabularies alone."""
    given = {"get_bidirectional_mask_vision": image, "get_bidirectional_mask_audio": sound}
    with contextlib.ExitStack() as stack:
        for name, token in given.items():
            if token is not None:
                stack.enter_context(mock.patch.object(processor, name, partial(_stands_for, token)))
        yield


def _stands_for(token: int, _: Any, tokens: Any, is_video: bool = False) -> Any:
    return tokens == token


@contextlib.contextmanager
def all_of(mends: Mapping[str, Mapping[str, float]]) -> Iterator[None]:
    """Apply several changes by name, with their arguments."""
    with contextlib.ExitStack() as stack:
        for name, numbers in mends.items():
            stack.enter_context(_MENDS[name](**numbers))
        yield


def _stretched(*, theta: float, factor: float, original: int) -> contextlib.AbstractContextManager[Any]:
    """YaRN's frequencies in the compressed layers of DeepSeek V4, which are those of one theta."""
    plain = embeddings.DeepSeekV4RotaryEmbedding.inv_freq.fget

    def frequencies(rotary: Any) -> Any:
        found = plain(rotary)
        if rotary.rope_theta != theta:
            return found
        low, high = (_turns(each, rotary.dim, theta, original) for each in (32, 1))
        low, high = max(math.floor(low), 0), min(math.ceil(high), rotary.dim - 1)
        slow = jnp.clip((jnp.arange(rotary.dim // 2) - low) / (high - low), 0, 1)
        return found * (1 - slow) + found / factor * slow

    return mock.patch.object(embeddings.DeepSeekV4RotaryEmbedding, "inv_freq", property(frequencies))


def _turns(count: int, dim: int, theta: float, original: int) -> float:
    """The dimension that turns so often within the original context."""
    return dim * math.log(original / (count * 2 * math.pi)) / (2 * math.log(theta))


def _clipped(*, limit: float) -> contextlib.AbstractContextManager[Any]:
    """What goes into SwiGLU, in every block: MaxText's DeepSeek V4 clips it in chosen experts alone."""
    plain = linears._convert_to_activation_function
    clipping = {
        "silu": lambda x: jax.nn.silu(jnp.minimum(x, limit)),
        "linear": lambda x: jnp.clip(x, -limit, limit),
    }
    return mock.patch.object(
        linears, "_convert_to_activation_function", lambda name: clipping.get(name) or plain(name)
    )


def _unrounded() -> contextlib.AbstractContextManager[Any]:
    """Positions of patches in Qwen's towers as they are interpolated: MaxText rounds them to bfloat16."""
    plain = embeddings.Qwen3OmniMoeVisionPosEmbedInterpolate.__init__

    def begin(positions: Any, *args: Any, **options: Any) -> None:
        plain(positions, *args, **{**options, "cast_as_fprop_dtype": False})

    return mock.patch.object(embeddings.Qwen3OmniMoeVisionPosEmbedInterpolate, "__init__", begin)


@contextlib.contextmanager
def _smooth() -> Iterator[None]:
    """GELU itself in the patch mergers and ears of Qwen: MaxText has its approximation by tanh there, too."""
    with contextlib.ExitStack() as stack:
        for each in (
            qwen3.Qwen3OmniMoeVisionPatchMerger,
            qwen3.Qwen3OmniAudioEncoder,
            qwen3.Qwen3OmniAudioProjector,
        ):
            stack.enter_context(mock.patch.object(each, "__call__", _exact(each.__call__)))
        yield


def _exact(plain: Callable[..., Any]) -> Callable[..., Any]:
    exact = partial(jax.nn.gelu, approximate=False)

    def computed(module: Any, *args: Any, **options: Any) -> Any:
        with mock.patch.object(jax.nn, "gelu", exact):
            return plain(module, *args, **options)

    return computed


def _yarn_where_full() -> contextlib.AbstractContextManager[Any]:
    """Give layers with full attention YaRN, and no other: MaxText's OLMo 3 has one rotary embedding."""
    plain = attentions.Attention.__init__

    def begin(attention: Any, *args: Any, **options: Any) -> None:
        is_full = options["attention_type"] == AttentionType.GLOBAL
        plain(attention, *args, **{**options, "rope_type": "yarn" if is_full else "default"})

    return mock.patch.object(attentions.Attention, "__init__", begin)


def _llama3_scaled(*, factor: float, low: float, high: float) -> contextlib.AbstractContextManager[Any]:
    """Scale frequencies by the factors of a model: MaxText has those of Llama 3.1 in its code."""
    original = 8192

    def scaled(_: Any, frequency: Any) -> Any:
        turns = original * frequency / (2 * jnp.pi)
        smooth = jnp.clip((turns - low) / max(high - low, 1e-9), 0, 1)
        return (1 - smooth) * frequency / factor + smooth * frequency

    return mock.patch.object(embeddings.LLaMARotaryEmbedding, "_apply_scaling_factor", scaled)


_MENDS: Mapping[str, Callable[..., contextlib.AbstractContextManager[Any]]] = {
    "stretched": _stretched,
    "clipped": _clipped,
    "unrounded": _unrounded,
    "smooth": _smooth,
    "yarn_where_full": _yarn_where_full,
    "llama3_scaled": _llama3_scaled,
}
