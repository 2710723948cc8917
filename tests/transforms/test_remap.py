"""Rules and functions rename, drop and rearrange arrays, round trip, and refuse mistakes."""

from __future__ import annotations

import json
import warnings
from fnmatch import fnmatchcase

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command_line import run
from support.golden_data import described, golden_arrays, golden_checkpoint, leaves_by_package
from support.internals import MapArrays, keystr, parse_key, parse_rules, relayout, take
from support.locations import HF, ROOT
from support.stored_trees import EVERYTHING
from support.trees import tree_of

import ckpttools
from ckpttools import (
    DTYPES,
    CastTo,
    CoverageError,
    FormatError,
    MappingError,
    ShapeError,
    StorageError,
    Tree,
    as_checkpoint_conversion_fn,
    mapped_by,
)
from ckpttools.api.plan_report import Rename, fold_renames
from ckpttools.testing.strategies import assert_same, noise, statements, stored
from ckpttools.transforms.rename import Remap, Rule, parse_template, read_rules, renames

F32 = DTYPES["float32"]


def flat(*names, shape=(2,)):
    return tree_of(*[(name,) for name in names], shape=shape)


# Templates.


@given(statements())
def test_template_matches_its_formatted_name(statement):
    key = parse_key(statement.left)
    template = parse_template(statement.left)
    axes = {axis: statement.sizes[axis] - 1 for axis in key.axes}
    name = key.format(axes, statement.sizes)
    filled = template.match(name)
    assert filled is not None
    assert template.format(filled) == name
    assert template.match(f"{name}x") is None
    assert template.match(f"x{name}") is None


@pytest.mark.parametrize(
    ("template", "name", "matches"),
    [
        ("a.{i}.b", "a.12.b", True),
        ("a.{i}.b", "a.012.b", False),
        ("a.{i}.b", "a.x.b", False),
        ("a.{i+3}", "a.2", False),
        ("a.{i+3}", "a.3", True),
        ("{p:q,qk}.w", "qk.w", True),
        ("{p:q,k}.w", "v.w", False),
        ("{i}.{i}", "3.3", True),
        ("{i}.{i}", "3.4", False),
        ("{...}.w", "a.b.w", True),
        ("{...}.w", ".w", False),
        ("a.{...}", "a.", False),
        ("a.{i}.{...}.{j}", "a.1.b.2.3", True),
        ("{i}.{...}.{i}", "1.x.2", False),
        ("a²{i}", "a²²", False),
    ],
)
def test_template_matches_expected_names(template, name, matches):
    assert (parse_template(template).match(name) is not None) == matches


def test_invalid_templates_are_refused():
    for text in ("a{i", "a}", "{i}.{}"):
        with pytest.raises(MappingError, match=r"brace|axis names"):
            parse_template(text)


@given(st.text("ab.", max_size=9), st.text("ab.*", max_size=7))
def test_wildcards_match_as_globs(name, pattern):
    found = parse_template(pattern).match(name)
    assert (found is not None) == fnmatchcase(name, pattern)
    assert found is None or parse_template(pattern).format(found) == name


def test_many_wildcards_match_long_names_in_time():
    assert parse_template("*a*a*a*a*a*b").match("a" * 2000) is None
    assert parse_template("*.{i}.*.{j}.*b").match("1.2." * 1000) is None


def test_wildcards_match_little_text_and_keep_their_order():
    names = {"a.b.c": "c/a/b", "a.b.c.d": "c.d/a/b"}
    assert [keystr(path) for path in flat(*names).pipe(renames({"*.b.*": "*/*/b"}))] == ["a/c/b", "a/c.d/b"]
    assert list(flat("x.norm", "norm").pipe(renames({"*norm": "*ln"}))) == [("x.ln",), ("ln",)]


# Names.


@st.composite
def bijections(draw):
    """Draw flat names of layers, and rules that rename each without losing any."""
    layers = draw(st.integers(1, 12))
    words = draw(st.lists(st.sampled_from(("q", "k", "up.w", "bias")), min_size=1, unique=True))
    offset = draw(st.integers(0, 9))
    names = [f"model.{layer}.{word}" for layer in range(layers) for word in words]
    new = draw(st.permutations(words))
    target = {word: f"m/l_{{layer+{offset}}}/{other}" for word, other in zip(words, new, strict=True)}
    rules = {f"model.{{layer}}.{word}": target[word] for word in words}
    return names, rules


@given(bijections())
def test_renames_are_reversible(case):
    names, rules = case
    tree = flat(*names)
    there = tree.pipe(renames(rules))
    assert len(there) == len(tree)
    assert all(path[0] == "m" and len(path) == 3 for path in there)
    back = there.pipe(renames({target: source for source, target in rules.items()}))
    assert {keystr(path): leaf for path, leaf in back.items()} == {n: tree[n,] for n in names}


