"""Parameters alone: equal to what MaxText's own tool writes, and loaded by the calls that MaxText makes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from support.command_line import ended, run
from support.golden_data import described, golden_checkpoint, leaves_by_package
from support.internals import LINEN, NNX, Chunked, cast, keystr, linen_state, roles, view_of
from support.locations import FIXTURES, TRAINED
from support.quantized_kinds import GPTQ, KINDS
from support.scripts import answers
from support.train_data import ALL, golden_leaves, layered
from support.trees import lazy

import ckpttools
from ckpttools import (
    DTYPES,
    Empty,
    ForceUnroll,
    FormatError,
    MappingError,
    Metadata,
    StripOptimizer,
    Tree,
    UsageError,
)
from ckpttools.array.nodes import LazyArray
from ckpttools.testing.strategies import assert_same

BFLOAT16 = DTYPES["bfloat16"]


def narrow(tree: Tree) -> Tree:
    """The tree with its floating-point arrays in bfloat16, as MaxText's tool writes them."""
    leaves = {p: cast(leaf, BFLOAT16) if isinstance(leaf, LazyArray) else leaf for p, leaf in tree.items()}
    return Tree(leaves, tree.metadata)


def contents(directory: Path) -> dict[str, str]:
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


class TestGolden:
    def test_strip_matches_maxtext(self, tmp_path):
        """Tree and values; the training run was NNX, so that is the flavor of MaxText's result."""
        run("strip-optimizer", TRAINED, tmp_path / "out", "--flavor", "nnx", "--dtype", "bfloat16")
        tree = ckpttools.open(tmp_path / "out")
        assert leaves_by_package(tree) == golden_leaves("paramonly_scanned_0")
        assert tree.metadata.step == 0

    def test_linen_output_has_the_nodes_of_maxtext(self):
        expected = golden_leaves("paramonly_scanned_linen_0")
        built = leaves_by_package(narrow(StripOptimizer()(ckpttools.open(TRAINED)).tree))
        assert set(built) == set(expected)
        for path in ("step", "opt_state"):
            assert built[path] == expected[path]
        for path, leaf in built.items():
            if isinstance(leaf, dict):
                assert (leaf["shape"], leaf["dtype"]) == (expected[path]["shape"], expected[path]["dtype"])

    def test_stripped_parameters_keep_every_bit(self):
        built = leaves_by_package(StripOptimizer()(ckpttools.open(TRAINED)).tree)
        expected = golden_leaves("llama_scanned_1")
        kept = {path: leaf for path, leaf in built.items() if path.startswith("params/")}
        assert kept == {path: leaf for path, leaf in expected.items() if path.startswith("params/")}

    @pytest.mark.skipif(ALL is None, reason="CKPTTOOLS_GOLDEN names no directory")
    @pytest.mark.parametrize(
        ("run", "transform", "expected"),
        [
            ("llama_scanned", StripOptimizer(flavor="nnx"), "paramonly_scanned"),
            ("llama_scanned_linen", StripOptimizer(), "paramonly_scanned_linen"),
            ("llama_unscanned", StripOptimizer(flavor="nnx"), "paramonly_unscanned"),
            ("llama_scanned", ForceUnroll(flavor="nnx"), "paramonly_scanned_unrolled"),
            ("llama_scanned_linen", ForceUnroll(), "paramonly_scanned_linen_unrolled"),
        ],
    )
    def test_all_golden_runs_are_stripped_like_maxtext(self, run, transform, expected):
        built = narrow(transform(ckpttools.open(ALL / "train" / run / "checkpoints" / "1")).tree)
        golden = ckpttools.open(ALL / "train" / expected / "checkpoints" / "0")
        assert_same(built.with_metadata(step=0, custom={}), golden)

    def test_unrolled_names_match_maxtext(self):
        built = StripOptimizer(flavor="nnx")(
            Tree(
                {
                    tuple(int(k) if k.isdigit() else k for k in path.split("/")): (
                        lazy(np.zeros(leaf["shape"], leaf["dtype"]))
                        if isinstance(leaf, dict)
                        else Empty(leaf)
                    )
                    for path, leaf in golden_leaves("llama_unscanned_1").items()
                }
            )
        ).tree
        assert set(map(keystr, built)) == set(golden_leaves("paramonly_unscanned_0"))


