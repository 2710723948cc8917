"""Manifests: written, read, and checked against what a checkpoint holds."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod
from typing import ClassVar
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command_line import run
from support.digests import array_digest
from support.golden_data import golden_checkpoint
from support.internals import (
    Bytes,
    OrbaxWriter,
    SafetensorsWriter,
    Selection,
    execute,
    parse_compression,
    plan_tree,
)
from support.locations import GOLDEN
from support.stored_trees import write

import ckpttools
from ckpttools import (
    DTYPES,
    DestinationExistsError,
    FormatError,
    Metadata,
    Resources,
    StackLayers,
    Tree,
    UsageError,
)
from ckpttools.digest.digest import ALGORITHMS, DEFAULT_ALGORITHM, Digest, block_count
from ckpttools.digest.hashing import hash_tree
from ckpttools.digest.manifest import Manifest, read_manifest
from ckpttools.plan import plan as planning
from ckpttools.stores.local.files import write_atomically
from ckpttools.testing.models import LlamaSizes, write_llama
from ckpttools.testing.strategies import dtypes, noise, shapes, stored, trees

PLENTY = {"memory": 512 << 20, "jobs": 2}


@settings(max_examples=30)
@given(trees(most_leaves=6), st.sampled_from(sorted(ALGORITHMS)), st.booleans())
def test_manifest_round_trips_through_file(tmp_path_factory, tree, algorithm, layers):
    built = hash_tree(tree, Selection(layers=layers), algorithm=algorithm, **PLENTY)
    path = tmp_path_factory.mktemp("manifest") / "file.json"
    built.write(path)
    assert read_manifest(path) == built
    assert [item.name for item in path.parent.iterdir()] == ["file.json"]


@pytest.fixture
def written(tmp_path):
    """The manifest of a checkpoint, and its document."""
    path = tmp_path / "manifest.json"
    run("hash", golden_checkpoint(scan=True), "--manifest", path)
    return path, json.loads(path.read_text())


def test_manifest_has_the_documented_fields(written):
    path, document = written
    arrays = document.pop("arrays")
    assert {key: document[key] for key in document if key not in ("digest", "parameters")} == {
        "format": "ckpttools-manifest",
        "version": 1,
        "algorithm": "xxh3-128",
        "block_bytes": 262144,
        "per_layer": True,
        "pattern": "*",
        "only_parameters": False,
        "names": "stored",
        "texts": {},
        "nodes": {
            "layout": "linen",
            "is_stacked": True,
            "has_state": False,
            "is_read": True,
            "kinds": {"step": "Python number", "opt_state": "empty node (Dict)"},
        },
    }
    assert len(arrays) == 40
    assert arrays["decoder/layers_3/mlp/wi_0/kernel"].keys() == {"dtype", "shape", "digest", "blocks"}
    assert len([line for line in path.read_text().splitlines() if '"blocks"' in line]) == 40


def test_other_layouts_match_the_manifest(written):
    path, _ = written
    text = run("verify", golden_checkpoint(scan=False), "--manifest", path)
    assert text.endswith(f"equal to {path}: 40 arrays, 362 kB\n")


def edited(path, change):
    """The manifest with a change, its digests made to fit it."""
    manifest = read_manifest(path)
    arrays = dict(manifest.arrays)
    change(arrays)
    path.with_name("edited.json").unlink(missing_ok=True)
    type(manifest)(manifest.algorithm, manifest.selection, arrays).write(path.with_name("edited.json"))
    return path.with_name("edited.json")


def test_missing_and_extra_arrays_are_reported(written):
    path, _ = written

    def rename(arrays):
        arrays["decoder/more"] = arrays.pop("decoder/decoder_norm/scale")

    text = run("verify", golden_checkpoint(scan=True), "--manifest", edited(path, rename), code=1)
    assert ": 1 array missing, 1 array too many\n\n" in text
    assert text.endswith("\ndecoder/more: missing\ndecoder/decoder_norm/scale: extra\n")


def test_other_shapes_and_dtypes_are_reported(tmp_path):
    for name, shape, dtype in (("a", (2, 3), "float32"), ("b", (3, 2), "float32"), ("c", (2, 3), "int32")):
        tree = Tree({("x",): stored(noise((6,), DTYPES[dtype]).reshape(shape), DTYPES[dtype])})
        write(tree, SafetensorsWriter(), tmp_path / name)
    run("hash", tmp_path / "a", "--manifest", tmp_path / "a.json")
    assert "x: float32[3,2] instead of float32[2,3]" in run(
        "verify", tmp_path / "b", "--manifest", tmp_path / "a.json", code=1
    )
    assert "x: int32[2,3] instead of float32[2,3]" in run(
        "verify", tmp_path / "c", "--manifest", tmp_path / "a.json", code=1
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_flipped_bit_is_located_by_its_block(algorithm, tmp_path):
    """The fourth block of an array of rows of 3000 bytes."""
    values = noise((400, 1500), DTYPES["bfloat16"])
    write(Tree({("x",): stored(values, DTYPES["bfloat16"])}), SafetensorsWriter(), tmp_path / "st")
    manifest = tmp_path / "manifest.json"
    run("hash", tmp_path / "st", "--manifest", manifest, "--algorithm", algorithm)
    file = tmp_path / "st" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[data.index(values.tobytes()) + 3 * 262144 + 5] ^= 64
    file.write_bytes(data)
    text = run("verify", tmp_path / "st", "--manifest", manifest, code=1)
    assert text.endswith("\nx: different values, the first between [262, 216] and [349, 787]\n")
    first = np.ravel_multi_index((262, 216), values.shape), np.ravel_multi_index((349, 787), values.shape)
    assert first == (3 * 131072, 4 * 131072 - 1)
    (result,) = json.loads(run("verify", tmp_path / "st", "--manifest", manifest, "--json", code=1))[
        "differences"
    ]
    damaged = np.frombuffer(data[-values.nbytes :], np.uint16).reshape(values.shape)
    assert result["got"] == array_digest(damaged, "bfloat16", algorithm)
    assert result["expected"] == array_digest(values, "bfloat16", algorithm)


def test_verify_checks_the_hashed_selection(tmp_path):
    options = ("--whole", "--filter", "*/wi_?/*", "--algorithm", "sha256")
    manifest = tmp_path / "manifest.json"
    run("hash", golden_checkpoint(scan=True), "--manifest", manifest, *options)
    assert ": 2 arrays, 131 kB" in run("verify", golden_checkpoint(scan=True), "--manifest", manifest)
    assert "manifest determines which" in run(
        "verify", golden_checkpoint(scan=True), "--manifest", manifest, "--whole", code=2
    )


def test_existing_manifest_is_not_overwritten(written):
    path, _ = written
    before = path.read_bytes()
    assert "exists" in run("hash", golden_checkpoint(scan=False), "--manifest", path, code=2)
    assert path.read_bytes() == before
    run("hash", golden_checkpoint(scan=True), "--manifest", path.parent / "no" / "directory", code=5)


def test_foreign_unfinished_file_and_links_are_kept(tmp_path):
    """Somebody's file with the name of an unfinished manifest, and a link that leads nowhere."""
    mine, link = tmp_path / "m.json.partial", tmp_path / "link.json"
    mine.write_text("mine")
    link.symlink_to(tmp_path / "nowhere")
    run("hash", golden_checkpoint(scan=True), "--manifest", tmp_path / "m.json")
    assert mine.read_text() == "mine"
    assert {item.name for item in tmp_path.iterdir()} == {"m.json", "m.json.partial", "link.json"}
    assert "exists" in run("hash", golden_checkpoint(scan=True), "--manifest", link, code=2)
    assert link.is_symlink()


