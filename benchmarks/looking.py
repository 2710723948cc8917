"""`ckpt inspect tree` of a large model behind a network: seconds and requests.

    python benchmarks/looking.py [--latency SECONDS] [--rounds N] [--only gs]

91,000 tensors in 163 safetensors shards, on the servers of the tests, in a process of its own, which wait
before each answer. Targets, at 20 ms: at most 2 requests for each shard, under 5 s.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

SHARDS, LAYERS, EXPERTS = 163, 61, 249
PARTS = ("gate_proj", "up_proj", "down_proj")
CONFIG = {"model_type": "deepseek_v3", "num_hidden_layers": LAYERS, "n_routed_experts": EXPERTS}
# Shards are longer than what is read of each for its header.
SHAPE, NBYTES = [16, 16], 512


def names() -> Iterator[str]:
    """Those of experts with their scales, as in DeepSeek V3."""
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for part in PARTS:
                name = f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight"
                yield name
                yield f"{name}_scale_inv"


def model() -> dict[str, bytes]:
    """Its files."""
    every = list(names())
    files, weights = {"config.json": json.dumps(CONFIG).encode()}, {}
    for number in range(SHARDS):
        mine = every[number * len(every) // SHARDS : (number + 1) * len(every) // SHARDS]
        entries = {
            name: {"dtype": "BF16", "shape": SHAPE, "data_offsets": [at * NBYTES, (at + 1) * NBYTES]}
            for at, name in enumerate(mine)
        }
        header = json.dumps(entries).encode()
        shard = f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"
        files[shard] = len(header).to_bytes(8, "little") + header + bytes(len(mine) * NBYTES)
        weights |= dict.fromkeys(mine, shard)
    files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": weights}).encode()
    return files


def serve(latency: float, addresses: Any) -> None:
    """Serves the model until the process ends."""
    from support import gcs_server, web_server

    web_server.PAGE_SIZE = 1000
    files = model()
    with ExitStack() as stack:
        bucket = stack.enter_context(gcs_server.Server().running())
        web = stack.enter_context(web_server.web_server())
        bucket.latency, web.delay = latency, latency
        for name, content in files.items():
            bucket.put("bucket", f"model/{name}", content)
            web.files[f"model/{name}"] = web.files[f"hub/org/model/{name}"] = content
        addresses.send((bucket.url, f"http://{web.address}"))
        time.sleep(1e6)


def looked(location: str, environment: dict[str, str]) -> tuple[float, str]:
    """Seconds that the command took, and what it says of its requests."""
    words = [str(Path(sys.executable).with_name("ckpt")), "inspect", "tree", location, "--depth", "1"]
    start = time.monotonic()
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | environment, check=True)
    return time.monotonic() - start, done.stderr.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--latency", type=float, default=0.02, help="seconds before each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("gs", "http", "hf"))
    arguments = parser.parse_args()
    here, there = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(arguments.latency, there), daemon=True)
    server.start()
    bucket, web = here.recv()
    locations = {"gs": "gs://bucket/model", "http": f"{web}/model", "hf": "hf://org/model"}
    environment = {"STORAGE_EMULATOR_HOST": bucket, "HF_ENDPOINT": web, "HF_HUB_CACHE": "/nonexistent"}
    for scheme in (arguments.only,) if arguments.only else locations:
        rounds = [looked(locations[scheme], environment) for _ in range(arguments.rounds)]
        middle = statistics.median(taken for taken, _ in rounds)
        print(f"{scheme:5} median {middle:5.2f} s, best {min(rounds)[0]:5.2f} s; {rounds[-1][1]}", flush=True)
    server.terminate()


if __name__ == "__main__":
    main()
