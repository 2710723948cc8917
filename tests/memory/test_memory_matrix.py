"""`--memory` is a promise of the whole process: it holds, or the command refuses with a number that holds.

Real processes, each telling its peak (`VmHWM`) when it ends. CKPTTOOLS_MEMORY=all takes every command at
every budget on 100,000 tensors, which lasts for an hour on two cores.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
from support.internals import Constant, DataFile, Layout, Placement, build
from support.measured import measured, within
from support.orbax_items import LITTLE, write_item, zarr2, zarr3

import ckpttools
from ckpttools import DTYPES, ToMaxText, Tree, plan_to_maxtext, save
from ckpttools.testing.models import LlamaSizes, write_llama

MIB = 1 << 20
EVERYTHING = os.environ.get("CKPTTOOLS_MEMORY") == "all"


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


@dataclass(frozen=True)
class Sources:
    """Checkpoints, made when first asked for: a file of so many tensors, models of a tenth as many."""

    folder: Path
    count: int

    @cached_property
    def file(self):
        return write_tiny(self.folder / "model.safetensors", self.count)

    @cached_property
    def rules(self):
        path = self.folder / "rules.toml"
        path.write_text('[[rules]]\nfrom = "model.{...}"\nto = "other.{...}"\n')
        return path

    @cached_property
    def hf(self):
        sizes = LlamaSizes(
            layers=self.count // 90, hidden=8, mlp=8, heads=2, kv_heads=1, head_dim=4, vocab=16, tied=False
        )
        return write_llama(self.folder / "hf", sizes).parent

    @cached_property
    def scanned(self):
        plan_to_maxtext(self.hf).run(self.folder / "scanned")
        return self.folder / "scanned"

    @cached_property
    def unscanned(self):
        plan_to_maxtext(self.hf, ToMaxText(scan=False)).run(self.folder / "unscanned")
        return self.folder / "unscanned"

    @cached_property
    def training(self):
        """A third of the tensors are parameters, the others their moments."""
        fewer = Sources(self.folder / "fewer", self.count // 3)
        leaves = dict(ckpttools.open(fewer.unscanned).leaves)
        for moment in ("mu", "nu"):
            leaves |= {
                ("opt_state", moment, *path[1:]): leaf for path, leaf in leaves.items() if path[0] == "params"
            }
        leaves["opt_state", "count"] = leaves["step",] = Constant((), DTYPES["int32"], bytes(4))
        save(Tree(leaves), self.folder / "training", "orbax")
        return self.folder / "training"


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    return Sources(tmp_path_factory.mktemp("many"), 100_000)


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    return Sources(tmp_path_factory.mktemp("several"), 2_000)


# Every way to read and to write, by name; `$name` is a source, DIR/ an empty directory.
COMMANDS = {
    "hash": "hash $file",
    "manifest": "hash $file --manifest DIR/m.json",
    "diff": "diff $file $file",
    "verify": "verify $file --against $file",
    "stats": "inspect stats $file",
    "report": "inspect report $file -o DIR/r.html",
    "safetensors": "convert to-safetensors $file DIR/st",
    "orbax": "convert to-orbax $file DIR/orbax",
    "zstd": "convert to-orbax $file DIR/zstd --compression zstd",
    "files": "convert to-orbax $file DIR/files --no-ocdbt",
    "zarr3": "convert to-zarr3 $file DIR/zarr3",
    "hashed": "convert to-safetensors $file DIR/st --manifest DIR/st.json",
    "cast": "cast $file DIR/cast --dtype float32",
    "select": "select $file DIR/select --drop *.0.gate_proj.weight",
    "remap": "remap $file DIR/remap --map $rules",
    "hf-to-maxtext": "convert hf-to-maxtext $hf DIR/maxtext",
    "unscanned": "convert hf-to-maxtext $hf DIR/unscanned --no-scan",
    "maxtext-to-hf": "convert maxtext-to-hf $scanned DIR/hf --like $hf",
    "unstack": "unstack $scanned DIR/unstacked",
    "stack": "stack $unscanned DIR/stacked",
    "strip-optimizer": "strip-optimizer $training DIR/parameters",
}
# These take no `--memory`.
LOOKING = ("inspect tree $file", "inspect tree $unscanned", "inspect chunks $unscanned")
NAMES = tuple(COMMANDS)


def spelled_out(command, sources, folder):
    """The words of a command."""
    words = command.replace("DIR", str(folder)).split()
    return [getattr(sources, word[1:]) if word.startswith("$") else word for word in words]


QUICK = ("hash", "diff", "stats", "orbax")


@pytest.mark.parametrize("mib", [64, 128])
def test_refusal_stays_within_the_memory_limit(many, tmp_path, mib):
    for name in NAMES if EVERYTHING else QUICK:
        folder = tmp_path / name
        folder.mkdir()
        ended = within(*spelled_out(COMMANDS[name], many, folder), mib=mib)
        assert ended.peak <= mib * MIB, name
        if _may_fit(name, ended):
            continue
        assert ended.code == 4, (name, ended.declared)
        assert mib < ended.hint <= 900, name
        assert not list(folder.iterdir())


def _may_fit(name, ended):
    """Whether a command is done in a budget that is too small for the file: models have a tenth as many."""
    return ended.code == 0 and "$file" not in COMMANDS[name]


@pytest.mark.parametrize("name", NAMES if EVERYTHING else ("hash", "diff", "orbax"))
def test_memory_named_in_refusal_is_sufficient(several, tmp_path, name):
    refused = within(*spelled_out(COMMANDS[name], several, tmp_path), mib=100)
    assert refused.peak <= 100 * MIB
    if _may_fit(name, refused):
        return
    assert refused.code == 4, refused.declared
    ended = within(*spelled_out(COMMANDS[name], several, tmp_path), mib=refused.hint)
    assert ended.code == 0, ended.declared
    assert ended.peak <= refused.hint * MIB


@pytest.mark.skipif(not EVERYTHING, reason="CKPTTOOLS_MEMORY=all")
@pytest.mark.parametrize("mib", [256, 300, 400, 512])
@pytest.mark.parametrize("name", NAMES)
def test_commands_on_many_tensors_stay_within_the_limit(many, tmp_path, name, mib):
    ended = within(*spelled_out(COMMANDS[name], many, tmp_path), mib=mib)
    assert ended.peak <= mib * MIB, ended.declared
    if ended.code:
        assert ended.code == 4, ended.declared
        again = within(*spelled_out(COMMANDS[name], many, tmp_path), mib=ended.hint)
        assert again.code == 0, again.declared
        assert again.peak <= ended.hint * MIB


@pytest.mark.skipif(not EVERYTHING, reason="CKPTTOOLS_MEMORY=all")
@pytest.mark.parametrize("command", LOOKING)
def test_read_commands_need_little_memory(many, tmp_path, command):
    ended = measured(*spelled_out(command, many, tmp_path))
    assert ended.code == 0, ended.declared
    assert ended.peak <= 512 * MIB


SIDE = 6 << 10
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


MORE_CODECS = {"crc32c": [LITTLE, {"name": "crc32c"}]}
# Of zarr v2.
COMPRESSORS = {"zlib": {"id": "zlib", "level": 1}, "bz2": {"id": "bz2", "level": 1}}


def write_giant(folder, codec):
    """An array of one chunk of 72 MiB, more than the smallest budget."""
    values = (np.arange(SIDE * SIDE, dtype=np.uint32) // 64).astype(np.uint16).reshape(SIDE, SIDE)
    if codec in COMPRESSORS:
        created = zarr2(COMPRESSORS[codec], [SIDE, SIDE])
    else:
        created = zarr3((CODECS | MORE_CODECS)[codec], [SIDE, SIDE])
    return write_item(folder, {("giant",): (created, values)}, use_ocdbt=False)


@pytest.mark.parametrize("codec", (*CODECS, *MORE_CODECS, *COMPRESSORS) if EVERYTHING else CODECS)
def test_giant_chunks_stay_within_the_limit_or_are_refused(tmp_path, codec):
    (tmp_path / "in").mkdir()
    source = write_giant(tmp_path / "in", codec)
    for mib in (64, 128, 512) if EVERYTHING else (64,):
        words = [("convert", "to-safetensors", source, tmp_path / f"{mib}.safetensors"), ("hash", source)]
        for command in words if EVERYTHING else words[:1]:
            ended = within(*command, mib=mib)
            assert ended.peak <= mib * MIB, (command, ended.declared)
            if ended.code:
                assert ended.code == 4, ended.declared
                # tensorstore decodes gzip and blosc with four copies of a chunk, and two chunks may be open.
                assert ended.hint <= 100 + 9 * 72
                again = within(*command, mib=ended.hint)
                assert again.code == 0, again.declared
                assert again.peak <= ended.hint * MIB, (command, ended.hint)


@dataclass
class Cut:
    """A writer of one array, cut into chunks of so many bytes."""

    chunk: int
    name: str = "cut"

    def layout(self, tree, limit):
        (path,) = tree
        return Layout({path: Placement((MIB,), 1, (self.chunk,), DataFile("data"))}, {"data": MIB})


def test_chunks_count_in_the_projected_memory():
    tree = Tree({("w",): Constant((MIB,), DTYPES["uint8"], b"\0")})
    few, lots = (build(tree, Cut(chunk), memory=1 << 30, jobs=1).projected_peak for chunk in (MIB, 16))
    # An index entry of each is held with its key, as an object and encoded.
    assert lots - few >= (MIB // 16 - 1) * 512


LIMITED = "import resource; resource.setrlimit(resource.RLIMIT_AS, ({0}, {0}));"


@pytest.mark.parametrize("limit", [100, 280, 330, 400])
def test_low_address_space_limit_is_handled(tmp_path, limit):
    """Fewer threads do the work, or the command says what it lacks; never a traceback or another code."""
    source = write_tiny(tmp_path / "model.safetensors", 50)
    commands = [("hash", source), ("convert", "to-zarr3", source, tmp_path / "out")]
    for command in commands:
        ended = within(*command, "--jobs", "16", mib=2000, limit=LIMITED.format(limit * MIB))
        assert ended.code in (0, 4), ended.declared
        assert ended.code == 4 or limit > 100
        assert "ulimit -v" in ended.declared or ended.code == 0
