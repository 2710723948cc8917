"""What is a parameter and what is an optimizer's: told by structure, for every optimizer in every nesting."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from support.command_line import run, succeed
from support.internals import keystr, roles, view_of
from support.trees import tree_with

import ckpttools
from ckpttools import FormatError, StackLayers, StripOptimizer, Tree, UnstackLayers, UsageError, save
from ckpttools.testing.strategies import assert_same

COUNT = np.array(3, np.int32)
KEYS = (
    "decoder",
    "encoder",
    "mlp",
    "norm",
    "scale",
    "kernel",
    "v",
    "m",
    "mu",
    "nu",
    "optimizer",
    "opt",
    "embedding",
    "layers_0",
)


COUNTERS = ("cache_index", "num_batches_tracked", "step", "count")
NAMES = st.lists(st.lists(st.sampled_from(KEYS), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5)
SHAPES = st.lists(st.integers(1, 3), min_size=1, max_size=2)
# Which module each is in, by its number; and what it is called.
BESIDE = st.lists(st.tuples(st.integers(0, 59), st.sampled_from(COUNTERS)), max_size=3)


@st.composite
def models(draw):
    """Parameters of a model: some with names that optimizers have as well, some beside counters."""
    paths = []
    for name in draw(NAMES):
        # No path may run through another one.
        if not any(name[: len(item)] == item or item[: len(name)] == name for item in paths):
            paths.append(name)
    model = {("decoder", *path, "w"): np.ones(draw(SHAPES), np.float32) for path in paths}
    modules = ((), *paths)
    beside = [(modules[number % len(modules)], name) for number, name in draw(BESIDE)]
    return model | {("decoder", *path, name): COUNT.copy() for path, name in beside}


def mirrored(model, *head, inner=()):
    return {(*head, *inner, *path): array for path, array in model.items()}


def factored(model):
    """T5X: moments below each parameter, of other shapes where they are factored."""
    return {
        (*path, part): np.ones(array.shape[:1] if part == "v_row" else (1,), np.float32)
        for path, array in model.items()
        for part in ("m", "v", "v_row", "v_col")
    }


# Name -> state of an optimizer over a model, below the key that optimizers' states have.
OPTIMIZERS = {
    "adam": lambda m: {
        (0, "count"): COUNT,
        **mirrored(m, 0, "mu"),
        **mirrored(m, 0, "nu"),
        (2, "count"): COUNT,
    },
    "flat": lambda m: {("count",): COUNT, **mirrored(m, "mu"), **mirrored(m, "nu")},
    "lion": lambda m: {(0, "count"): COUNT, **mirrored(m, 0, "mu")},
    "momentum": lambda m: {**mirrored(m, 0, "trace"), (1, "count"): COUNT},
    "plain": lambda m: {(1, "count"): COUNT},
    "adafactor": lambda m: {
        (0, "count"): COUNT,
        **{(0, "v_row", *path): np.ones(a.shape[:1], np.float32) for path, a in m.items()},
        **{(0, "v_col", *path): np.ones(1, np.float32) for path in m},
        **mirrored(m, 0, "v"),
    },
    "muon": lambda m: {
        ("inner_states", "muon", "inner_state", 0, "count"): COUNT,
        **mirrored(dict(list(m.items())[:1]), "inner_states", "muon", "inner_state", 0, "mu"),
        ("inner_states", "adam", "inner_state", 0, "count"): COUNT,
        **mirrored(dict(list(m.items())[1:]), "inner_states", "adam", "inner_state", 0, "mu"),
    },
    "shampoo": lambda m: {
        ("count",): COUNT,
        **{
            ("stats", *p, "statistics", k): np.ones((n, n), np.float32)
            for p, a in m.items()
            for k, n in enumerate(a.shape)
        },
    },
    "several steps": lambda m: {
        ("mini_step",): COUNT,
        ("gradient_step",): COUNT,
        **mirrored(m, "acc_grads"),
        ("inner_opt_state", 0, "count"): COUNT,
        **mirrored(m, "inner_opt_state", 0, "mu"),
    },
}


def below(head, leaves, suffix=()):
    return {(*head, *path, *suffix): array for path, array in leaves.items()}


# Name -> (where the parameters are, where the optimizer's state is, what is behind all, what else there is).
NESTINGS = {
    "maxtext": (("params", "params"), ("opt_state",), (), {("step",): COUNT}),
    "params": (("params",), ("opt_state",), (), {}),
    "bare": ((), ("opt_state",), (), {("step",): COUNT}),
    "optimizer": (("params",), ("optimizer", "opt_state"), (), {("optimizer", "step"): COUNT}),
    "nnx tuple": (("0",), ("1", "opt_state"), ("value",), {("1", "step", "value"): COUNT}),
    "nnx list": ((0,), (1, "opt_state"), ("value",), {(1, "step", "value"): COUNT}),
    "nnx optimizer": (("model",), ("opt_state",), ("value",), {("step", "value"): COUNT}),
    "within an optimizer": (("optimizer", "model"), ("optimizer", "opt_state"), ("value",), {}),
    "state": (("state", "params"), ("state", "opt_state"), (), {("state", "step"): COUNT}),
    "tunix": (("model_params",), ("optimizer_state",), ("value",), {}),
    "t5x": (("target",), ("state", "param_states"), (), {("state", "step"): COUNT}),
    "t5x of old": (("optimizer", "target"), ("optimizer", "state", "param_states"), (), {}),
    "pax": (("mdl_vars", "params"), ("opt_states_0",), (), {("step",): COUNT}),
    "somebody's": (("run", "net"), ("run", "opt_state"), (), {}),
}
# What else a state may hold that is learned, or no number of a model at all.
LEARNED = {
    "batch_stats": {("batch_stats", "decoder", "bn", "mean"): np.ones(3, np.float32)},
    "bias": {("nnx_aux", "model", "decoder", "gate", "bias"): np.ones(4, np.float32)},
    "collection": {("params", "MoEBiasVar", "decoder", "gate", "bias"): np.ones(4, np.float32)},
    "none": {},
}
BOOKKEEPING = {
    ("nnx_aux", "model", "decoder", "dropout", "rngs", "key"): np.ones(4, np.uint32),
    ("nnx_aux", "model", "dropout", "key"): np.ones(2, np.uint32),
    ("nnx_aux", "model", "dropout", "count"): np.array(2, np.uint32),
    ("rng",): np.ones(2, np.uint32),
    ("loss_scale", "loss_scale"): np.array(8, np.float32),
}


tree_of = partial(tree_with, step=7)


def kept_by(transform, tree):
    return {id(item) for path, item in transform(tree).tree.arrays.items() if path != ("step",)}


def refusal(tree):
    """The paths that stripping keeps, or why it refuses."""
    try:
        kept = kept_by(StripOptimizer(), tree)
    except FormatError as error:
        return error
    except UsageError:
        kept = arrays_at(tree, tree)
    return {path for path in tree if id(tree[path]) in kept}


def arrays_at(tree, paths):
    return {id(tree[path]) for path in paths}


class TestEveryOptimizer:
    @given(
        models(),
        st.sampled_from(sorted(OPTIMIZERS)),
        st.sampled_from(sorted(NESTINGS)),
        st.sampled_from(sorted(LEARNED)),
    )
    def test_only_parameters_are_kept(self, model, optimizer, nesting, beside):
        inner, outer, suffix, rest = NESTINGS[nesting]
        state = factored(model) if nesting.startswith("t5x") else OPTIMIZERS[optimizer](model)
        learned = below(inner, model, suffix)
        learned |= {} if nesting == "bare" and beside == "collection" else LEARNED[beside]
        leaves = {**learned, **below(outer, state, suffix), **rest, **BOOKKEEPING}
        tree = tree_of(leaves)
        known = roles(tree)
        assert known.unclear == ()
        assert {path for path in tree if known.of(path) == "parameter"} == set(learned)
        assert {path for path in tree if known.of(path) == "optimizer"} >= set(below(outer, state, suffix))
        assert {known.of(path) for path in BOOKKEEPING} == {"other"}
        assert kept_by(StripOptimizer(), tree) == arrays_at(tree, learned)

    @given(models(), st.sampled_from(["adam", "flat", "lion"]), st.sampled_from([("0", "1"), (0, 1)]))
    def test_unnamed_roles_are_inferred(self, model, optimizer, keys):
        """A tuple of parameters and an optax state."""
        first, second = keys
        state = below((second,), OPTIMIZERS[optimizer](model))
        tree = tree_of({**below((first,), model), **state})
        assert {path for path in tree if roles(tree).of(path) == "optimizer"} == set(state)
        assert kept_by(StripOptimizer(), tree) == arrays_at(tree, below((first,), model))

    @given(
        models(), st.sampled_from(sorted(OPTIMIZERS)), st.sampled_from([("opt_state",), ("0", "opt_state")])
    )
    def test_state_without_parameters_is_not_a_model(self, model, optimizer, head):
        with pytest.raises(FormatError, match="no parameters"):
            StripOptimizer()(tree_of(below(head, OPTIMIZERS[optimizer](model))))

    @given(models(), st.sampled_from(["adam", "flat", "lion"]), st.sampled_from([(), ("0",)]))
    def test_unnamed_state_is_recognized(self, model, optimizer, head):
        with pytest.raises(FormatError, match="no parameters"):
            StripOptimizer()(tree_of(below(head, OPTIMIZERS[optimizer](model))))

    @given(models())
    def test_model_without_state_is_all_parameters(self, model):
        for head in ((), ("params",), ("params", "params"), ("model",), ("opt",)):
            tree = tree_of(below(head, model))
            assert {roles(tree).of(path) for path in tree} == {"parameter"}
            with pytest.raises(UsageError, match="nothing to strip"):
                StripOptimizer()(tree)


@pytest.mark.parametrize("nesting", ["nnx tuple", "nnx list", "state", "tunix", "somebody's"])
def test_moments_are_restacked_with_their_parameters(nesting):
    """However they are nested, layers go apart in both, and together again."""
    inner, outer, suffix, rest = NESTINGS[nesting]
    rng = np.random.default_rng(1)
    shapes = {("decoder", "layers", "w"): (3, 2), ("decoder", "layers", "norm"): (5, 2), ("embedding",): (4,)}
    model = {path: rng.standard_normal(shape, np.float32) for path, shape in shapes.items()}
    state = OPTIMIZERS["adam"]({path: array + 1 for path, array in model.items()})
    tree = tree_of({**below(inner, model, suffix), **below(outer, state, suffix), **rest})
    apart = UnstackLayers()(tree).tree
    moment = apart[(*outer, 0, "nu", "decoder", "layers_1", "w", *suffix)]
    assert np.array_equal(moment.read(), model["decoder", "layers", "w"][:, 1] + 1)
    assert_same(Tree(StackLayers()(apart).tree.leaves), Tree(tree.leaves))
    assert_same(
        Tree(UnstackLayers()(StripOptimizer()(tree).tree).tree.leaves),
        Tree(StripOptimizer()(apart).tree.leaves),
    )


class TestAmbiguousRoles:
    @given(
        models(),
        st.sampled_from(["adam", "lion", "adafactor", "plain"]),
        st.sampled_from(["maxtext", "state", "pax", "nnx optimizer"]),
        st.sampled_from([("ema_params",), ("ema", "params"), ("teacher",), ("slow", "momentum")]),
    )
    def test_ambiguous_copy_needs_a_decision(self, model, optimizer, nesting, head):
        inner, outer, suffix, rest = NESTINGS[nesting]
        head = (*inner[:1], *head) if nesting == "state" else head
        copy = below(head, model, suffix)
        learned = below(inner, model, suffix)
        tree = tree_of({**learned, **copy, **below(outer, OPTIMIZERS[optimizer](model), suffix), **rest})
        assert {roles(tree).of(path) for path in (*learned, *copy)} == {"parameter"}
        with pytest.raises(FormatError, match="is unclear whether") as caught:
            StripOptimizer()(tree)
        assert "drop=" in caught.value.hint
        pattern = keystr(head)
        assert kept_by(StripOptimizer(drop=[pattern]), tree) == arrays_at(tree, learned)
        assert kept_by(StripOptimizer(keep=[pattern]), tree) == arrays_at(tree, [*learned, *copy])

    @given(models(), st.sampled_from(["maxtext", "pax", "state"]))
    def test_average_in_the_optimizer_is_state(self, model, nesting):
        """Pax keeps the average of the weights there, optax that of gradients."""
        inner, outer, _, _ = NESTINGS[nesting]
        state = {**OPTIMIZERS["adam"](model), **mirrored(model, 3, "ema")}
        tree = tree_of({**below(inner, model), **below(outer, state)})
        with pytest.raises(FormatError, match="is unclear whether"):
            StripOptimizer()(tree)
        pattern = keystr((*outer, 3, "ema"))
        assert kept_by(StripOptimizer(drop=[pattern]), tree) == arrays_at(tree, below(inner, model))

    def test_unrelated_arrays_below_an_optimizer_name_are_refused(self):
        model = {("decoder", "w"): np.ones((2, 3), np.float32)}
        odd = {("optimizer", "head", "kernel"): np.ones((5, 4), np.float32)}
        with pytest.raises(FormatError, match="optimizer"):
            StripOptimizer()(tree_of({**below(("params",), model), **odd}))

    def test_other_flavor_refuses_arrays_outside_parameters(self):
        model = {("decoder", "w"): np.ones((2, 3), np.float32)}
        tree = tree_of(
            {**below(("params", "params"), model), **LEARNED["batch_stats"], ("opt_state", 0, "count"): COUNT}
        )
        with pytest.raises(FormatError, match="batch_stats"):
            StripOptimizer(flavor="nnx")(tree)
        built = StripOptimizer(flavor="nnx", drop=["batch_stats"])(tree).tree
        assert set(built) == {("decoder", "w", "value")}


def weights(*names, shape=(4, 4)):
    """name -> array, of names joined by dots."""
    return {tuple(name.split(".")): np.ones(shape, np.float32) for name in names}


def counters(*names, dtype=np.int32):
    return {tuple(name.split(".")): np.array(3, dtype) for name in names}


def attention(*heads):
    return weights(*(f"{head}.{name}.kernel" for head in heads for name in "qkvo"))


NETWORK = weights("l0.w", "l1.mlp.w", "embed.w") | {("l1", "norm"): np.ones(4, np.float32)}
# Name -> a model that has modules called as moments are, and counters beside them.
PLAIN = {
    "attention": weights("embed.weight", *(f"attn.{name}.weight" for name in "qkvo")) | counters("attn.step"),
    "vae": weights(
        "enc.conv.weight",
        "enc.conv.bias",
        *(f"bottleneck.{name}.{leaf}" for name in ("mu", "logvar") for leaf in ("weight", "bias")),
    )
    | counters("bottleneck.num_batches_tracked"),
    "batch norm": weights("l0.w", "l0.b", "bn.m", "bn.v", "bn.scale", "bn.offset", shape=(4,))
    | counters("bn.count"),
    "t5": weights("decoder.layers_0.mlp.wo", "decoder.layers_0.mlp.wi", "token_embedder.embedding")
    | attention("decoder.layers_0.attn", "decoder.layers_1.attn")
    | counters("decoder.layers_0.attn.cache_index", "decoder.layers_1.attn.cache_index"),
    "one layer": weights("embed.w", "attn.v.w", "attn.mu.w") | counters("attn.count"),
}


class TestParametersNamedLikeMoments:
    @pytest.mark.parametrize("name", sorted(PLAIN))
    def test_parameters_named_like_moments_are_kept(self, name):
        for head, suffix in (
            ((), ()),
            (("params",), ()),
            (("model",), ("value",)),
            (("params", "params"), ()),
        ):
            tree = tree_of(below(head, PLAIN[name], suffix))
            assert {roles(tree).of(path) for path in tree} == {"parameter"}
            assert roles(tree).unclear == ()
            with pytest.raises(UsageError, match="no known optimizer state"):
                StripOptimizer()(tree)

    @given(models(), st.sampled_from(sorted(PLAIN)), st.sampled_from([(), ("params",), ("0",), ("net",)]))
    def test_learned_arrays_are_never_dropped_silently(self, model, name, head):
        tree = tree_of({**below(head, model), **below(head, PLAIN[name])})
        left = refusal(tree)
        assert isinstance(left, FormatError) or left == set(tree)

    @given(models(), st.sampled_from(sorted(PLAIN)), st.sampled_from(["maxtext", "nnx tuple", "state"]))
    def test_parameters_named_like_moments_next_to_an_optimizer_are_ambiguous(self, model, name, nesting):
        inner, outer, suffix, rest = NESTINGS[nesting]
        model = {**model, **PLAIN[name]}
        learned, state = below(inner, model, suffix), below(outer, OPTIMIZERS["adam"](model), suffix)
        assert refusal(tree_of({**learned, **state, **rest})) == set(learned)


def per_parameter(model, *head):
    """PyTorch: moments and a step of its own below each parameter."""
    return {
        (*head, *path, name): np.ones(() if name == "step" else array.shape, np.float32)
        for path, array in model.items()
        for name in ("exp_avg", "exp_avg_sq", "step")
    }


class TestUnrecognizedMoments:
    @given(models(), st.integers(1, 3), st.sampled_from([(), ("run",), ("state",)]))
    @example(NETWORK, 2, ())
    def test_unnamed_moments_are_refused_until_the_user_decides(self, model, moments, head):
        # A module that mirrors another one, such as optimizer/decoder/mlp, is unclear by itself.
        assume(not any(path != other and path[-len(other) :] == other for path in model for other in model))
        names = ("first", "second", "third")[:moments]
        state = {k: item for name in names for k, item in below(("tx_state", name), model).items()}
        leaves = {**below(("params",), model), **state, ("tx_state", "count"): COUNT}
        loose = {("step",): COUNT, ("rng",): np.ones(2, np.uint32)} if not head else {}
        # A model with modules m and v next to a step is unclear by itself, too.
        assume(not roles(tree_of({**below((*head, "params"), model), **loose})).unclear)
        tree = tree_of({**below(head, leaves), **loose})
        pattern = keystr((*head, "tx_state"))
        assert roles(tree).unclear == ((*head, "tx_state"),)
        error = refusal(tree)
        assert isinstance(error, FormatError)
        assert pattern in error.hint
        kept = kept_by(StripOptimizer(drop=[pattern]), tree)
        assert kept == arrays_at(tree, below((*head, "params"), model))

    @given(models(), st.sampled_from([(), ("app",)]), st.sampled_from(["optim.state", "optim", "state"]))
    @example(NETWORK, (), "optim.state")
    @example(NETWORK, ("app",), "optim.state")
    def test_moments_below_each_parameter_are_recognized(self, model, head, location):
        learned = below((*head, "model"), model)
        state = per_parameter(model, *head, *location.split("."))
        tree = tree_of({**learned, **state})
        left = refusal(tree)
        if left != set(learned):
            assert 'drop="' + keystr((*head, "model")) + '"' not in left.hint

    @pytest.mark.parametrize("head", [(), ("app",)])
    def test_float_step_per_parameter_is_state(self, head):
        learned = below((*head, "model"), NETWORK)
        state = per_parameter(NETWORK, *head, "optim", "state")
        assert refusal(tree_of({**learned, **state})) == set(learned)
        # Numbered, they do not tell what they belong to.
        numbered = per_parameter(
            {(k,): item for k, item in enumerate(NETWORK.values())}, *head, "optim", "state"
        )
        error = refusal(tree_of({**learned, **numbered}))
        assert keystr((*head, "optim")) in error.hint

    @given(models(), st.sampled_from([("mu", "nu"), ("mu",), ("exp_avg", "exp_avg_sq")]), st.booleans())
    def test_unnamed_moments_are_recognized(self, model, names, counted):
        """Below a key of its own, with a counter or without."""
        state = {k: item for name in names for k, item in below(("tx", name), model).items()}
        state |= {("tx", "count"): COUNT} if counted else {}
        learned = below(("params",), model)
        left = refusal(tree_of({**learned, **state}))
        if counted and len(names) > 1:
            assert left == set(learned)
        else:
            assert '"tx"' in left.hint

    def test_hint_joins_keys_like_the_tree(self):
        learned = below(("run", "params"), NETWORK)
        state = {**below(("run", "tx", "first"), NETWORK), ("run", "tx", "count"): COUNT}
        flat = {(".".join(map(str, path)),): item for path, item in {**learned, **state}.items()}
        assert 'drop="run.tx"' in refusal(tree_of(flat)).hint
        assert len(kept_by(StripOptimizer(drop=["run.tx"]), tree_of(flat))) == len(learned)

    @pytest.mark.parametrize("behind", [(), ("codes",)])
    def test_moments_of_other_shapes_need_a_decision(self, behind):
        """As those that are stored in eight bits."""
        state = {("1", 0, "mu", *path, *behind): np.ones((7, 2), np.uint8) for path in NETWORK}
        leaves = {**below(("0",), NETWORK), **state}
        assert refusal(tree_of(leaves)) == set(leaves)
        counted = tree_of({**leaves, ("1", 0, "count"): COUNT})
        assert roles(counted).unclear == (("1",),)
        assert kept_by(StripOptimizer(drop=["1"]), counted) == arrays_at(counted, below(("0",), NETWORK))

    def test_factored_moments_next_to_parameters_are_recognized(self):
        state = {
            (0, "v_row", *path): np.ones(item.shape[1:] or (1,), np.float32) for path, item in NETWORK.items()
        }
        state |= {(0, "v", *path): np.ones(1, np.float32) for path in NETWORK} | {(0, "count"): COUNT}
        learned = below(("0",), NETWORK)
        assert refusal(tree_of({**learned, **below(("1",), state)})) == set(learned)


def router(model_layers=2, experts=4, axis=1):
    """Deepseek's training state as MaxText 0.2.5 writes it: the router's bias outside of the parameters."""
    rng = np.random.default_rng(0)
    random = lambda *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
    block = ("decoder", "moe_layers", "DeepSeekMoeBlock_0", "MoeBlock_0")
    model = {
        ("decoder", "decoder_norm", "scale"): random(8),
        ("decoder", "moe_layers", "norm", "scale"): random(8, model_layers),
        (*block, "gate", "kernel"): random(8, model_layers, experts),
        (*block, "wi_0"): random(experts, model_layers, 8, 6),
    }
    return {
        **below(("params", "params"), model),
        ("opt_state", 0, "count"): COUNT,
        **mirrored(model, "opt_state", 0, "mu", inner=("params",)),
        **mirrored(model, "opt_state", 0, "nu", inner=("params",)),
        ("nnx_aux", "model", *block, "gate", "bias"): random(model_layers, experts),
        ("nnx_aux", "model", *block, "rngs", "key"): np.ones((model_layers, 4), np.uint32),
        ("step",): COUNT,
    }


BIAS = ("decoder", "moe_layers", "DeepSeekMoeBlock_0", "MoeBlock_0", "gate", "bias")


class TestRouterBias:
    @pytest.mark.parametrize("sizes", [(2, 4), (4, 4), (4, 2)])
    def test_router_bias_is_kept_as_a_parameter(self, sizes):
        tree = tree_of(router(*sizes))
        built = StripOptimizer()(tree).tree
        stored = tree["nnx_aux", "model", *BIAS].read()
        # (layers, experts): of what was tried, the one place and shape that both of MaxText's loaders take.
        assert np.array_equal(built["params", "params", *BIAS].read(), stored)
        assert not [path for path in built if path[0] == "nnx_aux"]
        assert view_of(tree).contradictions == ()
        # Seen as a parameter, its layers are where those of others are.
        assert np.array_equal(view_of(tree).parameters[BIAS].read(), stored.T)
        assert view_of(built).flavor == view_of(tree).flavor

    def test_additional_axes_follow_the_layers(self):
        beside = (*BIAS[:-1], "scale")
        scale = np.arange(30, dtype=np.float32).reshape(3, 5, 2)
        tree = tree_of(router(3, 4) | {("nnx_aux", "model", *beside): scale})
        assert np.array_equal(view_of(tree).parameters[beside].read(), scale.transpose(1, 0, 2))

    @pytest.mark.parametrize("sizes", [(2, 4), (4, 4)])
    def test_router_bias_unstacks_and_stacks(self, sizes):
        tree = tree_of(router(*sizes))
        single = UnstackLayers()(tree).tree
        bias = single["nnx_aux", "model", "decoder", "moe_layers_1", *BIAS[2:]]
        assert np.array_equal(bias.read(), tree["nnx_aux", "model", *BIAS].read()[1])
        back = StackLayers()(single).tree
        assert_same(Tree(back.leaves), Tree(tree.leaves))
        stripped = StripOptimizer()(tree).tree
        apart = UnstackLayers()(stripped).tree
        assert_same(Tree(StackLayers()(apart).tree.leaves), Tree(stripped.leaves))
        assert_same(Tree(StackLayers()(StripOptimizer()(single).tree).tree.leaves), Tree(stripped.leaves))
        assert np.array_equal(
            apart["params", "params", "decoder", "moe_layers_1", *BIAS[2:]].read(), bias.read()
        )
        assert view_of(apart).parameters.keys() == view_of(StripOptimizer()(single).tree).parameters.keys()

    def test_commands_treat_router_bias_as_a_parameter(self, tmp_path):
        save(tree_of(router()), tmp_path / "run", format="orbax")
        shown = json.loads(succeed("inspect", "tree", tmp_path / "run", "--json").stdout)
        of = {item["path"]: item["role"] for item in shown["arrays"]}
        assert of[keystr(("nnx_aux", "model", *BIAS))] == "parameter"
        assert sorted(of.values()).count("optimizer") == 9
        run("strip-optimizer", tmp_path / "run", tmp_path / "out", "--no-progress")
        run("diff", tmp_path / "run", tmp_path / "out", "--parameters")
        hashes = [run("hash", tmp_path / name, "--json", "--parameters") for name in ("run", "out")]
        assert len({json.loads(digest)["parameters"] for digest in hashes}) == 1


MODEL = {("decoder", "layers", "w"): np.ones((2, 3), np.float32), ("norm",): np.ones(4, np.float32)}


class TestCommands:
    @pytest.fixture
    def tuple_of_nnx(self, tmp_path):
        inner, outer, suffix, rest = NESTINGS["nnx tuple"]
        state = below(outer, OPTIMIZERS["adam"](MODEL), suffix)
        save(tree_of({**below(inner, MODEL, suffix), **state, **rest}), tmp_path / "run", format="orbax")
        return tmp_path / "run"

    def test_inspect_counts_only_parameters(self, tuple_of_nnx):
        shown = json.loads(succeed("inspect", "tree", tuple_of_nnx, "--json").stdout)
        assert (shown["num_parameters"], shown["kind"], shown["flavor"]) == (10, "stacked-training", "nnx")
        assert shown["optimizer"]["name"] == "adamw"

    @pytest.mark.parametrize("flavor", ["same", "linen", "nnx"])
    def test_strip_optimizer_keeps_the_parameters(self, tuple_of_nnx, tmp_path, flavor):
        run("strip-optimizer", tuple_of_nnx, tmp_path / "out", "--flavor", flavor, "--no-progress")
        tree = ckpttools.open(tmp_path / "out")
        assert view_of(tree).parameters.keys() == MODEL.keys()
        assert len(tree.arrays) == 2 + (flavor == "linen")

    def test_stored_average_is_reported_and_refused(self, tmp_path):
        inner, outer, _, rest = NESTINGS["maxtext"]
        leaves = {**below(inner, MODEL), **below(outer, OPTIMIZERS["adam"](MODEL)), **rest}
        leaves |= below(("ema_params",), MODEL)
        save(tree_of(leaves), tmp_path / "run", format="orbax")
        warnings = json.loads(succeed("inspect", "tree", tmp_path / "run", "--json").stdout)["warnings"]
        assert [warning["name"] for warning in warnings if warning["name"] == "unclear-state"]
        run("strip-optimizer", tmp_path / "run", tmp_path / "out", code=3)
        assert not (tmp_path / "out").exists()
        run("strip-optimizer", tmp_path / "run", tmp_path / "out", "--drop", "ema_params", "--no-progress")
        assert {path[0] for path in ckpttools.open(tmp_path / "out").arrays} == {"params", "step"}
        run("convert", "to-safetensors", tmp_path / "run", tmp_path / "st", "--strip-optimizer", code=3)
        run(
            "convert",
            "to-safetensors",
            tmp_path / "run",
            tmp_path / "st",
            "--strip-optimizer",
            "--drop",
            "ema_params",
        )

    def test_dotted_names_have_the_same_roles(self):
        leaves = {
            **below(("params", "params"), MODEL),
            **below(("opt_state",), OPTIMIZERS["adam"](MODEL)),
        }
        flat = tree_of({(".".join(map(str, path)),): array for path, array in leaves.items()})
        known = roles(flat)
        assert {path for path in flat if known.of(path) == "parameter"} == {
            path for path in flat if path[0].startswith("params.")
        }


def test_roles_are_computed_once():
    tree = tree_of(router())
    assert roles(tree) is roles(tree)
    assert roles(replace(tree)) is not roles(tree)


PLAIN_MODEL = {("decoder", "w"): np.ones((4, 4), np.float32), ("decoder", "norm"): np.ones(4, np.float32)}


class TestBookkeepingNames:
    """What is learned stays, whatever the keys above it are called."""

    def test_fractions_below_a_key_of_random_states_are_learned(self):
        model = {**mirrored(PLAIN_MODEL, "params"), ("params", "rngs", "embedding", "k"): np.ones((4, 4))}
        state = {("opt_state", "0", "mu", *path): item for path, item in model.items()}
        random = {("params", "rngs", "dropout", "key"): np.zeros(2, np.uint32)}
        built = tree_of({**model, **state, ("opt_state", "0", "count"): COUNT, **random}).pipe(
            StripOptimizer()
        )
        assert ("params", "rngs", "embedding", "k") in built.arrays
        assert not any("opt_state" in path or "dropout" in path for path in built.arrays)

    LEARNED = (
        *(("epoch", "float32", (16, 16)), ("state/step", "bfloat16", (4,)), ("rng", "float16", (2,))),
        *(("loss_scale/weight", "float32", (4,)), ("dynamic_scale", "float64", (3,))),
        *(("net/rngs/table", "float32", ()), ("prng", "complex64", (2,))),
        *(("rngs/table", "int32", (8,)), ("params/rngs/codes", "int8", (4, 2)), ("rng", "int64", (3,))),
    )
    # Whatever is beside them, and beside the state of an optimizer alone.
    BOOKS = (
        *(("step", "int32", ()), ("0/global_step", "int64", ()), ("epoch", "uint32", ())),
        *(("rng", "uint32", (2,)), ("state/dropout_rng", "uint32", (8, 2)), ("rng", "uint8", (16,))),
        *(("rngs/dropout/count", "int32", (8,)), ("rngs/dropout/key", "uint32", (8, 2))),
        *(("loss_scale/counter", "int32", ()), ("dynamic_scale/fin_steps", "int32", ())),
    )
    OF_TRAINING = (
        *(("loss_scale", "float32", ()), ("loss_scale/scale", "float32", ()), ("epoch", "float64", ())),
        *(("train_state/dynamic_scale/scale", "float32", ()), ("step", "int32", (8,))),
    )

    @pytest.mark.parametrize("is_training", [False, True])
    def test_bookkeeping_names_without_matching_shapes_are_learned(self, is_training):
        model = mirrored(PLAIN_MODEL, "params") | (adam(PLAIN_MODEL, "opt_state") if is_training else {})
        told = {
            **dict.fromkeys(self.LEARNED, "parameter"),
            **dict.fromkeys(self.BOOKS, "other"),
            **dict.fromkeys(self.OF_TRAINING, "other" if is_training else "parameter"),
        }
        for (name, dtype, shape), expected in told.items():
            array = {keys(name): np.zeros(shape, dtype)}
            assert roles(tree_of({**model, **array})).of(keys(name)) == expected, (name, dtype, shape)

    def test_scale_with_moments_is_learned(self):
        model = {**PLAIN_MODEL, ("loss_scale",): np.float32(2)}
        state = {**mirrored(model, "0"), **adam(model, "1", "opt_state"), ("2", "loss_scale", "value"): COUNT}
        built = tree_of(state).pipe(StripOptimizer())
        assert sorted(path[-1] for path in built.arrays) == ["loss_scale", "norm", "w"]

    def test_float32_copies_in_an_optimizer_need_a_decision(self):
        state = mirrored(PLAIN_MODEL, "opt_state", "master_params")
        tree = tree_of({**mirrored(PLAIN_MODEL, "params"), **state, ("opt_state", "count"): COUNT})
        with pytest.raises(FormatError, match="is unclear whether"):
            tree.pipe(StripOptimizer())


def rows_and_columns(model, *head):
    """Adafactor's moments below each parameter: those of matrices are summed up over one axis."""
    state = {}
    for path, array in model.items():
        if array.ndim < 2:
            state[(*head, *path, "v")] = array
        else:
            state[(*head, *path, "v_row")] = np.ones(array.shape[:-1], np.float32)
            state[(*head, *path, "v_col")] = np.ones(array.shape[1:], np.float32)
    return state


