"""Stacking and unstacking: inverse to each other, equal to MaxText's own, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from support.command_line import run
from support.golden_data import described, golden_checkpoint
from support.internals import LINEN, keystr, linen_state, view_of
from support.locations import TRAINED
from support.train_data import ALL, Layers, golden_leaves, layered
from support.trees import lazy

import ckpttools
from ckpttools import (
    Empty,
    ForceUnroll,
    FormatError,
    ShapeError,
    StackLayers,
    StripOptimizer,
    Tree,
    UnstackLayers,
    UsageError,
)
from ckpttools.testing.strategies import assert_same


def stack_of(case: Layers) -> StackLayers:
    return StackLayers(case.axis, case.cycle, None if case.cycle == 1 else case.names)


def shaped(tree: Tree) -> dict[str, object]:
    return {
        keystr(path): leaf.kind if isinstance(leaf, Empty) else [list(leaf.shape), leaf.dtype.name]
        for path, leaf in tree.items()
    }


def apart(tree: Tree, axis: int = 1) -> Tree:
    """Layers one by one, without the note of how they were stacked."""
    return unnoted(UnstackLayers(axis)(tree).tree)


def unnoted(tree: Tree) -> Tree:
    declared = {key: value for key, value in tree.metadata.custom.items() if key != "ckpttools"}
    return tree.with_metadata(custom=declared)


class TestEveryLayout:
    @given(layered())
    def test_stack_matches_numpy(self, case):
        assert_same(stack_of(case)(case.single).tree, case.stacked)

    @given(layered())
    def test_unstack_matches_numpy(self, case):
        assert_same(apart(case.stacked, case.axis), case.single)

    @given(layered())
    def test_stack_and_unstack_are_inverse(self, case):
        stack, unstack = stack_of(case), UnstackLayers(case.axis)
        assert_same(apart(stack(case.single).tree, case.axis), case.single)
        assert_same(stack(unstack(case.stacked).tree).tree, case.stacked)

    @given(layered())
    def test_cycles_are_inferred_from_differing_layers(self, case):
        if case.told:
            assert_same(StackLayers(case.axis)(case.single).tree, case.stacked)

    @given(layered((LINEN,)))
    def test_training_states_convert_to_parameters(self, case):
        stack, unstack, strip = stack_of(case), UnstackLayers(case.axis), StripOptimizer()
        scanned, single = case.stacked, case.single
        if not case.trained:
            assert view_of(scanned).kind == "stacked-inference"
            return
        assert view_of(scanned).kind == "stacked-training"
        assert view_of(single).kind == "unstacked-training"
        plain_scanned, plain_single = strip(scanned).tree, strip(single).tree
        assert_same(unnoted(unstack(plain_scanned).tree), plain_single)
        assert_same(stack(plain_single).tree, plain_scanned)
        assert_same(unnoted(ForceUnroll(case.axis)(scanned).tree), plain_single)
        assert_same(strip(stack(single).tree).tree, plain_scanned)
        assert {view_of(plain_scanned).kind, view_of(plain_single).kind} == {
            "stacked-inference",
            "unstacked-inference",
        }


class TestGolden:
    def test_maxtext_conversions_stack_and_unstack(self):
        scanned, single = (ckpttools.open(golden_checkpoint(scan)) for scan in (True, False))
        assert_same(apart(scanned), single)
        assert_same(StackLayers()(single).tree, scanned)

    def test_golden_training_state_stacks_and_unstacks(self):
        tree = ckpttools.open(TRAINED)
        apart = UnstackLayers()(tree).tree
        assert_same(StackLayers()(apart).tree, tree)
        expected = golden_leaves("llama_unscanned_1")
        got = shaped(apart)
        assert [path for path in expected if path not in got] == []
        for path in (p for p, leaf in expected.items() if isinstance(leaf, dict) and "opt_state" not in p):
            assert got[path] == [expected[path]["shape"], expected[path]["dtype"]], path

    def test_shared_random_states_stay_with_the_first_layer(self):
        leaves = {}
        for path, leaf in golden_leaves("llama_unscanned_1").items():
            keys = tuple(int(key) if key.isdigit() else key for key in path.split("/"))
            if isinstance(leaf, dict):
                leaves[keys] = lazy(np.zeros(leaf["shape"], np.dtype(leaf["dtype"])))
            else:
                leaves[keys] = Empty(leaf)
        single = Tree(leaves).with_metadata(custom={"scan_layers": False})
        scanned = StackLayers()(single).tree
        shared = ("nnx_aux", "model", "decoder", "layers_0", "self_attention", "attention_op", "rngs")
        assert [path for path in scanned if "layers_0" in path] == [
            path for path in single if path[: len(shared)] == shared
        ]
        assert scanned["nnx_aux", "model", "decoder", "layers", "dropout", "rngs", "aqt", "key"].shape == (
            4,
            4,
        )
        assert_same(apart(scanned), single)

    @pytest.mark.parametrize("name", ["paramonly_scanned_unrolled_0"])
    def test_force_unroll_matches_golden_data(self, name, tmp_path):
        run("unstack", TRAINED, tmp_path / "out", "--force-unroll", "--flavor", "nnx", "--dtype", "bfloat16")
        tree = ckpttools.open(tmp_path / "out")
        assert {keystr(path): described(array.read()) for path, array in tree.arrays.items()} == (
            golden_leaves(name)
        )

    @pytest.mark.skipif(ALL is None, reason="CKPTTOOLS_GOLDEN names no directory")
    @pytest.mark.parametrize("cycled", [("gemma3", 6), ("gpt-oss", 2), ("llama4-scout", 4), ("*", None)])
    def test_all_families_are_stacked(self, cycled):
        family, cycle = cycled
        named = ("gemma3", "gpt-oss", "llama4-scout")
        result = [
            p for p in sorted(ALL.glob(f"{family}/*_scanned")) if (p.parent.name in named) == bool(cycle)
        ]
        assert result
        for scanned in (path for path in result if path.parent.name != "train"):
            single = scanned.with_name(scanned.name.replace("scanned", "unscanned"))
            if not single.exists():
                continue
            a, b = ckpttools.open(scanned), ckpttools.open(single)
            assert_decoders_same(apart(a), b)
            assert_decoders_same(StackLayers(cycle=cycle)(b).tree, a)

    @pytest.mark.skipif(ALL is None, reason="CKPTTOOLS_GOLDEN names no directory")
    @pytest.mark.parametrize("run", ["llama_scanned", "llama_scanned_linen", "llama_unscanned"])
    @pytest.mark.parametrize("step", [0, 1])
    def test_all_training_runs_are_stacked(self, run, step):
        tree = ckpttools.open(ALL / "train" / run / "checkpoints" / str(step))
        one, other = (UnstackLayers(), StackLayers())[:: 1 if "llama_scanned" in run else -1]
        assert_same(unnoted(other(one(tree).tree).tree), tree)


def assert_decoders_same(got: Tree, expected: Tree) -> None:
    """MaxText's scripts leave out other models, such as a vision encoder, one way."""
    built, due = (
        Tree({path: leaf for path, leaf in view_of(tree).parameters.items() if path[0] == "decoder"})
        for tree in (got, expected)
    )
    assert_same(built, due)


