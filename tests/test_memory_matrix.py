"""`--memory` is a promise of the whole process: it holds, or the command refuses with a number that holds.

Real processes, each telling its peak (`VmHWM`) when it ends. CKPTTOOLS_MEMORY=all takes every command at
every budget on 100,000 tensors, which lasts for an hour on two cores.
"""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts

from ckpttools.dtypes import DTYPES
from ckpttools.formats.base import Layout
from ckpttools.formats.placement import DataFile, Placement
from ckpttools.ir.nodes import Constant
from ckpttools.ir.tree import Tree
from ckpttools.plan.plan import build

MIB = 1 << 20
EVERYTHING = os.environ.get("CKPTTOOLS_MEMORY") == "all"
RUN = """
import atexit, sys
from ckpttools.run.memory import peak_bytes
atexit.register(lambda: print("peak", peak_bytes(), file=sys.stderr))
from ckpttools.cli.main import main
main()
"""


@dataclass
class Ended:
    """How a command ended: its exit code, its peak in bytes, what it said on stderr."""

    code: int
    peak: int
    said: str

    @property
    def hint(self):
        """The number that the refusal names, in MiB."""
        return int(re.search(r"try --memory (\d+)MiB$", self.said, re.MULTILINE)[1])


def ckpt(*words, mib, limit=""):
    """Runs a command with so much memory."""
    command = [sys.executable, "-c", limit + RUN, *map(str, words), "--memory", f"{mib}MiB"]
    done = subprocess.run([*command, "--no-progress"], capture_output=True, text=True, check=False)
    said, _, peak = done.stderr.rpartition("peak ")
    assert "Traceback" not in said, said
    return Ended(done.returncode, int(peak or 0), said)


def write_tiny(path, count):
    """A safetensors file of so many tensors of four elements, with names as models have them."""
    entries = {
        f"model.layers.{k // 100}.mlp.experts.{k % 100}.gate_proj.weight": {
            "dtype": "BF16",
            "shape": [4],
            "data_offsets": [8 * k, 8 * k + 8],
        }
        for k in range(count)
    }
    header = json.dumps(entries, separators=(",", ":")).encode()
    values = np.random.default_rng(0).integers(0, 16000, 4 * count, np.uint16)
    path.write_bytes(struct.pack("<Q", len(header)) + header + values.tobytes())
    return path


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("many") / "model.safetensors", 100_000)


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("several") / "model.safetensors", 2_000)


def commands(source, folder):
    """Every way to read and to write, by name."""
    return {
        "hash": ("hash", source),
        "manifest": ("hash", source, "--manifest", folder / "m.json"),
        "diff": ("diff", source, source),
        "verify": ("verify", source, "--against", source),
        "stats": ("inspect", "stats", source),
        "report": ("inspect", "report", source, "-o", folder / "r.html"),
        "safetensors": ("convert", "to-safetensors", source, folder / "st"),
        "orbax": ("convert", "to-orbax", source, folder / "orbax"),
        "zstd": ("convert", "to-orbax", source, folder / "zstd", "--compression", "zstd"),
        "files": ("convert", "to-orbax", source, folder / "files", "--no-ocdbt"),
        "zarr3": ("convert", "to-zarr3", source, folder / "zarr3"),
        "hashed": ("convert", "to-safetensors", source, folder / "st", "--manifest", folder / "st.json"),
        "cast": ("cast", source, folder / "cast", "--dtype", "float32"),
    }


NAMES = tuple(commands(Path(), Path()))
QUICK = ("hash", "diff", "stats", "orbax")


@pytest.mark.parametrize("mib", [64, 128])
def test_a_refusal_stays_within_the_budget(many, tmp_path, mib):
    for name in NAMES if EVERYTHING else QUICK:
        ended = ckpt(*commands(many, tmp_path)[name], mib=mib)
        assert ended.code == 4, (name, ended.said)
        assert ended.peak <= mib * MIB, name
        assert mib < ended.hint <= 900, name
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", NAMES if EVERYTHING else ("hash", "diff", "orbax"))
def test_what_a_refusal_names_is_enough(several, tmp_path, name):
    refused = ckpt(*commands(several, tmp_path)[name], mib=100)
    assert refused.code == 4, refused.said
    assert refused.peak <= 100 * MIB
    ended = ckpt(*commands(several, tmp_path)[name], mib=refused.hint)
    assert ended.code == 0, ended.said
    assert ended.peak <= refused.hint * MIB