def placeholders(model, *head):
    """Adafactor of optax: three trees, with one number where a parameter has no such moment."""
    one = np.ones(1, np.float32)
    state = {}
    for path, array in model.items():
        is_factored = array.ndim > 1
        state[(*head, "v_row", *path)] = np.ones(array.shape[:-1], np.float32) if is_factored else one
        state[(*head, "v_col", *path)] = np.ones(array.shape[1:], np.float32) if is_factored else one
        state[(*head, "v", *path)] = one if is_factored else array
    return state | {(*head, "count"): COUNT}


def adam(model, *head):
    return {**mirrored(model, *head, "mu"), **mirrored(model, *head, "nu"), (*head, "count"): COUNT}


def preconditioners(model, *head):
    """Two square matrices for each matrix."""
    matrices = {path: array for path, array in model.items() if array.ndim == 2}
    return {
        (*head, side, *path): np.ones((array.shape[k], array.shape[k]), np.float32)
        for path, array in matrices.items()
        for k, side in enumerate("LR")
    }


def parts(model):
    """The model in the two parts that optimizers for matrices and for other arrays have."""
    return tuple({p: a for p, a in model.items() if (a.ndim > 1) is matrices} for matrices in (True, False))


NET = {
    ("decoder", "layers_0", "attention", "kernel"): np.ones((4, 6), np.float32),
    ("decoder", "layers_0", "norm", "scale"): np.ones(4, np.float32),
    ("decoder", "layers_0", "moe", "wi"): np.ones((2, 4, 6), np.float32),
    ("embedder", "embedding"): np.ones((8, 4), np.float32),
}
MATRICES, VECTORS = parts(NET)
FRACTION, YES = np.array(0.5, np.float32), np.array(True)
# Name -> (where the parameters are, the optimizer's state, which of it is for the user to tell).
LAYOUTS = {
    "factored below each parameter": (
        ("params",),
        {**rows_and_columns(NET, "inner"), ("inner", "count"): COUNT, ("opt_state", "count"): COUNT},
        None,
    ),
    "factored beside any name": (
        ("net",),
        {**rows_and_columns(NET, "inner"), ("inner", "count"): COUNT, ("opt_state", "count"): COUNT},
        None,
    ),
    "factored beside a bare model": (
        (),
        {**rows_and_columns(NET, "inner"), ("inner", "count"): COUNT, ("opt_state", "count"): COUNT},
        None,
    ),
    "optax adafactor": (("0",), placeholders(NET, "1", 0), None),
    "optax adafactor beside any name": (("net",), placeholders(NET, "tx", 0), None),
    "optax adafactor with momentum": (
        ("params",),
        {**placeholders(NET, "opt_state", 0), **mirrored(NET, "opt_state", 4, "ema")},
        "opt_state/4",
    ),
    "t5x": (
        ("target",),
        {**rows_and_columns(NET, "state", "param_states"), ("state", "step"): COUNT},
        None,
    ),
    "pax": (
        ("mdl_vars", "params"),
        {
            ("opt_states_0", "no_prefix", "count"): COUNT,
            **mirrored(NET, "opt_states_0", "no_prefix", "m", "params"),
            **mirrored(NET, "opt_states_0", "no_prefix", "v", "params"),
        },
        None,
    ),
    "easylm": (
        ("params", "params"),
        adam({("params", *p): a for p, a in NET.items()}, "opt_state", 1, 0),
        None,
    ),
    "levanter": (
        ("model",),
        {**adam(NET, "opt_state", "inner_state", 0), ("training_key",): np.ones(2, np.uint32)},
        None,
    ),
    "multi steps beside any name": (
        ("net",),
        {
            ("tx", "mini_step"): COUNT,
            ("tx", "gradient_step"): COUNT,
            **adam(NET, "tx", "inner_opt_state", 0),
            **mirrored(NET, "tx", "acc_grads"),
        },
        None,
    ),
    "masked": (("params",), adam(MATRICES, "tx", "inner_state", 0), None),
    "one for matrices, one for others": (
        ("params",),
        {
            ("tx", "inner_states", "muon", "inner_state", 0, "count"): COUNT,
            **mirrored(MATRICES, "tx", "inner_states", "muon", "inner_state", 0, "mu"),
            **adam(VECTORS, "tx", "inner_states", "adam", "inner_state", 0),
        },
        None,
    ),
    "muon with its own names": (
        ("params",),
        {
            ("opt_state", "muon", "count"): COUNT,
            **mirrored(MATRICES, "opt_state", "muon", "momentum"),
            ("opt_state", "muon", "ns_coeffs"): np.ones(3, np.float32),
        },
        None,
    ),
    "hyperparameters": (
        ("net",),
        {
            ("tx", "hyperparams", "learning_rate"): FRACTION,
            ("tx", "count"): COUNT,
            **adam(NET, "tx", "inner_state", 0),
        },
        None,
    ),
    "if finite": (
        ("params",),
        {("tx", "last_finite"): YES, ("tx", "notfinite_count"): COUNT, **adam(NET, "tx", "inner_state", 0)},
        None,
    ),
    "plateau": (
        ("params",),
        {**adam(NET, "tx", 0), ("tx", 1, "scale"): FRACTION, ("tx", 1, "best_value"): FRACTION},
        "tx/1",
    ),
    "soap": (("params",), {**adam(NET, "opt_state", 0), **preconditioners(NET, "opt_state", 0)}, None),
    "soap beside any name": (("net",), {**adam(NET, "tx"), **preconditioners(NET, "tx")}, "tx"),
    "schedule-free": (
        ("params",),
        {
            ("tx", "weight_sum"): FRACTION,
            ("tx", "max_lr"): FRACTION,
            **mirrored(NET, "tx", "z"),
            **adam(NET, "tx", "base_optimizer_state", 0),
        },
        "tx/z",
    ),
    "eight bits": (
        ("params",),
        {
            ("tx", "count"): COUNT,
            **{("tx", "mu", *path, "codes"): np.ones((3, 16), np.uint8) for path in NET},
            **{("tx", "mu", *path, "scales"): np.ones(3, np.float32) for path in NET},
        },
        "tx",
    ),
    "copies with a counter": (
        ("params",),
        {
            **mirrored(NET, "tx", 0, "gradients"),
            ("tx", 0, "count"): COUNT,
            ("tx", 1, "memory"): np.ones((3, 2)),
        },
        "tx",
    ),
    "momentum beside any name": (("net",), mirrored(NET, "tx", 0, "trace"), "tx"),
}