def test_inconsistent_manifest_is_damaged(written, tmp_path):
    path, _ = written
    for key, value in (("pattern", "*/wo/*"), ("algorithm", "md5")):
        document = {**json.loads(path.read_text()), key: value}
        (tmp_path / "m.json").write_text(json.dumps(document))
        text = run("verify", golden_checkpoint(scan=True), "--manifest", tmp_path / "m.json", code=3)
        assert str(tmp_path / "m.json") in text


def test_cast_is_refused_for_a_manifest(written):
    path, _ = written
    text = run("verify", golden_checkpoint(scan=True), "--manifest", path, "--cast", code=2)
    assert "--cast is for --against" in text


# Conversions


class Counted(Bytes):
    """Bytes that note how many of them were read for arrays: samples, which tell files apart, are none."""

    counts: ClassVar[list[int]] = []

    def read_into(self, offset, out):
        Counted.counts.append(memoryview(out).nbytes)
        super().read_into(offset, out)

    def read(self, offset, nbytes):
        return bytes(self.data[offset : offset + nbytes])


def decoder(layers: int = 4) -> Tree:
    """Layers of 1.5 MB, one by one, in sources that count."""
    dtype, leaves = DTYPES["bfloat16"], {}
    for layer in range(layers):
        key = ("params", "params", "decoder", f"layers_{layer}")
        for name, shape in (("wi", (512, 1536)), ("scale", (512,))):
            array = stored(noise(shape, dtype, layer), dtype, f"{layer}{name}")
            leaves[*key, name] = replace(array, source=Counted(array.source.path, array.source.data))
    return Tree(leaves, Metadata(step=0))


