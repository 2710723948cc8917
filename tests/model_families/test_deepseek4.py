"""DeepSeek V4: arrays that files lack, integer tables, single layers before pairs."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from support.golden_data import SCAN_NAMES, all_described, leaves_by_package
from support.internals import (
    ModelFiles,
    StackAsModel,
    Whole,
    families,
    keystr,
    parse_key,
    to_huggingface,
    to_maxtext,
)
from support.locations import GOLDEN_0_2_5
from support.trees import lazy

import ckpttools
from ckpttools import (
    DTYPES,
    CastMap,
    CastTo,
    CoverageError,
    MappingError,
    Resources,
    StackLayers,
    ToHuggingFace,
    ToMaxText,
    Tree,
    UnstackLayers,
    UsageError,
    plan_to_huggingface,
    plan_to_maxtext,
)
from ckpttools.model_families.deepseek4 import RESAVED

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
    result = json.loads((GOLDEN / f"leaves_{SCAN_NAMES[scan]}.json").read_bytes())
    return {among_parameters(path): leaf for path, leaf in result.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the run directories of the golden model, scanned and unscanned."""
    locations = {scan: tmp_path_factory.mktemp("deepseek4") / "out" for scan in (True, False)}
    for scan, location in locations.items():
        plan_to_maxtext(GOLDEN / "hf", ToMaxText(scan=scan), Resources(jobs=2)).run(location)
    return locations


def back(source, location):
    plan_to_huggingface(source, ToHuggingFace(like=GOLDEN / "hf"), Resources(jobs=2)).run(location)
    return all_described(load_file(location / "model.safetensors"))


def changed(tree, end, value):
    """Return a tree with one value of the first array of this name changed, in float32."""
    path = next(path for path in tree.arrays if path[-len(end) :] == end)
    values = tree.arrays[path].read().astype(np.float32)
    values[(-1,) * values.ndim] = value
    return Tree({**tree, path: lazy(values)}, tree.metadata)


@SCANS
def test_every_deepseek4_leaf_equals_maxtext(runs, scan):
    assert leaves_by_package(ckpttools.open(runs[scan])) == leaves(scan)


@SCANS
def test_deepseek4_round_trips(runs, tmp_path, scan):
    assert back(runs[scan], tmp_path / "hf") == all_described(load_file(GOLDEN / "hf" / "model.safetensors"))


def test_pairs_are_stacked_after_single_layers(runs):
    single, stacked = (ckpttools.open(runs[scan]) for scan in (False, True))
    expected = leaves_by_package(stacked)
    assert leaves_by_package(StackAsModel()(single).tree) == expected
    bare = single.with_metadata(config=None)
    assert leaves_by_package(StackAsModel()(bare).tree) == expected
    assert leaves_by_package(StackLayers(names="blocks-layers")(bare).tree) == expected
    apart = UnstackLayers()(stacked).tree
    assert leaves_by_package(apart) == leaves_by_package(single)
    assert leaves_by_package(StackAsModel()(apart).tree) == expected


def test_unpaired_layers_are_not_stacked(runs):
    single = ckpttools.open(runs[False]).with_metadata(config=None)
    lacking = {path: leaf for path, leaf in single.items() if not {"layers_5", "layers_6"} & {*path}}
    built = StackLayers(names="blocks-layers")(Tree(lacking, single.metadata)).tree
    assert [path for path in built if "scanned_blocks" in path]
    with pytest.raises(UsageError, match="complete cycles of 9"):
        StackLayers(names="blocks-layers", cycle=9)(single)


@pytest.mark.parametrize("count", range(1, 6))
def test_stack_leaves_table_routed_layers_single(runs, count):
    single = ckpttools.open(runs[False]).with_metadata(config=None)
    leaves = {path: leaf for path, leaf in single.items() if not str(path[3:4]).startswith("('layers_")}
    for number in range(count):
        leaves |= {
            (*path[:3], f"layers_{number}", *path[4:]): leaf
            for path, leaf in single.items()
            if path[3:4] == ("layers_0",)
        }
    with pytest.raises(UsageError, match="complete cycles"):
        StackLayers(names="blocks-layers")(Tree(leaves, single.metadata))


