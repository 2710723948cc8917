"""`ckpt inspect tree --against`: all that is missing, too much or otherwise, and nothing else."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from support.command_line import ckpt
from support.golden_data import FAMILIES
from support.internals import Constant, Family, Layers, families, keystr, row
from support.internals import Path as TreePath
from support.locations import GOLDEN
from support.trees import maxtext_tree, right_one, without

import ckpttools
from ckpttools import DTYPES, Tree, UsageError
from ckpttools.inspection.against import compare_with_family, compare_with_tree
from ckpttools.inspection.comparison import ArraySpec, Comparison, sort_comparison

LLAMA = GOLDEN / "llama3.1"
NAMES = st.lists(st.sampled_from(("a", "b", "0", "1")), min_size=1, max_size=3).map(tuple)
ARRAYS = st.builds(
    lambda length, name: Constant((length,), DTYPES[name], bytes(DTYPES[name].itemsize)),
    st.integers(1, 2),
    st.sampled_from(("int8", "bfloat16")),
)


def config_of(model: str) -> dict[str, object]:
    return json.loads((GOLDEN / model / "hf" / "config.json").read_bytes())


class TestTrees:
    @given(st.dictionaries(NAMES, ARRAYS, max_size=8), st.dictionaries(NAMES, ARRAYS, max_size=8))
    def test_difference_lists_transform_one_tree_into_the_other(
        self, mine: dict[TreePath, Constant], theirs: dict[TreePath, Constant]
    ):
        result = compare_with_tree(Tree(mine), Tree(theirs))
        built = {keystr(path): (array.shape, array.dtype.name) for path, array in mine.items()}
        for extra in result.extra:
            assert built.pop(extra.path) == (extra.shape, extra.dtype)
        for item in result.different:
            assert (
                built[item.path]
                == (item.got.shape, item.got.dtype)
                != (item.expected.shape, item.expected.dtype)
            )
            built[item.path] = (item.expected.shape, item.expected.dtype)
        for missing in result.missing:
            assert missing.path not in built
            built[missing.path] = (missing.shape, missing.dtype)
        assert built == {keystr(path): (array.shape, array.dtype.name) for path, array in theirs.items()}
        assert result.is_same == (not result.missing and not result.extra and not result.different)

    @given(
        st.dictionaries(NAMES, ARRAYS, max_size=8),
        st.dictionaries(NAMES, ARRAYS, max_size=8),
        st.sampled_from(("a*", "*b*", "*/0", "*")),
    )
    def test_pattern_equals_comparing_matching_subtrees(
        self, mine: dict[TreePath, Constant], theirs: dict[TreePath, Constant], pattern: str
    ):
        matching = [
            Tree({path: array for path, array in tree.items() if fnmatchcase(keystr(path), pattern)})
            for tree in (mine, theirs)
        ]
        if any(matching) or not (mine or theirs):
            assert compare_with_tree(Tree(mine), Tree(theirs), pattern) == compare_with_tree(*matching)
        else:
            with pytest.raises(UsageError, match="no array has a path that matches"):
                compare_with_tree(Tree(mine), Tree(theirs), pattern)

    def test_differences_are_sorted_by_size_or_name(self):
        shapes = {"w10": (2,), "w9": (2,), "b": (3, 5), "a": ()}
        specs = tuple(ArraySpec(name, shape, "int8") for name, shape in shapes.items())
        unknown = ArraySpec("c", None, None)
        wide = ArraySpec("d", (2,), "float64")
        result = Comparison("x", 4, missing=(*specs, unknown), extra=(*specs, wide))
        assert [item.path for item in sort_comparison(result, "size").missing] == ["b", "w9", "w10", "a", "c"]
        assert [item.path for item in sort_comparison(result, "size").extra] == ["d", "b", "w9", "w10", "a"]
        assert [item.path for item in sort_comparison(result, "name").missing] == ["a", "b", "c", "w9", "w10"]

    def test_equal_trees_have_no_differences(self):
        tree = ckpttools.open(LLAMA / "hf")
        result = compare_with_tree(tree, ckpttools.open(LLAMA / "hf_sharded"))
        assert result.is_same
        assert (result.num_compared, result.against) == (39, str(LLAMA / "hf_sharded"))


class TestFamilies:
    @pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unscanned"])
    @pytest.mark.parametrize("model", FAMILIES)
    def test_maxtext_output_matches_its_config(self, model: str, scan: bool):
        family = families()[right_one(model)]
        assert compare_with_family(maxtext_tree(model, scan), family, config_of(model), "config.json").is_same
        assert compare_with_family(maxtext_tree(model, scan), family).is_same

    @pytest.mark.parametrize("model", FAMILIES)
    def test_hugging_face_weights_match_their_config(self, model: str):
        family = families()[right_one(model)]
        tree = ckpttools.open(GOLDEN / model / "hf")
        assert compare_with_family(tree, family, config_of(model), "config.json").is_same

    @pytest.mark.parametrize("with_config", [True, False])
    def test_missing_extra_and_different_arrays_are_all_listed(self, with_config: bool):
        tree = maxtext_tree("llama3.1", scan=False)
        top: TreePath = ("params", "params", "decoder")
        tree = without(tree, (*top, "layers_2", "mlp", "wo", "kernel"))
        odd = Constant((64, 7), DTYPES["bfloat16"], b"\0\0")
        changed = Tree({**tree, (*top, "layers_1", "mlp", "wi_0", "kernel"): odd, (*top, "foo"): odd})
        config = config_of("llama3.1") if with_config else None
        result = compare_with_family(changed, families()["llama"], config, "config.json")
        assert result.missing == (ArraySpec("decoder.layers_2.mlp.wo.kernel", (128, 64), None),)
        assert result.extra == (ArraySpec("decoder.foo", (64, 7), "bfloat16"),)
        (different,) = result.different
        assert (different.path, different.got.shape, different.expected.shape) == (
            "decoder.layers_1.mlp.wi_0.kernel",
            (64, 7),
            (64, 128),
        )
        assert different.reason and different.reason.startswith("mlp 128 from ")

    def test_optimizer_and_step_are_not_compared(self):
        tree = maxtext_tree("llama3.1", scan=True)
        state = Constant((), DTYPES["int32"], bytes(4))
        result = compare_with_family(Tree({**tree, ("opt_state", 0, "count"): state}), families()["llama"])
        assert result.is_same
        assert result.num_compared == 12

    def test_other_family_lists_missing_arrays(self):
        result = compare_with_family(maxtext_tree("llama3.1", scan=True), families()["qwen3"])
        assert [item.path.split(".")[-2] for item in result.missing] == ["query_norm", "key_norm"]
        assert not result.extra

    def test_missing_middle_layer_is_reported(self):
        tree = ckpttools.open(GOLDEN / "llama3.1" / "hf")
        arrays = {path: leaf for path, leaf in tree.items() if ".layers.2." not in keystr(path)}
        result = compare_with_family(Tree(arrays), families()["llama"])
        assert result.missing == (ArraySpec("model.layers.2.*", None, None),)

    def test_missing_first_layer_is_reported(self):
        tree = ckpttools.open(GOLDEN / "llama3.1" / "hf")
        arrays = {path: leaf for path, leaf in tree.items() if ".layers.0." not in keystr(path)}
        result = compare_with_family(Tree(arrays), families()["llama"])
        assert result.missing == (ArraySpec("model.layers.0.*", None, None),)

    @pytest.mark.parametrize(("number", "first"), [("{layer}", 0), ("{layer+1}", 1)])
    def test_family_declares_the_first_layer(self, number: str, first: int):
        # Shapes do not tell heads, so that only names are compared.
        rows = (row("up: heads head_dim <-> up: (heads head_dim)"),)
        layers = Layers(f"blocks.{number}", "decoder.layers_{layer}", "decoder.layers", ("layer",), rows)
        rows = (row("head: mlp <-> head: mlp"),)
        family = Family("own", ("own",), (), rows=rows, layers=(layers,), sizes={})
        leaf = Constant((4,), DTYPES["int8"], b"\0")
        result = compare_with_family(
            Tree({(f"blocks.{k}.up",): leaf for k in (2, 3)} | {("head",): leaf}), family
        )
        assert [item.path for item in result.missing] == [f"blocks.{k}.*" for k in range(first, 2)]

    @pytest.mark.parametrize("location", ["hf", "maxtext_scanned", "maxtext_unscanned"])
    def test_missing_last_layer_needs_a_config(self, location: str):
        """Without the last one names and shapes are those of a shorter model."""
        tree = Tree(dict(ckpttools.open(LLAMA / location)))
        where = "model.layers" if location == "hf" else "decoder/layers"
        (*_, declared) = compare_with_family(tree, families()["llama"]).reasons
        assert declared == (
            f"Layers found: 4 in {where}. Only the model's config.json shows whether there should be more."
        )
        assert not compare_with_family(
            tree, families()["llama"], config_of("llama3.1"), "config.json"
        ).reasons

    def test_huge_layer_number_does_not_list_preceding_layers(self):
        tree = Tree(dict(ckpttools.open(LLAMA / "hf")))
        last = max(tree, key=keystr)
        odd = Tree({**tree, (f"model.layers.{10**30}.mlp.up_proj.weight",): tree[last]})
        result = compare_with_family(odd, families()["llama"])
        assert len(result.missing) + len(result.extra) < 20

    def test_pattern_matches_paths_of_the_tree(self):
        tree, qwen = maxtext_tree("llama3.1", scan=True), families()["qwen3"]
        result = compare_with_family(tree, qwen, pattern="params/params/*/self_attention/*")
        assert [item.path.split(".")[-2] for item in result.missing] == ["query_norm", "key_norm"]
        assert result.num_compared == 4
        only = compare_with_family(tree, qwen, pattern="*/query_norm/*")
        assert (len(only.missing), only.num_compared) == (1, 0)
        assert compare_with_family(tree, qwen, pattern="*/mlp/*").is_same

    @pytest.mark.parametrize("pattern", ["step", "decoder.*", "*nothing*"])
    def test_pattern_without_compared_arrays_is_refused(self, pattern: str):
        with pytest.raises(UsageError, match="no array has a path that matches"):
            compare_with_family(maxtext_tree("llama3.1", scan=True), families()["llama"], pattern=pattern)

    def test_many_layer_names_get_no_suggestion(self):
        tree = Tree(dict(ckpttools.open(LLAMA / "hf")))
        with pytest.raises(UsageError, match="only names can be compared"):
            compare_with_family(tree, families()["llama"], pattern="*.mlp.*")

    def test_comparison_by_names_only_is_reported(self):
        """Gemma 3's unscanned layers do not tell how many form a cycle."""
        tree = maxtext_tree("gemma3", scan=False)
        result = compare_with_family(tree, families()["gemma3"])
        assert result.is_same
        assert not result.shapes_compared
        lost = Tree({path: leaf for path, leaf in tree.items() if "wi_0" not in path})
        assert not compare_with_family(lost, families()["gemma3"]).is_same


