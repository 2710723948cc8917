"""What references cost: stripping, converting and stacking without moving the bytes.

1. `strip-optimizer` of a training checkpoint of 15 GB: seconds, and bytes that are new on the disk.
2. `hf-to-maxtext --reference` of 2.47 GB against `cp` + `sync` of the file.
3. `hf-to-maxtext --reference` of a checkpoint of 671 B parameters whose data are holes: seconds and memory.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from deepseek import FULL, SMALL
from pairs import against_copy, ckpt, command, remove, seconds

from ckpttools.array.nodes import Constant
from ckpttools.array.tree import Leaf, Metadata, Tree
from ckpttools.array.tree import Path as TreePath
from ckpttools.core.dtypes import DTYPES
from ckpttools.formats.orbax.write import OrbaxWriter
from ckpttools.maxtext.conversion_options import ToMaxText
from ckpttools.maxtext.synthetic import synthetic_model
from ckpttools.maxtext.to_maxtext import to_maxtext
from ckpttools.maxtext.view import view_of
from ckpttools.plan.plan import build
from ckpttools.run.executor import execute
from ckpttools.testing.models import LlamaSizes, write_llama, write_model


def write_training(directory: Path, sizes: LlamaSizes) -> int:
    """A scanned train state of adamw in float32 as MaxText names it, all on disk; returns its bytes."""
    config = sizes.config()
    model = to_maxtext(synthetic_model(config), ToMaxText()).state
    shapes = {name: array.shape for name, array in view_of(model).named.items()}
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
    return sum(item.st_blocks * 512 for item in status if item.st_nlink == 1)


def stripping(directory: Path, rounds: int, sizes: LlamaSizes) -> None:
    """The command as a process."""
    source, output = directory / "training", directory / "stripped"
    nbytes = write_training(source, sizes)
    print(f"strip-optimizer of {nbytes / 1e9:.1f} GB, parameters and both moments in float32", flush=True)
    for _ in range(rounds):
        taken, printed = seconds(lambda: command("strip-optimizer", source, output, "--json"))
        receipt = json.loads(printed)
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


def holes(directory: Path, config: Mapping[str, object]) -> None:
    """Planning and writing an index, and what little is not referenced."""
    source, output = directory / "deepseek", directory / "converted"
    write_model(source, config, sparse=True, shard_bytes=8 << 30)
    print("hf-to-maxtext --reference of DeepSeek V3's shape, all holes", flush=True)
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
    llama, deepseek = LlamaSizes(), FULL
    if arguments.small:
        llama = replace(llama, layers=2, vocab=8000)
        deepseek = SMALL
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        stripping(directory, arguments.rounds, llama)
        converting(directory, arguments.rounds, llama)
        holes(directory, deepseek)
        os.sync()


if __name__ == "__main__":
    main()
