"""Names of weights without what PyTorch's trainers put around them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.trees import lazy

from ckpttools.array.tree import Metadata, Tree
from ckpttools.transforms.unwrapped import patterns_of_others, unwrapped

NAMES = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight")


def tree_of(paths, scalars=()):
    leaves = {path: lazy(np.full(2, n, "f4")) for n, path in enumerate(paths)}
    numbers = {path: lazy(np.array(3)) for path in scalars}
    return Tree(leaves | numbers, Metadata(scalars=frozenset(scalars)))


def names_of(made):
    return {path: array.read()[0] for path, array in made.tree.arrays.items()}


PLAIN = {(name,): n for n, name in enumerate(NAMES)}
PREFIXES = st.sampled_from(
    ("", "module.", "_orig_mod.", "_fsdp_wrapped_module.", "module._orig_mod.", "model.")
)
OUTER = st.sampled_from(((), ("model",), ("app", "model"), ("state_dict",)))


@given(OUTER, PREFIXES, st.booleans(), st.sampled_from(("", "_fsdp_wrapped_module.", "_orig_mod.")))
def test_wrapped_names_are_plain_again(outer, prefix, number, inner):
    """Around everything, before all names, and within a name: the arrays and their order stay."""
    wrapped = [(*outer, prefix + name.replace("0.self", f"0.{inner}self")) for name in NAMES]
    made = unwrapped(tree_of(wrapped, [("epoch",)] if number and outer else []))
    assert names_of(made) == PLAIN
    assert bool(made.notes.remarks) == (bool(outer) or bool(prefix) or bool(inner))


@pytest.mark.parametrize(
    "paths",
    [
        [(name,) for name in NAMES],
        [("module.a",), ("b",)],  # not all have it
        [("module.a",), ("module._orig_mod.a",)],  # two would have one name
        [("encoder", "a"), ("encoder", "b")],  # no trainer's word
        [("model", "a"), ("optim", "state", "a", "exp_avg")],  # what is beside it the user has to drop
        [("model", "layers", "a"), ("model", "b")],  # a nested tree of a model
        [("model.embed_tokens.weight",), ("model.norm.weight",)],  # a tied model's own names
    ],
)
def test_all_else_stays_as_it_is(paths):
    tree = tree_of(paths)
    made = unwrapped(tree)
    assert made.tree is tree and not made.notes.remarks


def test_what_is_dropped_may_have_any_name():
    tree = tree_of(
        [
            ("app", "model", "a"),
            ("app", "model", "b"),
            ("app", "optim", "state", "a", "exp_avg"),
            ("app", "rng"),
        ]
    )
    assert patterns_of_others(tree) == ["app.optim.*", "app.rng"]
    made = unwrapped(tree, ("app.optim.*", "app.rng"))
    assert set(made.tree.arrays) == {
        ("a",),
        ("b",),
        ("app", "optim", "state", "a", "exp_avg"),
        ("app", "rng"),
    }
    assert not patterns_of_others(tree_of([("a",), ("b",)]))
