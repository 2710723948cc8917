"""Checkpoints of DeepSpeed and of PyTorch to safetensors, against `cp` + `sync` of what is written.

    python benchmarks/torch.py --torch PYTHON [--deepspeed PYTHON] [--directory DIR] [--rounds N]
        [--parameters N]

PYTHON are interpreters with torch and with DeepSpeed: they write the checkpoints, of 2 billion parameters in
float32 (8 GB), by ZeRO-3 on 8 ranks and DCP on 2, and gather each once themselves, for which they need memory
of twice the weights. The target is a ratio of at least 0.8 and a peak of at most 1 GiB, for any model.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import tempfile
from pathlib import Path

from pairs import against_copy, ckpt, command, remove, seconds

# Llama's shapes, as many layers as there are parameters for.
SHAPES = """
def shapes(parameters):
    hidden, inside, rows = 2048, 5632, 32000
    layer = 4 * hidden * hidden + 3 * hidden * inside
    found = {"model.embed_tokens.weight": (rows, hidden), "lm_head.weight": (rows, hidden)}
    for number in range(max(1, (parameters - 2 * rows * hidden) // layer)):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            found[f"model.layers.{number}.self_attn.{name}.weight"] = (hidden, hidden)
        for name in ("gate_proj", "up_proj"):
            found[f"model.layers.{number}.mlp.{name}.weight"] = (inside, hidden)
        found[f"model.layers.{number}.mlp.down_proj.weight"] = (hidden, inside)
        found[f"model.layers.{number}.input_layernorm.weight"] = (hidden,)
    return found
"""
ZERO = (
    SHAPES
    + """
import math, os, sys, torch
folder, parameters, world = sys.argv[1] + "/global_step1", int(sys.argv[2]), 8
os.makedirs(folder)
sizes = {name: torch.Size(shape) for name, shape in shapes(parameters).items()}
length = sum(-(-math.prod(shape) // world) for shape in sizes.values())
model = {"module": {}, "buffer_names": [], "param_shapes": [sizes], "shared_params": {},
         "ds_version": "0.19.8", "frozen_param_shapes": None, "frozen_param_fragments": None}
for rank in range(world):
    groups = [torch.randn(length)]
    state = {"zero_stage": 3, "partition_count": world, "fp32_flat_groups": groups,
             "optimizer_state_dict": {"state": {}, "param_groups": []}}
    torch.save(model, f"{folder}/zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    torch.save({"optimizer_state_dict": state}, f"{folder}/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
open(sys.argv[1] + "/latest", "w").write("global_step1")
"""
)
DCP = (
    SHAPES
    + """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
mesh = init_device_mesh("cpu", (2,))
state = {name: DTensor.from_local(torch.randn(first // 2, *rest), mesh, [Shard(0)])
         for name, (first, *rest) in shapes(int(sys.argv[2])).items()}
dcp.save({"model": state}, checkpoint_id=sys.argv[1])
dist.destroy_process_group()
"""
)
GATHER = """
import sys
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
dcp_to_torch_save(sys.argv[1], sys.argv[2])
"""


def run(*words: str | Path) -> float:
    """Runs something; returns the most memory that any such has taken so far, in GiB."""
    # Where this file lies, `import torch` would be of it.
    done = subprocess.run(words, capture_output=True, text=True, cwd=tempfile.gettempdir())
    if done.returncode:
        raise SystemExit(done.stderr)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20


def measured(name: str, source: Path, directory: Path, rounds: int) -> None:
    """`ckpt convert to-safetensors` in alternation with `cp` of what it writes, and that it is the same."""
    print(f"{name} to safetensors", flush=True)
    flat = directory / "flat"
    ckpt("to-safetensors", source, flat)
    command("verify", flat, "--against", source)
    against_copy(flat, directory, rounds, "to-safetensors", source)
    remove(flat)


def theirs(name: str, *words: str | Path) -> None:
    taken, peak = seconds(lambda: run(*words))
    print(f"    {name}: {taken:5.2f} s, peak {peak:.2f} GiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\\n")[0])
    parser.add_argument("--torch", required=True, help="an interpreter with torch")
    parser.add_argument("--deepspeed", help="an interpreter with DeepSpeed")
    parser.add_argument("--directory", type=Path, help="a place with three times the room of the weights")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parameters", type=int, default=2_000_000_000)
    arguments = parser.parse_args()
    count = str(arguments.parameters)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        zero, dcp, out = directory / "zero", directory / "dcp", directory / "theirs"
        run(arguments.torch, "-c", ZERO, zero, count)
        measured("DeepSpeed ZeRO-3, 8 ranks", zero, directory, arguments.rounds)
        if arguments.deepspeed:
            script = (arguments.deepspeed, "-m", "deepspeed.utils.zero_to_fp32", "--safe_serialization")
            theirs("zero_to_fp32.py", *script, zero, out)
            remove(out)
        remove(zero)
        script = directory / "save.py"
        script.write_text(DCP)
        run(arguments.torch, "-m", "torch.distributed.run", "--nproc-per-node", "2", script, dcp, count)
        measured("distributed checkpoint, 2 ranks", dcp, directory, arguments.rounds)
        theirs("dcp_to_torch_save", arguments.torch, "-c", GATHER, dcp, out)


if __name__ == "__main__":
    main()
