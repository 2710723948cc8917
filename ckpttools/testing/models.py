"""Hugging Face checkpoints of any size made out of noise: for the demo, benchmarks and tests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class LlamaSizes:
    """Sizes of a Llama model; by default those of Llama 3.2 1B (1.24 B parameters, 2.47 GB in bfloat16)."""

    layers: int = 16
    hidden: int = 2048
    mlp: int = 8192
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 64
    vocab: int = 128256
    tied: bool = True

    def config(self) -> dict[str, object]:
        """The model's `config.json`."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": self.layers,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "torch_dtype": "bfloat16",
            "rope_scaling": {"rope_type": "llama3", "factor": 32.0},
        }

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of all tensors, in file order."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if not self.tied:
            yield "lm_head.weight", (self.vocab, self.hidden)
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            yield prefix + "input_layernorm.weight", (self.hidden,)
            yield prefix + "mlp.down_proj.weight", (self.hidden, self.mlp)
            yield prefix + "mlp.gate_proj.weight", (self.mlp, self.hidden)
            yield prefix + "mlp.up_proj.weight", (self.mlp, self.hidden)
            yield prefix + "post_attention_layernorm.weight", (self.hidden,)
            yield prefix + "self_attn.k_proj.weight", (keys, self.hidden)
            yield prefix + "self_attn.o_proj.weight", (self.hidden, queries)
            yield prefix + "self_attn.q_proj.weight", (queries, self.hidden)
            yield prefix + "self_attn.v_proj.weight", (keys, self.hidden)
        yield "model.norm.weight", (self.hidden,)


def write_llama(directory: Path, sizes: LlamaSizes, *, sparse: bool = False) -> Path:
    """Writes `config.json` and `model.safetensors` in bfloat16.

    Args:
        directory: where; made if it is not there.
        sizes: of the model.
        sparse: leave the data as a hole, which reads as zeros and takes no time and no disk.

    Returns:
        The path of `model.safetensors`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(sizes.config(), indent=1))
    header, nbytes = _header(dict(sizes.shapes()))
    path = directory / "model.safetensors"
    with path.open("wb") as file:
        file.write(header)
        if sparse:
            file.truncate(len(header) + nbytes)
        else:
            for block in _noise(nbytes // 2):
                file.write(block.tobytes())
    return path


def _header(shapes: Mapping[str, tuple[int, ...]]) -> tuple[bytes, int]:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + prod(shape) * 2
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


def _noise(count: int) -> Iterator[np.ndarray]:
    """bfloat16 patterns of normal numbers, so that exponents, compression and arithmetic are as in life."""
    source = np.random.default_rng(0)
    for start in range(0, count, _BLOCK):
        values = source.standard_normal(min(_BLOCK, count - start), np.float32) * np.float32(0.02)
        yield (values.view(np.uint32) >> 16).astype("<u2")