class TestNames:
    def test_first_matching_rule_applies(self):
        tree = flat("a.1", "a.2", "b")
        built = tree.pipe(renames({"a.1": "first", "a.{i}": "other_{i}"}))
        assert list(built) == [("first",), ("other_2",), ("b",)]

    def test_none_target_drops_arrays(self):
        done = renames({"a.{i}": None})(flat("a.1", "a.2", "b"))
        assert list(done.tree) == [("b",)]
        assert done.notes.dropped == ("a.1", "a.2")

    def test_labels_and_offsets_are_applied(self):
        built = flat("x.q.0", "x.k.1").pipe(renames({"x.{part:q,k}.{i}": "y.{i+5}.{part:query,key}"}))
        assert list(built) == [("y.5.query",), ("y.6.key",)]

    def test_merged_numbers_stay_one_field(self):
        built = flat("x.17").pipe(renames({"x.{block layer}": "y.{block layer}"}))
        assert list(built) == [("y.17",)]

    def test_more_coordinates_than_labels_is_refused(self):
        with pytest.raises(MappingError, match="more coordinates than labels") as caught:
            flat("x.2").pipe(renames({"x.{i}": "{i:a,b}"}))
        assert (caught.value.got, caught.value.expected) == ("coordinate 2", "at most 1, the one of 'b'")

    def test_dots_slashes_and_list_indices_are_supported(self):
        tree = tree_of(("opt", 0, "mu", "w"), ("opt", 1, "mu", "w"), ("params", "w"))
        by_slash = tree.pipe(renames({"opt/{i}/mu/{...}": "state/{i}/m/{...}"}))
        assert set(by_slash) == {("state", 0, "m", "w"), ("state", 1, "m", "w"), ("params", "w")}
        assert tree.pipe(renames({"opt.{i}.mu.w": "state.{i}.m.w"})).keys() == by_slash.keys()
        nested = flat("a.b.c").pipe(renames({"a.{...}": "x/a/{...}"}))
        assert list(nested) == [("x", "a", "b.c")]

    def test_every_leaf_and_its_metadata_move(self):
        built = EVERYTHING.pipe(renames({"{...}": "all/{...}"}))
        assert [keystr(path[1:]) for path in built] == [keystr(path) for path in EVERYTHING]
        assert built.metadata.scalars == {("all", "number"), ("all", "yes")}
        assert ("all", "rng", "key") in built.metadata.key_impls
        assert_same(built.pipe(renames({"all/{...}": "{...}"})), EVERYTHING)

    def test_replaced_arrays_are_not_restored_as_keys(self):
        """Orbax restores arrays marked as random keys; replaced arrays lose the mark."""

        def replaced(path, array):
            if path in ("rng/key", "number"):
                return stored(noise((4,), F32), F32)
            return ("moved/keys", array) if path == "rng/keys" else path

        built = EVERYTHING.pipe(mapped_by(replaced)).metadata
        assert dict(built.key_impls) == {("moved", "keys"): "threefry2x32"}
        assert built.scalars == {("yes",)}