class TestLibraryLayouts:
    @pytest.mark.parametrize("name", sorted(LAYOUTS))
    def test_stripping_keeps_parameters_or_asks_for_a_decision(self, name):
        head, state, question = LAYOUTS[name]
        learned = below(head, NET)
        tree = tree_of({**learned, **state})
        pattern = []
        if question:
            error = refusal(tree)
            assert isinstance(error, FormatError)
            assert f'drop="{question}"' in error.hint
            assert [keystr(path) for path in roles(tree).unclear] == [question]
            pattern = [question]
        assert kept_by(StripOptimizer(drop=pattern), tree) == arrays_at(tree, learned)
        told = {path for path in tree if not roles(tree).unclear_of(path)}
        assert {path for path in told if roles(tree).of(path) == "parameter"} == set(learned)


# Keys that frameworks, and people, put around a state.
WRAPPERS = st.lists(
    st.sampled_from(("tx", "0", 1, "inner", "inner_state", "state", "opt_state", "run", "optim")), max_size=3
)
STATES = {
    "adam": adam,
    "rows and columns": rows_and_columns,
    "placeholders": placeholders,
    "momentum": lambda model, *head: mirrored(model, *head, "trace"),
}


class TestNestedOptimizers:
    @settings(max_examples=40)
    @given(
        models(),
        st.sampled_from([(), ("params",), ("params", "params"), ("net",), ("0",), ("state", "model")]),
        st.lists(st.tuples(WRAPPERS, st.sampled_from(sorted(STATES))), min_size=1, max_size=3),
    )
    def test_stripping_keeps_exactly_the_parameters_or_is_refused(self, model, head, nests):
        model, leaves = {**model, **NET}, {}
        for location, (keys, name) in enumerate(nests):
            outer = (("tx", "opt_state", "ema")[location], *keys)
            leaves |= STATES[name](model, *outer) | {(*outer, "count"): COUNT}
        learned = below(head, model)
        left = refusal(tree_of({**learned, **leaves}))
        assert isinstance(left, FormatError) or left == set(learned)


