"""`ckpt convert to-safetensors`, and the same as a library: any checkpoint there and back."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from support.command_line import ckpt, succeed
from support.internals import OrbaxWriter, SafetensorsWriter, plan_tree
from support.locations import GOLDEN, HF

import ckpttools
from ckpttools import DTYPES, Empty, Metadata, Resources, ToMaxText, Tree, plan_to_maxtext
from ckpttools.testing.conformance import write
from ckpttools.testing.models import LlamaSizes, write_llama
from ckpttools.testing.strategies import assert_same, noise, stored

MIB = 1 << 20


def refused(code, *arguments):
    """The message of a command that must end with this exit code."""
    result = ckpt("convert", "to-safetensors", *arguments)
    assert result.exit_code == code, result.output
    return result.stderr


@pytest.fixture(scope="module", params=["scan", "no-scan"])
def orbax(request, tmp_path_factory):
    location = tmp_path_factory.mktemp("orbax") / "llama"
    plan_to_maxtext(HF, ToMaxText(scan=request.param == "scan")).run(location)
    return location


def files(location: Path):
    result = [file for file in location.rglob("*") if file.is_file()]
    return {str(file.relative_to(location)): hashlib.sha256(file.read_bytes()).hexdigest() for file in result}


class TestRoundTrips:
    @pytest.mark.parametrize("options", [(), ("--max-shard-size=40KB",), ("--separator=/",)], ids=str)
    def test_orbax_tree_is_unchanged_in_safetensors(self, orbax, tmp_path, options):
        succeed("convert", "to-safetensors", orbax, tmp_path / "st", *options)
        expected, got = ckpttools.open(orbax), ckpttools.open(tmp_path / "st")
        assert_same(got, expected)
        assert list(got) == list(expected)
        assert got.metadata.step == 0
        assert got.metadata.custom == expected.metadata.custom
        assert "scan_layers" in got.metadata.custom
        assert Empty("Dict") in [leaf for path, leaf in got.items() if path[0] == "opt_state"]

    @pytest.mark.parametrize("separator", [".", "/"])
    def test_names_are_joined_keys(self, orbax, tmp_path, separator):
        succeed("convert", "to-safetensors", orbax, tmp_path / "st", f"--separator={separator}")
        tree = ckpttools.open(orbax)
        with safe_open(tmp_path / "st" / "model.safetensors", framework="numpy") as file:
            assert set(file.keys()) == {separator.join(map(str, path)) for path in tree.arrays}
            for path, array in tree.arrays.items():
                got = file.get_tensor(separator.join(map(str, path)))
                assert got.tobytes() == array.read().tobytes()

    def test_orbax_round_trips_through_safetensors(self, orbax, tmp_path):
        plan_tree(ckpttools.open(orbax), SafetensorsWriter(40_000)).run(tmp_path / "st")
        plan_tree(ckpttools.open(tmp_path / "st"), OrbaxWriter(step=0)).run(tmp_path / "orbax")
        assert_same(ckpttools.open(tmp_path / "orbax"), ckpttools.open(orbax))
        before, after = (location / "0" / "items" / "_METADATA" for location in (orbax, tmp_path / "orbax"))
        assert json.loads(after.read_bytes()) == json.loads(before.read_bytes())

    def test_hugging_face_shards_can_be_merged_and_split(self, tmp_path):
        sharded = GOLDEN / "llama3.1" / "hf_sharded"
        succeed("convert", "to-safetensors", sharded, tmp_path / "one")
        assert set(files(tmp_path / "one")) == {"config.json", "model.safetensors"}
        succeed("convert", "to-safetensors", tmp_path / "one", tmp_path / "many", "--max-shard-size=30KB")
        assert len(files(tmp_path / "many")) > 3
        for location in ("one", "many"):
            got, expected = ckpttools.open(tmp_path / location), ckpttools.open(sharded)
            assert_same(got.with_metadata(custom={}), expected.with_metadata(custom={}))

    def test_step_of_a_run_can_be_chosen(self, tmp_path):
        for step in (3, 20):
            tree = Tree({("w", 0): stored(noise((4,), DTYPES["int32"], step), DTYPES["int32"])})
            write(tree.with_metadata(step=step), OrbaxWriter(step=step), tmp_path / f"run{step}")
        (tmp_path / "run3" / "3").rename(tmp_path / "run20" / "3")
        succeed("convert", "to-safetensors", tmp_path / "run20", tmp_path / "latest")
        succeed("convert", "to-safetensors", tmp_path / "run20", tmp_path / "third", "--step=3")
        for location, step in (("latest", 20), ("third", 3)):
            tree = ckpttools.open(tmp_path / location)
            assert tree.metadata.step == step
            assert np.array_equal(tree["w", 0].read().view("u4"), noise((4,), DTYPES["int32"], step))


class TestCommand:
    def test_command_reports_the_result_and_leaves_no_extra_files(self, orbax, tmp_path):
        output = succeed("convert", "to-safetensors", orbax, tmp_path / "st", "--no-progress").stdout
        assert output.startswith(f"{tmp_path / 'st'}: ")
        assert [location.name for location in tmp_path.iterdir()] == ["st"]
        sidecars = {"hf/config.json", "hf/ckpttools.json"}
        assert set(files(tmp_path / "st")) == {"model.safetensors", *sidecars}

    def test_cast_reports_its_loss(self, orbax, tmp_path):
        result = succeed("convert", "to-safetensors", orbax, tmp_path / "st", "--dtype=fp16")
        assert "INEXACT" in result.stderr
        dtypes = {str(array.dtype) for array in ckpttools.open(tmp_path / "st").arrays.values()}
        assert dtypes == {"float16", "int64"} or dtypes == {"float16", "int32"}

    def test_dry_run_lists_the_files_and_writes_nothing(self, orbax, tmp_path):
        arguments = ("convert", "to-safetensors", orbax, tmp_path / "st", "--max-shard-size=40KB")
        output = succeed(*arguments, "--dry-run").stdout
        assert list(tmp_path.iterdir()) == []
        plan = json.loads(succeed(*arguments, "--dry-run", "--json").stdout)
        succeed(*arguments)
        sizes = {file.name: file.stat().st_size for file in (tmp_path / "st").glob("*.safetensors")}
        assert plan["files"] == sizes
        assert all(name in output for name in sizes)

    def test_existing_destination_is_refused(self, orbax, tmp_path):
        (tmp_path / "st").mkdir()
        (tmp_path / "st" / "precious").write_text("x")
        assert "precious" in refused(2, orbax, tmp_path / "st", "--overwrite")
        assert [location.name for location in tmp_path.rglob("*")] == ["st", "precious"]
        (tmp_path / "st" / "precious").unlink()
        succeed("convert", "to-safetensors", orbax, tmp_path / "st")
        assert "--overwrite" in refused(2, orbax, tmp_path / "st")
        succeed("convert", "to-safetensors", orbax, tmp_path / "st", "--overwrite")
        sidecars = {"hf/config.json", "hf/ckpttools.json"}
        assert set(files(tmp_path / "st")) == {"model.safetensors", *sidecars}

    def test_invalid_option_combinations_are_refused(self, orbax, tmp_path):
        destination = tmp_path / "st"
        assert "nothing to resume" in refused(2, orbax, destination, "--resume")
        assert "step 7 does not exist" in refused(2, orbax, destination, "--step=7")
        assert "unknown dtype" in refused(2, orbax, destination, "--dtype=float17")
        assert "is not one of" in refused(2, orbax, destination, "--separator=_")
        assert "is not a size" in refused(2, orbax, destination, "--max-shard-size=big")
        assert "does not exist" in refused(2, tmp_path / "none", destination)
        assert "does not fit into the memory" in refused(4, orbax, destination, "--memory=1MiB")
        assert list(tmp_path.iterdir()) == []

    def test_unsupported_dtypes_are_refused(self, tmp_path):
        dtype = DTYPES["float8_e3m4"]
        tree = Tree({("w", "a"): stored(noise((4, 2), dtype), dtype)}, Metadata(step=0))
        write(tree, OrbaxWriter(), tmp_path / "orbax")
        message = refused(3, tmp_path / "orbax", tmp_path / "st")
        assert "w/a: float8_e3m4" in message
        assert "--dtype bfloat16" in message
        succeed("convert", "to-safetensors", tmp_path / "orbax", tmp_path / "st", "--dtype", "bfloat16")

    def test_colliding_names_are_refused(self, tmp_path):
        dtype = DTYPES["int8"]
        leaves = {path: stored(noise((2,), dtype), dtype) for path in (("a", "b/c"), ("a/b", "c"))}
        write(Tree(leaves, Metadata(step=0)), OrbaxWriter(), tmp_path / "orbax")
        message = refused(3, tmp_path / "orbax", tmp_path / "st", "--separator=/")
        assert """["a", "b/c"] and ["a/b", "c"]: 'a/b/c'""" in message
        succeed("convert", "to-safetensors", tmp_path / "orbax", tmp_path / "st")
        assert set(ckpttools.open(tmp_path / "st")) == set(leaves)


def test_resources_do_not_change_the_files(orbax, tmp_path):
    for name, jobs, memory in (("a", 1, 128 * MIB), ("b", 4, 512 * MIB)):
        resources = Resources(memory=memory, jobs=jobs)
        plan_tree(ckpttools.open(orbax), SafetensorsWriter(40_000), resources).run(tmp_path / name)
    assert files(tmp_path / "a") == files(tmp_path / "b")


CONVERT = """
import sys
from ckpttools.cli.main import main
main(sys.argv[1:])
"""


def test_conversion_stays_within_the_memory_limit(tmp_path):
    sizes = LlamaSizes(layers=2, hidden=2048, mlp=16384, heads=16, kv_heads=4, head_dim=128, vocab=8192)
    write_llama(tmp_path / "hf", sizes, sparse=True)
    words = ("to-safetensors", tmp_path / "hf", tmp_path / "st", "--memory=128MiB", "--json", "--no-progress")
    command = [sys.executable, "-c", CONVERT, "convert", *map(str, words)]
    receipt = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert receipt["bytes_out"] > 256 * MIB
    assert receipt["peak_bytes"] <= 128 * MIB


def test_safetensors_package_loads_the_output_into_jax(tmp_path):
    from safetensors.flax import load_file

    # Its loader knows no float8 (safetensors 0.8).
    dtypes = [DTYPES[name] for name in ("bfloat16", "float16", "float32", "int32", "bool")]
    tree = Tree({("w", dtype.name): stored(noise((5, 3), dtype), dtype) for dtype in dtypes})
    write(tree, SafetensorsWriter(), tmp_path / "out")
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    for dtype in dtypes:
        got = np.asarray(loaded[f"w.{dtype.name}"])
        assert got.dtype == dtype.numpy
        assert got.tobytes() == tree.arrays["w", dtype.name].read().tobytes()
