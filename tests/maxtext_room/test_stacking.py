"""Layers are stacked as the model's family groups them: equal to what MaxText stacks, for every family."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
from hypothesis import given, settings
from support.command_line import ckpt
from support.golden_data import FAMILIES, GOLDEN_VERSION, convert, golden_leaves, leaves_by_package
from support.internals import (
    NEWEST,
    VERSIONS,
    Constant,
    LayerGroup,
    StackAsModel,
    family_named,
    linen_state,
    view_of,
)
from support.locations import TRAIN
from support.train_data import layered

import ckpttools
from ckpttools import DTYPES, Empty, FormatError, Metadata, Tree, UnstackLayers
from ckpttools.maxtext import stacking
from ckpttools.maxtext.cycles import Cycle
from ckpttools.maxtext.stacking import cycle_of
from ckpttools.testing.strategies import assert_same

GOLDEN = [path.parent.name for path in sorted(TRAIN.with_name("golden").glob("*/leaves_scanned.json"))]


def golden_tree(family, scan):
    """MaxText's checkpoint of a family without its numbers, and without a configuration."""
    leaves = {}
    for name, leaf in golden_leaves(family, scan).items():
        path = tuple(name.split("/"))
        if isinstance(leaf, dict):
            dtype = DTYPES[leaf["dtype"]]
            leaves[path] = Constant(tuple(leaf["shape"]), dtype, bytes(dtype.itemsize))
        else:
            leaves[path] = Empty(leaf)
    return Tree(leaves, Metadata(custom={"scan_layers": scan}))


def shapes(tree):
    return {path: (array.shape, array.dtype.name) for path, array in tree.arrays.items()}


def without_note(tree):
    return tree.with_metadata(custom={"scan_layers": False})


@pytest.mark.parametrize("config", [True, False])
def test_unstacked_layers_are_restacked_as_before(config):
    """Every family: what was noted, the configuration, or the names alone tell."""
    for family in GOLDEN:
        scanned, single = golden_tree(family, True), golden_tree(family, False)
        apart = UnstackLayers()(scanned).tree
        assert shapes(apart) == shapes(single), family
        if config:
            declared = json.loads((TRAIN.with_name("golden") / family / "hf" / "config.json").read_bytes())
            apart = apart.with_metadata(config=declared)
        for tree, version in ((apart, None), (without_note(apart), GOLDEN_VERSION)):
            back = StackAsModel(maxtext=version)(tree).tree
            assert shapes(back) == shapes(scanned), family
            assert back.metadata.custom == {"scan_layers": True}


def some_layers(count, *names):
    kernel = Constant((8, 8), DTYPES["float32"], bytes(4))
    arrays = {("decoder", f"layers_{k}", *name.split(".")): kernel for k in range(count) for name in names}
    return linen_state(arrays, 0, {})


class TestAmbiguousLayouts:
    def test_unknown_names_need_a_cycle(self):
        with pytest.raises(FormatError, match="do not match a known family") as caught:
            StackAsModel()(some_layers(4, "mixer.kernel", "norm.scale"))
        assert "`cycle`" in caught.value.hint
        assert "family=" in caught.value.hint

    def test_ambiguous_families_with_different_stacks_are_refused(self, monkeypatch):
        """A family of the user with the names of llama's and another cycle."""
        llama, groups = family_named("llama"), family_named("olmo3").layers
        layers = tuple(replace(group, rows=llama.layers[0].rows) for group in groups)
        both = {"llama": llama, "odd": replace(llama, name="odd", layers=layers)}
        monkeypatch.setattr(stacking, "families", lambda: both)
        tree = without_note(UnstackLayers()(golden_tree("llama3.1", True)).tree)
        with pytest.raises(FormatError, match="these layouts match") as caught:
            StackAsModel()(tree)
        assert "cycle=1, as in llama" in caught.value.message
        assert 'cycle=4 cycle_names="layers", as in odd' in caught.value.message
        assert view_of(StackAsModel(cycle=4)(tree).tree).layers[0].cycle == 4
        assert view_of(StackAsModel(cycle=1)(tree).tree).layers[0].layout == "stacked"

    def test_requested_cycle_overrides_the_note(self):
        apart = UnstackLayers()(golden_tree("gemma3", True)).tree
        assert view_of(StackAsModel(cycle=1)(apart).tree).layers[0].layout == "stacked"

    def test_note_about_other_layers_is_ignored(self):
        apart = UnstackLayers()(golden_tree("gemma3", True)).tree
        fewer = {path: leaf for path, leaf in apart.items() if "layers_7" not in path}
        back = StackAsModel()(Tree(fewer, apart.metadata)).tree
        assert view_of(back).layers == (LayerGroup("decoder/layers", 7, "cycle", 6, 1),)

    @pytest.mark.parametrize("stacks", [3, {"layers": 3}, {"layers": {"layers": [[0], 1]}}, {"layers": {}}])
    def test_foreign_note_is_ignored(self, stacks):
        apart = UnstackLayers()(golden_tree("gemma3", True)).tree
        for note in (stacks, {"stacks": stacks, "scan_axis": "1", "first_axis": 7}):
            odd = apart.with_metadata(custom={"ckpttools": note})
            assert shapes(StackAsModel()(odd).tree) == shapes(golden_tree("gemma3", True))