class TestTrainingStates:
    @given(layered())
    def test_stripped_tree_has_only_parameters(self, case):
        if not case.trained:
            with pytest.raises(UsageError, match="nothing to strip"):
                StripOptimizer()(case.stacked)
            return
        done = StripOptimizer()(case.stacked)
        assert view_of(done.tree).parameters == view_of(case.stacked).parameters
        assert view_of(done.tree).flavor == case.flavor
        of = roles(done.tree).of
        assert not [path for path in done.tree.arrays if of(path) != "parameter" and path != ("step",)]
        left_out = set(map(keystr, case.stacked.arrays)) - set(map(keystr, done.tree))
        assert set(done.notes.dropped) == left_out
        assert view_of(done.tree).kind == "stacked-inference"
        assert done.tree.metadata.step is None

    @given(layered())
    def test_parameters_are_written_in_other_flavors(self, case):
        for name, flavor in (("linen", LINEN), ("nnx", NNX)):
            if case.trained or case.flavor != flavor:
                built = StripOptimizer(flavor=name)(case.single).tree
                assert view_of(built).flavor == flavor
                assert view_of(built).parameters == view_of(case.single).parameters
                assert (("step",) in built) == (("opt_state",) in built) == (name == "linen")

    @given(layered())
    def test_step_is_kept_on_request(self, case):
        if case.trained:
            built = StripOptimizer(keep_step=True)(case.stacked).tree
            assert built.metadata.step == 9
            assert (("step",) in built) == (case.flavor.name != "nnx")
            assert built.get(("step",), case.stacked["step",]) is case.stacked["step",]
            assert ("step",) not in built.metadata.scalars


class TestCommand:
    def test_strip_does_not_change_the_source(self, tmp_path):
        before = contents(TRAINED)
        run("strip-optimizer", TRAINED, tmp_path / "out")
        assert contents(TRAINED) == before

    def test_checkpoint_without_optimizer_is_refused(self, tmp_path):
        output = run("strip-optimizer", golden_checkpoint(True), tmp_path / "out", code=2)
        assert "nothing to strip" in output
        assert "ckpt cast" in output
        assert list(tmp_path.iterdir()) == []

    def test_keep_step_option_keeps_the_step(self, tmp_path):
        run("strip-optimizer", TRAINED, tmp_path / "out", "--keep-step")
        tree = ckpttools.open(tmp_path / "out")
        assert (tmp_path / "out" / "1" / "items").is_dir()
        assert tree["step",].read().item() == 2
        assert tree["step",].dtype.name == "int32"

    def test_missing_step_cannot_be_kept(self):
        moment = {("opt_state", 0, "mu", "x"): lazy(np.ones(2))}
        tree = Tree({("params", "params", "x"): lazy(np.ones(2))} | moment)
        with pytest.raises(UsageError, match="no step to keep"):
            StripOptimizer(keep_step=True)(tree)

    def test_missing_parameters_are_refused(self):
        moment = {("opt_state", 0, "mu", "x"): lazy(np.ones(2))}
        for location in ("/run/7/items", None):
            with pytest.raises(FormatError, match="no parameters") as error:
                StripOptimizer()(Tree(moment, Metadata(location=location or "")))
            assert error.value.location == location

    def test_random_state_is_stripped(self):
        keys = {("params", "params", "rngs", "key"): lazy(np.ones(4, np.uint32))}
        tree = Tree({**linen_state({("x",): lazy(np.ones(2))}, 0, {}), **keys})
        done = StripOptimizer()(tree)
        assert done.notes.dropped == ("params/params/rngs/key",)

    def test_stripped_arrays_keep_their_chunks(self):
        """Nothing is laid over the arrays, so that a writer can refer to the bytes that are there."""
        built = view_of(StripOptimizer()(ckpttools.open(TRAINED)).tree)
        assert all(isinstance(parameter, Chunked) for parameter in built.parameters.values())

    def test_strip_optimizer_prints_json(self, tmp_path):
        arguments = ["strip-optimizer", str(TRAINED), str(tmp_path / "out"), "--json"]
        receipt = json.loads(ended(*arguments).stdout)
        assert receipt["arrays"] == 13


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """What Orbax and the calls that MaxText makes say: name -> case -> problem. One process loads all."""
    directory = tmp_path_factory.mktemp("loads")
    maxtext = [f"maxtext_parameters-{how}" for how in ("first_axis", "replicated", "float32")]
    some = ["standard-none", "standard-first_axis", "manager_pytree-first_axis", "v1_load-none"]
    commands = {
        "stripped": (["strip-optimizer", "--dtype", "bfloat16"], [*some, *maxtext, "maxtext_metadata"]),
        "unrolled": (
            ["unstack", "--force-unroll", "--dtype", "bfloat16"],
            [*some, *maxtext, "maxtext_metadata"],
        ),
        "nnx": (["strip-optimizer", "--flavor", "nnx"], some),
    }
    jobs = []
    for name, ((command, *options), cases) in commands.items():
        run(command, TRAINED, directory / name, *options)
        jobs.append([name, str(directory / name), leaves_by_package(ckpttools.open(directory / name)), cases])
    # A training state lies in a step of its own number; the script's loaders look for 0.
    run("unstack", TRAINED, directory / "single")
    (directory / "single" / "1").rename(directory / "single" / "0")
    nested = ckpttools.open(directory / "single").nested()
    jobs.append(["single", str(directory / "single"), spelled_out(nested), ["restore", "resume"]])
    return answers("train_loader_script", jobs, directory)