class TestRefusals:
    def test_collision_error_names_both_arrays(self):
        with pytest.raises(MappingError, match=r"a\.1 and b\.1 both become c\.1"):
            flat("a.1", "b.1").pipe(renames({"a.{i}": "c.{i}", "b.{i}": "c.{i}"}))
        with pytest.raises(MappingError, match="a and b both become a"):
            flat("a", "b").pipe(renames({"b": "a"}))

    def test_path_below_another_leaf_is_refused(self):
        with pytest.raises(MappingError, match="which is below it"):
            flat("a", "b").pipe(renames({"b": "a/x"}))

    def test_dropping_every_array_is_refused(self):
        with pytest.raises(MappingError, match="no array is left"):
            flat("a", "b").pipe(renames({"{...}": None}))

    def test_gaps_in_lists_are_refused(self):
        tree = tree_of(("l", 0), ("l", 1))
        with pytest.raises(FormatError, match="gaps"):
            tree.pipe(renames({"l/0": None}))

    def test_unmatched_rule_is_reported(self):
        with pytest.raises(MappingError, match="matches nothing") as caught:
            flat("layers.0.kernel").pipe(renames({"layers.{i}.kernle": "x.{i}"}))
        assert caught.value.hint == 'write `from = "layers.{i}.kernel"` and `to = "x.{i}"`'
        optional = Remap([Rule("x.{i}", "y.{i}", optional=True)])
        assert list(flat("a").pipe(optional)) == [("a",)]

    @pytest.mark.parametrize(
        ("source", "target", "cause", "instead"),
        [
            ("m.{r}", "b.{r}", "{r} matches only a number", ("m.{...}", "b.{...}")),
            ("m.l.{i}.{r}.w", "b.{r}.{i}", "{r} matches only a number", ("m.l.{i}.{...}.w", "b.{...}.{i}")),
            ("m.{a}.{i}.{b}", "{a}/{i}/{b}", "{b} matches only", ("m.{...}.{i}.{...}", "{...}/{i}/{...}")),
            ("m.l.{i}.{p:k,v}.w", "{i}.{p:k,v}", "only these words", ("m.l.{i}.{...}.w", "{i}.{...}")),
            ("m.l.{i}", "b.{i}", "only the beginning", ("m.l.{i}.{...}", "b.{i}.{...}")),
            ("l.{i}.q.w", "{i}", "'m.' at the beginning", ("m.l.{i}.q.w", "{i}")),
            ("q.w", "b", "which begin with", ("{...}.q.w", "{...}.b")),
            ("x.m.l.{i}.q.w", "{i}", "names without 'x.'", ("m.l.{i}.q.w", "{i}")),
            ("M.L.{i}.q.w", "{i}", "the same case", ("m.l.{i}.q.w", "{i}")),
            ("m/l/{i}/q/w", "{i}", "'.' in the old name", ("m.l.{i}.q.w", "{i}")),
            ("M.l.{i}.{r}", "{i}.{r}", "'m' instead of 'M'", ("m.l.{i}.{...}", "{i}.{...}")),
            ("M.{r}", None, "{r} matches only", ("m.{...}", None)),
        ],
    )
    def test_unmatched_rule_gets_its_cause_and_a_rule_that_works(self, source, target, cause, instead):
        tree = flat("m.l.0.q.w", "m.l.1.q.w", "m.norm.weight", "head")
        with pytest.raises(MappingError, match="matches nothing") as caught:
            tree.pipe(renames({source: target}))
        assert cause in caught.value.expected
        names = [
            f"`{key} = {json.dumps(name)}`" for key, name in zip(("from", "to"), instead, strict=True) if name
        ]
        assert caught.value.hint == f"write {' and '.join(names)}"
        assert len(tree.pipe(renames(dict([instead])))) <= 4

    def test_no_rule_for_a_last_key_alone_is_suggested(self):
        with pytest.raises(MappingError, match="matches nothing") as caught:
            flat("a.norm.weight", "b.weight").pipe(renames({"lm_head.weight": "b"}))
        assert "write" not in caught.value.hint

    def test_rule_for_names_of_an_earlier_rule_is_reported(self):
        with pytest.raises(MappingError, match="earlier") as caught:
            flat("a.1").pipe(renames({"a.{i}": "b.{i}", "a.1": "c"}))
        assert caught.value.got == "a.1, taken by a.{i} -> b.{i}"

    def test_strict_refuses_unmatched_arrays(self):
        with pytest.raises(CoverageError, match="no rule matches these arrays") as caught:
            flat("a", "b.0", "b.1").pipe(Remap([Rule("a", "x")], strict=True))
        assert "b.{0..1}" in str(caught.value)

    def test_strict_ignores_non_array_leaves(self):
        rules = Remap([Rule(keystr(path), keystr(path)) for path in EVERYTHING.arrays], strict=True)
        assert_same(EVERYTHING.pipe(rules), EVERYTHING)

    @pytest.mark.parametrize(
        ("source", "target"), [("a.{i}", "b"), ("a", "b.{i}"), ("a.{...}", "b"), ("a.{i j}", "b.{i}.{j}")]
    )
    def test_names_with_different_fields_are_refused(self, source, target):
        with pytest.raises(MappingError, match="different fields") as caught:
            Rule(source, target)
        assert caught.value.got.startswith("only in the ")

    @pytest.mark.parametrize(
        ("source", "target"),
        [("m.{n:gate,up}.w", "m.{n}.w"), ("{n:a,b}.{i}", "{i}.{n}")],
    )
    @pytest.mark.parametrize("axes", [None, "embed mlp"])
    def test_words_are_not_replaced_by_numbers(self, source, target, axes):
        with pytest.raises(MappingError, match="has labels in one name") as caught:
            Rule(source, target, axes)
        assert "0,1}" in str(caught.value)

    @pytest.mark.parametrize("axes", [None, "embed mlp"])
    def test_unequal_word_lists_are_refused(self, axes):
        for target, got in (("{n:q,k}", "3 in {n:q,k,v}, 2 in {n:q,k}"), ("{n:q,k,v,o}", "4 in {n:q,k,v,o}")):
            with pytest.raises(MappingError, match="differ in number") as caught:
                Rule("m.{n:q,k,v}.w", f"m.{target}.w", axes)
            assert got in str(caught.value)
            assert "one label for each label in the other name" in str(caught.value)

    @pytest.mark.parametrize(("source", "target"), [("m.{n:q,q}", "x.{n:a,b}"), ("m.{n:a,b}", "x.{n:q,q}")])
    def test_duplicate_word_is_refused(self, source, target):
        with pytest.raises(MappingError, match="one word for two coordinates") as caught:
            Rule(source, target)
        assert caught.value.got == "q twice in {n:q,q}"

    def test_words_are_replaced_as_declared(self):
        tree = flat("m.gate.w", "m.up.w").pipe(Remap([Rule("m.{n:gate,up}.w", "m.{n:0,1}.w")]))
        assert [keystr(path) for path in tree.arrays] == ["m.0.w", "m.1.w"]

    def test_wildcards_and_drops_have_no_axes(self):
        with pytest.raises(MappingError, match="cannot have both"):
            Rule("{...}", "x/{...}", "a b")
        with pytest.raises(MappingError, match="cannot have axes"):
            Rule("a", None, "a b")
        with pytest.raises(MappingError, match="the axes of both sides"):
            Rule("a", "b", None, "a b")