def decoder_tree(shapes: dict[str, tuple[int, ...]], dtype: type = np.float32) -> Tree:
    arrays = {("decoder", *name.split("/")): lazy(np.ones(s, dtype)) for name, s in shapes.items()}
    return linen_state(arrays, 0, {})


LAYER = {"mlp/kernel": (2, 3), "norm/scale": (2,)}


def single_layers(*numbers: int, **changed: dict[str, tuple[int, ...]]) -> Tree:
    layers = {f"layers_{k}": changed.get(f"layers_{k}", LAYER) for k in numbers}
    return decoder_tree({f"{key}/{path}": s for key, layer in layers.items() for path, s in layer.items()})


def test_layers_are_stacked_in_numeric_order():
    """In whatever order they come: names in the order of text have layers_10 before layers_2."""
    arrays = {("decoder", f"layers_{k}", "w"): lazy(np.full(3, k, np.float32)) for k in reversed(range(12))}
    tree = linen_state(arrays, 0, {})
    key, number = ("rng", "key"), ("count",)
    tree = Tree(
        {**tree, key: lazy(np.ones(2, np.uint32)), number: lazy(np.array(1, np.int32))}, tree.metadata
    )
    tree = tree.with_metadata(key_impls={key: "threefry2x32"}, scalars=tree.metadata.scalars | {number})
    stacked = StackLayers()(tree).tree
    (w,) = (array for path, array in stacked.arrays.items() if path[-1] == "w")
    assert np.array_equal(w.read().view(np.float32), np.tile(np.arange(12, dtype=np.float32), (3, 1)))
    single = UnstackLayers()(stacked).tree
    for built in (stacked, single):
        assert built.metadata.key_impls == tree.metadata.key_impls
        assert built.metadata.scalars == tree.metadata.scalars
    assert set(single) == set(tree)
    assert all(np.array_equal(single.arrays[path].read(), item.read()) for path, item in tree.arrays.items())