@pytest.mark.parametrize("count", range(4, 12))
@pytest.mark.parametrize("has_config", [False, True])
def test_stack_refuses_an_odd_number_of_repeating_layers(runs, count, has_config):
    single = ckpttools.open(runs[False])
    config = single.metadata.config | {"num_hidden_layers": count} if has_config else None
    hashed = sum("tid2eid" in path for path in single)
    leaves = {path: leaf for path, leaf in single.items() if not str(path[3:4]).startswith("('layers_")}
    for number in range(count):
        # The layer of the golden model that has the same kind.
        own = f"layers_{number if number < hashed else hashed + (number - hashed) % 2}"
        leaves |= {
            (*path[:3], f"layers_{number}", *path[4:]): leaf
            for path, leaf in single.items()
            if path[3:4] == (own,)
        }
    tree = Tree(leaves, single.metadata).with_metadata(config=config)
    for stack in (StackAsModel(), StackAsModel(family="deepseek4"), StackLayers(names="blocks-layers")):
        if (count - hashed) % 2:
            with pytest.raises(UsageError, match="complete cycles"):
                stack(tree)
        else:
            built = stack(tree).tree
            assert any("scanned_blocks" in path and "hca_compressor" in path for path in built)
            assert all("hca_compressor" not in path for path in built if "layers_1" in path[4:5])


@SCANS
def test_trained_norm_is_multiplied_into_the_next_array(runs, tmp_path, scan):
    """The norm of the last layer, which may be stacked."""
    golden = load_file(GOLDEN / "hf" / "model.safetensors")
    last = max(int(name.split(".")[1]) for name in golden if name.startswith("layers."))
    of_last = ("scanned_blocks", "layers_1") if scan else (f"layers_{last}",)
    tree = changed(ckpttools.open(runs[scan]), (*of_last, *NORM), 1.5)
    fn = golden[f"layers.{last}.hc_attn_fn"]
    fn[:, -1] = (fn[:, -1].astype(np.float32) * 1.5).astype(fn.dtype)
    assert back(tree, tmp_path / "hf") == all_described(golden)


class TestTable:
    def test_float32_table_converts_back(self, runs, tmp_path):
        """MaxText's training stores the table in float32."""
        tree = ckpttools.open(runs[False])
        path = next(path for path in tree.arrays if path[-1] == "tid2eid")
        same = changed(tree, ("tid2eid",), tree.arrays[path].read()[-1, -1])
        assert same.arrays[path].dtype.name == "float32"
        assert back(same, tmp_path / "hf") == all_described(load_file(GOLDEN / "hf" / "model.safetensors"))

    def test_non_integer_values_are_refused(self, runs, tmp_path):
        with pytest.raises(MappingError, match="not an integer, or too large") as caught:
            back(changed(ckpttools.open(runs[False]), ("tid2eid",), 2.5), tmp_path / "hf")
        assert "ffn.gate.tid2eid" in caught.value.location

    def test_rounded_values_are_refused(self, runs, tmp_path):
        """A bfloat16 value of 256 may have been 257."""
        tree = changed(ckpttools.open(runs[False]), ("tid2eid",), 256)
        path = next(path for path in tree.arrays if path[-1] == "tid2eid")
        cast_down = CastMap({keystr(path): "bfloat16"})(tree).tree
        with pytest.raises(MappingError, match="may have been rounded") as caught:
            back(cast_down, tmp_path / "hf")
        assert "256" in str(caught.value.expected)

    def test_cast_keeps_integer_tables(self, runs):
        tree = changed(ckpttools.open(runs[False]), ("tid2eid",), 257)
        path = next(path for path in tree.arrays if path[-1] == "tid2eid")
        built = CastTo("bfloat16")(tree)
        assert {item.dtype.name for at, item in built.tree.arrays.items() if at != path} >= {"bfloat16"}
        assert built.tree.arrays[path].dtype.name == "float32"
        assert "expert indices" in " ".join(built.notes.remarks)
        named = CastMap({keystr(path): "float64"}, "bfloat16")(tree).tree
        assert named.arrays[path].dtype.name == "float64"

    @given(st.lists(st.integers(-(2**33), 2**33), min_size=1))
    def test_table_values_round_trip_or_are_refused(self, numbers):
        op, source = Whole("int32", "int64").bound({}), np.array(numbers, np.int64)
        built, again = np.empty(source.shape, np.int32), np.empty_like(source)
        if all(-(2**31) <= number < 2**31 for number in numbers):
            op.apply(source, built.view(DTYPES["int32"].carrier), DTYPES["int64"])
            op.inverse().apply(built, again.view(DTYPES["int64"].carrier), DTYPES["int32"])
            assert again.tolist() == numbers
        else:
            with pytest.raises(MappingError, match="too large"):
                op.apply(source, built, DTYPES["int64"])

    @pytest.mark.parametrize("odd", [0.5, np.nan, np.inf, 2.0**31])
    def test_non_integer_value_is_not_cast(self, odd):
        source = np.array([1, odd], np.float32)
        with pytest.raises(MappingError, match="not an integer, or too large"):
            Whole("int32", "int64").bound({}).apply(source, np.empty(2, np.int32), DTYPES["float32"])


