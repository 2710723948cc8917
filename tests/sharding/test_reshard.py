"""`ckpt reshard` and `--chunks`: grids that suit a mesh, or that the user gives, for the same arrays."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command_line import ckpt, run, succeed, with_flags
from support.internals import Sharding, advice, keystr
from support.locations import GOLDEN, HF, TRAINED

import ckpttools
from ckpttools import ShapeError, UsageError
from ckpttools.formats.orbax.sharding import stored_shardings
from ckpttools.formats.zarr.chunking import parse_chunks
from ckpttools.sharding.mesh import mesh_chunk

MAXTEXT = GOLDEN / "llama3.1" / "maxtext_scanned"
MESH = "fsdp=4,tensor=2"


def digests(location):
    tree = ckpttools.open(location)
    return {
        keystr(path): hashlib.sha256(np.ascontiguousarray(item.read()).tobytes()).hexdigest()
        for path, item in tree.arrays.items()
    }


def grid(location):
    """Shape of an array -> shape of its chunks, by name."""
    result = json.loads(succeed("inspect", "chunks", location, "--json").stdout)["report"]["arrays"]
    return {item["path"]: (tuple(item["shape"]), tuple(item["chunk_shape"])) for item in result}


@pytest.fixture(scope="module")
def resharded(tmp_path_factory):
    location = tmp_path_factory.mktemp("resharded") / "out"
    run("reshard", MAXTEXT, location, "--mesh", MESH, "--subchunks", "4KiB")
    return location


@given(st.data())
def test_shards_consist_of_complete_chunks(data):
    shard = tuple(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4)))
    shape = tuple(length * data.draw(st.integers(1, 8)) for length in shard)
    stacked = data.draw(st.sets(st.integers(0, len(shape) - 1)))
    limit = data.draw(st.integers(1, 4096))
    chunk = mesh_chunk(shape, shard, 2, stacked, limit)
    if prod(shape) * 2 <= limit:
        assert chunk == shape
        return
    assert all(length % part == 0 for length, part in zip(shard, chunk, strict=True))
    assert prod(chunk) * 2 <= max(limit, 2)


class TestReshard:
    def test_devices_read_complete_chunks(self, resharded):
        assert digests(resharded) == digests(MAXTEXT)
        shapes = grid(resharded)
        shape, chunk = shapes["params/params/decoder/layers/mlp/wi_0/kernel"]
        assert (shape[0] // 4) % chunk[0] == 0 and (shape[2] // 2) % chunk[2] == 0
        assert prod(chunk) * 2 <= 4096
        path = ("params", "params", "decoder", "layers", "mlp", "wi_0", "kernel")
        stored = stored_shardings(ckpttools.open(resharded))[path]
        mesh = (("fsdp", 4), ("tensor", 2))
        assert stored == Sharding("NamedSharding", mesh, (("fsdp",), (), ("tensor",)))

    def test_resharded_devices_read_only_what_they_need(self, resharded):
        before, after = (
            ckpttools.chunks(location, mesh=MESH, rules="maxtext").loading
            for location in (MAXTEXT, resharded)
        )
        assert before.over_read > 3 and after.over_read < 1.05
        assert ckpttools.chunks(MAXTEXT, mesh=MESH).loading == before

    def test_reshard_gain_is_reported(self, resharded, tmp_path):
        words = (MAXTEXT, tmp_path / "out", "--mesh", MESH, "--subchunks", "4KiB")
        dry = json.loads(succeed("reshard", *words, "--dry-run", "--json").stdout)["mesh_reads"]
        declared = " ".join(ckpt("reshard", *words).output.split())
        done = ckpttools.reshard(MAXTEXT, tmp_path / "other", mesh=MESH, subchunks="4KiB")
        for name, location in (("before", MAXTEXT), ("after", tmp_path / "out")):
            loading = ckpttools.chunks(location, mesh=MESH, rules="maxtext").loading
            assert getattr(done.mesh_reads, name) == loading
            assert dry[name] == json.loads(json.dumps(asdict(loading)))
            assert f"in {loading.reads:,} reads, over-read {loading.over_read:.2f}" in declared, declared
        assert "before a device of fsdp=4,tensor=2, rules maxtext, needs" in declared

    def test_missing_gain_is_reported_before_writing(self, resharded, tmp_path):
        words = (resharded, tmp_path / "out", "--mesh", MESH, "--subchunks", "4KiB")
        assert "no gain" in ckpt("reshard", *words, "--dry-run").output
        assert "no gain" in ckpt("reshard", *words).output

    def test_increased_reads_are_reported(self, resharded, tmp_path):
        declared = " ".join(
            ckpt("reshard", resharded, tmp_path / "out", "--mesh", MESH, "--dry-run").output.split()
        )
        assert "devices will fetch more from DST than from SRC" in declared and "no gain" not in declared, (
            declared
        )

    @pytest.mark.parametrize(
        ("mesh", "how", "words"),
        [
            (MESH, {"rules": "maxtext"}, "--mesh fsdp=4,tensor=2 --rules maxtext"),
            ("4x2", {"spec": "axis-1"}, "--mesh 4x2 --rules RULES"),
        ],
    )
    def test_mesh_advice_suggests_reshard(self, mesh, how, words):
        report = ckpttools.chunks(MAXTEXT, mesh=mesh, **how)
        large = tuple(replace(array, min_read_nbytes=1 << 23) for array in report.arrays)
        declared = {item.subject: with_flags(item.command) for item in advice(replace(report, arrays=large))}
        assert declared["over-read"] == f"ckpt reshard SRC DST {words}"

    def test_processes_share_the_reshard(self, resharded, tmp_path):
        words = ("reshard", MAXTEXT, tmp_path / "out", "--mesh", MESH, "--subchunks", "4KiB")
        assert ckpt("plan", *words, "-o", tmp_path / "plan").exit_code == 0
        for number in range(2):
            declared = " ".join(run("run", tmp_path / "plan", "--part", f"{number}/2", "--publish").split())
            assert ("over-read" in declared and "no gain" not in declared) is bool(number), declared
        for name in ("d/data", "d/index", "_sharding", "_METADATA"):
            one, other = (location / "0" / "items" / name for location in (resharded, tmp_path / "out"))
            assert one.read_bytes() == other.read_bytes(), name

    def test_training_checkpoint_keeps_its_state(self, tmp_path):
        run("reshard", TRAINED, tmp_path / "out", "--mesh", "fsdp=2", "--compression", "zstd")
        assert digests(tmp_path / "out") == digests(TRAINED)

    def test_unused_rules_are_refused_or_reported(self, tmp_path):
        rules = tmp_path / "rules.toml"
        rules.write_text('[arrays]\n"*/wo/kernel" = "P(\'tensor\')"\n"*/no/such" = "P(\'fsdp\')"\n')
        words = ("reshard", MAXTEXT, tmp_path / "out", "--mesh", MESH, "--rules", rules)
        refused = ckpt(*words)
        assert refused.exit_code == 2 and "matches no array" in refused.output, refused.output
        assert "*/no/such" in refused.output and not (tmp_path / "out").exists()
        rules.write_text('axes = [["mlp", "tensor"]]\n')
        output = " ".join(run(*words).split())
        assert "8 arrays match no sharding rule" in output and "logical axes without a rule: " in output, (
            output
        )

    def test_reshard_accepts_a_rules_file(self, tmp_path):
        rules = tmp_path / "rules.toml"
        rules.write_text("[arrays]\n\"*/wo/kernel\" = \"P('tensor', None, 'fsdp')\"\n")
        words = ("--mesh", MESH, "--subchunks", "1KiB", "--rules", rules)
        run("reshard", MAXTEXT, tmp_path / "out", *words)
        shape, chunk = grid(tmp_path / "out")["params/params/decoder/layers/mlp/wo/kernel"]
        assert (shape[0] // 2) % chunk[0] == 0 and (shape[2] // 4) % chunk[2] == 0

    @pytest.mark.parametrize(
        ("words", "code", "says"),
        [
            (("--mesh", "fsdp=3"), 3, "cannot be divided evenly"),
            (("--mesh", "fsdp"), 2, "is not a mesh"),
            (("--mesh", "fsdp=2", "--rules", "nothing"), 2, "these rules do not exist"),
            (("--mesh", "fsdp=2", "--to", "zarr3"), 2, "No such option"),
            ((), 2, "Missing option '--mesh'"),
        ],
    )
    def test_invalid_reshard_options_are_refused(self, words, code, says, tmp_path):
        result = ckpt("reshard", MAXTEXT, tmp_path / "out", *words)
        assert result.exit_code == code and says in result.output, result.output
        assert not (tmp_path / "out").exists()

    def test_chunks_and_mesh_are_mutually_exclusive(self, tmp_path):
        with pytest.raises(UsageError, match="both determine how arrays are stored"):
            ckpttools.reshard(MAXTEXT, tmp_path / "out", mesh="fsdp=2", chunks="*=-")
        with pytest.raises(ShapeError, match="cannot be divided evenly"):
            ckpttools.reshard.plan(MAXTEXT, tmp_path / "out", mesh="fsdp=7")


class TestChunks:
    @pytest.mark.parametrize(
        "words",
        [
            ("convert", "hf-to-maxtext", HF),
            ("convert", "to-orbax", MAXTEXT),
            ("convert", "to-zarr3", MAXTEXT),
            ("convert", "to-orbax", MAXTEXT, "--compression", "zstd"),
            ("select", MAXTEXT, "--keep", "params"),
        ],
    )
    def test_every_chunked_format_accepts_a_grid(self, words, tmp_path):
        command = words[:2] if words[0] == "convert" else words[:1]
        source, *rest = words[len(command) :]
        declared = "*/wo/kernel=16x1x-,*decoder_norm*=7"
        run(*command, source, tmp_path / "out", *rest, "--chunks", declared)
        shapes = grid(tmp_path / "out")
        (wo,) = (item for name, item in shapes.items() if name.endswith("wo/kernel"))
        (norm,) = (item for name, item in shapes.items() if name.endswith("decoder_norm/scale"))
        assert wo == ((128, 4, 64), (16, 1, 64)) and norm == ((64,), (7,))
        run(*command, source, tmp_path / "plain", *rest)
        assert digests(tmp_path / "out") == digests(tmp_path / "plain")

    @pytest.mark.parametrize("text", ["", "*", "=4", "*=0", "*=4x", "*=-1", "*=4,*", "*=1.5", "*=x4"])
    def test_invalid_chunk_grid_is_refused(self, text):
        with pytest.raises(UsageError, match="does not set chunk shapes"):
            parse_chunks(text)

    @pytest.mark.parametrize(
        ("declared", "says"),
        [
            ("*/wo/kernel=16", "chunks have as many axes as their array"),
            ("*/nothing=16", "this pattern of chunks matches no array"),
        ],
    )
    def test_grid_without_an_array_is_refused(self, declared, says, tmp_path):
        result = ckpt("convert", "to-orbax", MAXTEXT, tmp_path / "out", "--chunks", declared)
        assert result.exit_code == 2 and says in result.output, result.output
