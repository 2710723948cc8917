"""Names of a caller's tree are found in a checkpoint, or there is more than one place for them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.trees import lazy

from ckpttools.array.tree import Tree
from ckpttools.roles.of_tree import roles
from ckpttools.sharding.matching import match

NAMES = [("decoder", "mlp", "kernel"), ("decoder", "norm"), ("embedding",)]
KEYS = st.sampled_from(["params", "state", "model", "0"])


@given(below=st.lists(KEYS, max_size=3), data=st.data())
def test_names_are_found_below_any_keys(below, data):
    wanted = data.draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    found = match(wanted, [(*below, *name) for name in NAMES])
    assert found.found == {name: (*below, *name) for name in wanted}
    assert not found.missing and not found.others
    assert set(found.unread) == {(*below, *name) for name in NAMES if name not in wanted}


def test_of_several_places_all_are_named():
    found = match([("w",), ("b",)], [("one", "w"), ("one", "b"), ("two", "w"), ("two", "b"), ("three", "w")])
    assert set(found.others) == {("one", "w"), ("two", "w")}


def test_what_may_be_moments_or_not_is_not_guessed():
    tree = Tree({(key, "w"): lazy(np.ones((4, 4), np.float32)) for key in ("mu", "nu", "params")})
    known = roles(tree)
    assert match([("w",)], tree.arrays, lambda path: known.of(path) == "parameter").others


def test_names_as_they_are_come_first():
    found = match([("w",), ("b",), ("c",)], [("w",), ("b",), ("ema", "w"), ("ema", "b")])
    assert found.found == {("w",): ("w",), ("b",): ("b",)} and not found.others


@pytest.mark.parametrize(
    "paths",
    [
        ["opt_state/mu/w", "params/params/w"],
        ["opt_state/0/mu/decoder/w", "opt_state/0/nu/decoder/w", "params/decoder/w"],
    ],
)
def test_parameters_are_meant_not_their_moments(paths):
    tree = Tree({tuple(each.split("/")): lazy(np.ones((4, 4), np.float32)) for each in [*paths, "step"]})
    known = roles(tree)
    found = match([("w",)], tree.arrays, lambda path: known.of(path) == "parameter")
    assert found.found["w",][0] == "params" and not found.others