class TestRefusedTrees:
    def test_stacked_tree_cannot_be_stacked(self):
        tree = StackLayers()(single_layers(0, 1)).tree
        with pytest.raises(UsageError, match="already stacked"):
            StackLayers()(tree)

    def test_unstacked_tree_cannot_be_unstacked(self):
        with pytest.raises(UsageError, match="not stacked"):
            UnstackLayers()(single_layers(0, 1))

    @pytest.mark.parametrize("transform", [StackLayers(), UnstackLayers(), ForceUnroll()])
    def test_tree_without_layers_is_refused(self, transform):
        with pytest.raises(FormatError, match="no layers"):
            transform(linen_state({("a", "b"): lazy(np.ones(2))}, 0, {}))

    @pytest.mark.parametrize("transform", [StackLayers(), UnstackLayers()])
    def test_pipelines_are_refused(self, transform):
        with pytest.raises(FormatError, match="pipeline"):
            transform(decoder_tree({"pipeline_module/layers/kernel": (2, 2, 2), "layers_0/kernel": (2,)}))

    def test_missing_layer_indices_are_refused(self):
        with pytest.raises(FormatError, match="indices are missing") as caught:
            StackLayers()(single_layers(0, 1, 3, 5))
        assert caught.value.location == "decoder/layers_{0..1,3,5}"
        assert caught.value.expected == "also 2,4"

    def test_layers_of_different_shapes_are_refused(self):
        tree = single_layers(0, 1, 2, layers_2={"mlp/kernel": (2, 4), "other": (1,)})
        with pytest.raises(ShapeError) as caught:
            StackLayers()(tree)
        text = str(caught.value)
        assert "layers_2 and layers_0 cannot be stacked" in text
        assert "mlp/kernel: float32[2,4] and float32[2,3]" in text.replace(", ", ",")
        assert "norm/scale: none and float32[2]" in text
        assert "other: float32[1] and none" in text
        assert "set `cycle` N" in text

    def test_invalid_cycle_is_refused(self):
        odd = {"mlp/kernel": (3, 3)}
        tree = single_layers(0, 1, 2, 3, layers_1=odd, layers_3=odd)
        assert view_of(StackLayers()(tree).tree).layers[0].cycle == 2
        with pytest.raises(ShapeError, match="layers_3 and layers_0"):
            StackLayers(cycle=3)(tree)

    def test_cycle_of_named_groups_is_refused(self):
        tree = decoder_tree({"dense_layers_0/kernel": (2,), "moe_layers_0/kernel": (3,)})
        with pytest.raises(UsageError, match="repeat"):
            StackLayers(cycle=2)(tree)
        assert view_of(StackLayers()(tree).tree).kind == "stacked-inference"

    def test_out_of_range_scan_axis_is_refused(self):
        with pytest.raises(ShapeError, match="cannot be stacked"):
            StackLayers(axis=2)(single_layers(0, 1))

    def test_wrong_scan_axis_is_refused(self):
        layer = {"mlp/kernel": (2, 3), "out/kernel": (3, 2)}
        tree = StackLayers(axis=0)(single_layers(0, 1, layers_0=layer, layers_1=layer)).tree
        with pytest.raises(ShapeError, match="different numbers of layers on axis 1") as caught:
            UnstackLayers(1)(tree)
        assert caught.value.hint == "they fit together on axis 0: set scan_axis=0"
        assert view_of(UnstackLayers()(tree).tree).kind == "unstacked-inference"

    def test_leaf_with_another_layer_count_is_refused(self):
        shapes = {"layers/a": (2, 4), "layers/b": (3, 4, 2), "layers/c": (2, 5)}
        with pytest.raises(ShapeError, match="different numbers of layers") as caught:
            UnstackLayers(1)(decoder_tree(shapes))
        assert "decoder/layers/c [2, 5]" in str(caught.value)
        assert caught.value.expected == "4"
        assert caught.value.hint is None

    def test_groups_of_unequal_length_are_refused(self):
        shapes = {"layers/layers_0/a": (2, 4), "layers/layers_1/a": (2, 3)}
        with pytest.raises(ShapeError, match="positions of a cycle have different"):
            UnstackLayers(1)(decoder_tree(shapes))

    def test_missing_cycle_positions_are_refused(self):
        with pytest.raises(FormatError, match="positions of a cycle are missing"):
            UnstackLayers(1)(decoder_tree({"layers/layers_0/a": (2, 4), "layers/layers_2/a": (2, 4)}))

    @pytest.mark.parametrize("path", ["layers/mlp/kernel", "layers/other"])
    def test_moments_with_other_shapes_are_refused(self, path):
        tree = StackLayers()(single_layers(0, 1)).tree
        odd = {("opt_state", 0, "v_row", "params", "decoder", *path.split("/")): lazy(np.ones(2))}
        with pytest.raises(ShapeError, match="do not mirror") as caught:
            UnstackLayers()(Tree({**tree, **odd}, tree.metadata))
        assert "strip_optimizer" in str(caught.value)

    def test_missing_moments_are_refused(self):
        tree = single_layers(0, 1)
        moment = {
            ("opt_state", 0, "mu", "params", "decoder", "layers_0", "norm", "scale"): lazy(
                np.ones(2, np.float32)
            )
        }
        with pytest.raises(FormatError, match="lack this") as caught:
            StackLayers()(Tree({**tree, **moment}, tree.metadata))
        assert "layers_1" in str(caught.value)

    @pytest.mark.parametrize("stacked", [True, False])
    def test_unrolling_needs_a_training_state(self, stacked):
        tree = single_layers(0, 1)
        with pytest.raises(UsageError, match="stacked training"):
            ForceUnroll()(StackLayers()(tree).tree if stacked else tree)

    def test_random_states_of_another_length_are_refused(self):
        tree = StackLayers()(single_layers(0, 1)).tree
        odd = {("nnx_aux", "model", "decoder", "layers", "rngs", "key"): lazy(np.ones((3, 4), np.uint32))}
        with pytest.raises(
            ShapeError, match="does not have the number of layers of its parameters"
        ) as caught:
            UnstackLayers()(Tree({**tree, **odd}, tree.metadata))
        assert caught.value.expected == "2 on axis 0"


