"""What is written loads through Orbax itself: every public loader, with and without a target, and sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.golden_data import (
    all_described,
    arrays_by_tensorstore,
    convert,
    described,
    golden_arrays,
    golden_leaves,
    leaves_by_package,
    opened_by_tensorstore,
)
from support.internals import Constant, OrbaxWriter, build, execute
from support.locations import GOLDEN
from support.orbax_loads import EVERY_CASE, LOADERS, METADATA, SHARDED, some_cases
from support.scripts import answers

import ckpttools
from ckpttools import DTYPES, Empty, Metadata, Resources, Text, ToMaxText, Tree, plan_to_maxtext
from ckpttools.formats.zarr import chunking

# Name -> family, scanned, cut into many chunks.
CHECKPOINTS = {
    "scanned-chunks": ("llama3.1", True, True),
    "scanned": ("llama3.1", True, False),
    "unscanned": ("llama3.1", False, False),
    "unscanned-chunks": ("llama3.1", False, True),
    "biases-tied": ("qwen2.5-tied", True, True),
}
# What a target's regions meet is most various in stacked leaves of ragged chunks.
CASES = {name: some_cases(number) for number, name in enumerate(CHECKPOINTS)} | {"scanned-chunks": EVERY_CASE}
EVERY = "every-leaf"


def constant(dtype: str, number: float, *shape: int) -> Constant:
    return Constant(shape, DTYPES[dtype], np.array(number).astype(DTYPES[dtype].numpy).tobytes())


EVERY_LEAF = Tree(
    {
        **{("dtypes", name): constant(name, 1, 3, 2) for name, dtype in DTYPES.items() if dtype.zarr3},
        ("empty", "none"): Empty("None"),
        ("empty", "dict"): Empty("Dict"),
        ("empty", "list"): Empty("List"),
        ("empty", "tuple"): Empty("Tuple"),
        ("list", 0): constant("float32", 2),
        ("list", 1, "nested"): constant("int32", 7, 5),
        ("list", 2): Empty("None"),
        ("number",): constant("float64", 1.5),
        ("yes",): constant("bool", 1),
        ("text",): Text('é / "quoted"\n'),
    },
    Metadata(step=0, custom={"a": {"b": [1, None, "é"]}}, scalars=frozenset({("number",), ("yes",)})),
)


def spelled_out(tree: Any) -> Any:
    """What Orbax gives without a target, as the script spells it; numbers come back as Python's."""
    if isinstance(tree, dict):
        return {key: spelled_out(value) for key, value in tree.items()} | (
            {"number": 1.5, "yes": True} if "number" in tree else {}
        )
    if isinstance(tree, list | tuple):
        return [spelled_out(value) for value in tree]
    return described(tree.read()) if isinstance(tree, Constant) else tree


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All checkpoints: name -> run directory."""
    return {name: built(tmp_path_factory.mktemp(name) / "run", *how) for name, how in CHECKPOINTS.items()}


def built(run: Path, family: str, scan: bool, many_chunks: bool) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        if many_chunks:
            # Matrices of 16 KiB become 6 chunks, those of 8 KiB 3: no axis of theirs is so divisible.
            patch.setattr(chunking, "SMALLEST", 6 << 10)
            patch.setattr(chunking, "LARGEST", 3000)
            # Not from what was converted before, with chunks as they always are.
            plan_to_maxtext(GOLDEN / family / "hf", ToMaxText(scan=scan), Resources(jobs=2)).run(run)
        else:
            convert(run, family, scan=scan)
    return run


@pytest.fixture(scope="module")
def every_leaf(tmp_path_factory):
    """The run directory of a checkpoint with every kind of leaf."""
    run = tmp_path_factory.mktemp("every-leaf") / "run"
    writer = OrbaxWriter()
    execute(build(EVERY_LEAF, writer, memory=1 << 30, jobs=1), writer, run)
    return run


@pytest.fixture(scope="module")
def results(runs, every_leaf, tmp_path_factory):
    """What became of every case: name -> case -> problem. One process loads everything."""
    jobs = [
        (name, str(runs[name]), golden_leaves(*how[:2]), CASES[name]) for name, how in CHECKPOINTS.items()
    ]
    jobs.append((EVERY, str(every_leaf), spelled_out(EVERY_LEAF.nested()), LOADERS))
    return answers("orbax_loader_script", jobs, tmp_path_factory.mktemp("results"))


@pytest.mark.parametrize(("checkpoint", "case"), [(name, case) for name in CASES for case in CASES[name]])
def test_orbax_loads_every_checkpoint(results, checkpoint, case):
    assert results[checkpoint][case] == "", results[checkpoint][case]


@pytest.mark.parametrize("loader", LOADERS)
def test_orbax_loads_all_leaf_kinds(results, loader):
    assert results[EVERY][loader] == "", results[EVERY][loader]


@pytest.mark.parametrize("number", range(5))
def test_every_checkpoint_has_every_loader_and_target(number):
    chosen = [case.rpartition("-") for case in some_cases(number)]
    assert {loader for loader, _, _ in chosen} >= {*LOADERS, "maxtext_parameters"}
    assert {target for _, _, target in chosen} >= {"none", "unsharded", *SHARDED, *METADATA}
    assert {*some_cases(number)} <= {*EVERY_CASE}


class TestAllLeafKinds:
    """Every dtype that zarr has, numbers, text, empty leaves, lists: also for readers that are not Orbax."""

    def test_tensorstore_reads_all_leaf_kinds(self, every_leaf):
        expected = {
            "/".join(map(str, path)): described(array.read()) for path, array in EVERY_LEAF.arrays.items()
        }
        assert all_described(arrays_by_tensorstore(every_leaf / "0" / "items")) == expected

    def test_package_reads_all_leaf_kinds(self, every_leaf):
        tree = ckpttools.open(every_leaf)
        assert list(tree) == list(EVERY_LEAF)
        assert tree.metadata.scalars == EVERY_LEAF.metadata.scalars
        assert tree.metadata.custom == EVERY_LEAF.metadata.custom
        for path, leaf in EVERY_LEAF.items():
            if isinstance(leaf, Constant):
                assert described(tree.arrays[path].read()) == described(leaf.read())
            else:
                assert tree[path] == leaf


class TestManyChunks:
    """The checkpoints with small chunks are what they are meant to be."""

    @pytest.mark.parametrize("name", [name for name, how in CHECKPOINTS.items() if how[2]])
    def test_chunk_grids_are_ragged(self, runs, name):
        ragged = [
            path
            for path, array in opened_by_tensorstore(runs[name] / "0" / "items").items()
            if any(n % c for n, c in zip(array.shape, array.chunk_layout.read_chunk.shape or (), strict=True))
        ]
        assert any("mlp" in path for path in ragged)
        assert any("query" in path for path in ragged)
        assert any("embedding" in path for path in ragged)

    @pytest.mark.parametrize("name", ["scanned-chunks", "biases-tied"])
    def test_each_layer_has_separate_chunks(self, runs, name):
        arrays = opened_by_tensorstore(runs[name] / "0" / "items")
        query = arrays["params/params/decoder/layers/self_attention/query/kernel"]
        assert query.shape == (64, 4, 4, 16)
        assert query.chunk_layout.read_chunk.shape == (22, 1, 4, 16)

    @pytest.mark.parametrize("name", CHECKPOINTS)
    def test_values_of_many_chunks_match_golden_data(self, runs, name):
        family, scan, _ = CHECKPOINTS[name]
        item = runs[name] / "0" / "items"
        assert leaves_by_package(ckpttools.open(item)) == golden_leaves(family, scan)
        assert all_described(arrays_by_tensorstore(item)) == golden_arrays(family, scan)