WRITERS = {
    "orbax": OrbaxWriter(),
    "orbax-zstd": OrbaxWriter(compression=parse_compression("zstd:1")),
    "safetensors": SafetensorsWriter(),
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("task_bytes", [64 << 20, 1 << 20])
def test_convert_writes_manifest_without_rereading(tmp_path, name, stacked, task_bytes):
    tree = decoder()
    tree = StackLayers()(tree).tree if stacked else tree
    with patch.object(planning, "LARGEST_TASK", task_bytes):
        conversion = plan_tree(tree, WRITERS[name], Resources(jobs=3))
    Counted.counts.clear()
    conversion.run(tmp_path / "made", manifest=tmp_path / "m.json")
    assert sum(Counted.counts) == tree.nbytes
    assert read_manifest(tmp_path / "m.json") == hash_tree(tree, **PLENTY)
    run("verify", tmp_path / "made", "--manifest", tmp_path / "m.json")


def test_manifest_includes_tasks_of_an_earlier_run(tmp_path):
    tree = decoder()
    conversion = plan_tree(tree, OrbaxWriter(), Resources(jobs=1))
    calls = []

    def stop(path, region, values):
        calls.append(path)
        if len(calls) > len(tree.arrays) // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(conversion.plan, conversion.writer, tmp_path / "made", watch=stop)
    receipt = conversion.run(tmp_path / "made", manifest=tmp_path / "m.json")
    assert receipt.tasks_resumed == len(tree.arrays) // 2
    assert read_manifest(tmp_path / "m.json") == hash_tree(tree, **PLENTY)


def test_manifest_includes_referenced_arrays(tmp_path):
    dtype = DTYPES["float32"]
    kernel, moment = (stored(noise((600, 600), dtype, seed), dtype, str(seed)) for seed in (0, 1))
    leaves = {("params", "params", "w"): kernel, ("opt_state", "mu", "w"): moment}
    write(Tree(leaves, Metadata(step=0)), OrbaxWriter(), tmp_path / "training")
    run("strip-optimizer", tmp_path / "training", tmp_path / "made", "--manifest", tmp_path / "m.json")
    built = read_manifest(tmp_path / "m.json")
    assert built.arrays["w"].digest == array_digest(kernel.read(), "float32")
    run("verify", tmp_path / "made", "--manifest", tmp_path / "m.json")
    run("verify", tmp_path / "made", "--against", tmp_path / "training", "--parameters")


CONVERT = """
import sys
from ckpttools.api.prepared import Resources
from ckpttools.api.hf_to_maxtext import plan_to_maxtext
source, destination, memory, manifest = sys.argv[1:]
conversion = plan_to_maxtext(source, resources=Resources(memory=int(memory), jobs=2))
print(conversion.run(destination, manifest=manifest).peak_bytes)
"""


@pytest.mark.parametrize("memory", [128 << 20, 256 << 20])
def test_convert_with_manifest_stays_within_memory_limit(tmp_path, memory):
    sizes = LlamaSizes(layers=2, hidden=2048, mlp=8192, heads=16, kv_heads=4, head_dim=128, vocab=32768)
    write_llama(tmp_path / "hf", sizes, sparse=True)
    locations = (tmp_path / "hf", tmp_path / "made", memory, tmp_path / "m.json")
    command = [sys.executable, "-c", CONVERT, *map(str, locations)]
    peak = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert int(peak) <= memory
    run("verify", tmp_path / "made", "--manifest", tmp_path / "m.json")


def test_convert_replaces_manifest_only_with_overwrite(written, tmp_path):
    path, _ = written
    before = path.read_bytes()
    command = ("convert", "to-zarr3", golden_checkpoint(scan=True), tmp_path / "made", "--manifest", path)
    assert "exists" in run(*command, code=2)
    assert not (tmp_path / "made").exists()
    other = tmp_path / "other.json"
    run("hash", GOLDEN / "llama3.1" / "hf", "--manifest", other)
    path.write_bytes(other.read_bytes())
    run(*command, "--overwrite")
    assert path.read_bytes() == before


def test_convert_refuses_manifest_inside_destination(tmp_path):
    conversion = plan_tree(decoder(1), OrbaxWriter(), Resources(jobs=1))
    for location in (tmp_path / "made", tmp_path / "made" / "m.json", tmp_path / "made.partial"):
        with pytest.raises(UsageError, match=r"(is|lies in) .*DST"):
            conversion.run(tmp_path / "made", manifest=location)
    assert list(tmp_path.iterdir()) == []


def test_manifest_in_maxtext_names_matches_both_sides(tmp_path):
    hugging_face, manifest = GOLDEN / "llama3.1" / "hf", tmp_path / "m.json"
    run("hash", hugging_face, "--as", "maxtext", "--manifest", manifest)
    run("verify", hugging_face, "--manifest", manifest)
    run("verify", golden_checkpoint(scan=True), "--manifest", manifest)
    assert "--whole" in run("hash", hugging_face, "--as", "maxtext", "--whole", code=2)


DAMAGES = {
    "names of another kind": lambda document: document | {"names": "other"},
    "not json": lambda document: "{",
    "too deep": lambda document: "[" * 200_000,
    "no object": lambda document: "[]",
    "another format": lambda document: document | {"format": "other"},
    "a later version": lambda document: document | {"version": 2},
    "no version": lambda document: {key: document[key] for key in document if key != "version"},
    "other blocks": lambda document: document | {"block_bytes": 4096},
    "an unknown algorithm": lambda document: document | {"algorithm": "md5"},
    "no algorithm": lambda document: {key: document[key] for key in document if key != "algorithm"},
    "an algorithm that is no name": lambda document: document | {"algorithm": ["sha256"]},
    "no arrays": lambda document: {key: document[key] for key in document if key != "arrays"},
    "arrays that are a list": lambda document: document | {"arrays": []},
    "an array that is none": lambda document: document | {"arrays": document["arrays"] | {"x": 1}},
    "an array left out": lambda document: document | {"arrays": dict([*document["arrays"].items()][1:])},
    "another digest": lambda document: document | {"digest": "0" * 32},
    "another digest of the parameters": lambda document: document | {"parameters": "0" * 32},
    "a pattern that is none": lambda document: document | {"pattern": 1},
}
ENTRY = {
    "shape": {"shape": [63]},
    "length": {"shape": ["64"]},
    "dtype": {"dtype": "float32"},
    "digest": {"digest": "0" * 32},
    "blocks": {"blocks": "0" * 32},
    "digits": {"blocks": "xyz"},
}
for key, change in ENTRY.items():
    DAMAGES[f"another {key} of an array"] = lambda document, change=change: (
        document | {"arrays": {name: item | change for name, item in [*document["arrays"].items()][:1]}}
    )


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_manifest_is_refused(written, damage):
    path, document = written
    changed = DAMAGES[damage](document)
    path.write_text(changed if isinstance(changed, str) else json.dumps(changed))
    text = run("verify", golden_checkpoint(scan=True), "--manifest", path, code=3)
    assert "manifest" in text or "algorithm" in text


@given(count=st.integers(0, 4), shape=shapes(limit=1 << 18), dtype=dtypes())
def test_manifest_with_another_number_of_blocks_is_refused(tmp_path_factory, count, shape, dtype):
    """Its digests agree with each other, as in a manifest that a program changed."""
    path = tmp_path_factory.mktemp("manifest") / "m.json"
    digest = Digest.of(DEFAULT_ALGORITHM, dtype.name, shape, bytes(16 * count))
    Manifest(DEFAULT_ALGORITHM, Selection(), {"a": digest}).write(path)
    if count == block_count(prod(shape) * dtype.itemsize):
        assert read_manifest(path).arrays == {"a": digest}
    else:
        with pytest.raises(FormatError, match="the manifest is damaged"):
            read_manifest(path)


class TestKilledManifestWriter:
    def built(self):
        return hash_tree(ckpttools.open(GOLDEN / "llama3.1" / "hf"), **PLENTY)

    def unfinished(self, path):
        name = f".ckpttools-unfinished-{zlib.crc32(path.name.encode()):08x}-0123456789abcdef"
        return path.with_name(name)

    def test_leftovers_are_removed_by_the_next_write(self, tmp_path):
        built, path = self.built(), tmp_path / "m.json"
        self.unfinished(path).write_text("{")
        names = (".ckpttools-unfinished-0123", ".ckpttools-unfinished-00000000-0123456789abcdef")
        others = [tmp_path / name for name in names]
        for other in others:
            other.write_text("somebody else's")
        built.write(path)
        assert {item.name for item in tmp_path.iterdir()} == {"m.json", *(item.name for item in others)}
        assert read_manifest(path) == built

    def test_active_writer_keeps_its_temporary_file(self, tmp_path):
        path = tmp_path / "m.json"
        growing = self.unfinished(path)
        growing.write_text("{")
        with growing.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self.built().write(path)
        assert growing.exists() and path.exists()

    def test_concurrent_writers_of_one_manifest_all_succeed(self, tmp_path):
        def writing(content):
            for _ in range(50):
                write_atomically(tmp_path / ("n" * 250), content)

        contents = [bytes([number]) * 1000 for number in range(4)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(writing, contents))
        (only,) = tmp_path.iterdir()
        assert only.read_bytes() in contents

    def test_manifest_created_meanwhile_is_not_replaced(self, tmp_path):
        built, path = self.built(), tmp_path / "m.json"
        path.write_text("precious")
        for overwrite in (False, True):
            with pytest.raises(DestinationExistsError):
                built.write(path, overwrite=overwrite)
        assert path.read_text() == "precious" and len(list(tmp_path.iterdir())) == 1
