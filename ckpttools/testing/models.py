"""Hugging Face checkpoints of any size with random weights, for the demo, benchmarks and tests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ckpttools.core.dataclass import dataclass
from ckpttools.formats.safetensors.write import split
from ckpttools.maxtext.synthetic import shapes_of as shapes_of

_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class LlamaSizes:
    """Sizes of a Llama model; the defaults are Llama 3.2 1B's (1.24 B parameters, 2.47 GB in bfloat16)."""

    layers: int = 16
    hidden: int = 2048
    mlp: int = 8192
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 64
    vocab: int = 128256
    tied: bool = True

    def config(self) -> dict[str, object]:
        """Return the model's `config.json`."""
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
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": self.tied,
            "torch_dtype": "bfloat16",
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        }


def write_llama(directory: Path, sizes: LlamaSizes, *, sparse: bool = False) -> Path:
    """Write a Llama model to one file; see `write_model`."""
    return write_model(directory, sizes.config(), sparse=sparse)


def write_model(
    directory: Path, config: Mapping[str, Any], *, sparse: bool = False, shard_bytes: int | None = None
) -> Path:
    """Write `config.json` and bfloat16 safetensors files for a model of any family.

    Args:
        directory: The destination; created if necessary.
        config: The model's `config.json`, which must define all sizes.
        sparse: Whether to write holes instead of data, which read as zeros and take no time or space.
        shard_bytes: Maximum size of the tensors in a file; None for one file.

    Returns:
        The path of the only file, or of the index.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    shapes = shapes_of(config)
    names = list(shapes)
    groups = split([2 * prod(shapes[name]) for name in names], shard_bytes)
    files: dict[str, list[str]] = {}
    for number, group in enumerate(groups, 1):
        file = (
            f"model-{number:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else "model.safetensors"
        )
        files[file] = [names[position] for position in group]
        _write_file(directory / file, {name: shapes[name] for name in files[file]}, sparse)
    if len(files) == 1:
        return directory / "model.safetensors"
    index = directory / "model.safetensors.index.json"
    weight_map = {name: file for file, group in files.items() for name in group}
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def _write_file(path: Path, shapes: Mapping[str, tuple[int, ...]], sparse: bool) -> None:
    header, nbytes = _header(shapes)
    with path.open("wb") as file:
        file.write(header)
        if sparse:
            file.truncate(len(header) + nbytes)
        else:
            for block in _noise(nbytes // 2):
                file.write(block.tobytes())


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
    """Yield bit patterns of normally distributed bfloat16 values, whose exponents compress as in models."""
    source = np.random.default_rng(0)
    for start in range(0, count, _BLOCK):
        values = source.standard_normal(min(_BLOCK, count - start), np.float32) * np.float32(0.02)
        yield (values.view(np.uint32) >> 16).astype("<u2")