# Axes.

STACKING = parse_rules(
    {
        "rules": [
            {
                "from": "m.{layer}.up",
                "axes": "mlp embed",
                "to": "p/layers/up",
                "to-axes": "embed layer mlp",
            },
            {
                "from": "m.{layer}.q",
                "axes": "(heads dim) embed",
                "to": "p/layers/q",
                "to-axes": "embed layer heads dim",
            },
        ],
        "sizes": {"dim": 2},
    }
)


def layers(count, shapes):
    rng = np.random.default_rng(0)
    values = {
        f"m.{k}.{n}": rng.standard_normal(s).astype(np.float32)
        for k in range(count)
        for n, s in shapes.items()
    }
    return values, Tree({(name,): stored(value.view(np.uint32), F32) for name, value in values.items()})


SHAPES = {"up": (6, 4), "q": (8, 4)}


class TestAxes:
    def test_arrays_with_equal_names_are_refused(self):
        """Joined by dots, keys that contain dots are equal to others."""
        tree = tree_of(("a", "b.c"), ("a.b", "c"), shape=(2, 3))
        with pytest.raises(MappingError, match="two arrays have the same name") as error:
            Remap((Rule("a.b.c", "x.y", "p q", "q p"),))(tree)
        assert error.value.got == "a/b.c and a.b/c: a.b.c"

    def test_layers_are_stacked_into_arrays(self):
        values, tree = layers(3, SHAPES)
        built = tree.pipe(STACKING)
        up = np.stack([values[f"m.{k}.up"].T for k in range(3)], axis=1)
        q = np.stack([values[f"m.{k}.q"].reshape(4, 2, 4).transpose(2, 0, 1) for k in range(3)], axis=1)
        assert np.array_equal(built["p", "layers", "up"].read(), up)
        assert np.array_equal(built["p", "layers", "q"].read(), q)

    def test_remap_round_trip_restores_the_tree(self):
        _, tree = layers(12, SHAPES)
        back = Remap(
            [Rule(str(rule.target), rule.source, rule.target_axes, rule.axes) for rule in STACKING.rules],
            {"dim": 2},
        )
        again = tree.pipe(STACKING, back)
        assert set(again) == set(tree)
        assert all(np.array_equal(again[path].read(), tree[path].read()) for path in tree)

    def test_missing_layer_and_different_shape_are_refused(self):
        _, tree = layers(3, SHAPES)
        gone = Tree({path: leaf for path, leaf in tree.items() if path != ("m.1.up",)})
        with pytest.raises(CoverageError, match=r"m\.1\.up"):
            gone.pipe(STACKING)
        odd = Tree({**tree, ("m.2.up",): stored(noise((6, 5), F32), F32)})
        with pytest.raises(CoverageError, match=r"m\.2\.up: got \[6, 5\]"):
            odd.pipe(STACKING)

    def test_undeterminable_sizes_are_refused(self):
        _, tree = layers(2, {"q": (8, 4)})
        rules = Remap([Rule("m.{layer}.q", "q/{layer}", "(heads dim) embed", "heads dim embed")])
        with pytest.raises(ShapeError, match="cannot be inferred"):
            tree.pipe(rules)

    def test_only_arrays_have_axes(self):
        with pytest.raises(MappingError, match="not an array"):
            EVERYTHING.pipe(Remap([Rule("empty/none", "x", "a", "a")]))

    def test_collision_error_names_the_rules(self):
        _, tree = layers(2, SHAPES)
        rules = [Rule("m.{layer}.up", "x", "a b", "a layer b"), Rule("m.{layer}.q", "x", "c d", "c layer d")]
        with pytest.raises(
            MappingError, match=r"the rule for m\.\{layer\}\.up and the rule for m\.\{layer\}\.q both"
        ):
            tree.pipe(Remap(rules))


