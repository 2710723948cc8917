"""`ckpt assemble --list`: seconds for each 100,000 keys that hosts have, and memory.

    python benchmarks/hosts.py [--hosts 256] [--arrays 1000] [DIRECTORY]

Two slices of hosts, each of which has a chunk of every array and the array's metadata, in its own index.
Target: under 3 s for 100,000 keys.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ckpttools.array.tree import Tree
from ckpttools.formats.orbax.metadata import checkpoint_document, tree_document
from ckpttools.formats.orbax.ocdbt import Extent
from ckpttools.formats.orbax.ocdbt_files import encode
from ckpttools.testing.strategies import stored

import numpy as np  # isort: skip

from ckpttools.core.dtypes import DTYPES  # isort: skip


def make(location: Path, hosts: int, arrays: int) -> int:
    """Writes the hosts' directories; returns the number of keys in them."""
    names = [f"params.params.decoder.layers_{n // 10}.part_{n % 10}.kernel" for n in range(arrays)]
    leaf = stored(np.zeros((1,), np.uint16), DTYPES["bfloat16"], "w")
    tree = json.dumps(tree_document(Tree({tuple(name.split(".")): leaf for name in names}))).encode()
    column = hosts // 2
    document = json.dumps(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [column, 1024],
            "data_type": "bfloat16",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, 1024]}},
            "chunk_key_encoding": {"name": "default"},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
            "fill_value": 0.0,
        }
    ).encode()
    step = json.dumps(checkpoint_document("state", {})).encode()
    for host in range(hosts):
        item = location / f"host{host:03}" / "7" / "state"
        (item / f"ocdbt.process_{host}" / "d").mkdir(parents=True)
        (item.parent / "process_metadata").mkdir()
        (item.parent / "_CHECKPOINT_METADATA").write_bytes(step)
        (item / "_METADATA").write_bytes(tree)
        data = f"ocdbt.process_{host}/d/data"
        with (item / data).open("wb") as file:
            file.truncate(2048 * arrays)
        chunk = f"c/{host % column}/0"
        entries = [(f"{name}/{chunk}".encode(), Extent(data, 2048 * n, 2048)) for n, name in enumerate(names)]
        entries += [(f"{name}/zarr.json".encode(), document) for name in names]
        index = encode(entries, "d/index")
        (item / "d").mkdir()
        (item / "d" / "index").write_bytes(index.nodes)
        (item / "manifest.ocdbt").write_bytes(index.manifest)
    return 2 * hosts * arrays


def _cpu_seconds() -> float:
    """What ended processes have taken, which other work on the machine does not change."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?")
    parser.add_argument("--hosts", type=int, default=256)
    parser.add_argument("--arrays", type=int, default=1000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.directory) as name:
        location = Path(name)
        keys = make(location, asked.hosts, asked.arrays)
        for what, kept in (
            ("all hosts", asked.hosts),
            ("all but one", asked.hosts - 1),
            ("one slice", asked.hosts // 2),
        ):
            named = [str(item) for item in sorted(location.iterdir())[:kept]]
            command = [sys.executable, "-m", "ckpttools", "assemble", *named, "--list", "--json"]
            began, before = time.perf_counter(), _cpu_seconds()
            done = subprocess.run(command, capture_output=True, check=True)
            seconds, cpu = time.perf_counter() - began, _cpu_seconds() - before
            (save,) = json.loads(done.stdout)["saves"]
            missing = sum(len(item["cells"]) for item in save["missing"])
            share = keys * kept / asked.hosts
            rates = [f"{item / share * 1e5:.2f} s" for item in (seconds, cpu)]
            print(f"{what}: {share:,.0f} keys, {missing:,} missing: {seconds:.1f} s")
            print(f"  for 100,000 keys {rates[0]}, of a processor {rates[1]}")
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        print(f"peak memory {peak:.0f} MiB")


if __name__ == "__main__":
    main()