@pytest.mark.parametrize(
    "module",
    [
        {("z", "w"): np.ones((4, 4)), ("weight_sum",): np.ones(()), ("w",): np.ones((4, 4))},
        {("mu", "q", "w"): np.ones((4, 4)), ("nu", "q", "w"): np.ones((4, 4)), ("count",): COUNT},
    ],
)
def test_module_with_state_names_is_kept(module):
    leaves = {("embed", "q", "w"): np.ones((4, 4)), **below(("head",), module)}
    left = refusal(tree_of(leaves))
    assert isinstance(left, FormatError) or left == set(leaves)


# Copies of the model, as somebody may call them in an optimizer.
COPIES = (
    *("ema", "avg_params", "w_avg", "mean", "slow", "slow_params", "target_params", "teacher", "ref_params"),
    *("prev_params", "best", "master", "fp32", "theta", "anchor", "momentum_encoder", "lookahead", "gizmo"),
)
# What optax 0.2.8 keeps of each parameter: optimizer -> keys above the parameters' paths.
OPTAX = {
    "adam": "0/mu 0/nu",
    "adafactor": "0/v",
    "adan": "0/g 0/m 0/n 0/v",
    "ademamix": "0/m1 0/m2 0/nu",
    "simplified_ademamix": "0/m 0/n",
    "lion": "0/mu",
    "amsgrad": "0/mu 0/nu 0/nu_max",
    "optimistic_adam": "0/mu 0/nu 1/previous_gradient",
    "rmsprop": "0/mu 0/nu 2/trace",
    "lbfgs": "0/params 0/updates 0/diff_params_memory 0/diff_updates_memory 2/grad",
    "scale_by_lbfgs": "params updates diff_params_memory diff_updates_memory",
    "rprop": "0/prev_updates 0/step_sizes",
    "adagrad": "0/sum_of_squares",
    "adadelta": "1/e_g 1/e_x",
    "madgrad": "1/grad_sum_sq 1/s 1/x0",
    "dog": "1/init_params",
    "cocob": "2/cumulative_gradients 2/init_particles 2/reward 2/scale 2/subgradients",
    "galore": "0/base_optimizer_state/mu 0/base_optimizer_state/nu 0/projector",
    "mechanize": "base_optimizer_state/0/mu base_optimizer_state/0/nu x0",
    "sophia": "0/mu 0/nu",
    "sam": "opt_state/0/mu opt_state/0/nu",
    "prodigy": "exp_avg exp_avg_sq grad_sum params0",
    "lookahead": "fast_state/0/mu fast_state/0/nu",
    "apply_every": "grad_acc",
    "apply_if_finite": "inner_state/0/mu inner_state/0/nu",
    "multi_steps": "acc_grads inner_opt_state/0/mu inner_opt_state/0/nu",
    "partition": "inner_states/a/inner_state/0/mu inner_states/b/inner_state/0/trace",
    "named_chain": "scaler/0/mu scaler/0/nu",
}
# Arrays that do not mirror parameters: path -> shape.
ALONE = {
    "muon": {"inner_states/muon/inner_state/0/ns_coeffs": (3,)},
    "mechanize": {"m": (6,), "r": (6,), "s": (6,), "v": (6,)},
    "flatten": {"0/mu": (84,), "0/nu": (84,)},
    "lbfgs": {"0/weights_memory": (10,)},
    "sm3": {"0/mu/embedder/embedding/0": (8,), "0/mu/embedder/embedding/1": (4,)},
    "sophia": {"0/hessian_fn_state/key": (2,)},
    "named_chain": {"scaler/0/count": ()},
}
LOCATIONS = {
    "params": "opt_state",
    "params/params": "optimizer/opt_state",
    "net": "opt_state",
    "0": "1/opt_state",
}