# Files of rules.

TOML = """
[[rules]]
from = "model.layers.{layer}.mlp.gate_proj.weight"
axes = "mlp embed"
to = "params/params/decoder/layers/mlp/wi_0/kernel"
to-axes = "embed layer mlp"

[[rules]]
from = "lm_head.weight"
drop = true
"""


class TestFiles:
    def test_toml_and_json_rules_are_equivalent(self, tmp_path):
        import tomllib

        (tmp_path / "r.toml").write_text(TOML)
        (tmp_path / "r.json").write_text(json.dumps(tomllib.loads(TOML)))
        one, two = read_rules(tmp_path / "r.toml"), read_rules(tmp_path / "r.json")
        assert one.rules == two.rules

    @pytest.mark.parametrize(
        ("document", "message"),
        [
            ([], "contains no rules"),
            ({"rules": {}}, "wrong type"),
            ({"rules": [], "size": {}}, "did you mean sizes"),
            ({"rules": [], "sizes": {"a": 0}}, "at least 1"),
            ({"rules": [3]}, "a table"),
            ({"rules": [{"form": "a"}]}, "did you mean from"),
            ({"rules": [{"from": "a"}]}, "a rule needs `from`"),
            ({"rules": [{"to": "a"}]}, "a rule needs `from`"),
            ({"rules": [{"from": "a", "to": "b", "drop": True}]}, "a rule needs `from`"),
            ({"rules": [{"from": "a", "to": 3}]}, "wrong type"),
            ({"rules": [{"from": "a", "drop": "yes"}]}, "wrong type"),
            ({"rules": [{"from": "a", "to": "b"}, {"from": "a{", "to": "b"}]}, "rules[1]: a{"),
        ],
    )
    def test_invalid_rules_file_is_refused(self, document, message):
        with pytest.raises(MappingError) as caught:
            parse_rules(document, "r.toml")
        assert message in str(caught.value)
        assert "r.toml" in str(caught.value)

    def test_undecodable_rules_file_is_refused(self, tmp_path):
        for name in ("r.toml", "r.json"):
            (tmp_path / name).write_text("rules: [")
            with pytest.raises(MappingError, match=name.rpartition(".")[2].upper()):
                read_rules(tmp_path / name)
        (tmp_path / "latin.toml").write_bytes(b'rules = "\xe9"\n')
        with pytest.raises(MappingError, match="text in UTF-8"):
            read_rules(tmp_path / "latin.toml")
        with pytest.raises(StorageError, match="cannot read") as caught:
            read_rules(tmp_path / "none.toml")
        assert (
            caught.value.got == "No such file or directory (errno 2)"
            and "module:function" in caught.value.hint
        )


# Functions.

CODE = """
from dataclasses import dataclass

from ckpttools.array.nodes import relayout

@dataclass
class Names:
    prefix: str = "new"

def rename(path, array):
    if path == "lm_head.weight":
        return None
    if "norm" in path:
        return f"{Names().prefix}/{path}"
    if path.endswith("gate_proj.weight"):
        rows, columns = array.shape
        return path, relayout(array, [(rows,), (columns,)], (1, 0), (1, 1))
    return array

def fails(path, array):
    raise ValueError(f"not today: {array.shape}")

def ends(path, array):
    raise SystemExit(0)

def wrong(path, array):
    return 3

value = 3
"""


@pytest.fixture
def code(tmp_path):
    (tmp_path / "names.py").write_text(CODE)
    return tmp_path / "names.py"


