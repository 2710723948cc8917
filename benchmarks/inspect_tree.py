"""`ckpt inspect tree` of OCDBT checkpoints with many arrays, against Orbax's own metadata call.

    python benchmarks/inspect_tree.py [--directory DIR] [--rounds N]

Whole processes in alternation. Targets: 960 arrays in at most 0.35 s and at least 4 times as fast as Orbax;
100,000 arrays in at most 5 s.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from pairs import command, seconds

from ckpttools.api.prepared import Prepared
from ckpttools.array.nodes import Constant
from ckpttools.array.tree import Leaf, Metadata, Tree
from ckpttools.array.tree import Path as TreePath
from ckpttools.core.dtypes import DTYPES
from ckpttools.formats.orbax.write import OrbaxWriter
from ckpttools.plan.plan import build

# What a layer of an unscanned decoder holds, with the rank of each.
LAYER = {
    "mlp.wi_0.kernel": 2,
    "mlp.wi_1.kernel": 2,
    "mlp.wo.kernel": 2,
    "post_self_attention_layer_norm.scale": 1,
    "pre_self_attention_layer_norm.scale": 1,
    "self_attention.key.kernel": 2,
    "self_attention.key_norm.scale": 1,
    "self_attention.out.kernel": 2,
    "self_attention.query.kernel": 2,
    "self_attention.value.kernel": 2,
}
ORBAX = """
import sys
import orbax.checkpoint as ocp
metadata = ocp.PyTreeCheckpointer().metadata(sys.argv[1])
print(len(str(metadata)))
"""


def write(directory: Path, arrays: int) -> Path:
    """A checkpoint of so many small arrays by this package's own writer; returns the item."""
    dtype = DTYPES["bfloat16"]
    leaves: dict[TreePath, Leaf] = {
        ("params", "params", "decoder", f"layers_{layer}", *name.split(".")): Constant(
            (4,) * rank, dtype, b"\x80\x3f"
        )
        for layer in range(arrays // len(LAYER))
        for name, rank in LAYER.items()
    }
    writer = OrbaxWriter(step=0, item="items")
    tree = Tree(leaves, Metadata(step=0, custom={"scan_layers": False}))
    Prepared(build(tree, writer, memory=1 << 30, jobs=2), writer).run(directory)
    return directory / "0" / "items"


def inspecting(location: Path, *options: str) -> float:
    return seconds(lambda: command("inspect", "tree", location, *options))[0]


def by_orbax(location: Path) -> float:
    words: list[str | Path] = [sys.executable, "-c", ORBAX, location]
    return seconds(lambda: subprocess.run(words, check=True, capture_output=True))[0]


def show(what: str, times: list[float]) -> None:
    spread = f"{min(times):.2f} to {max(times):.2f}"
    print(f"  {what:32} median {statistics.median(times):5.2f} s, {spread}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=Path, help="a place with 200 MB of room; default a temporary one")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        few, many = write(Path(name, "few"), 960), write(Path(name, "many"), 100_000)
        inspecting(few), by_orbax(few)  # the first runs compile and warm what later ones find
        pairs = [(inspecting(few), by_orbax(few)) for _ in range(arguments.rounds)]
        print("960 arrays")
        show("ckpt inspect tree", [ours for ours, _ in pairs])
        show("Orbax's metadata call", [theirs for _, theirs in pairs])
        print(f"  median ratio {statistics.median(theirs / ours for ours, theirs in pairs):.1f}")
        print("100,000 arrays")
        for options in ((), ("--flat",), ("--json",)):
            times = [inspecting(many, *options) for _ in range(max(1, arguments.rounds // 2))]
            show(" ".join(("ckpt inspect tree", *options)), times)


if __name__ == "__main__":
    main()