def spelled_out(node: object) -> object:
    """A nested tree as the script spells what Orbax gives."""
    if isinstance(node, dict):
        return {key: spelled_out(value) for key, value in node.items()}
    if isinstance(node, list):
        return [spelled_out(value) for value in node]
    return described(node.read()) if isinstance(node, LazyArray) else node


@pytest.mark.parametrize("name", ["stripped", "unrolled", "nnx", "single"])
def test_stripped_checkpoints_load_in_maxtext(loaded, name):
    assert len(loaded[name]) >= 2
    assert {case: problem for case, problem in loaded[name].items() if problem} == {}


def test_quantized_module_stays_complete():
    """What belongs to a weight stays with it; to leave some of it out is refused."""
    layer = ("params", "params", "decoder", "layers_0")
    parts = {key: lazy(np.zeros(shape, dtype)) for key, (dtype, shape) in KINDS["gptq"][1].items()}
    leaves = {(*layer, "mlp", "up", key): part for key, part in parts.items()}
    norm = lazy(np.ones(16, np.float32))
    for head in ((), ("opt_state", "0", "mu"), ("opt_state", "0", "nu")):
        leaves[(*head, *layer[len(head) > 0 :], "norm", "scale")] = norm
    tree = Tree(
        {**leaves, ("step",): lazy(np.zeros((), np.int32))}, Metadata(config={"quantization_config": GPTQ})
    )
    kept = {path for path in leaves if path[0] == "params"}
    assert {*tree.pipe(StripOptimizer()).arrays} == {*kept, ("step",)}
    with pytest.raises(MappingError, match="each module completely"):
        tree.pipe(StripOptimizer(drop=["*/scales"]))


def test_dropped_step_is_counted():
    """Of trees that no tool of MaxText made, such as distributed checkpoints of PyTorch: they get none."""
    saved = ckpttools.open(FIXTURES / "torch/dcp")
    done = StripOptimizer()(Tree({**saved, ("step",): lazy(np.int64(7))}, saved.metadata))
    assert set(done.notes.dropped) == {*map(keystr, saved.arrays), "step"} - {*map(keystr, done.tree)}
    assert done.notes.remarks[0].endswith("5 of the optimizer, 2 of neither")
