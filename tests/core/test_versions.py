"""What versions of MaxText store differently: written for each, and read from all."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.command_line import run
from support.golden_data import (
    GOLDEN_VERSION,
    SCAN_NAMES,
    Leaves,
    all_described,
    arrays_by_tensorstore,
    leaves_by_package,
)
from support.internals import (
    NEWEST,
    VERSIONS,
    ModelFiles,
    StackAsModel,
    keystr,
    to_huggingface,
    to_maxtext,
    view_of,
    window,
)
from support.internals import Path as TreePath
from support.locations import GOLDEN_0_2_5
from support.trees import lazy

import ckpttools
from ckpttools import (
    DTYPES,
    FormatError,
    ForVersion,
    Resources,
    StackLayers,
    StripOptimizer,
    ToHuggingFace,
    ToMaxText,
    Tree,
    UnknownNameError,
    UnstackLayers,
    UsageError,
    plan_to_huggingface,
    plan_to_maxtext,
)
from ckpttools.maxtext.variables import matching_versions

MODELS = ("qwen3-next", "deepseek3", "deepseek3.2", "kimi-k2")
SCANS = pytest.mark.parametrize("scan", [True, False], ids=SCAN_NAMES.get)
EVERY_MODEL = pytest.mark.parametrize("model", MODELS)
EVERY_VERSION = pytest.mark.parametrize("version", VERSIONS)
# MaxText's converter puts these where one of its own ways of loading does not look; all take them from here.
COLLECTIONS = ("params/MoEBiasVar/", "params/Tid2EidVar/")
NORM = ("decoder_norm", "scale")
BIAS = "params/params/decoder/moe_layers/DeepSeekMoeBlock_0/MoeBlock_0/gate/bias"


def among_parameters(path: str) -> str:
    for collection in COLLECTIONS:
        path = path.replace(collection, "params/params/")
    return path


def golden(model: str, scan: bool) -> Leaves:
    leaves = json.loads((GOLDEN_0_2_5 / model / f"leaves_{SCAN_NAMES[scan]}.json").read_bytes())
    return {among_parameters(path): leaf for path, leaf in leaves.items()}


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """The run directory that a model becomes for a version of MaxText; each is converted once."""

    @cache
    def run(model: str, scan: bool = True, version: str = NEWEST) -> Path:
        location = tmp_path_factory.mktemp(model) / "out"
        options = ToMaxText(scan=scan, maxtext=version)
        plan_to_maxtext(GOLDEN_0_2_5 / model / "hf", options, Resources(jobs=2)).run(location)
        return location

    return run


def same(a: Tree, b: Tree) -> bool:
    return leaves_by_package(a) == leaves_by_package(b)


class TestNewestVersion:
    @SCANS
    @EVERY_MODEL
    def test_converted_leaves_match_golden_checkpoints(self, converted, model, scan):
        item, expected = converted(model, scan) / "0" / "items", golden(model, scan)
        assert leaves_by_package(ckpttools.open(item)) == expected
        arrays = {path: leaf for path, leaf in expected.items() if isinstance(leaf, dict)}
        assert all_described(arrays_by_tensorstore(item)) == arrays


class TestEveryVersion:
    @EVERY_VERSION
    @EVERY_MODEL
    def test_version_converts_back_to_hf(self, converted, tmp_path, model, version):
        run = converted(model, True, version)
        plan_to_huggingface(run, ToHuggingFace(), Resources(jobs=2)).run(tmp_path / "hf")
        expected = load_file(GOLDEN_0_2_5 / model / "hf" / "model.safetensors")
        assert all_described(load_file(tmp_path / "hf" / "model.safetensors")) == all_described(expected)

    @EVERY_VERSION
    @EVERY_MODEL
    def test_version_is_identified(self, converted, model, version):
        view = view_of(ckpttools.open(converted(model, True, version)))
        assert matching_versions(view, ["qwen3-next"] if model == "qwen3-next" else ["deepseek"]) == (
            version,
        )

    @EVERY_MODEL
    def test_unstacked_layout_is_equal_in_all_versions(self, converted, model):
        trees = [ckpttools.open(converted(model, False, version)) for version in VERSIONS]
        assert all(same(trees[0], tree) for tree in trees)
        assert matching_versions(view_of(trees[0]), [model]) == tuple(VERSIONS)

    @EVERY_VERSION
    @EVERY_MODEL
    def test_stack_matches_the_converted_layout(self, converted, model, version):
        single, stacked = (ckpttools.open(converted(model, scan, version)) for scan in (False, True))
        built = StackAsModel(maxtext=version)(single).tree
        assert same(built, stacked)
        assert built.metadata.custom == stacked.metadata.custom

    @pytest.mark.parametrize("target", VERSIONS)
    @EVERY_VERSION
    @EVERY_MODEL
    def test_stack_writes_the_layout_of_a_given_version(self, converted, model, version, target):
        """What was taken apart goes back as it was, or as a version wants it that is named."""
        tree = ckpttools.open(converted(model, True, version))
        single = UnstackLayers()(tree).tree
        assert same(StackAsModel()(single).tree, tree)
        other = ckpttools.open(converted(model, True, target))
        assert same(StackAsModel(maxtext=target)(single).tree, other)

    @pytest.mark.parametrize("target", VERSIONS)
    @EVERY_VERSION
    @EVERY_MODEL
    def test_remap_converts_to_another_version(self, converted, model, version, target):
        tree, expected = (ckpttools.open(converted(model, True, item)) for item in (version, target))
        if version == target:
            with pytest.raises(UsageError, match=f"already has the layout of MaxText {target}"):
                ForVersion(target)(tree)
        else:
            built = ForVersion(target)(tree).tree
            assert same(built, expected)
            assert built.metadata.custom == expected.metadata.custom

    def test_unknown_family_is_not_converted_between_versions(self, converted):
        """Qwen3.5 has the same names, and all versions stack it as the older one stacks Qwen3-Next."""
        tree = ckpttools.open(converted("qwen3-next", True, GOLDEN_VERSION))
        bare = tree.with_metadata(config=None)
        with pytest.raises(FormatError, match=r"as in qwen3\.5-moe") as caught:
            ForVersion()(bare)
        assert "family=" in caught.value.hint
        assert "cycle" not in caught.value.hint
        expected = ckpttools.open(converted("qwen3-next"))
        assert same(ForVersion(family="qwen3-next")(bare).tree, expected)

    def test_unknown_version_is_refused(self):
        with pytest.raises(UnknownNameError, match=r"one of 0\.2\.5, e591f30"):
            ToMaxText(maxtext="0.2.6")


class TestRouterBias:
    def test_newest_version_stacks_layers_first(self, converted):
        new, old = (ckpttools.open(converted("deepseek3", True, item)) for item in (NEWEST, GOLDEN_VERSION))
        path = tuple(BIAS.split("/"))
        assert (new.arrays[path].shape, old.arrays[path].shape) == ((2, 4), (4, 2))
        assert np.array_equal(new.arrays[path].read(), old.arrays[path].read().T)

    @EVERY_VERSION
    @pytest.mark.parametrize("axis", [0, 1])
    def test_ambiguous_axes_are_read_from_metadata(self, version, axis):
        """As many layers as experts: the note in the metadata says which axis is which."""
        source = with_experts(ckpttools.open(GOLDEN_0_2_5 / "deepseek3" / "hf"), 2)
        options = ToMaxText(maxtext=version, scan_axis=axis)
        state = to_maxtext(source, options).state
        assert state.arrays[tuple(BIAS.split("/"))].shape == (2, 2)
        back = to_huggingface(state, ToHuggingFace(scan_axis=axis), ModelFiles(source.metadata.config)).tree
        assert leaves_by_package(back) == leaves_by_package(source)
        single = to_maxtext(source, ToMaxText(scan=False)).state
        assert same(UnstackLayers(axis)(state).tree, single)

    def test_bias_collection_is_converted_to_parameters(self, converted):
        """MaxText's own converter puts it where only one of its ways of loading looks."""
        tree = ckpttools.open(converted("deepseek3"))
        bias = tuple(BIAS.split("/"))
        there = ("params", "MoEBiasVar", *bias[2:])
        collection = Tree({there if path == bias else path: leaf for path, leaf in tree.items()})
        assert same(ForVersion()(collection).tree, tree)
        old = ckpttools.open(converted("deepseek3", True, GOLDEN_VERSION))
        assert same(ForVersion(GOLDEN_VERSION)(collection).tree, old)

    def test_strip_optimizer_moves_router_bias_to_parameters(self, converted):
        """In training it lies in `nnx_aux`, or in a collection of its own, with its layers on axis 0."""
        tree = ckpttools.open(converted("deepseek3"))
        bias = tuple(BIAS.split("/"))
        moments = {("opt_state", "0", "mu", *bias[1:3], "decoder_norm", "scale"): tree[(*bias[:3], *NORM)]}
        for there in (("params", "MoEBiasVar", *bias[2:]), ("nnx_aux", "model", *bias[2:])):
            training = Tree({there if path == bias else path: leaf for path, leaf in tree.items()} | moments)
            built = StripOptimizer()(training).tree
            assert same(built, tree)
            assert view_of(built).notes.first_axis == {BIAS}
            report = ckpttools.inspect(training)
            assert report.maxtext == (NEWEST,)

    @SCANS
    @pytest.mark.parametrize("wrapped", [(), ("value",)])
    def test_training_state_round_trips_between_versions(self, converted, scan, wrapped):
        """MaxText 0.2.5 keeps it in `nnx_aux`, without moments; e591f30 among the parameters."""
        training = trained(ckpttools.open(converted("deepseek3")), wrapped)
        old = ckpttools.open(converted("deepseek3", True, GOLDEN_VERSION))
        if not scan:
            training, old = (UnstackLayers()(item).tree for item in (training, old))
        built = ForVersion(GOLDEN_VERSION)(training)
        assert all("not resume training" in remark for remark in built.notes.remarks) and built.notes.remarks
        assert {path for path in built.tree if path[0] == "nnx_aux"} == set()
        moved = {path: item for path, item in built.tree.items() if path[0] != "opt_state"}
        assert same(Tree(moved), Tree({path: item for path, item in old.items() if path[0] != "opt_state"}))
        back = ForVersion()(built.tree)
        assert not back.notes.remarks
        if not wrapped:
            assert same(back.tree, training)
            assert back.tree.metadata.custom == training.metadata.custom
        with pytest.raises(UsageError, match=r"already has the layout of MaxText 0\.2\.5"):
            ForVersion()(training)

    def test_remap_converts_training_state_between_versions(self, converted, tmp_path):
        ckpttools.save(trained(ckpttools.open(converted("deepseek3"))), tmp_path / "training")
        run("remap", tmp_path / "training", tmp_path / "old", "--maxtext", GOLDEN_VERSION)
        done = run("remap", tmp_path / "old", tmp_path / "new", "--maxtext", NEWEST)
        assert "cycle" not in done
        assert same(ckpttools.open(tmp_path / "new"), ckpttools.open(tmp_path / "training"))

    def test_unknown_family_layers_are_restacked(self):
        """DeepSeek V4 has single layers first, then pairs, and two kinds of variables."""
        leaves = json.loads((GOLDEN_0_2_5 / "deepseek4" / "leaves_scanned.json").read_bytes())
        arrays = {tuple(k.split("/")): v for k, v in leaves.items() if isinstance(v, dict)}
        zeros = {k: lazy(np.zeros(v["shape"], DTYPES[v["dtype"]].carrier)) for k, v in arrays.items()}
        built = ForVersion()(Tree(zeros)).tree
        assert {path[:2] for path in built if path[:1] == ("params",)} == {("params", "params")}
        assert {keystr(path): item.shape for path, item in built.arrays.items()} == {
            among_parameters(keystr(path)): item.shape for path, item in zeros.items()
        }
        assert len(view_of(built).notes.first_axis) == 2

    def test_training_state_of_router_bias_is_kept(self, converted):
        """MaxText e591f30 trains it as any parameter."""
        tree = ckpttools.open(converted("deepseek3", True, GOLDEN_VERSION))
        moments = {
            ("opt_state", "0", "mu", *path[1:]): item for path, item in tree.arrays.items() if path[1:]
        }
        training = Tree({**tree, **moments, ("opt_state", "0", "count"): tree[("step",)]}, tree.metadata)
        with pytest.raises(FormatError, match=r"state of parameters that MaxText 0\.2\.5 does not train"):
            ForVersion()(training)
        apart = UnstackLayers()(training).tree.with_metadata(custom={})
        assert same(StackLayers()(apart).tree, training)
        with pytest.raises(FormatError, match=r"state of parameters that MaxText 0\.2\.5 does not train"):
            StackLayers(maxtext=NEWEST)(apart)