def keys(path):
    return tuple(path.split("/"))


class TestParameterCopies:
    @pytest.mark.parametrize("head", ["opt_state", "optimizer", "opt_state/0", "state/opt_state"])
    def test_copies_of_any_name_need_a_decision(self, head):
        learned, state = below(("params",), NET), adam(NET, *keys(head))
        for name in COPIES:
            copy = below((*keys(head), name), NET)
            tree = tree_of({**learned, **state, **copy, ("step",): COUNT})
            pattern = f"{head}/{name}"
            assert [keystr(path) for path in roles(tree).unclear] == [pattern]
            assert f'drop="{pattern}"' in refusal(tree).hint
            assert kept_by(StripOptimizer(drop=[pattern]), tree) == arrays_at(tree, learned)
            assert kept_by(StripOptimizer(keep=[pattern]), tree) == arrays_at(tree, [*learned, *copy])

    @pytest.mark.parametrize("name", ["teacher", "adapter"])
    def test_copies_next_to_parameters_need_a_decision(self, name):
        leaves = below(("optimizer", "target"), NET) | below(("optimizer", name), NET)
        leaves |= rows_and_columns(NET, "optimizer", "state", "param_states")
        tree = tree_of(leaves | {("optimizer", "state", "step"): COUNT})
        assert f'keep="optimizer/{name}"' in refusal(tree).hint

    @pytest.mark.parametrize(
        "path", ["adapter/kernel", "adapter/v/kernel", "adapter/v", "0/adapter/scale", "lora/mu/a", "extra"]
    )
    def test_unmatched_state_is_refused(self, path):
        learned, state = below(("params",), NET), adam(NET, "opt_state")
        tree = tree_of({**learned, **state, ("opt_state", *keys(path)): np.ones((5, 7), np.float32)})
        head = f"opt_state/{keys(path)[0]}"
        assert f'keep="{head}"' in refusal(tree).hint

    def test_batch_statistics_of_a_copy_stay_with_it(self):
        model = NET | {("logit_scale",): FRACTION, ("bn", "num_batches_tracked"): COUNT}
        copy = below(("opt_state", "teacher"), model)
        tree = tree_of({**below(("params",), model), **adam(NET, "opt_state"), **copy})
        kept = kept_by(StripOptimizer(keep=["opt_state/teacher"]), tree)
        assert kept == arrays_at(tree, [*below(("params",), model), *copy])

    def test_library_states_need_no_decision(self):
        for name in OPTAX.keys() | ALONE.keys():
            state = {}
            for head in OPTAX.get(name, "").split():
                lead = (10,) if head.endswith("_memory") else ()
                state |= {(*keys(head), *p): np.ones((*lead, *a.shape), a.dtype) for p, a in NET.items()}
            for path, shape in ALONE.get(name, {}).items():
                state[keys(path)] = np.ones(shape, np.uint32 if path.endswith("key") else np.float32)
            for inner, outer in LOCATIONS.items():
                learned = below(keys(inner), NET)
                assert refusal(tree_of({**learned, **below(keys(outer), state)})) == set(learned), name


