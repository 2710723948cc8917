"""Quantized models to bfloat16 MaxText against `cp` + `sync` of what is written, and a plan of the largest.

    python benchmarks/quantized.py [--directory DIR] [--rounds N] [--parameters N] [--quick]

FP8 in blocks of 128 x 128 and MXFP4, of 2 billion parameters (4 GB written): the target is a ratio of at
least 0.8 and a peak of at most 1 GiB. DeepSeek V3 in FP8, 671 B parameters in some 91,000 tensors, as files
of holes: the target for its plan is 10 s and 1 GiB.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping
from itertools import islice
from math import prod
from pathlib import Path

import numpy as np
from deepseek import FULL as DEEPSEEK
from deepseek import plan_of
from pairs import against_copy, ckpt, remove

from ckpttools.core.text import array_count
from ckpttools.testing.models import shapes_of

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4"}
# As many experts, of the full size, as DeepSeek V3 has: with their scales its files have so many tensors.
FULL = {**DEEPSEEK, "moe_intermediate_size": 2048, "n_routed_experts": 256, "quantization_config": FP8}
DENSE = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "tie_word_embeddings": True,
    "quantization_config": FP8,
}
EXPERTS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 16,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "quantization_config": MXFP4,
}
Tensors = Mapping[str, tuple[str, tuple[int, ...]]]
_BYTES = {"F8_E4M3": 1, "U8": 1, "BF16": 2, "F32": 4}
_BLOCK = 1 << 20
# Of DeepSeek's matrices one has another name: that of the keys' and values' smaller ones.
_FP8_ENDS = ("proj.weight", "kv_a_proj_with_mqa.weight")


def tensors_of(config: Mapping[str, object]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names, dtypes and shapes of a quantized model's tensors."""
    result: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, shape in shapes_of(config).items():
        if config["quantization_config"] == MXFP4 and name.endswith(("gate_up_proj", "down_proj")):
            experts, inside, outside = shape
            result[f"{name}_blocks"] = "U8", (experts, outside, inside // 32, 16)
            result[f"{name}_scales"] = "U8", (experts, outside, inside // 32)
        elif config["quantization_config"] == FP8 and name.endswith(_FP8_ENDS):
            result[name] = "F8_E4M3", shape
            result[f"{name}_scale_inv"] = "F32", tuple(-(-length // 128) for length in shape)
        else:
            result[name] = "BF16", shape
    return result


def write(directory: Path, config: Mapping[str, object], *, sparse: bool = False) -> Path:
    """Writes a model in files of some 5 GB; returns the directory."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    tensors, index = tensors_of(config), {}
    for number, names in enumerate(_shards(tensors), 1):
        file = f"model-{number:05d}.safetensors"
        _write_file(directory / file, {name: tensors[name] for name in names}, sparse=sparse)
        index |= dict.fromkeys(names, file)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (directory / "model.safetensors.index.json").write_text(text)
    return directory


def _shards(tensors: Tensors) -> Iterator[list[str]]:
    names: list[str] = []
    nbytes = 0
    for name, (dtype, shape) in tensors.items():
        names.append(name)
        nbytes += _BYTES[dtype] * prod(shape)
        if nbytes > 5_000_000_000:
            yield names
            names, nbytes = [], 0
    yield names


def _write_file(path: Path, tensors: Tensors, *, sparse: bool) -> None:
    entries, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + _BYTES[dtype] * prod(shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if sparse:
            file.truncate(8 + len(text) + end)
            return
        rng = np.random.default_rng(0)
        for name, (dtype, shape) in tensors.items():
            for block in _noise(rng, dtype, prod(shape), is_scale="scale" in name):
                file.write(block.tobytes())


def _noise(rng: np.random.Generator, dtype: str, count: int, *, is_scale: bool) -> Iterator[np.ndarray]:
    """Numbers as in life, in blocks of one that is made."""
    size = min(count, _BLOCK)
    if dtype == "BF16":
        block = ((rng.standard_normal(size, np.float32) * 0.02).view(np.uint32) >> 16).astype("<u2")
    elif dtype == "F32":
        block = rng.uniform(1e-5, 1e-3, size).astype(np.float32)
    elif dtype == "F8_E4M3":
        block = rng.integers(0, 126, size).astype(np.uint8) | rng.integers(0, 2, size).astype(np.uint8) << 7
    else:
        block = rng.integers(110, 130, size) if is_scale else rng.integers(0, 256, size)
        block = block.astype(np.uint8)
    for start in range(0, count, size):
        yield block[: count - start]


def layers_for(config: dict[str, object], parameters: int) -> dict[str, object]:
    """The configuration with as many layers as make so many parameters."""
    sizes = [_parameters({**config, "num_hidden_layers": layers}) for layers in (2, 4)]
    layers = 2 + 2 * max(0, round((parameters - sizes[0]) / (sizes[1] - sizes[0])))
    return {**config, "num_hidden_layers": layers}


def _parameters(config: Mapping[str, object]) -> int:
    return sum(map(prod, shapes_of(config).values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=Path, help="a place with 12 GB of room; default a temporary one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parameters", type=float, default=2e9, help="of the models that are converted")
    parser.add_argument("--quick", action="store_true", help="not the plan of DeepSeek V3")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        for config, declared in ((DENSE, "FP8 in blocks"), (EXPERTS, "MXFP4")):
            sized = layers_for(config, int(arguments.parameters))
            model = write(directory / "model", sized)
            built = directory / "made"
            written = ckpt("hf-to-maxtext", model, built)["bytes_out"]
            (copied,) = islice(sorted(built.rglob("*"), key=lambda item: -item.stat().st_size), 1)
            whole = directory / "whole"
            copied.rename(whole)
            remove(built)
            print(
                f"{declared}, {_parameters(sized) / 1e9:.2f} B parameters, {written / 1e9:.2f} GB written",
                flush=True,
            )
            against_copy(whole, directory, arguments.rounds, "hf-to-maxtext", model)
            remove(whole)
            remove(model)
        if not arguments.quick:
            full = write(directory / "full", FULL, sparse=True)
            print(f"DeepSeek V3 in FP8, {array_count(tensors_of(FULL))}", flush=True)
            plan_of(full, "convert hf-to-maxtext")
            plan_of(full, "cast", "--dtype", "bfloat16")


if __name__ == "__main__":
    main()
