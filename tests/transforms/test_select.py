"""Select leaves: keep and drop split a tree in two, and nothing else changes."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from functools import partial

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support import command_line
from support.golden_data import golden_checkpoint
from support.internals import dotted, keystr
from support.locations import HF
from support.stored_trees import EVERYTHING
from support.trees import tree_of

import ckpttools
from ckpttools import DTYPES, FormatError, MappingError, Select, UsageError, save
from ckpttools.testing.strategies import trees

run = partial(command_line.run, "select")

F32 = DTYPES["float32"]


JOINS = st.sampled_from((keystr, dotted))


def pattern(draw, tree):
    """Draw a pattern that matches: a path, its parents, or a part of it, joined either way."""
    path = draw(st.sampled_from(list(tree)))
    prefix = path[: draw(st.integers(1, len(path)))]
    text = draw(JOINS)(prefix)
    cut = draw(st.integers(0, len(text)))
    escaped = "".join("[[]" if c == "[" else c for c in text)
    return draw(st.sampled_from((escaped, f"{text[:cut]}*", f"*{text[cut:]}", f"**{text[cut:]}")))


@settings(max_examples=50)
@given(st.data(), trees(structure=False))
def test_keep_and_drop_partition_the_tree(data, tree):
    chosen = [pattern(data.draw, tree) for _ in range(data.draw(st.integers(1, 3)))]
    names = {
        path: [join(path[:n]) for n in range(1, len(path) + 1) for join in (keystr, dotted)] for path in tree
    }
    matched = [path for path in tree if any(fnmatchcase(name, p) for name in names[path] for p in chosen)]
    rest = [path for path in tree if path not in matched]
    assert list(tree.pipe(Select(keep=chosen))) == matched
    if not rest:
        with pytest.raises(UsageError, match="no array is left"):
            Select(drop=chosen)(tree)
        return
    dropped = Select(drop=chosen)(tree)
    assert list(dropped.tree) == rest
    assert dropped.notes.dropped == tuple(map(keystr, matched))
    assert all(dropped.tree[path] is tree[path] for path in rest)
    assert dropped.tree.metadata == tree.metadata


@settings(max_examples=40)
@given(st.data(), trees(structure=False, most_leaves=6))
def test_drop_applies_after_keep(data, tree):
    keep, drop = pattern(data.draw, tree), pattern(data.draw, tree)
    kept, left = set(tree.pipe(Select(keep=[keep]))), set(tree) - set(Select(keep=[drop])(tree).tree)
    assume(kept & left)
    assert set(tree.pipe(Select([keep], [drop]))) == kept & left


class TestPatterns:
    TREE = tree_of(
        ("params", "layers_1", "kernel", "value"),
        ("params", "layers_10", "bias"),
        ("opt_state", 0, "mu"),
        ("w.a",),
    )

    @pytest.mark.parametrize(
        ("pattern", "count"),
        [
            ("params", 2),
            ("*/kernel", 1),
            ("*kernel", 1),
            ("params.layers_1.*", 1),
            ("params/layers_?", 1),
            ("*layers_[0-9]*", 2),
            ("opt_state/0", 1),
            ("w.a", 1),
            ("w", 1),
            ("**", 4),
        ],
    )
    def test_pattern_selects_expected_names(self, pattern, count):
        assert len(Select([pattern])(self.TREE).tree) == count

    @pytest.mark.parametrize(
        ("pattern", "near"),
        [("parms", "params"), ("*/kernle/*", "kernel"), ("params/layer_1", "params/layers_1")],
    )
    def test_unmatched_pattern_suggests_similar_names(self, pattern, near):
        for options in ({"keep": [pattern]}, {"drop": ["params", pattern]}):
            with pytest.raises(UsageError, match="no array name matches the pattern") as caught:
                Select(**options)(self.TREE)
            assert near in str(caught.value.hint)

    def test_unmatched_pattern_hints_at_listing_names(self):
        with pytest.raises(UsageError, match=r'hint +`ckpttools.inspect\("SRC"\)` shows all names'):
            Select(["zzzz"])(self.TREE)


def test_tree_with_one_leaf_is_selected():
    tree = tree_of(())
    assert len(tree.pipe(Select(["*"]))) == 1


class TestMetadata:
    def test_metadata_of_dropped_leaves_is_removed(self):
        built = EVERYTHING.pipe(Select(drop=["number", "rng/keys"]))
        assert built.metadata.scalars == {("yes",)}
        assert dict(built.metadata.key_impls) == {("rng", "key"): "threefry2x32"}
        assert built.metadata.step == EVERYTHING.metadata.step
        assert built.metadata.custom == EVERYTHING.metadata.custom

    def test_empty_leaves_and_strings_are_selected_like_arrays(self):
        built = EVERYTHING.pipe(Select(drop=["empty", "list"]))
        assert set(EVERYTHING) - set(built) == {path for path in EVERYTHING if path[0] in ("empty", "list")}

    def test_selecting_only_empty_leaves_is_refused(self):
        with pytest.raises(UsageError, match="no array is left"):
            Select(["empty"])(EVERYTHING)


class TestLists:
    TREE = tree_of(*[("chain", k, name) for k in range(3) for name in ("mu", "nu")], ("w",))

    def test_last_list_elements_may_be_dropped(self):
        assert len(self.TREE.pipe(Select(drop=["chain/2"]))) == 5
        assert len(self.TREE.pipe(Select(drop=["*mu"]))) == 4

    @pytest.mark.parametrize("pattern", ["chain/0", "chain/1"])
    def test_gaps_in_lists_are_refused(self, pattern):
        with pytest.raises(FormatError, match="a sequence has gaps") as caught:
            Select(drop=[pattern])(self.TREE)
        assert caught.value.location == "chain"


class TestCommand:
    def test_orbax_loads_the_selection(self, tmp_path):
        import orbax.checkpoint as ocp

        source = golden_checkpoint(True)
        run(source, tmp_path / "out", "--keep", "params", "--drop", "*/mlp")
        tree = ckpttools.open(source)
        expected = {p: a for p, a in tree.arrays.items() if p[0] == "params" and "mlp" not in p}
        restored = ocp.StandardCheckpointer().restore(tmp_path / "out" / "0" / "items")
        assert set(restored) == {"params"}
        assert list(ckpttools.open(tmp_path / "out")) == list(expected)
        for path, array in expected.items():
            node = restored
            for key in path:
                node = node[key]
            assert np.array_equal(np.asarray(node), array.read())

    def test_safetensors_package_loads_the_selection(self, tmp_path):
        from safetensors.numpy import load_file

        run(HF, tmp_path / "out", "--drop", "*.mlp.*", "--drop", "lm_head.weight")
        loaded = load_file(tmp_path / "out" / "model.safetensors")
        expected = {
            k: a
            for (k,), a in ckpttools.open(HF).arrays.items()
            if ".mlp." not in k and k != "lm_head.weight"
        }
        assert set(loaded) == set(expected)
        assert all(loaded[k].tobytes() == a.read().tobytes() for k, a in expected.items())

    def test_step_and_item_are_kept_across_formats(self, tmp_path):
        tree = tree_of(("a", "w"), ("b",), step=7)
        save(tree, tmp_path / "src", "orbax", item="state")
        run(tmp_path / "src", tmp_path / "out", "--keep", "a")
        assert (tmp_path / "out" / "7" / "state" / "_METADATA").is_file()
        run(tmp_path / "src", tmp_path / "z", "--keep", "a", "--to", "zarr3", "--compression", "zstd")
        assert (tmp_path / "z" / "zarr.json").is_file()
        assert ckpttools.open(tmp_path / "z").metadata.step == 7

    def test_select_dry_run_writes_nothing(self, tmp_path):
        report = json.loads(run(HF, tmp_path / "out", "--keep", "*norm*", "--dry-run", "--json"))
        assert all("norm" in item["path"] for item in report["array_list"])
        assert len(report["dropped"]) + report["arrays"] == len(ckpttools.open(HF).arrays)
        assert not (tmp_path / "out").exists()


class TestBadInput:
    def test_missing_patterns_are_refused(self, tmp_path):
        assert "--keep PATTERN" in run(HF, tmp_path / "out", code=2)

    def test_unmatched_patterns_are_refused(self, tmp_path):
        output = run(HF, tmp_path / "out", "--keep", "*lm_haed*", code=2)
        assert "did you mean lm_head" in output
        assert not (tmp_path / "out").exists()

    def test_selecting_no_arrays_is_refused(self, tmp_path):
        assert "--drop '*'" in run(HF, tmp_path / "out", "--drop", "*", code=2)

    def test_read_only_format_is_refused(self):
        tree = tree_of(("w",), format="npy")
        with pytest.raises(UsageError, match="npy cannot be written"):
            save(tree, "/nowhere")
        with pytest.raises(UsageError, match="no output format is given"):
            save(tree_of(("w",)), "/nowhere")


def test_conflicting_paths_are_named():
    from ckpttools.transforms.base import Move, move_leaves

    tree = tree_of(("a",), ("b",))
    with pytest.raises(MappingError, match="a becomes x, b x/y, which is below it"):
        move_leaves(tree, [Move(("a",), ("x",), tree["a",]), Move(("b",), ("x", "y"), tree["b",])])


PREFIXED = (("policy.a",), ("policy", "b.c"), ("policy_2.a",), ("x", "policy", "a"))


@pytest.mark.parametrize(
    ("prefix", "left"),
    [
        ("policy", [("a",), ("b.c",)]),
        ("policy.", [("a",), ("b.c",)]),
        ("policy.b", [("c",)]),
        ("x.policy", [("a",)]),
        ("x/policy/", None),
        ("pol", None),
        ("policy.a", None),
    ],
)
def test_prefix_matches_complete_words_and_is_removed(prefix, left):
    """The prefix selects one of several models that were saved together."""
    select = Select(prefix=prefix)
    if left is None:
        with pytest.raises(UsageError, match="no name begins with this prefix"):
            select(tree_of(*PREFIXED))
    else:
        built = select(tree_of(*PREFIXED))
        assert list(built.tree) == left and len(built.notes.dropped) == len(PREFIXED) - len(left)


def test_patterns_match_names_with_the_prefix():
    built = Select(drop=("policy.b.*",), prefix="policy")(tree_of(*PREFIXED))
    assert list(built.tree) == [("a",)]
    with pytest.raises(UsageError, match="no array is left"):
        Select(keep=("x",), prefix="policy")(tree_of(*PREFIXED))