class TestFewParameters:
    @pytest.mark.parametrize("count", [1, 2])
    @pytest.mark.parametrize("name", ["trace", "mu", "momentum"])
    def test_moments_with_one_name_are_recognized(self, name, count):
        model = dict(
            list({("w",): np.ones((4, 3), np.float32), ("b",): np.ones(3, np.float32)}.items())[:count]
        )
        learned, state = below(("net",), model), below(("tx", "0", name), model)
        tree = tree_of({**learned, **state, ("tx", "0", "count"): COUNT})
        assert roles(tree).unclear == (("tx",),)
        assert kept_by(StripOptimizer(drop=["tx"]), tree) == arrays_at(tree, learned)

    def test_module_next_to_its_model_is_state(self):
        model = weights("decoder.mlp.w", "decoder.m.w") | counters("decoder.step")
        tree = tree_of({**below(("params", "params"), model), **adam(model, "opt_state")})
        assert refusal(tree) == {path for path in tree if path[0] == "params"}

    def test_momentum_without_a_counter_is_recognized(self):
        tree = tree_of({("net", "w"): np.ones((4, 3)), ("tx", "trace", "w"): np.ones((4, 3))})
        assert 'drop="tx"' in refusal(tree).hint


def test_lbfgs_state_is_recognized_under_any_name():
    state = {("tx", "0", "count"): COUNT, ("tx", "0", "weights_memory"): np.ones(10, np.float32)}
    for name in ("params", "updates", "diff_params_memory", "diff_updates_memory"):
        lead = (10,) if name.endswith("_memory") else ()
        state |= {("tx", "0", name, *p): np.ones((*lead, *a.shape), a.dtype) for p, a in NET.items()}
    learned = below(("net",), NET)
    left = refusal(tree_of({**learned, **state}))
    assert left == set(learned) or '"tx' in left.hint