@pytest.mark.skipif(not EVERYTHING, reason="CKPTTOOLS_MEMORY=all")
@pytest.mark.parametrize("mib", [256, 300, 400, 512])
@pytest.mark.parametrize("name", NAMES)
def test_a_hundred_thousand_tensors(many, tmp_path, name, mib):
    ended = ckpt(*commands(many, tmp_path)[name], mib=mib)
    assert ended.peak <= mib * MIB, ended.said
    if ended.code:
        assert ended.code == 4, ended.said
        again = ckpt(*commands(many, tmp_path)[name], mib=ended.hint)
        assert again.code == 0, again.said
        assert again.peak <= ended.hint * MIB


SIDE = 6 << 10
LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
CODECS = {
    "none": [LITTLE],
    "zstd": [LITTLE, {"name": "zstd", "configuration": {"level": 1}}],
    "gzip": [LITTLE, {"name": "gzip", "configuration": {"level": 1}}],
    "blosc": [LITTLE, {"name": "blosc", "configuration": {"cname": "lz4", "clevel": 1}}],
    "transpose": [{"name": "transpose", "configuration": {"order": [1, 0]}}, LITTLE],
    "sharding": [
        {
            "name": "sharding_indexed",
            "configuration": {
                "chunk_shape": [SIDE // 2, SIDE],
                "codecs": [LITTLE, {"name": "zstd", "configuration": {"level": 1}}],
            },
        }
    ],
}


def write_giant(folder, codec):
    """An array of one chunk of 72 MiB, more than the smallest budget."""
    made = ts.open(
        {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": str(folder / "giant")},
            "metadata": {
                "shape": [SIDE, SIDE],
                "data_type": "uint16",
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [SIDE, SIDE]}},
                "codecs": CODECS[codec],
            },
            "create": True,
        }
    ).result()
    made[...] = (np.arange(SIDE * SIDE, dtype=np.uint32) // 64).astype(np.uint16).reshape(SIDE, SIDE)
    (folder / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    return folder


@pytest.mark.parametrize("codec", CODECS)
def test_giant_chunks(tmp_path, codec):
    (tmp_path / "in").mkdir()
    source = write_giant(tmp_path / "in", codec)
    words = [("hash", source), ("convert", "to-safetensors", source, tmp_path / "out.safetensors")]
    for command in words if EVERYTHING else words[1:]:
        for mib in (64, 128, 512) if EVERYTHING else (64,):
            ended = ckpt(*command, *(["--overwrite"] if mib > 64 and "convert" in command else []), mib=mib)
            assert ended.peak <= mib * MIB, (command, ended.said)
            if ended.code:
                assert ended.code == 4, ended.said
                # tensorstore decodes gzip and blosc with four copies of a chunk, and two chunks may be open.
                assert ended.hint <= 100 + 9 * 72
                again = ckpt(*command, mib=ended.hint)
                assert again.code == 0, again.said
                assert again.peak <= ended.hint * MIB, (command, ended.hint)


@dataclass
class Cut:
    """A writer of one array, cut into chunks of so many bytes."""

    chunk: int
    name: str = "cut"

    def layout(self, tree, most):
        (path,) = tree
        return Layout({path: Placement((MIB,), 1, (self.chunk,), DataFile("data"))}, {"data": MIB})


def test_chunks_count_in_the_projected_memory():
    tree = Tree({("w",): Constant((MIB,), DTYPES["uint8"], b"\0")})
    few, lots = (build(tree, Cut(chunk), memory=1 << 30, jobs=1).projected_peak for chunk in (MIB, 16))
    # An index entry of each is held with its key, as an object and encoded.
    assert lots - few >= (MIB // 16 - 1) * 512


LIMITED = "import resource; resource.setrlimit(resource.RLIMIT_AS, ({0}, {0}));"


@pytest.mark.parametrize("limit", [100, 280, 330, 400])
def test_a_process_that_may_have_little_memory(tmp_path, limit):
    """Fewer threads do the work, or the command says what it lacks; never a traceback or another code."""
    source = write_tiny(tmp_path / "model.safetensors", 50)
    commands = [("hash", source), ("convert", "to-zarr3", source, tmp_path / "out")]
    for command in commands:
        ended = ckpt(*command, "--jobs", "16", mib=2000, limit=LIMITED.format(limit * MIB))
        assert ended.code in (0, 4), ended.said
        assert ended.code == 4 or limit > 100
        assert "ulimit -v" in ended.said or ended.code == 0
