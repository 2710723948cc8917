import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.internals import Constant, dotted, keystr

from ckpttools import DTYPES, Empty, FormatError, Metadata, Text, Tree

F32 = DTYPES["float32"]


def array(*shape):
    return Constant(shape, F32, bytes(4))


def nests():
    leaves = st.builds(array, st.integers(1, 9))
    keys = st.text("abc", min_size=1, max_size=2)
    return st.recursive(
        leaves,
        lambda inner: (
            st.dictionaries(keys, inner, min_size=1, max_size=3) | st.lists(inner, min_size=1, max_size=3)
        ),
        max_leaves=12,
    )


def flattened(node, path=()):
    if isinstance(node, dict):
        return {k: v for key, item in node.items() for k, v in flattened(item, (*path, key)).items()}
    if isinstance(node, list):
        return {k: v for key, item in enumerate(node) for k, v in flattened(item, (*path, key)).items()}
    return {path: node}


@given(nests())
def test_nesting_is_the_inverse_of_flattening(nest):
    leaves = flattened(nest)
    tree = Tree(leaves)
    assert tree.nested() == nest
    assert list(tree) == list(leaves)
    assert tree.arrays == leaves
    assert tree.nbytes == sum(leaf.nbytes for leaf in leaves.values())


def test_leaves_without_data_become_their_python_values():
    leaves = {(name,): Empty(name) for name in ("None", "Dict", "List", "Tuple")} | {("text",): Text("words")}
    assert Tree(leaves).nested() == {"None": None, "Dict": {}, "List": [], "Tuple": (), "text": "words"}
    assert Tree(leaves).arrays == {}
    assert Tree({(): Empty("Dict")}).nested() == {}
    assert Tree({(): Text("words")}).nested() == "words"
    assert Tree({}).nested() == {}


def test_empty_leaves_are_separate_objects():
    nested = Tree({("a",): Empty("Dict"), ("b",): Empty("Dict")}).nested()
    nested["a"]["x"] = 1
    assert nested["b"] == {}


@pytest.mark.parametrize("leaf", [array(2), Text("words"), Empty("Dict"), Empty("None")])
@pytest.mark.parametrize("first", [0, 1])
def test_path_through_a_leaf_is_refused(leaf, first):
    paths = {("a", "b"): leaf, ("a", "b", "c"): array(3)}
    ordered = dict(sorted(paths.items(), reverse=bool(first)))
    with pytest.raises(FormatError, match="runs through a leaf") as caught:
        Tree(ordered).nested()
    assert caught.value.location == "a/b"


def test_sequence_with_gaps_is_refused():
    with pytest.raises(FormatError, match="gaps") as caught:
        Tree({("a", 0): array(1), ("a", 2): array(1)}).nested()
    assert (caught.value.location, caught.value.got) == ("a", "[0, 2]")


def test_mixed_numeric_and_text_keys_stay_a_dictionary():
    nested = Tree({("a", 0): array(1), ("a", "x"): array(2)}).nested()
    assert set(nested["a"]) == {0, "x"}


def test_tree_is_immutable():
    leaves = {("a",): array(1)}
    tree = Tree(leaves, Metadata(step=3))
    leaves["b",] = array(2)
    assert len(tree) == 1
    with pytest.raises(TypeError):
        tree.leaves["b",] = array(2)
    changed = tree.with_metadata(step=4, format="x")
    assert (changed.metadata.step, changed.metadata.format, tree.metadata.step) == (4, "x", 3)
    assert changed["a",] is tree["a",]


def test_paths_are_formatted_with_separators():
    assert keystr(("a", 0, "b")) == "a/0/b"
    assert dotted(("a", 0, "b")) == "a.0.b"
    assert keystr(()) == ""