class TestUserDefinedChains:
    """What is below an optimizer's name is told by its structure, whatever is in between."""

    @pytest.mark.parametrize("head", ["params", "params/params", "net", "0"])
    def test_optimizer_states_need_no_decision(self, head):
        learned = below(keys(head), NET)
        for state in (
            adam,
            placeholders,
            rows_and_columns,
            lambda model, *head: mirrored(model, *head, "trace"),
            lambda model, *head: (
                mirrored(model, *head, "prev_updates") | mirrored(model, *head, "step_sizes")
            ),
            lambda model, *head: mirrored(model, *head, "grad_sum_sq") | mirrored(model, *head, "s"),
        ):
            for nest in ("model", "model/0", "weights/0", "params/0", "clip/adam", "mine/inner_state/0"):
                tree = tree_of({**learned, **state(NET, "opt_state", *keys(nest))})
                assert refusal(tree) == set(learned), nest
                assert {roles(tree).of(path) for path in tree} == {"parameter", "optimizer"}

    def test_weights_below_a_weights_name_are_parameters(self):
        learned = below(("params",), NET)
        state = adam(NET, "opt_state", "0") | mirrored(NET, "opt_state", "model")
        assert '"opt_state/model"' in refusal(tree_of({**learned, **state})).hint

    def test_moments_with_other_shapes_need_a_decision(self):
        state = {("opt_state", "model", "mu", *path): np.ones((7, 2), np.float32) for path in NET}
        tree = tree_of({**below(("net",), NET), **state})
        assert isinstance(refusal(tree), FormatError)


class TestRandomStates:
    @pytest.mark.parametrize("name", ["key", "rng_key"])
    @pytest.mark.parametrize("head", ["tx", "tx/0", "net/dropout"])
    def test_random_key_and_counter_are_bookkeeping(self, name, head):
        """As optax adds noise, below any name; a module may keep a weight beside them."""
        learned = below(("net",), NET) | {(*keys(head), "kernel"): np.ones((4, 4), np.float32)}
        state = {(*keys(head), "count"): COUNT, (*keys(head), name): np.ones(2, np.uint32)}
        tree = tree_of({**learned, **state})
        assert {roles(tree).of(path) for path in state} == {"other"}
        assert refusal(tree) == set(learned)

    @pytest.mark.parametrize("head", ["params/vq", "params/net/0", "vq"])
    @pytest.mark.parametrize(
        ("key", "dtype", "count", "is_random"),
        [
            ((512, 4), "int32", (512,), False),
            ((512, 2), "uint8", (512,), False),
            ((512, 4), "uint32", (), False),
            ((512, 4), "uint32", (4,), False),
            ((4,), "int64", (), False),
            ((2,), "bool", (), False),
            ((512, 3), "uint32", (512,), False),
            ((2,), "uint32", (), True),
            ((4,), "uint32", (), True),
            ((8, 2), "uint32", (8,), True),
        ],
    )
    def test_codebook_with_usage_counts_is_kept(self, head, key, dtype, count, is_random):
        state = {
            (*keys(head), "key"): np.zeros(key, dtype),
            (*keys(head), "count"): np.zeros(count, np.int32),
        }
        tree = tree_of({**below(("params", "net"), NET), **state, **adam(NET, "opt_state")})
        kept = StripOptimizer()(tree).tree.arrays.keys() & state.keys()
        assert kept == (set() if is_random else set(state))


