"""What a tree is: kind, flavor, scan axis, layers, optimizer; and parameters without their wrapping."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.flavors import with_parameters
from support.golden_data import golden_checkpoint
from support.internals import LINEN, NNX, Constant, LayerGroup, linen_state, roles, view_of
from support.locations import ORBAX, TRAINED
from support.train_data import ALL, FLAVORS, golden_leaves, layered
from support.trees import lazy

import ckpttools
from ckpttools import DTYPES, Empty, Tree
from ckpttools.maxtext.layers import decoder_parameters, layer_stacks, split_number
from ckpttools.maxtext.view import PLAIN, Optimizer
from ckpttools.testing.strategies import trees

F32 = DTYPES["float32"]


def array(*shape):
    return Constant(shape, F32, bytes(4))


def words(*shape):
    """As states of random number generators and counters are kept."""
    return Constant(shape, DTYPES["uint32"], bytes(4))


def model(stacked, axis=1, layers=3, embed=5):
    norm = ("decoder", "decoder_norm", "scale"), array(embed)
    if stacked:
        shape = [embed]
        shape.insert(axis, layers)
        return dict([norm, (("decoder", "layers", "norm", "scale"), array(*shape))])
    return dict([norm, *((("decoder", f"layers_{k}", "norm", "scale"), array(embed)) for k in range(layers))])


class TestKinds:
    @pytest.mark.parametrize("stacked", [True, False])
    @pytest.mark.parametrize("trained", [True, False])
    @pytest.mark.parametrize("axis", [0, 1])
    def test_kind_combines_stacking_and_training(self, stacked, trained, axis):
        tree = linen_state(model(stacked, axis), 7, {"scan_layers": stacked})
        assert tree.metadata.step == 7
        assert tree["step",].read().item() == 7
        leaves = dict(tree.leaves) | ({("opt_state", "mu", "x"): array(2)} if trained else {})
        view = view_of(Tree(leaves, tree.metadata))
        name = f"{'stacked' if stacked else 'unstacked'}-{'training' if trained else 'inference'}"
        assert (view.kind, view.flavor.name, view.scan_axis) == (name, "linen", axis if stacked else None)
        assert view.layers == (LayerGroup("decoder/layers", 3, "stacked" if stacked else "unstacked"),)
        assert view.contradictions == ()

    @given(layered())
    def test_every_layout_is_recognized(self, case):
        stacked, single = view_of(case.stacked), view_of(case.single)
        suffix = "training" if case.trained else "inference"
        assert (stacked.kind, single.kind) == (f"stacked-{suffix}", f"unstacked-{suffix}")
        assert stacked.flavor == single.flavor == case.flavor
        assert [group.length for group in stacked.layers] == [group.length for group in single.layers]
        assert {group.cycle for group in stacked.layers} == {case.cycle}
        assert single.scan_axis is None
        assert {group.layout for group in single.layers} == {"unstacked"}
        layout = {"plain": "stacked", "local-global": "blocks"}.get(case.names, "cycle")
        assert {group.layout for group in stacked.layers} == {layout}
        assert stacked.contradictions == single.contradictions == ()

    @given(layered())
    def test_layer_counts_match_the_other_layout(self, case):
        stacks = layer_stacks(decoder_parameters(view_of(case.stacked).parameters), case.axis)
        keys = [key for stack in stacks for key in stack.layer_keys]
        singles = {
            path[:1] for path in decoder_parameters(view_of(case.single).parameters) if split_number(path[0])
        }
        assert sorted(keys) == sorted(singles)

    @settings(max_examples=50)
    @given(trees())
    def test_arbitrary_trees_have_a_kind(self, tree):
        assert view_of(tree).kind is None or "decoder" in str(list(tree))

    @pytest.mark.parametrize("leaves", [{}, {("model.norm.weight",): array(3)}, {(): array(3)}])
    def test_other_models_have_no_optimizer(self, leaves):
        view = view_of(Tree(leaves))
        assert (view.kind, view.scan_axis, view.optimizer) == (None, None, None)
        assert view.layers == view.contradictions == ()

    @pytest.mark.parametrize("stacked", [True, False])
    def test_contradiction_is_reported(self, stacked):
        view = view_of(linen_state(model(stacked), 0, {"scan_layers": not stacked}))
        assert view.kind == ("stacked-inference" if stacked else "unstacked-inference")
        (warning,) = view.contradictions
        assert f"scan_layers={str(not stacked).lower()}" in warning
        assert warning.endswith(f"but layers are {'stacked' if stacked else 'not stacked'}")

    def test_inconsistent_layers_are_reported(self):
        leaves = {("decoder", "layers", name): array(2, n) for name, n in (("a", 3), ("b", 3), ("c", 4))}
        view = view_of(linen_state(leaves, 0, {}))
        assert (view.kind, view.scan_axis) == ("stacked-inference", 0)
        leaves = {("decoder", "layers", name): array(k + 2, 3 + (k == 2)) for k, name in enumerate("abc")}
        view = view_of(linen_state(leaves, 0, {}))
        assert (view.kind, view.scan_axis, view.layers) == ("stacked-inference", 1, ())
        assert "different numbers of layers" in view.contradictions[0]

    def test_leading_layers_continue_the_count(self):
        leaves = {("decoder", f"layers_{k}", "a"): array(2) for k in range(3)}
        leaves |= {("decoder", "scanned_blocks", f"layers_{k}", "a"): array(2, 4) for k in range(2)}
        stacks = layer_stacks(decoder_parameters(leaves), 1)
        assert stacks[3].numbers == (3, 5, 7, 9)
        assert stacks[4].layer_keys == (("layers_4",), ("layers_6",), ("layers_8",), ("layers_10",))


class TestGolden:
    def test_golden_training_state_is_recognized(self):
        view = view_of(ckpttools.open(TRAINED))
        assert (view.kind, view.flavor, view.scan_axis) == ("stacked-training", LINEN, 1)
        assert view.layers == (LayerGroup("decoder/layers", 4, "stacked"),)
        assert view.optimizer == Optimizer("adamw", ("opt_state/0/mu", "opt_state/0/nu"))
        assert (view.metadata.step, view.contradictions) == (1, ())
        assert ckpttools.inspect(TRAINED).random_states == 30

    @pytest.mark.parametrize("scan", [True, False])
    def test_golden_conversions_are_recognized(self, scan):
        view = view_of(ckpttools.open(golden_checkpoint(scan)))
        assert view.kind == f"{'stacked' if scan else 'unstacked'}-inference"
        assert (view.optimizer, view.contradictions, view.layers[0].length) == (None, (), 4)

    @pytest.mark.parametrize("name", ["maxtext_nnx", "maxtext_run"])
    def test_orbax_samples_are_training_states(self, name):
        tree = ckpttools.open(ORBAX / name)
        assert view_of(tree).kind == "stacked-training"
        assert view_of(tree).optimizer.name == "adamw"

    @pytest.mark.skipif(ALL is None, reason="CKPTTOOLS_GOLDEN names no directory")
    @pytest.mark.parametrize(
        ("family", "expected"),
        [
            ("gemma3", [LayerGroup("decoder/layers", 8, "cycle", 6, 2)]),
            ("gemma4-moe", [LayerGroup("decoder/scanned_blocks", 12, "blocks", 6)]),
            ("gpt-oss", [LayerGroup("decoder/layers", 4, "cycle", 2)]),
            ("qwen3-next", [LayerGroup("decoder/layers", 8, "cycle", 4)]),
            ("gemma2", [LayerGroup("decoder/layers", 2, "stacked")]),
            (
                "deepseek3",
                [
                    LayerGroup("decoder/dense_layers", 2, "stacked"),
                    LayerGroup("decoder/moe_layers", 3, "stacked"),
                ],
            ),
        ],
    )
    def test_all_families_are_stacked(self, family, expected):
        view = view_of(ckpttools.open(ALL / family / "maxtext_scanned"))
        assert (list(view.layers), view.scan_axis, view.contradictions) == (expected, 1, ())


MODEL = {("decoder", "layers", "mlp", "kernel"): array(2, 3), ("embedding",): array(4)}


def state(*optimizer):
    return Tree({**linen_state(MODEL, 0, {}), **dict(optimizer)})


def mirrored(head, *wrapping):
    return [((*head, *wrapping, *path), item) for path, item in MODEL.items()]


class TestOptimizers:
    def test_state_without_optimizer_is_recognized(self):
        assert view_of(state()).optimizer is None

    def test_flat_adam_state_is_recognized(self):
        moments = [*mirrored(("opt_state", "mu"), "params"), *mirrored(("opt_state", "nu"), "params")]
        tree = state((("opt_state", "count"), array()), *moments)
        assert view_of(tree).optimizer == Optimizer("adam_pax", ("opt_state/mu", "opt_state/nu"))

    def test_chain_next_to_its_module_is_recognized(self):
        head = ("optimizer", "opt_state", 0)
        moments = [*mirrored((*head, "mu")), *mirrored((*head, "nu"))]
        leaves = [((*path, "value"), item) for path, item in moments]
        tree = Tree(
            {("model", *path, "value"): item for path, item in MODEL.items()}
            | {("optimizer", "step", "value"): array(), (*head, "count", "value"): array()}
            | dict(leaves)
        )
        assert view_of(tree).optimizer == Optimizer(
            "adamw", ("optimizer/opt_state/0/mu", "optimizer/opt_state/0/nu")
        )
        assert view_of(tree).flavor.name == "nnx"

    @pytest.mark.parametrize("momentum", [True, False])
    def test_sgd_state_is_recognized(self, momentum):
        trace = mirrored(("opt_state", 0, "trace"), "params") if momentum else []
        tree = state((("opt_state", 0), Empty("None")), (("opt_state", 1, "count"), array()), *trace)
        assert view_of(tree).optimizer == Optimizer("sgd", ("opt_state/0/trace",) if momentum else ())

    def test_sgd_without_state_is_training(self):
        tree = state((("opt_state", 0), Empty("None")), (("opt_state", 1), Empty("None")))
        assert view_of(tree).kind == "stacked-training"

    def test_unrecognized_moments_are_an_unknown_optimizer(self):
        odd = ("opt_state", 0, "v_row", "params", "embedding"), array(1)
        assert view_of(state(odd)).optimizer == Optimizer(
            "unknown", ("opt_state/0/v_row",), matches_parameters=False
        )


class TestFlavors:
    @given(layered(), st.sampled_from([None, *FLAVORS]))
    def test_unwrapping_and_wrapping_are_inverse(self, case, other):
        for tree in (case.single, case.stacked):
            inner = view_of(tree).parameters
            assert with_parameters(tree, inner).leaves == tree.leaves
            changed = with_parameters(tree, inner, other)
            if other in (None, LINEN, NNX, case.flavor):
                assert list(view_of(changed).parameters) == list(inner)
                assert with_parameters(changed, inner, case.flavor).leaves == tree.leaves

    @settings(max_examples=50)
    @given(trees())
    def test_arbitrary_trees_have_a_flavor(self, tree):
        assert with_parameters(tree, view_of(tree).parameters).leaves == tree.leaves

    @given(layered())
    def test_wrapped_parameters_exclude_other_state(self, case):
        wrapped = {case.flavor.wrapped(path) for path in view_of(case.stacked).parameters}
        rest = {path for path in case.stacked if path[0] in ("opt_state", "nnx_aux", "step")}
        assert wrapped | rest == set(case.stacked)
        assert wrapped.isdisjoint(rest)
        assert all(path[0] == "decoder" for path in view_of(case.stacked).parameters)

    @pytest.mark.parametrize("flavor", FLAVORS)
    def test_flavor_is_recognized_from_names(self, flavor):
        tree = Tree({flavor.wrapped(path): item for path, item in MODEL.items()})
        assert view_of(tree).flavor == flavor
        assert view_of(tree).parameters == MODEL

    def test_other_models_are_unchanged(self):
        other = {("critic", "decoder", "x"): array(2), ("step",): array()}
        tree = Tree({("base", *path): item for path, item in MODEL.items()} | other)
        assert view_of(tree).parameters == MODEL
        changed = with_parameters(tree, {("y",): array(1)})
        assert set(changed) == {("base", "y"), *other}

    def test_random_states_are_not_parameters(self):
        rngs = {("model", "decoder", "dropout", "rngs", "params", "key", "value"): words(4)}
        tree = Tree({("model", *path, "value"): item for path, item in MODEL.items()} | rngs)
        assert view_of(tree).parameters == MODEL

    def test_names_without_a_tree_are_unchanged(self):
        tree = Tree({("model.layers.0.self_attn.value",): array(2), ("params",): array(1)})
        assert view_of(tree).flavor == PLAIN
        assert view_of(tree).parameters == tree.arrays
        bare = Tree({(): array(3)})
        assert view_of(bare).parameters == bare.arrays

    def test_attention_value_is_not_a_suffix(self):
        kernel = ("decoder", "layers", "self_attention", "value", "kernel")
        assert view_of(Tree({(*kernel, "value"): array(2)})).parameters.keys() == {kernel}

    def test_golden_training_state_unwraps_to_nnx_names(self):
        plain = view_of(ckpttools.open(TRAINED)).parameters
        nnx = {tuple(path.split("/"))[:-1] for path in golden_leaves("paramonly_scanned_0")}
        assert set(plain) == nnx


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (("params", "params", "x"), "parameter"),
        (("opt_state", "mu"), "optimizer"),
        (("optimizer", 0), "optimizer"),
        (("step",), "other"),
        (("rngs", "x"), "other"),
        (("model", "dropout", "rngs", "key"), "other"),
        ((), "parameter"),
    ],
)
def test_paths_have_expected_roles(path, expected):
    leaf = words() if {"rngs", "step"} & {*path} else array()
    assert roles(Tree({path: leaf})).of(path) == expected


def test_lazy_arrays_equal_numpy_arrays():
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.array_equal(lazy(values).read(), values)