class TestFunctions:
    def test_function_returns_renamed_paths(self, code):
        tree = ckpttools.open(HF)
        built = tree.pipe(mapped_by(f"{code}:rename"))
        assert ("lm_head.weight",) not in built
        assert ("new", "model.norm.weight") in built
        gate = ("model.layers.1.mlp.gate_proj.weight",)
        assert np.array_equal(built[gate].read(), tree[gate].read().T)
        assert built["model.embed_tokens.weight",] is tree["model.embed_tokens.weight",]
        assert built.metadata.notes.dropped == ("lm_head.weight",)

    def test_function_in_a_module_is_called(self, code, monkeypatch):
        monkeypatch.syspath_prepend(code.parent)
        assert len(ckpttools.open(HF).pipe(mapped_by("names:rename"))) == len(ckpttools.open(HF)) - 1

    def test_list_indices_are_kept(self):
        tree = tree_of(("opt", 0, "mu"), ("opt", 1, "mu"))
        built = tree.pipe(mapped_by(lambda path, array: path.replace("opt", "state")))
        assert list(built) == [("state", 0, "mu"), ("state", 1, "mu")]

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("fails", "ValueError: not today: (256, 64)"),
            ("ends", "SystemExit: 0"),
            ("wrong", "returned an unsupported value"),
        ],
    )
    def test_failing_function_is_named_with_the_path(self, code, name, message, tmp_path):
        output = run("remap", HF, tmp_path / "out", "--map", f"{code}:{name}", code=3)
        assert message in output
        assert f"{code}:{name}" in output
        assert "lm_head.weight" in output
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            ("{code}:renam", "did you mean rename"),
            ("{code}:value", "no function value"),
            ("no_such_module:f", "cannot import no_such_module"),
        ],
    )
    def test_missing_function_is_refused(self, code, tmp_path, spec, message):
        assert message in run("remap", HF, tmp_path / "out", "--map", spec.format(code=code), code=2)

    def test_missing_file_is_refused(self, tmp_path):
        spec = tmp_path / "none" / "x.py"
        assert f"{spec} does not exist" in run("remap", HF, tmp_path / "out", "--map", f"{spec}:f", code=2)

    def test_failing_code_is_reported(self, tmp_path):
        (tmp_path / "broken.py").write_text("def f(:\n")
        with pytest.raises(FormatError, match="SyntaxError"):
            mapped_by(f"{tmp_path / 'broken.py'}:f")

    def test_colliding_function_results_are_refused(self):
        with pytest.raises(MappingError, match="a and b both become c"):
            flat("a", "b").pipe(MapArrays(lambda path, array: "c"))

    def test_function_may_return_an_expression(self):
        def first(path, array):
            return take(array, 0, 1)

        tree = flat("a", shape=(3, 2))
        assert np.array_equal(tree.pipe(mapped_by(first))["a",].read(), tree["a",].read()[1])


# The command.


DECODER = "params/params/decoder"
LAYER = "model.layers.{l}"
# Source, its axes, target, its axes.
LLAMA_ROWS = [
    ("lm_head.weight", "v e", f"{DECODER}/logits_dense/kernel", "e v"),
    (
        f"{LAYER}.mlp.{{p:gate_proj,up_proj}}.weight",
        "m e",
        f"{DECODER}/layers/mlp/{{p:wi_0,wi_1}}/kernel",
        "e l m",
    ),
    (f"{LAYER}.mlp.down_proj.weight", "e m", f"{DECODER}/layers/mlp/wo/kernel", "m l e"),
    (
        f"{LAYER}.{{n:input,post_attention}}_layernorm.weight",
        "e",
        f"{DECODER}/layers/{{n:pre,post}}_self_attention_layer_norm/scale",
        "e l",
    ),
    (
        f"{LAYER}.self_attn.v_proj.weight",
        "(k d) e",
        f"{DECODER}/layers/self_attention/value/kernel",
        "e l k d",
    ),
    (f"{LAYER}.self_attn.o_proj.weight", "e (h d)", f"{DECODER}/layers/self_attention/out/kernel", "h l d e"),
]
LLAMA = {
    "sizes": {"d": 16},
    "rules": [
        {"from": "model.embed_tokens.weight", "to": "params/params/token_embedder/embedding"},
        {"from": "model.norm.weight", "to": f"{DECODER}/decoder_norm/scale"},
        *(dict(zip(("from", "axes", "to", "to-axes"), row, strict=True)) for row in LLAMA_ROWS),
        {"from": f"{LAYER}.self_attn.{{...}}", "drop": True},
    ],
}


class TestCommand:
    def test_rules_reproduce_maxtext_conversion(self, tmp_path):
        """Compare all arrays except query and key, whose values MaxText's converter changes."""
        (tmp_path / "llama.json").write_text(json.dumps(LLAMA))
        run("remap", HF, tmp_path / "out", "--map", tmp_path / "llama.json", "--strict", "--to", "orbax")
        built = leaves_by_package(ckpttools.open(tmp_path / "out"))
        expected = golden_arrays("llama3.1", True)
        left_out = {f"params/params/decoder/layers/self_attention/{name}/kernel" for name in ("query", "key")}
        assert built == {path: leaf for path, leaf in expected.items() if path not in left_out | {"step"}}

    def test_orbax_loads_the_result(self, tmp_path):
        import orbax.checkpoint as ocp

        (tmp_path / "names.toml").write_text(
            '[[rules]]\nfrom = "params/params/{...}"\nto = "base/{...}"\n'
            '[[rules]]\nfrom = "step"\ndrop = true\n'
        )
        run("remap", golden_checkpoint(True), tmp_path / "out", "--map", tmp_path / "names.toml")
        restored = ocp.StandardCheckpointer().restore(tmp_path / "out" / "0" / "items")
        source = ckpttools.open(golden_checkpoint(True))
        array = source["params", "params", "token_embedder", "embedding"].read()
        assert np.array_equal(np.asarray(restored["base"]["token_embedder"]["embedding"]), array)

    def test_invalid_remap_calls_are_refused(self, tmp_path, code):
        assert "--map" in run("remap", HF, tmp_path / "out", code=2)
        run("remap", HF, tmp_path / "out", "--map", tmp_path / "none.toml", code=2)
        assert "decides about every array" in run(
            "remap", HF, tmp_path / "out", "--map", f"{code}:rename", "--strict", code=2
        )
        (tmp_path / "r.toml").write_text('[[rules]]\nfrom = "nothing"\nto = "x"\n')
        assert "matches nothing" in run("remap", HF, tmp_path / "out", "--map", tmp_path / "r.toml", code=3)
        assert not (tmp_path / "out").exists()


