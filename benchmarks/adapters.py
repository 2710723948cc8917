"""`ckpt adapter merge` against `cp` + `sync` of the base: whole processes, in alternation.

    python benchmarks/adapters.py [--directory DIR] [--rounds N] [--rank N] [--layers N]

Prints every pair and the medians, for Hugging Face's files and for MaxText's stacked layers, with factors for
all linear layers and for those of attention alone. The target is the time of the copy. Models have the shapes
of Llama 3.2 1B, by default all 16 layers of it (2.47 GB of bfloat16).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from pairs import alternated, ckpt, command

from ckpttools.testing.models import LlamaSizes, shapes_of, write_llama

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def write_adapter(directory: Path, sizes: LlamaSizes, rank: int, modules: tuple[str, ...]) -> Path:
    """Factors of noise in bfloat16 for these modules of every layer, as PEFT saves them."""
    directory.mkdir()
    declared = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(modules)}
    (directory / "adapter_config.json").write_text(json.dumps(declared))
    random, entries, blocks, end = np.random.default_rng(0), {}, [], 0
    for name, shape in shapes_of(sizes.config()).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in modules:
            continue
        for factor, (rows, columns) in (("A", (rank, shape[1])), ("B", (shape[0], rank))):
            values = random.standard_normal((rows, columns), np.float32) * np.float32(0.02)
            blocks.append((values.view(np.uint32) >> 16).astype("<u2").tobytes())
            offsets = [end, end + len(blocks[-1])]
            full = f"base_model.model.{module}.lora_{factor}.weight"
            entries[full] = {"dtype": "BF16", "shape": [rows, columns], "data_offsets": offsets}
            end = offsets[1]
    header = json.dumps(entries).encode()
    data = len(header).to_bytes(8, "little") + header + b"".join(blocks)
    (directory / "adapter_model.safetensors").write_bytes(data)
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=Path, help="a place with 11 GB of room; default a temporary one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=16)
    arguments = parser.parse_args()
    sizes = LlamaSizes(layers=arguments.layers)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        model = write_llama(directory / "model", sizes).parent
        command("convert", "hf-to-maxtext", model, directory / "maxtext")
        every = write_adapter(directory / "every", sizes, arguments.rank, LINEAR)
        attention = write_adapter(directory / "attention", sizes, arguments.rank, ATTENTION)
        for adapter in (every, attention):
            for base in (model, directory / "maxtext"):
                print(f"{base.name}, factors of {adapter.name}", flush=True)
                merge = partial(ckpt, "merge", base, adapter, group="adapter")
                alternated(base, directory, arguments.rounds, merge)


if __name__ == "__main__":
    main()
