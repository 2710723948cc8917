"""A mixture of experts of DeepSeek's shape: a small real one against `cp`, and planning the full one.

    python benchmarks/deepseek.py [--directory DIR] [--rounds N]

The full model is of DeepSeek V3's shape: 671 B parameters in 89 939 tensors of bfloat16, as files of holes,
1.34 TB in appearance. The target for its plan is 10 s and 1 GiB. The small one has 8 layers (one dense) and
32 experts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from pairs import against_copy, command, remove, seconds

import ckpttools
from ckpttools.api.plans import header_of
from ckpttools.plan.parts import dealt
from ckpttools.plan.plan_file import encode_plan, read_plan
from ckpttools.stores import parse
from ckpttools.testing.models import write_model

FULL = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    # Twice DeepSeek V3's experts of half the size: as many parameters, and as many tensors as its float8
    # files have with their scales.
    "moe_intermediate_size": 1024,
    "n_routed_experts": 512,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
}
SMALL = {
    **FULL,
    "num_hidden_layers": 8,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "n_routed_experts": 32,
    "num_attention_heads": 16,
    "vocab_size": 32768,
}


# A process counts what its parent had when it was started: the parent must be a small one.
_PEAK = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], capture_output=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def plan_of(source: Path, name: str, *options: str) -> None:
    """Plans with --dry-run; prints seconds and peak memory.

    Args:
        source: what is converted.
        name: of the command, such as "convert hf-to-maxtext".
        options: of it.
    """
    words: list[str | Path] = [*name.split(), source, source.with_name("out"), *options, "--dry-run"]
    # The plan is printed, then refused (4) where the disk has no room for it.
    taken, _ = seconds(lambda: command(*words, accepted=(0, 4)))
    small = [sys.executable, "-c", _PEAK, Path(sys.executable).with_name("ckpt"), *words]
    peak = int(subprocess.run(small, capture_output=True, check=True).stdout) / 2**20
    declared = " ".join(("ckpt", name, *options, "--dry-run"))
    print(f"  {declared}: {taken:.1f} s, peak {peak:.2f} GiB", flush=True)


# In a process of its own, as a part is: what each part would do if the plan held only the call.
_AGAIN = """
import sys, time
start, cpu = time.perf_counter(), time.process_time()
import ckpttools
from ckpttools.run.source_copies import fingerprint
prepared = ckpttools.hf_to_maxtext.plan(sys.argv[1], sys.argv[2])
fingerprint(prepared.plan, prepared.writer)
print(time.perf_counter() - start, time.process_time() - cpu)
"""
_PART = """
import sys, time
from ckpttools.plan.parts import dealt
from ckpttools.plan.plan_file import read_plan
from ckpttools.stores import parse
start = time.perf_counter()
file = read_plan(parse(sys.argv[1]))
cuts = dealt(file.groups, 64)
plan, opened = file.part(cuts[31], cuts[32], 4, str)
for task in plan.tasks:
    plan.tree.arrays[task.path].first_byte(task.region)
print(time.perf_counter() - start)
"""


def dealing(source: Path) -> None:
    """Writes the plan of a model to a file; prints how long a part reads it, and how even parts are."""
    prepared = ckpttools.hf_to_maxtext.plan(source, source.with_name("out"))
    file = source / "plan"
    file.write_bytes(encode_plan(prepared.plan, header_of(prepared)))
    words = [sys.executable, "-c", _PART, file]
    taken = float(subprocess.run(words, capture_output=True, check=True, text=True).stdout)
    words = [sys.executable, "-c", _AGAIN, source, source.with_name("out")]
    done = subprocess.run(words, capture_output=True, check=True, text=True)
    again, cpu = map(float, done.stdout.split())
    print(f"  planned again, with the fingerprint: {again:.1f} s, {cpu:.1f} s of CPU")
    sizes = read_plan(parse(file)).groups
    print(f"  in a file: {file.stat().st_size / 1e6:.1f} MB, one of 64 parts is read in {taken:.2f} s")
    for count in (8, 64, 256, 1024):
        cuts = dealt(sizes, count)
        largest = max(sum(sizes[first:stop]) for first, stop in pairwise(cuts))
        print(
            f"  {count} parts: the largest has {largest * count / sum(sizes):.4f} of their mean", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=Path, help="a place with 16 GB of room; default a temporary one")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        index = write_model(directory / "full", FULL, sparse=True, shard_bytes=5_000_000_000)
        tensors = len(json.loads(index.read_bytes())["weight_map"])
        print(f"DeepSeek V3, {tensors} tensors", flush=True)
        plan_of(index.parent, "convert hf-to-maxtext")
        plan_of(index.parent, "convert hf-to-maxtext", "--no-scan")
        dealing(index.parent)
        remove(index.parent)
        model = write_model(directory / "small", SMALL)
        print(f"8 layers, 32 experts, {model.stat().st_size / 1e9:.2f} GB", flush=True)
        against_copy(model, directory, arguments.rounds, "hf-to-maxtext", model.parent)


if __name__ == "__main__":
    main()