def trained(tree: Tree, wrapped: TreePath = ()) -> Tree:
    """DeepSeek V3 as a training state of MaxText 0.2.5: the bias lies apart, and has no moments."""
    bias = tuple(BIAS.split("/"))
    leaves = {path: leaf for path, leaf in tree.items() if path not in (bias, ("opt_state",))}
    moments = {
        ("opt_state", "0", kind, *path[1:]): item
        for path, item in tree.arrays.items()
        if path != bias and path[:1] == ("params",)
        for kind in ("mu", "nu")
    }
    aux = {("nnx_aux", "model", *bias[2:], *wrapped): tree[bias]}
    count = {("opt_state", "0", "count"): tree[("step",)]}
    return Tree({**leaves, **aux, **moments, **count}, replace(tree.metadata, custom={"scan_layers": True}))


def with_experts(tree: Tree, count: int) -> Tree:
    """A DeepSeek model with fewer experts."""
    config = {**(tree.metadata.config or {}), "n_routed_experts": count}
    arrays = {path: item for path, item in tree.arrays.items() if not _is_beyond(path, count)}
    gates = {path: item for path, item in arrays.items() if ".mlp.gate." in path[0]}
    cut = {
        path: window(item, (0,) * len(item.shape), (count, *item.shape[1:])) for path, item in gates.items()
    }
    return Tree({**arrays, **cut}, replace(tree.metadata, config=config))


def _is_beyond(path: TreePath, count: int) -> bool:
    return any(f".experts.{number}." in str(path[0]) for number in range(count, 4))


def test_linear_attention_layers_do_not_determine_the_cycle(converted):
    tree = ckpttools.open(converted("qwen3-next", False))
    with pytest.raises(FormatError, match="the names of their cycle"):
        StackLayers(cycle=4)(tree)