class TestRename:
    def test_dry_run_lists_names_folded_and_json_has_all(self, tmp_path):
        words = ("remap", HF, tmp_path / "x", "--dry-run", "--drop", "lm_head")
        text = run(*words, "--rename", "model.layers.{i}.mlp.*=h.{i+1}.ffn.*")
        assert "renamed  12 arrays\n" in text
        assert "model.layers.{0..3}.mlp.up_proj.weight -> h.{1..4}.ffn.up_proj.weight\n" in text
        assert "dropped  1 array: lm_head.weight\n" in text
        assert "same     26 arrays: model.embed_tokens.weight" in text
        report = json.loads(run(*words, "--rename", "model.layers.{i}.mlp.*=h.{i+1}.ffn.*", "--json"))
        assert len(report["renames"]) == 12
        assert {
            "sources": ["model.layers.3.mlp.up_proj.weight"],
            "name": "h.4.ffn.up_proj.weight",
            "is_rearranged": False,
        } in report["renames"]

    def test_plan_lists_rearranged_arrays(self, tmp_path):
        prepared = ckpttools.remap.plan(HF, tmp_path / "x", map=parse_rules(LLAMA), format="orbax")
        listed = {item.name: item for item in prepared.renames}
        assert len(listed["params/params/decoder/layers/mlp/wo/kernel"].sources) == 4
        assert all(
            item.is_rearranged == ("layers/" in item.name or "logits" in item.name)
            for item in listed.values()
        )
        lines = fold_renames(prepared.renames)
        assert "model.norm.weight -> params/params/decoder/decoder_norm/scale" in lines
        wo = f"{DECODER}/layers/mlp/wo/kernel (rearranged)"
        assert f"model.layers.{{0..3}}.mlp.down_proj.weight -> {wo}" in lines

    @given(st.permutations(range(6)), st.integers(0, 3))
    def test_folded_lines_hold_the_renames(self, order, offset):
        """Numbers in folded lines are equal or shifted; all others have a line of their own."""
        renamed = [Rename((f"a.{k}.w",), f"b{offset}/{order[k] + offset}", False) for k in range(6)]
        lines = fold_renames(renamed)
        if sorted(order) == list(order):
            assert lines == [f"a.{{0..5}}.w -> b{offset}/{{{offset}..{offset + 5}}}"]
        else:
            assert lines == [f"{item.sources[0]} -> {item.name}" for item in renamed]

    @pytest.mark.parametrize(
        ("rename", "names"),
        [
            ("model.*=base.*", "38 arrays: base.embed_tokens.weight"),
            ("model.*=base/*", "38 arrays: base/embed_tokens.weight"),
            ("lm_head.*=head.*", "1 array: head.weight"),
            ("model.layers.{i}.mlp.*=h.{i}.*", "12 arrays: h.{0..3}.down_proj.weight"),
        ],
    )
    def test_names_that_config_does_not_describe_are_noted(self, tmp_path, rename, names):
        old, new = rename.split("=")
        notes = ckpttools.remap.plan(HF, tmp_path / "x", rename={old: new}).plan.notes.remarks
        assert [names in note for note in notes if "config.json describes llama" in note] == [True]
        assert not any("convert the model" in note for note in notes)

    def test_names_that_peft_does_not_load_are_noted(self, tmp_path):
        adapter = ROOT / "fixtures" / "peft" / "plain"

        def notes(**rename):
            prepared = ckpttools.remap.plan(adapter, tmp_path / "x", rename=dict([rename["by"].split("=")]))
            return " ".join(prepared.plan.notes.remarks)

        assert "28 arrays: foo.model.layers.{0..1}" in notes(by="base_model.model.*=foo.*")
        assert "does not load the new names of 4 arrays" in notes(by="*.q_proj.*=*.wq.*")
        assert not notes(by="*.layers.{i}.*=*.layers.{i+2}.*")

    def test_names_of_the_family_are_not_noted(self, tmp_path):
        notes = ckpttools.remap.plan(HF, tmp_path / "x", map=parse_rules(LLAMA), format="orbax").plan.notes
        assert not any("does not have the new names" in note for note in notes.remarks)