class TestCommands:
    def test_remap_round_trip_restores_the_tree(self, tmp_path):
        run("unstack", TRAINED, tmp_path / "single")
        run("stack", tmp_path / "single", tmp_path / "stacked")
        assert_same(ckpttools.open(tmp_path / "stacked"), ckpttools.open(TRAINED))
        note = {"stacks": {"layers": {"layers": [0, 1, 2, 3]}}, "scan_axis": 1}
        assert ckpttools.open(tmp_path / "single").metadata.custom == {
            "scan_layers": False,
            "ckpttools": note,
        }

    @pytest.mark.parametrize("command", ["stack", "unstack"])
    def test_already_converted_layers_are_refused(self, command, tmp_path):
        source = golden_checkpoint(command == "stack")
        output = run(command, source, tmp_path / "out", code=2)
        assert "stacked" in output
        assert list(tmp_path.iterdir()) == []

    def test_stack_dry_run_prints_json(self, tmp_path):
        report = json.loads(run("unstack", TRAINED, tmp_path / "out", "--dry-run", "--json"))
        assert (report["arrays"], report["bytes_out"]) == (204, report["bytes_in"])
        assert list(tmp_path.iterdir()) == []

    def test_unroll_options_need_unrolling(self, tmp_path):
        assert "--force-unroll" in run("unstack", TRAINED, tmp_path / "out", "--keep-step", code=2)

    def test_stack_and_unstack_convert_formats(self, tmp_path):
        run("unstack", golden_checkpoint(True), tmp_path / "st", "--to", "safetensors")
        assert (tmp_path / "st" / "model.safetensors").exists()
        run("stack", tmp_path / "st", tmp_path / "orbax", "--to", "orbax")
        assert_same(ckpttools.open(Path(tmp_path / "orbax")), ckpttools.open(golden_checkpoint(True)))