def test_copy_below_a_counter_is_optimizer_state():
    """Of two that are alike, in names that say nothing; the first is not always the model."""
    copy = below(("average", "of"), NET) | {("average", "count"): COUNT}
    tree = tree_of({**copy, **below(("net",), NET), **adam(NET, "opt_state")})
    assert roles(tree).mirrored == ("net",)
    assert roles(tree).unclear == (("average",),)


# torchtitan's optimizer is one dictionary, whose names are joined and lead through those of weights.
TITAN = {(f"layers.{k}.attention.wq.weight",): np.ones((4, 3), np.float32) for k in range(2)}
TITANS_STATE = {
    ("optimizer", f"state.{name}.{part}"): np.ones(shape, np.float32)
    for (name,) in TITAN
    for part, shape in (("exp_avg", (4, 3)), ("exp_avg_sq", (4, 3)), ("step", ()))
}


class TestTorchtitan:
    def test_moments_are_not_parameters(self):
        tree = tree_of(TITAN | TITANS_STATE)
        assert {path for path in tree if roles(tree).of(path) == "optimizer"} == set(TITANS_STATE)
        assert not roles(tree).unclear
        assert refusal(tree) == set(TITAN)

    def test_trainer_scalars_are_not_parameters(self):
        beside = {
            ("lr_scheduler", "last_epoch"): COUNT,
            ("lr_scheduler", "base_lrs", "0"): np.array(1e-3, np.float64),
            ("train_state", "step"): COUNT,
            ("train_state", "ntokens_seen"): COUNT,
        }
        tree = tree_of(TITAN | TITANS_STATE | beside)
        assert {path for path in tree if roles(tree).of(path) == "other"} == set(beside)


def test_moments_belong_to_an_optimizer_under_any_name():
    """Also below the key `model`, which is one of weights."""
    for head in (("optimizer", "state"), ("optimizer_state",)):
        tree = tree_of({(*head, f"model.{k}.weight", "exp_avg"): np.ones((4, 3)) for k in range(2)})
        assert {roles(tree).of(path) for path in tree} == {"optimizer"}


def test_t5x_target_weights_are_the_model():
    tree = tree_of({**below(("optimizer", "target"), NET), ("version",): COUNT})
    assert not roles(tree).unclear
    assert {roles(tree).of(path) for path in tree} == {"parameter", "other"}


# Optimizer of Keras 3.15 -> what it appends to the joined path of each parameter.
KERAS_OPTIMIZERS = {
    "sgd": ("momentum",),
    "adam": ("momentum", "velocity"),
    "adam_1": ("momentum", "velocity", "velocity_hat"),
    "adam_w": ("gradient_accumulator", "momentum", "velocity"),
    "rm_sprop": ("velocity", "momentum", "average_gradient"),
    "adadelta": ("accumulated_grad", "accumulated_delta_var"),
    "adagrad": ("accumulator",),
    "adamax": ("momentum", "norm"),
    "lion": ("momentum",),
    "ftrl": ("accumulator", "linear"),
}
KERAS_MODEL = {
    ("dense", "kernel"): np.ones((4, 6), np.float32),
    ("dense", "bias"): np.ones(6, np.float32),
    ("average_pooling", "gamma"): np.ones(6, np.float32),
    # Layers may be called as moments are.
    ("net", "velocity", "momentum"): np.ones((6, 3), np.float32),
    ("norm", "linear_norm"): np.ones(3, np.float32),
}


def keras_state(optimizer, suffixes, head=("optimizer_variables",), steps="iteration"):
    above = (*head, optimizer)
    return {
        (*above, steps): COUNT,
        (*above, "learning_rate"): np.float32(0.1),
        **{(*above, "_".join((*p, suffix))): a for p, a in KERAS_MODEL.items() for suffix in suffixes},
    }


class TestKeras:
    @pytest.mark.parametrize("optimizer", KERAS_OPTIMIZERS)
    @pytest.mark.parametrize(
        ("model", "head", "steps"),
        [
            (("trainable_variables",), ("optimizer_variables",), "iteration"),
            (("pytree", "trainable_variables"), ("pytree", "optimizer_variables"), "iterations"),
            (("model",), ("optimizer",), "iteration"),
            (("variables",), (), "iteration"),
        ],
        ids=["callback", "step", "optimizer", "no container"],
    )
    def test_moments_are_optimizer_state(self, optimizer, model, head, steps):
        model = ("model",) if not head else model
        state = keras_state(optimizer, KERAS_OPTIMIZERS[optimizer], head, steps)
        tree = tree_of({**below(model, KERAS_MODEL), **state})
        result = roles(tree)
        assert {result.of((*model, *path)) for path in KERAS_MODEL} == {"parameter"}
        assert {result.of(path) for path in state} == {"optimizer"}
        stripped = StripOptimizer()(tree).tree
        assert set(stripped.arrays) == {(*model, *path) for path in KERAS_MODEL}

    @pytest.mark.parametrize("suffix", ["norm", "linear", "momentum", "accumulator"])
    @pytest.mark.parametrize("others", [{}, {("blk", "wq"): np.ones((3, 3), np.float32)}])
    @pytest.mark.parametrize("steps", [np.int32(1), np.ones(8, np.int32)])
    def test_block_with_iterations_is_kept(self, suffix, others, steps):
        model = {
            ("attn",): np.ones(8, np.float32),
            ("head", "kernel"): np.ones((8, 2), np.float32),
            ("tail", "kernel"): np.ones((8, 2), np.float32),
            ("blk", "iterations"): steps,
            ("blk", f"attn_{suffix}"): np.ones(8, np.float32),
            **others,
        }
        for tree in (model, {**below(("params",), model), **adam({("attn",): model["attn",]}, "opt_state")}):
            assert all(
                roles(tree_of(tree)).of(path) == "parameter" for path in tree if "opt_state" not in path
            )

    @pytest.mark.parametrize(
        ("optimizer", "suffix"), [("adam_w", "average"), ("schedule_free_adam_w", "momentum")]
    )
    def test_learned_averages_are_never_dropped_silently(self, optimizer, suffix):
        state = keras_state(optimizer, ("velocity", suffix))
        tree = tree_of({**below(("trainable_variables",), KERAS_MODEL), **state})
        assert {roles(tree).of(path) for path in state if path[-1].endswith(f"_{suffix}")} == {"parameter"}
        with pytest.raises(FormatError, match="unclear"):
            StripOptimizer()(tree)

    @given(st.permutations(sorted(KERAS_MODEL)), st.sampled_from(["momentum", "velocity", "norm", "linear"]))
    def test_model_with_keras_names_has_only_parameters(self, paths, suffix):
        model = {(*path[:-1], f"{path[-1]}_{suffix}"): KERAS_MODEL[path] for path in paths}
        for tree in (model, {**KERAS_MODEL, **model}, {**model, ("iteration",): COUNT}):
            result = roles(tree_of(tree))
            assert not result.optimizer and {result.of(path) for path in model} == {"parameter"}
