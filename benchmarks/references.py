"""What references cost: stripping, converting and stacking without moving the bytes.

1. `strip-optimizer` of a training checkpoint of 15 GB: seconds, and bytes that are new on the disk.
2. `hf-to-maxtext --reference` of 2.47 GB against `cp` + `sync` of the file.
3. `hf-to-maxtext --reference` of a checkpoint of 671 B parameters whose data are holes: seconds and memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np
from pairs import against_copy, ckpt, remove, seconds

from ckpttools.dtypes import DTYPES
from ckpttools.formats.orbax_write import OrbaxWriter
from ckpttools.ir.nodes import Constant
from ckpttools.ir.tree import Leaf, Metadata, Tree
from ckpttools.ir.tree import Path as TreePath
from ckpttools.plan.plan import build
from ckpttools.run.executor import execute
from ckpttools.testing.models import LlamaSizes, write_llama

_SHARD_BYTES = 8 << 30


@dataclass(frozen=True, slots=True)
class DeepSeekSizes:
    """Sizes of DeepSeek-V3, without its prediction layer."""

    layers: int = 61
    dense: int = 3
    hidden: int = 7168
    mlp: int = 18432
    expert_mlp: int = 2048
    experts: int = 256
    heads: int = 128
    vocab: int = 129280

    def config(self) -> dict[str, object]:
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "num_hidden_layers": self.layers,
            "first_k_dense_replace": self.dense,
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "moe_intermediate_size": self.expert_mlp,
            "n_routed_experts": self.experts,
            "n_shared_experts": 1,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "vocab_size": self.vocab,
            "tie_word_embeddings": False,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "torch_dtype": "bfloat16",
        }

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of all tensors, in file order."""
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            for norm in ("input_layernorm", "post_attention_layernorm"):
                yield f"{prefix}.{norm}.weight", (self.hidden,)
            yield from self._attention(f"{prefix}.self_attn")
            if layer < self.dense:
                yield from _gated(f"{prefix}.mlp", self.hidden, self.mlp)
            else:
                yield from self._experts(f"{prefix}.mlp")
        yield "model.norm.weight", (self.hidden,)
        yield "lm_head.weight", (self.vocab, self.hidden)

    def _attention(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{prefix}.q_a_proj.weight", (1536, self.hidden)
        yield f"{prefix}.q_a_layernorm.weight", (1536,)
        yield f"{prefix}.q_b_proj.weight", (self.heads * 192, 1536)
        yield f"{prefix}.kv_a_proj_with_mqa.weight", (576, self.hidden)
        yield f"{prefix}.kv_a_layernorm.weight", (512,)
        yield f"{prefix}.kv_b_proj.weight", (self.heads * 256, 512)
        yield f"{prefix}.o_proj.weight", (self.hidden, self.heads * 128)

    def _experts(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{prefix}.gate.weight", (self.experts, self.hidden)
        yield f"{prefix}.gate.e_score_correction_bias", (self.experts,)
        yield from _gated(f"{prefix}.shared_experts", self.hidden, self.expert_mlp)
        for expert in range(self.experts):
            yield from _gated(f"{prefix}.experts.{expert}", self.hidden, self.expert_mlp)


def _gated(prefix: str, hidden: int, mlp: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.gate_proj.weight", (mlp, hidden)
    yield f"{prefix}.up_proj.weight", (mlp, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, mlp)


def write_holes(directory: Path, sizes: DeepSeekSizes) -> int:
    """Writes shards of bfloat16 tensors whose data take no room, and all that goes with it; returns bytes."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(sizes.config()))
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in sizes.shapes():
        if filled + prod(shape) * 2 > _SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled += prod(shape) * 2
    weight_map: dict[str, str] = {}
    total = 0
    for number, shapes in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        total += _write_shard(directory / file, shapes)
        weight_map |= dict.fromkeys(shapes, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _write_shard(path: Path, shapes: dict[str, tuple[int, ...]]) -> int:
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + prod(shape) * 2
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return end


def write_training(directory: Path, sizes: LlamaSizes) -> int:
    """A scanned train state of adamw in float32 as MaxText names it, all on disk; returns its bytes."""
    layer = {
        "mlp.wi_0.kernel": (sizes.hidden, sizes.layers, sizes.mlp),
        "mlp.wi_1.kernel": (sizes.hidden, sizes.layers, sizes.mlp),
        "mlp.wo.kernel": (sizes.mlp, sizes.layers, sizes.hidden),
        "self_attention.query.kernel": (sizes.hidden, sizes.layers, sizes.heads, sizes.head_dim),
        "self_attention.key.kernel": (sizes.hidden, sizes.layers, sizes.kv_heads, sizes.head_dim),
        "self_attention.value.kernel": (sizes.hidden, sizes.layers, sizes.kv_heads, sizes.head_dim),
        "self_attention.out.kernel": (sizes.heads, sizes.layers, sizes.head_dim, sizes.hidden),
        "pre_self_attention_layer_norm.scale": (sizes.hidden, sizes.layers),
        "post_self_attention_layer_norm.scale": (sizes.hidden, sizes.layers),
    }
    shapes = {f"decoder.layers.{name}": shape for name, shape in layer.items()}
    shapes["decoder.decoder_norm.scale"] = (sizes.hidden,)
    shapes["token_embedder.embedding"] = (sizes.vocab, sizes.hidden)
    leaves: dict[TreePath, Leaf] = {("step",): _constant((), "int32", 7)}
    for prefix in (("params", "params"), ("opt_state", 0, "mu", "params"), ("opt_state", 0, "nu", "params")):
        for name, shape in shapes.items():
            leaves[(*prefix, *name.split("."))] = _constant(shape, "float32", 0.5)
    leaves["opt_state", 0, "count"] = _constant((), "int32", 7)
    tree = Tree(leaves, Metadata(step=7, custom={"scan_layers": True}))
    writer = OrbaxWriter(step=None)
    plan = build(tree, writer, memory=1 << 30, jobs=4)
    execute(plan, writer, directory)
    return plan.bytes_out


def _constant(shape: tuple[int, ...], dtype: str, value: float) -> Constant:
    return Constant(shape, DTYPES[dtype], np.array(value).astype(DTYPES[dtype].numpy).tobytes())


def own_bytes(directory: Path) -> int:
    """Bytes on the disk of files that have no other name."""
    status = [file.stat() for file in directory.rglob("*") if file.is_file()]
    return sum(each.st_blocks * 512 for each in status if each.st_nlink == 1)


def stripping(directory: Path, rounds: int, sizes: LlamaSizes) -> None:
    """The command as a process."""
    source, output = directory / "training", directory / "stripped"
    nbytes = write_training(source, sizes)
    print(f"strip-optimizer of {nbytes / 1e9:.1f} GB, parameters and both moments in float32", flush=True)
    command = [
        Path(sys.executable).with_name("ckpt"),
        "strip-optimizer",
        source,
        output,
        "--reference",
        "--json",
    ]
    for _ in range(rounds):
        taken, done = seconds(lambda: subprocess.run(command, check=True, capture_output=True, text=True))
        receipt = json.loads(done.stdout)
        print(
            f"    {taken:.2f} s, {own_bytes(output) / 1e6:.2f} MB new on the disk, "
            f"{receipt['bytes_referenced'] / 1e9:.2f} GB shared, {receipt['bytes_dead'] / 1e9:.2f} GB dead",
            flush=True,
        )
        remove(output)
    remove(source)


def converting(directory: Path, rounds: int, sizes: LlamaSizes) -> None:
    """Against a copy of the same file."""
    model = write_llama(directory / "hf", sizes)
    output = directory / "once"
    receipt = ckpt("hf-to-maxtext", model.parent, output, "--reference")
    remove(output)
    share = receipt["bytes_referenced"] / (receipt["bytes_referenced"] + receipt["bytes_out"])
    size = model.stat().st_size / 1e9
    print(f"hf-to-maxtext --reference of {size:.2f} GB, {100 * share:.1f} % referenced", flush=True)
    against_copy(model, directory, rounds, "hf-to-maxtext", model.parent, "--reference")
    remove(model.parent)


def holes(directory: Path, sizes: DeepSeekSizes) -> None:
    """Planning and writing an index, and what little is not referenced."""
    source, output = directory / "deepseek", directory / "converted"
    total = write_holes(source, sizes)
    print(f"hf-to-maxtext --reference of {total / 2e9:.0f} B parameters, all holes", flush=True)
    taken, receipt = seconds(lambda: ckpt("hf-to-maxtext", source, output, "--reference"))
    print(
        f"    {taken:.1f} s, peak {receipt['peak_bytes'] / 2**30:.2f} GiB, "
        f"{receipt['bytes_referenced'] / 1e9:.0f} GB shared, {receipt['bytes_out'] / 1e9:.2f} GB written",
        flush=True,
    )
    remove(output)
    remove(source)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--directory", type=Path, help="a place with 20 GB of room; default a temporary one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="small models, to try the script itself")
    arguments = parser.parse_args()
    llama, deepseek = LlamaSizes(), DeepSeekSizes()
    if arguments.small:
        llama = replace(llama, layers=2, vocab=8000)
        deepseek = replace(deepseek, layers=6, experts=16)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        stripping(directory, arguments.rounds, llama)
        converting(directory, arguments.rounds, llama)
        holes(directory, deepseek)
        os.sync()


if __name__ == "__main__":
    main()