class TestCommand:
    def test_matching_config_exits_with_0(self):
        result = ckpt("inspect", "tree", LLAMA / "hf", "--against", LLAMA / "hf" / "config.json")
        assert result.exit_code == 0, result.output
        assert " ".join(result.stdout.split()).endswith(
            f"Against family llama with {LLAMA / 'hf' / 'config.json'}: 39 arrays, none missing, none "
            "unexpected, all shapes as expected."
        )

    def test_differences_exit_with_1(self):
        result = ckpt("inspect", "tree", LLAMA / "hf", "--against", GOLDEN / "llama3.2-tied" / "hf")
        assert result.exit_code == 1
        lines = result.stdout.splitlines()
        assert lines[lines.index("1 array is not expected") + 1] == "  lm_head.weight  bfloat16[256,64]"

    def test_against_supports_filter_sort_and_flat(self, tmp_path: Path):
        """With --flat one line for each array; the filter may mean nothing but what is missing."""
        tree = ckpttools.open(LLAMA / "hf")
        arrays = {keystr(p): item.read() for p, item in tree.arrays.items() if ".layers.3." not in keystr(p)}
        save_file(arrays, tmp_path / "model.safetensors")
        arguments = ("--against", LLAMA / "hf", "--filter", "*.3.mlp.*", "--sort", "size", "--flat")
        outcome = ckpt("inspect", "tree", tmp_path, *arguments)
        assert outcome.exit_code == 1
        lines = outcome.stdout.splitlines()
        assert "  holds       0 arrays, 0 B" in lines
        assert lines[lines.index("3 arrays are missing") + 1 :] == [
            "  model.layers.3.mlp.down_proj.weight  bfloat16[64,128]",
            "  model.layers.3.mlp.gate_proj.weight  bfloat16[128,64]",
            "  model.layers.3.mlp.up_proj.weight    bfloat16[128,64]",
        ]
        result = json.loads(ckpt("inspect", "tree", tmp_path, *arguments, "--json").stdout)["comparison"]
        assert len(result["missing"]) == 3
        assert not result["extra"]
        same = ckpt("inspect", "tree", tmp_path, "--against", LLAMA / "hf", "--filter", "*.2.mlp.*")
        assert same.exit_code == 0
        assert " ".join(same.stdout.split()).endswith(
            "3 arrays, none missing, none unexpected, all shapes as expected."
        )

    def test_empty_against_option_is_refused(self):
        result = ckpt("inspect", "tree", LLAMA / "hf", "--against", "")
        assert result.exit_code == 2
        assert "'--against': the text is empty" in result.stderr

    def test_sharding_is_refused_with_against(self):
        result = ckpt("inspect", "tree", LLAMA / "hf", "--against", "llama", "--sharding")
        assert result.exit_code == 2
        assert "leave out --sharding" in result.stderr

    def test_depth_is_refused_with_against(self):
        arguments = ("inspect", "tree", LLAMA / "hf", "--against", "llama", "--depth", 1)
        result = ckpt(*arguments)
        assert result.exit_code == 2
        assert "leave out --depth" in result.stderr
        assert len(json.loads(ckpt(*arguments, "--json").stdout)["subtrees"]) == 2

    @pytest.mark.parametrize("model", ["llama4-scout", "gemma3"])
    def test_lines_fit_the_terminal(self, model: str):
        result = ckpt("inspect", "tree", GOLDEN / model / "hf", "--against", "llama", COLUMNS="80")
        lines = result.stdout.splitlines()
        assert max(map(len, lines[1:])) <= 80
        assert "      bfloat16[64,32]" in lines or model == "gemma3"

    def test_config_directory_is_accepted_as_against(self, tmp_path: Path):
        (tmp_path / "config.json").write_text(json.dumps(config_of("qwen3")))
        result = ckpt("inspect", "tree", LLAMA / "hf", "--against", tmp_path)
        assert result.exit_code == 1
        assert "model.layers.{0..3}.self_attn.q_norm.weight  [16]" in result.stdout

    def test_family_uses_the_existing_config(self):
        result = ckpt("inspect", "tree", LLAMA / "hf", "--against", "llama")
        assert result.exit_code == 0
        assert "with the config.json next to it" in result.stdout

    def test_against_prints_json(self):
        outcome = ckpt("inspect", "tree", LLAMA / "hf", "--against", "qwen3", "--json")
        assert outcome.exit_code == 1
        result = json.loads(outcome.stdout)
        assert result["num_arrays"] == 39
        assert result["comparison"]["missing"] == [
            {"path": f"model.layers.{{layer}}.self_attn.{name}.weight", "shape": None, "dtype": None}
            for name in ("q_norm", "k_norm")
        ]
        assert not result["comparison"]["shapes_compared"]

    @pytest.mark.parametrize(
        ("what", "code", "words"),
        [
            ("lama", 2, "did you mean llama?"),
            ("/no/such/place", 2, "/no/such/place does not exist"),
            (LLAMA / "leaves_scanned.json", 3, "does not state a model type"),
            (LLAMA, 3, "is not one checkpoint"),
        ],
    )
    def test_invalid_against_option_is_refused(self, what: str | Path, code: int, words: str):
        result = ckpt("inspect", "tree", LLAMA / "hf", "--against", what)
        assert result.exit_code == code
        assert words in result.stderr
        assert not result.stdout

    def test_invalid_config_is_refused(self, tmp_path: Path):
        (tmp_path / "config.json").write_text("{}")
        result = ckpt("inspect", "tree", LLAMA / "hf", "--against", tmp_path / "config.json")
        assert result.exit_code == 3
        assert "does not state a model type" in result.stderr
