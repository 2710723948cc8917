"""DeepSeek V4: arrays that files have none of, tables of whole numbers, single layers before pairs."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from support.golden_data import SCAN_NAMES, all_described, leaves_by_package
from support.places import GOLDEN_0_2_5
from support.trees import lazy

from ckpttools.api.conversion import Resources
from ckpttools.api.hf_to_maxtext import plan_to_maxtext
from ckpttools.api.maxtext_to_hf import plan_to_huggingface
from ckpttools.array.tree import Tree
from ckpttools.core.dtypes import DTYPES
from ckpttools.core.errors import ConfigError, MappingError, ShapeError
from ckpttools.formats.registry import open_tree
from ckpttools.mapping.whole_numbers import Whole
from ckpttools.maxtext.scan import StackLayers, UnstackLayers
from ckpttools.maxtext.stacking import StackAsModel
from ckpttools.maxtext.to_hf import ToHuggingFace
from ckpttools.maxtext.to_maxtext import ToMaxText, to_maxtext

GOLDEN = GOLDEN_0_2_5 / "deepseek4"
SCANS = pytest.mark.parametrize("scan", [True, False], ids=SCAN_NAMES.get)
# MaxText's converter puts these where one of its own ways of loading does not look.
COLLECTIONS = ("params/MoEBiasVar/", "params/Tid2EidVar/")
NORM = ("mhc_attention", "mhc_norm", "scale")


def among_parameters(path):
    for collection in COLLECTIONS:
        path = path.replace(collection, "params/params/")
    return path


def leaves(scan):
    found = json.loads((GOLDEN / f"leaves_{SCAN_NAMES[scan]}.json").read_bytes())
    return {among_parameters(path): leaf for path, leaf in found.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The run directory that the golden model becomes, scanned and not."""
    places = {scan: tmp_path_factory.mktemp("deepseek4") / "out" for scan in (True, False)}
    for scan, place in places.items():
        plan_to_maxtext(GOLDEN / "hf", ToMaxText(scan=scan), Resources(jobs=2)).run(place)
    return places


def back(source, place):
    plan_to_huggingface(source, ToHuggingFace(like=GOLDEN / "hf"), Resources(jobs=2)).run(place)
    return all_described(load_file(place / "model.safetensors"))


def changed(tree, end, value):
    """A tree with one number of the first array of this name changed, and in float32."""
    path = next(path for path in tree.arrays if path[-len(end) :] == end)
    values = tree.arrays[path].read().astype(np.float32)
    values[(-1,) * values.ndim] = value
    return Tree({**tree, path: lazy(values)}, tree.metadata)


@SCANS
def test_every_leaf_is_maxtexts(runs, scan):
    assert leaves_by_package(open_tree(runs[scan])) == leaves(scan)


@SCANS
def test_comes_back(runs, tmp_path, scan):
    assert back(runs[scan], tmp_path / "hf") == all_described(load_file(GOLDEN / "hf" / "model.safetensors"))


def test_pairs_are_stacked_behind_single_layers(runs):
    single, stacked = (open_tree(runs[scan]) for scan in (False, True))
    wanted = leaves_by_package(stacked)
    assert leaves_by_package(StackAsModel()(single).tree) == wanted
    bare = single.with_metadata(config=None)
    assert leaves_by_package(StackAsModel()(bare).tree) == wanted
    assert leaves_by_package(StackLayers(names="blocks-layers")(bare).tree) == wanted
    apart = UnstackLayers()(stacked).tree
    assert leaves_by_package(apart) == leaves_by_package(single)
    assert leaves_by_package(StackAsModel()(apart).tree) == wanted


def test_layers_that_are_no_pairs_are_not_stacked(runs):
    single = open_tree(runs[False]).with_metadata(config=None)
    lacking = {path: leaf for path, leaf in single.items() if not {"layers_5", "layers_6"} & {*path}}
    lacking = {path: leaf for path, leaf in lacking.items() if not {"layers_4"} & {*path}}
    made = StackLayers(names="blocks-layers")(Tree(lacking, single.metadata)).tree
    assert [path for path in made if "scanned_blocks" in path]
    with pytest.raises(ShapeError, match="no cycle"):
        StackLayers(names="blocks-layers", cycle=9)(single)


@SCANS
def test_a_norm_that_was_trained_is_refused(runs, tmp_path, scan):
    tree = changed(open_tree(runs[scan]), NORM, 1.5)
    with pytest.raises(ConfigError, match="as if this were 1 throughout") as caught:
        back(tree, tmp_path / "hf")
    assert "mhc_attention.mhc_norm.scale" in caught.value.place
    assert not (tmp_path / "hf").exists()


class TestTable:
    def test_of_float32_comes_back(self, runs, tmp_path):
        """So MaxText's training has it."""
        tree = open_tree(runs[False])
        path = next(path for path in tree.arrays if path[-1] == "tid2eid")
        same = changed(tree, ("tid2eid",), tree.arrays[path].read()[-1, -1])
        assert same.arrays[path].dtype.name == "float32"
        assert back(same, tmp_path / "hf") == all_described(load_file(GOLDEN / "hf" / "model.safetensors"))

    def test_of_other_numbers_is_refused(self, runs, tmp_path):
        with pytest.raises(MappingError, match="not whole, or too large") as caught:
            back(changed(open_tree(runs[False]), ("tid2eid",), 2.5), tmp_path / "hf")
        assert "ffn.gate.tid2eid" in caught.value.place

    @given(st.lists(st.integers(-(2**33), 2**33), min_size=1))
    def test_numbers_come_back_or_are_refused(self, numbers):
        op, source = Whole("int32", "int64").bound({}), np.array(numbers, np.int64)
        made, again = np.empty(source.shape, np.int32), np.empty_like(source)
        if all(-(2**31) <= each < 2**31 for each in numbers):
            op.apply(source, made.view(DTYPES["int32"].carrier), DTYPES["int64"])
            op.inverse().apply(made, again.view(DTYPES["int64"].carrier), DTYPES["int32"])
            assert again.tolist() == numbers
        else:
            with pytest.raises(MappingError, match="too large"):
                op.apply(source, made, DTYPES["int64"])

    @pytest.mark.parametrize("odd", [0.5, np.nan, np.inf, 2.0**31])
    def test_what_is_no_number_of_it(self, odd):
        source = np.array([1, odd], np.float32)
        with pytest.raises(MappingError, match="not whole"):
            Whole("int32", "int64").bound({}).apply(source, np.empty(2, np.int32), DTYPES["float32"])


def test_first_layers_may_be_heavily_compressed():
    """As in V4-Pro; by the configuration, not by what is there."""
    source = open_tree(GOLDEN / "hf")
    ratios = [128, 128, *(source.metadata.config or {})["compress_ratios"][2:]]
    heavy = source.with_metadata(config={**(source.metadata.config or {}), "compress_ratios": ratios})
    parts = {path: each for path, each in source.items() if path[0].startswith("layers.3.attn.compressor.")}
    more = {
        (path[0].replace("layers.3.", f"layers.{n}."),): each for path, each in parts.items() for n in (0, 1)
    }
    made = to_maxtext(Tree({**heavy, **more}, heavy.metadata), ToMaxText()).state
    assert sum("hca_compressor" in path for path in made) == 3 * len(parts)