CLIPPED = ["swiglu_limit is not set, so transformers uses 10"]


def in_todays_words(config):
    """Return a configuration as transformers saves it."""
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    older = ("num_hash_layers", "compress_ratios", "rope_parameters")
    count, rope = config["num_hash_layers"], config["rope_parameters"]
    return {
        **{name: item for name, item in config.items() if name not in older},
        "mlp_layer_types": ["hash_moe"] * count + ["moe"] * (config["num_hidden_layers"] - count),
        "layer_types": [kinds[item] for item in config["compress_ratios"]],
        "rope_parameters": {"main": rope, "compress": {**rope, "rope_theta": 160000.0}},
    }


class TestResavedModels:
    """Models that transformers saved, with other names for some arrays and fields."""

    def test_resaved_names_are_recognized(self, tmp_path):
        shutil.copytree(GOLDEN / "hf", tmp_path / "hf", symlinks=True)
        weights = load_file(GOLDEN / "hf" / "model.safetensors")
        plain = {RESAVED.key(parse_key(name)).first(): item for name, item in weights.items()}
        assert {"model.embed_tokens.weight", "model.layers.0.attn.norm.weight", "head.weight"} <= plain.keys()
        (tmp_path / "hf" / "model.safetensors").unlink()
        save_file(plain, tmp_path / "hf" / "model.safetensors")
        plan_to_maxtext(tmp_path / "hf", ToMaxText(), Resources(jobs=2)).run(tmp_path / "out")
        assert leaves_by_package(ckpttools.open(tmp_path / "out")) == leaves(scan=True)
        assert ckpttools.diff(tmp_path / "hf", GOLDEN / "hf").equal

    def test_resaved_config_gives_the_same_settings(self, tmp_path):
        config = json.loads((GOLDEN / "hf" / "config.json").read_bytes())
        for name, item in (("older", config), ("newer", in_todays_words(config))):
            (tmp_path / name).mkdir()
            (tmp_path / name / "config.json").write_text(json.dumps(item))
        older, newer = (ckpttools.maxtext_config(tmp_path / name) for name in ("older", "newer"))
        assert older.arguments() == newer.arguments()
        assert older.deviations == newer.deviations
        assert [deviation.what for deviation in older.deviations] == CLIPPED

    @pytest.mark.parametrize("count", [2, 4])
    def test_layer_list_gives_the_number_of_table_layers(self, count):
        config = json.loads((GOLDEN / "hf" / "config.json").read_bytes())
        config["num_hidden_layers"] = len(config["compress_ratios"]) - 1
        config["num_hash_layers"] = count
        table = families()["deepseek4"].table({**in_todays_words(config), "num_hash_layers": 3}, "")
        assert table.sizes["hash"].length == count

    def test_scaled_positions_are_reported(self, tmp_path):
        config = in_todays_words(json.loads((GOLDEN / "hf" / "config.json").read_bytes()))
        config["rope_parameters"]["compress"] |= {"rope_type": "yarn", "factor": 16.0}
        (tmp_path / "config.json").write_text(json.dumps(config))
        told = [deviation.what for deviation in ckpttools.maxtext_config(tmp_path / "config.json").deviations]
        assert any("yarn" in item for item in told)
        assert told[1:] == CLIPPED or told[:-1] == CLIPPED