@settings(max_examples=25)
@given(layered())
def test_every_layout_round_trips(case):
    apart = UnstackLayers(case.axis)(case.stacked).tree
    assert json.loads(json.dumps(apart.metadata.custom)) == apart.metadata.custom
    assert_same(StackAsModel()(apart).tree, case.stacked)


def test_unsupported_layouts_are_refused():
    """Single layers first, as DeepSeek-V4 has them, and MaxText 0.2.5's qwen3-next."""
    array = lambda *shape: Constant(shape, DTYPES["float32"], bytes(4))  # noqa: E731
    first = {("decoder", f"layers_{k}", "a"): array(2) for k in range(3)}
    pairs = {("decoder", "scanned_blocks", f"layers_{k}", "a"): array(2, 4) for k in range(2)}
    blocks = {("decoder", "layers", "local_layers", "a"): array(5, 2, 3)}
    blocks |= {("decoder", "layers", "global_layer", "a"): array(5, 2)}
    for leaves in ({**first, **pairs}, blocks):
        tree = linen_state(leaves, 0, {})
        assert shapes(StackAsModel()(UnstackLayers(1)(tree).tree).tree) == shapes(tree)


def test_another_scan_axis_is_noted():
    tree = linen_state({("decoder", "layers", "a"): Constant((4, 2), DTYPES["float32"], bytes(4))}, 0, {})
    apart = UnstackLayers(0)(tree).tree
    assert shapes(StackAsModel()(apart).tree) == shapes(tree)
    assert StackAsModel(axis=1)(apart).tree["params", "params", "decoder", "layers", "a"].shape == (2, 4)


def test_layer_note_is_stored_and_shown(tmp_path):
    convert(tmp_path / "scanned", "gemma3")
    shutil.rmtree(next((tmp_path / "scanned").rglob("hf")))
    ckpt("unstack", tmp_path / "scanned", tmp_path / "single")
    shown = ckpt("inspect", "tree", tmp_path / "single", "--json").stdout
    note = json.loads(shown)["custom_metadata"]["ckpttools"]
    assert note["stacks"]["layers/layers_0"] == {"layers": [0]}
    assert note["stacks"]["layers_remainder/layers_1"] == {"layers": 7}
    built = stack(tmp_path / "single", tmp_path / "stacked")
    assert leaves_by_package(built) == golden_leaves("gemma3", True)
    assert built.metadata.custom == {"scan_layers": True}


def stack(source, target, *options):
    arguments = ["stack", source, target, "--no-progress", *options]
    result = ckpt(*arguments)
    assert result.exit_code == 0, result.output
    return ckpttools.open(target)


@pytest.mark.parametrize("family", FAMILIES)
def test_carried_config_gives_the_cycle(tmp_path, family):
    convert(tmp_path / "single", family, scan=False)
    built = stack(tmp_path / "single", tmp_path / "stacked", "--maxtext", GOLDEN_VERSION)
    assert leaves_by_package(built) == golden_leaves(family, True)
    assert built.metadata.custom["scan_layers"] is True


@pytest.mark.parametrize(("golden", "family"), [("gemma3", "gemma3"), ("gpt-oss", "gpt-oss")])
def test_named_family_gives_the_cycle(tmp_path, golden, family):
    shutil.rmtree(convert(tmp_path / "single", golden, scan=False) / "hf")
    built = stack(tmp_path / "single", tmp_path / "stacked", "--family", family)
    assert leaves_by_package(built) == golden_leaves(golden, True)


@pytest.mark.parametrize(
    ("family", "cycle"),
    [
        ("llama", Cycle(1, None)),
        ("gemma2", Cycle(1, None)),
        ("deepseek", Cycle(1, None)),
        ("gpt-oss", Cycle(2, "layers")),
        ("olmo3", Cycle(4, "layers")),
        ("qwen3-next", Cycle(4, "layers-local-global")),
        ("gemma3", Cycle(6, "layers")),
        ("gemma4", Cycle(6, "local-global")),
        ("deepseek4", Cycle(2, "blocks-layers")),
    ],
)
def test_families_have_expected_cycles(family, cycle):
    assert cycle_of(family_named(family), VERSIONS[NEWEST]) == cycle


def test_older_version_has_expected_cycles():
    assert cycle_of(family_named("qwen3-next"), VERSIONS[GOLDEN_VERSION]) == Cycle(4, "layer")
