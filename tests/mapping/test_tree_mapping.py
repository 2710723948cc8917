"""Trees for Python users: paths as text, patterns, errors with similar names, JAX."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.internals import Constant, dotted, keystr

from ckpttools import DTYPES, CheckpointError, Empty, Metadata, NoSuchPathError, Tree, UsageError

KEYS = st.one_of(st.text("ab./", min_size=1, max_size=3), st.integers(0, 3))
PATHS = st.lists(KEYS, min_size=1, max_size=3).map(tuple)


def array(*shape):
    return Constant(shape, DTYPES["float32"], bytes(4))


def layers(count=3):
    leaves = {("params", "layers", k, "kernel"): array(k + 1, 4) for k in range(count)}
    return Tree({**leaves, ("params", "norm"): array(4), ("opt",): Empty("None")}, Metadata(location="here"))


@given(st.lists(PATHS, unique=True, max_size=6))
def test_text_resolves_to_path_or_reports_ambiguity(paths):
    tree = Tree({path: array(location) for location, path in enumerate(paths)})
    for path in paths:
        assert tree[path] is tree.leaves[path] and path in tree
        alike = [item for item in paths if keystr(item) == keystr(path)]
        if len(alike) == 1:
            assert tree[keystr(path)] is tree.get(keystr(path)) is tree.leaves[path]
        else:
            with pytest.raises(UsageError, match="several"):
                tree[keystr(path)]
        if sum(dotted(path) in (keystr(item), dotted(item)) for item in paths) == 1:
            assert tree[dotted(path)] is tree.leaves[path]


def test_slash_name_wins_over_dotted_name():
    tree = Tree({("a.b",): array(1), ("a", "b"): array(2)})
    assert tree["a.b"].shape == (1,) and tree["a/b"].shape == (2,)


def test_missing_path_raises_key_error_with_hint():
    tree = layers()
    with pytest.raises(KeyError, match="did you mean params/layers/0/kernel") as caught:
        tree["params/layers/0/kernle"]
    assert isinstance(caught.value, CheckpointError) and caught.value.location == "here"
    assert str(caught.value).startswith("no array has this name")
    with pytest.raises(NoSuchPathError, match="this path has 3 arrays below it"):
        tree["params/layers"]
    with pytest.raises(KeyError):
        tree[("params", "layers", 7)]
    with pytest.raises(KeyError):
        tree[3]
    assert tree.get("nothing", 5) == 5 and "nothing" not in tree and 3 not in tree and () not in tree


def test_glob_returns_tree_with_leaf_metadata():
    paths = (("params", "layers", 0, "kernel"), ("params", "norm"))
    tree = layers().with_metadata(scalars=frozenset(paths), key_impls=dict.fromkeys(paths, "rbg"))
    result = tree.glob("*/kernel")
    assert list(result) == [("params", "layers", k, "kernel") for k in range(3)]
    assert result.metadata.scalars == {paths[0]} and result.metadata.key_impls == {paths[0]: "rbg"}
    assert list(tree.glob("params.layers.1", "opt")) == [("params", "layers", 1, "kernel"), ("opt",)]
    assert not tree.glob("no*") and tree.glob("*") == tree


def test_repr_folds_layer_names():
    assert repr(layers(1)).splitlines() == [
        "<Tree of here: 2 arrays and 1 other leaf, 32 bytes",
        "    params/layers/0/kernel: float32[1, 4]",
        "    params/norm: float32[4]",
        "    opt: None>",
    ]
    many = Tree({("layers", k, "w"): array(2) for k in range(1000)})
    assert repr(many) == "<Tree: 1,000 arrays, 8,000 bytes\n    layers/{0..999}/w: float32[2]>"


def test_jax_maps_over_tree():
    """This runs in a separate process, because trees made before the import of jax are not pytrees yet."""
    script = """
import sys
from ckpttools.core.dtypes import DTYPES
from ckpttools.array.nodes import Constant
from ckpttools.array.tree import Empty, Tree
assert "jax" not in sys.modules
import jax
def array(*shape): return Constant(shape, DTYPES["float32"], bytes(4))
tree = Tree({("a", 0, "w"): array(2), ("a", 1, "w"): array(3), ("b",): Empty("None")})
assert jax.tree.map(lambda each: each.shape, tree) == {"a": [{"w": (2,)}, {"w": (3,)}], "b": None}
paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
assert paths == ["['a'][0]['w']", "['a'][1]['w']"], paths
assert jax.tree.map(lambda each: each.shape, Tree({(): array(5)})) == (5,)
assert jax.tree.map(lambda each: each.shape, Tree({(0,): array(5)})) == [(5,)]
assert jax.tree.leaves(Tree({})) == []
import numpy as np
assert np.array_equal(jax.tree.map(np.asarray, tree)["a"][0]["w"], np.zeros(2))
"""
    subprocess.run([sys.executable, "-c", script], check=True)