ALIKE = {0: "0", 4: "2", 128: "3"}  # what a layer attends to -> a layer of the golden model that does so
ROUTED = {True: "0", False: "3"}  # whether a table routes -> such a layer


def composed(ratios, count):
    """Return a model with these attention types, whose first few layers have routing tables."""
    golden = ckpttools.open(GOLDEN / "hf")
    of_layers = {path[0].split(".", 2)[1:][0] for path in golden if path[0].startswith("layers.")}
    assert of_layers >= {*ALIKE.values(), *ROUTED.values()}
    built = {path: item for path, item in golden.items() if not path[0].startswith("layers.")}
    for n, ratio in enumerate(ratios):
        for path, item in golden.items():
            first, _, rest = path[0].partition(".")
            number, _, name = rest.partition(".")
            if first == "layers" and number == (
                ROUTED[n < count] if name.startswith("ffn.") else ALIKE[ratio]
            ):
                built[(f"layers.{n}.{name}",)] = item
    declared = {"num_hidden_layers": len(ratios), "num_hash_layers": count, "compress_ratios": ratios}
    return Tree(built, replace(golden.metadata, config={**(golden.metadata.config or {}), **declared}))


class TestTableLayerCounts:
    @SCANS
    @pytest.mark.parametrize(
        "ratios, count",
        [([0, 0, 128, 4], 2), ([0, 0, 4, 128, 4], 3), ([0, 0, 4, 4, 128, 4], 4), ([128, 128, 4, 4, 4], 5)],
    )
    def test_supported_layer_compositions_are_converted(self, tmp_path, ratios, count, scan):
        tree = composed(ratios, count)
        built = to_maxtext(tree, ToMaxText(scan=scan)).state
        tables = {key for path in built for key in path if "tid2eid" in path}
        assert {f"layers_{n}" for n in range(count)} <= tables
        assert f"layers_{count}" not in tables
        (tmp_path / "config.json").write_text(json.dumps(tree.metadata.config))
        files = ModelFiles.of(built, str(tmp_path / "config.json"))
        again = to_huggingface(built, ToHuggingFace(), files).tree
        assert {path: item.shape for path, item in again.arrays.items()} == {
            path: item.shape for path, item in tree.arrays.items()
        }

    @pytest.mark.parametrize("ratios, count", [([0, 0, 4, 128], 2), ([0, 0, 4, 128, 4, 128], 4)])
    def test_unsupported_layer_compositions_are_refused(self, ratios, count):
        with pytest.raises(CoverageError, match="do not match the model"):
            to_maxtext(composed(ratios, count), ToMaxText())


def test_layer_entries_beyond_the_model_are_ignored(tmp_path):
    """Published configurations have an entry for the MTP layer."""
    config = json.loads((GOLDEN / "hf" / "config.json").read_bytes())
    told = ckpttools.maxtext_config(GOLDEN / "hf").arguments()
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "compress_ratios": [*config["compress_ratios"], 0]})
    )
    assert ckpttools.maxtext_config(tmp_path / "config.json").arguments() == told


def test_first_layers_may_be_heavily_compressed():
    """As in V4-Pro, where the configuration decides, not the arrays."""
    source = ckpttools.open(GOLDEN / "hf")
    ratios = [128, 128, *(source.metadata.config or {})["compress_ratios"][2:]]
    heavy = source.with_metadata(config={**(source.metadata.config or {}), "compress_ratios": ratios})
    parts = {path: item for path, item in source.items() if path[0].startswith("layers.3.attn.compressor.")}
    more = {
        (path[0].replace("layers.3.", f"layers.{n}."),): item for path, item in parts.items() for n in (0, 1)
    }
    built = to_maxtext(Tree({**heavy, **more}, heavy.metadata), ToMaxText()).state
    assert sum("hca_compressor" in path for path in built) == 3 * len(parts)