# MaxText's checkpoint_conversion_fn.


class TestConversionFunction:
    RULES = renames({"model.{...}": "params/model.{...}", "lm_head.weight": None})

    def test_renamed_arrays_are_the_same_objects(self):
        one, two = np.ones(3), np.zeros(2)
        convert = as_checkpoint_conversion_fn(self.RULES)
        built = convert({"model.a": one, "lm_head.weight": two})
        assert built["params"]["model.a"] is one
        assert "lm_head.weight" not in str(built)

    def test_nested_and_empty_containers_are_renamed(self):
        array = np.ones(3, np.float32)
        checkpoint = {"a": {"b": [array, array]}, "none": None, "empty": {}, "text": "x"}
        built = as_checkpoint_conversion_fn({"a/{...}": "c/{...}"})(checkpoint)
        assert built["c"]["b"][1] is array
        assert built["none"] is None
        assert built["empty"] == {}
        assert built["text"] == "x"

    @pytest.mark.parametrize("library", ["numpy", "jax"])
    def test_axes_casts_and_functions_are_applied(self, library):
        import jax.numpy as jnp

        values, _ = layers(3, SHAPES)
        xp = np if library == "numpy" else jnp
        convert = as_checkpoint_conversion_fn(
            STACKING, CastTo("bfloat16"), lambda path, array: path.replace("p/", "params/")
        )
        built = convert({name: xp.asarray(value) for name, value in values.items()})
        up = np.stack([values[f"m.{k}.up"].T for k in range(3)], axis=1)
        got = built["params"]["layers"]["up"]
        assert type(got) is type(xp.zeros(1))
        assert got.dtype.name == "bfloat16"
        assert np.array_equal(np.asarray(got), up.astype(got.dtype))

    def test_function_result_equals_a_tree_from_a_file(self):
        from safetensors.numpy import load_file

        rules = parse_rules(LLAMA)
        by_function = as_checkpoint_conversion_fn(rules)(load_file(HF / "model.safetensors"))
        for path, array in ckpttools.open(HF).pipe(rules).arrays.items():
            node = by_function
            for key in path:
                node = node[key]
            assert node.tobytes() == array.read().tobytes()

    def test_parts_and_windows_are_evaluated(self):
        from ckpttools.array.nodes import pad_array, window

        def change(path, array):
            return pad_array(window(take(array, 0, 1), (1, 0), (2, 4)), (3, 4))

        value = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
        built = as_checkpoint_conversion_fn(change)({"a": value})["a"]
        assert np.array_equal(built, np.concatenate([value[1, 1:], np.zeros((1, 4), np.float32)]))

    def test_sharded_arrays_stay_sharded(self):
        import jax

        array = jax.device_put(np.arange(6, dtype=np.float32).reshape(2, 3))
        turn = lambda path, value: relayout(value, [(2,), (3,)], (1, 0), (1, 1))  # noqa: E731
        built = as_checkpoint_conversion_fn(turn, CastTo("float16"))({"a": array})["a"]
        assert built.sharding == array.sharding
        assert np.array_equal(np.asarray(built), np.arange(6).reshape(2, 3).T)

    def test_maxtext_calls_load_the_result(self, tmp_path, monkeypatch):
        """`_load_full_state_from_path` with source_checkpoint_layout=safetensors, down to the import."""
        import importlib

        import jax
        from orbax.checkpoint import v1 as ocp

        (tmp_path / "my_names.py").write_text(
            "from ckpttools import as_checkpoint_conversion_fn\n"
            "from ckpttools.transforms.rename import parse_rules\n"
            f"convert = as_checkpoint_conversion_fn(parse_rules({LLAMA!r}))\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        module, _, name = "my_names.convert".rpartition(".")
        function = getattr(importlib.import_module(module), name)
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        layout = ocp.options.CheckpointLayout.SAFETENSORS
        with ocp.Context(checkpoint_layout=layout), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # names that Orbax is about to replace
            abstract = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
                ocp.pytree_metadata(HF).metadata,
            )
            state = function(ocp.load_pytree(HF, abstract))
        expected = {
            keystr(path): described(array.read())
            for path, array in ckpttools.open(HF).pipe(parse_rules(LLAMA)).arrays.items()
        }
        got = {
            jax.tree_util.keystr(path, simple=True, separator="/"): described(np.asarray(leaf))
            for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        }
        assert got == expected

    def test_errors_are_checkpoint_errors(self):
        with pytest.raises(ckpttools.CheckpointError, match="matches nothing"):
            as_checkpoint_conversion_fn({"x": "y"})({"a": np.ones(2)})
