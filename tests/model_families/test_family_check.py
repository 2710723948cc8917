"""Family checks accept correct families in every layout, and find every mistake."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.internals import (
    Constant,
    Family,
    FlagRule,
    Layers,
    Scale,
    families,
    family_from_toml,
    family_of,
    family_to_toml,
    row,
)
from support.locations import GOLDEN
from support.trees import hugging_face

from ckpttools import DTYPES, MappingError, Metadata, StorageError, Tree
from ckpttools.family_check.check import check_against, check_alone, check_family, check_on_config
from ckpttools.family_check.definition import Definition
from ckpttools.family_check.synthetic_models import Sizes, synthetic_model
from ckpttools.mapping.settings import SettingRules
from ckpttools.model_families.family import Spelling

BUILT_IN = tuple(families())
# The others take most of the time, as many settings of their flags are tried: 24 and 8.
SLOW = ("deepseek", "deepseek4", "gemma4", "kimi-k2.5", "qwen3.5-moe")
QUICK = tuple(name for name in BUILT_IN if name not in SLOW)
MODELS = tuple(sorted(path.name for path in GOLDEN.iterdir() if (path / "hf" / "config.json").is_file()))
ALL_LAYOUTS = ["unscanned", "scanned on axis 0", "scanned on axis 1"]
F32 = DTYPES["float32"]


@cache
def config_of(model):
    return json.loads((GOLDEN / model / "hf" / "config.json").read_text())


def family(model):
    return family_of(config_of(model), "config.json")


def tree(**shapes):
    """Return a tree of arrays without content; `__` in names stands for a dot."""
    arrays = {(name.replace("__", "."),): Constant(shape, F32, bytes(4)) for name, shape in shapes.items()}
    return Tree(arrays, Metadata(location="made up"))


def result(check):
    return {(finding.kind, finding.location) for finding in check.findings}


class TestCorrectFamilies:
    @pytest.mark.parametrize("name", BUILT_IN)
    def test_built_in_families_pass_the_check(self, name):
        check = check_alone(families()[name])
        assert check.findings == ()
        assert check.sound
        assert [layout.name for layout in check.layouts] == ALL_LAYOUTS
        assert check.num_arrays >= check.layouts[1].num_arrays == check.layouts[2].num_arrays > 0
        assert check.models

    @pytest.mark.parametrize("model", MODELS)
    def test_golden_models_match_their_family(self, model):
        directory = GOLDEN / model / "hf"
        for check in (
            check_family(family(model), against=directory),
            check_family(family(model), config=directory),
            check_family(family(model), config=directory / "config.json"),
            check_family(family(model), against=next(directory.glob("*.safetensors")), config=directory),
        ):
            assert check.findings == ()
            assert [layout.name for layout in check.layouts] == ALL_LAYOUTS
        assert check.side == "huggingface"

    @pytest.mark.parametrize("layout", ["scanned", "unscanned"])
    @pytest.mark.parametrize("model", sorted({path.parent.name for path in GOLDEN.glob("*/maxtext_*")}))
    def test_golden_maxtext_checkpoints_match_their_family(self, model, layout):
        source = GOLDEN / model / f"maxtext_{layout}"
        for config in (GOLDEN / model / "hf", None):
            check = check_family(family(model), against=source, config=config)
            assert check.findings == ()
            assert check.side == "maxtext"
            assert [item.name for item in check.layouts] == ALL_LAYOUTS
            assert (config is None) == any("interleaved" in hint for hint in check.hints)

    def test_checking_reads_no_array(self):
        """The arrays that are compared have no content."""
        tiny = Family("tiny", (), (), (row("a: x y <-> b: y x"),), (), {})
        check = check_against(tiny, tree(b=(3, 2)))
        assert check.sound
        assert check.num_arrays == 1
        assert (check.against, check.config) == ("made up", None)

    def test_missing_config_fields_get_defaults(self):
        config = {key: n for key, n in config_of("llama3.1").items() if key not in ("head_dim", "vocab_size")}
        assert check_on_config(families()["llama"], config, "config.json").sound

    def test_unreadable_reference_is_refused(self, tmp_path):
        with pytest.raises(StorageError):
            check_family(families()["llama"], against=tmp_path / "nothing")
        with pytest.raises(StorageError):
            check_family(families()["llama"], config=tmp_path / "nothing.json")


class TestSyntheticFamilies:
    @pytest.mark.parametrize("name", BUILT_IN)
    def test_formulas_have_valid_lengths(self, name):
        definition = Definition(families()[name])
        sizes = Sizes.of(definition)
        assert sizes.wrong == []
        assert definition.axes <= sizes.lengths.keys()
        # DeepSeek V4 has one third layer that routes by a table, whatever its size.
        derived = definition.family.derived.keys() - {"third", "rest", "rest_pair"}
        assert all(sizes.lengths[axis] >= 2 for axis in derived)

    def test_every_flag_combination_is_tried(self):
        declared = [model.declared for model in synthetic_model(Definition(families()["deepseek"]))]
        assert len(declared) == len(set(declared)) == 80
        assert sum("q_lora_rank null" in item for item in declared) == 40
        assert sum("no first_k_dense_replace" in item for item in declared) == 40

    def test_user_flags_are_varied(self):
        declared = [model.declared for model in synthetic_model(Definition(families()["mistral"]))]
        assert sum("interleaved true" in item for item in declared) == 2

    def test_unsolvable_formulas_are_reported(self):
        broken = replace(families()["qwen3"], derived={"x": "head_dim - head_dim - 1"})
        check = check_alone(broken)
        assert ("formula", "x") in result(check)


def all_rows(of):
    """Return the position of each row: the group's index, None outside of layers, and the row's index."""
    yield from ((None, k) for k in range(len(of.rows)))
    yield from ((g, k) for g, group in enumerate(of.layers) for k in range(len(group.rows)))


def with_rows(of, where, change):
    """Return the family with one changed list of rows."""
    if where is None:
        return replace(of, rows=change(of.rows))
    group = replace(of.layers[where], rows=change(of.layers[where].rows))
    return replace(of, layers=(*of.layers[:where], group, *of.layers[where + 1 :]))


@st.composite
def a_row_of(draw, of):
    group, number = draw(st.sampled_from(list(all_rows(of))))
    rows = of.rows if group is None else of.layers[group].rows
    return group, number, rows[number]


@cache
def mapped(model):
    """Return the model as the correct family maps it."""
    arrays = {path[0]: array for path, array in hugging_face(model).arrays.items()}
    spelling = family(model).spelling_of(arrays)
    return family(model).table(config_of(model), "config.json", spelling=spelling).to_left(arrays)


def names_of(model, each, group):
    """Return the names of the model's arrays that a row produces."""
    of = family(model)
    flags = {name for name, rule in of.flags.items() if rule.read(config_of(model), "c").value}
    spelled = each if group is None else next(replace(of.layers[group], rows=(each,)).all_rows(None))
    if not spelled.applies(flags) or not set(spelled.right.axes) <= mapped(model).sizes.keys():
        return set()
    sides = [replace(spelled.right, key=spelling.key(spelled.right.key)) for spelling in of.spellings]
    keys = {key for side in sides for key in side.keys(mapped(model).sizes)}
    return keys & {path[0] for path in hugging_face(model).arrays}


class TestMutations:
    """The check finds one change in a correct family."""

    @settings(max_examples=20)
    @given(model=st.sampled_from(MODELS), data=st.data())
    def test_dropped_row_is_found(self, model, data):
        group, number, each = data.draw(a_row_of(family(model)))
        if not names_of(model, each, group):
            return
        broken = with_rows(family(model), group, lambda rows: rows[:number] + rows[number + 1 :])
        check = check_against(broken, hugging_face(model), config_of(model))
        if (group, number) == (None, 0):
            assert not check.sound
            return
        assert {each.kind for each in check.findings} & {"not expected", "size"}

    @settings(max_examples=10)
    @given(name=st.sampled_from(QUICK), data=st.data())
    def test_duplicate_row_is_found(self, name, data):
        of = families()[name]
        group, _, each = data.draw(a_row_of(of))
        twin = replace(each, right=replace(each.right, key=each.right.key.below(row("x: <-> x:").left.key)))
        broken = with_rows(of, group, lambda rows: (*rows, twin))
        check = check_alone(broken)
        assert "key" in {each.kind for each in check.findings}

    @settings(max_examples=20)
    @given(model=st.sampled_from(MODELS), data=st.data())
    def test_swapped_axes_are_found(self, model, data):
        of = family(model)
        group, number, each = data.draw(a_row_of(of))
        names = names_of(model, each, group)
        if len(each.right.groups) < 2 or not names:
            return
        turned = replace(each, right=replace(each.right, groups=each.right.groups[::-1]))
        broken = with_rows(of, group, lambda rows: (*rows[:number], turned, *rows[number + 1 :]))
        check = check_against(broken, hugging_face(model), config_of(model))
        shapes = {hugging_face(model).arrays[(name,)].shape for name in names}
        assert check.sound == all(shape == shape[::-1] for shape in shapes)

    @settings(max_examples=20)
    @given(name=st.sampled_from(BUILT_IN), data=st.data())
    def test_axis_renamed_on_one_side_is_found(self, name, data):
        """The text of the file is changed, because such a row cannot be created."""
        of = replace(families()[name], settings=SettingRules())
        text = family_to_toml(of)
        axes = [match.span(1) for match in re.finditer(r"(?:^|<-> )[^ \n]+: +([^,<\n]+)", text, re.MULTILINE)]
        start, end = data.draw(st.sampled_from(axes))
        axis = data.draw(st.sampled_from(re.findall(r"\w+", text[start:end])))
        renamed = re.sub(rf"\b{axis}\b", f"{axis}_x", text[start:end])
        with pytest.raises(MappingError, match="different axes") as caught:
            family_from_toml(text[:start] + renamed + text[end:], "file")
        assert f"{axis}_x" in caught.value.got

    @settings(max_examples=20)
    @given(model=st.sampled_from(MODELS), data=st.data())
    def test_axis_renamed_on_both_sides_is_found(self, model, data):
        """It becomes a separate axis, and its declared length matches no array."""
        of = family(model)
        group, number, each = data.draw(a_row_of(of))
        axes = sorted({*each.right.array_axes} & {*each.left.array_axes})
        if not axes:
            return
        axis = data.draw(st.sampled_from(axes))
        renamed = replace(
            each, left=_renamed(each.left, axis, "other"), right=_renamed(each.right, axis, "other"), op=None
        )
        broken = with_rows(of, group, lambda rows: (*rows[:number], renamed, *rows[number + 1 :]))
        broken = replace(broken, constants={**broken.constants, "other": 7919})
        check = check_against(broken, hugging_face(model), config_of(model))
        assert check.sound == (not names_of(model, each, group))

    @settings(max_examples=6)
    @given(name=st.sampled_from(QUICK), data=st.data())
    def test_renamed_flag_is_found(self, name, data):
        of = families()[name]
        flag = data.draw(st.sampled_from(sorted(of.flags)))
        flags = {("x_" + item if item == flag else item): rule for item, rule in of.flags.items()}
        check = check_alone(replace(of, flags=flags))
        assert result(check) == {("flag", flag), ("flag", f"x_{flag}")}
        assert all("did you mean" in finding.text for finding in check.findings)

    @settings(max_examples=15)
    @given(model=st.sampled_from(MODELS), data=st.data())
    def test_renamed_array_is_found(self, model, data):
        arrays = dict(hugging_face(model).arrays)
        path = data.draw(st.sampled_from(sorted(p for p in arrays if p[0] not in mapped(model).dropped)))
        name = path[0] + "x"
        arrays[(name,)] = arrays.pop(path)
        check = check_against(family(model), Tree(arrays, Metadata(location="p")), config_of(model))
        assert not check.sound
        if {finding.kind for finding in check.findings} == {"missing", "not expected"}:
            assert result(check) == {("missing", path[0]), ("not expected", name)}
            missing = next(finding for finding in check.findings if finding.kind == "missing")
            assert missing.text.endswith(f"{name} exists")


def _renamed(side, axis, name):
    groups = tuple(tuple(name if item == axis else item for item in group) for group in side.groups)
    return replace(side, groups=groups)


X = row("a: x <-> b: x")
LAYERS = Layers("l.{k}", "d_{k}", "d", ("k",), (X,))


def tiny(**fields):
    return Family(
        **{"name": "t", "model_types": (), "models": (), "rows": (X,), "layers": (), "sizes": {}, **fields}
    )


class TestDefinition:
    """Mistakes that do not depend on a model, in one small family each."""

    @pytest.mark.parametrize(
        ("fields", "kind", "location", "text"),
        [
            ({"rows": ()}, "row", "rows", "there are no rows"),
            ({"sizes": {"x": ("n")}}, "row", "sizes['x']", "write ('n',)"),
            ({"model_types": "tiny"}, "row", "model_types", "write ('tiny',)"),
            ({"flags": {"f": FlagRule("n")}}, "row", "flags['f'].field", "write ('n',)"),
            ({"layers": (replace(LAYERS, stacked="k"),)}, "row", "layers[0].stacked", "write ('k',)"),
            ({"sizes": {"x": ()}}, "size", "x", "no configuration field"),
            ({"sizes": {"x": (3,)}}, "size", "x", "no configuration field"),
            ({"sizes": {"x": ("n",)}, "constants": {"x": 3}}, "size", "x", "both"),
            (
                {"rows": (row("a: x <-> b: x, when f"),)},
                "flag",
                "f",
                "no rule sets it, but a uses it",
            ),
            ({"flags": {"f": FlagRule(("n",))}}, "flag", "f", "no row uses it"),
            ({"derived": {"x": "y"}}, "formula", "x", "there is no axis y"),
            ({"derived": {"x": "layer * 2"}, "sizes": {"layers": ("n",)}}, "formula", "x", "mean layers?"),
            ({"derived": {"x": "y", "y": "x"}}, "formula", "x", "depends on x itself"),
            ({"derived": {"x": "2 ** 3"}}, "formula", "x", "may only use"),
            ({"rows": (row("a: x <-> b: x", op=Scale("y", 1.0)),)}, "op", "a", "scaled by y"),
            ({"left_out": ("m.{more+#x}.*",)}, "axis", "m.{more+#x}.*", "there is no axis more"),
            ({"rows": (X, row("c.{k+#dens}: <-> d.{k}:"))}, "axis", "c.{k+#dens}:", "axis dens"),
            (
                {"rows": (X, row("c: p <-> {p:q,k}:"), row("e: p <-> d.{p:q,k,v}:"))},
                "label",
                "p",
                "{p:q,k} and {p:q,k,v} have different lengths",
            ),
            (
                {"rows": (X, row("c: p <-> {p:q,k}:")), "constants": {"p": 3}},
                "label",
                "p",
                "{p:q,k}, but [constants] has 3",
            ),
            (
                {"layers": (Layers("l.{k}", "d_{k}", "d_{k}", ("k",), (X,)),)},
                "axis",
                "d_{k}.a: x k",
                "k occurs twice",
            ),
            ({"layers": (Layers("l.{k}", "d", "d", ("k",), (X,)),)}, "row", "", "different axes: k"),
            ({"spellings": ()}, "row", "spellings", "no spelling, not even an empty one"),
            (
                {"spellings": (Spelling(), Spelling({"b": "c"}))},
                "spelling",
                "hub",
                "two spellings have this name",
            ),
            ({"spellings": (Spelling({"z": "y"}),)}, "spelling", "hub", "no row's key begins with 'z'"),
            (
                {"spellings": (Spelling(), Spelling(name="text"))},
                "spelling",
                "text",
                "its files have b, like those of hub",
            ),
            (
                {"model_types": ("tiny",), "spellings": (Spelling(model_types=("tinny",)),)},
                "spelling",
                "hub",
                "no model_type tinny; did you mean tiny?",
            ),
        ],
    )
    def test_family_errors_are_found(self, fields, kind, location, text):
        check = check_alone(tiny(**fields))
        matching = [finding for finding in check.findings if finding.kind == kind and text in finding.text]
        assert matching
        assert any(location in item.location for item in matching)

    def test_family_with_one_row_passes_the_check(self):
        assert check_alone(tiny()).sound

    @pytest.mark.parametrize(
        ("rows", "location", "text"),
        [
            ((X, row("a: x <-> c: x")), "a", "produced twice, from b and from c"),
            ((X, X), "b", "produced twice, from a and from a"),
            ((X, row("c: x <-> b: x")), "b", "produced twice, from a and from c"),
            ((X, row("c.{k+p}: <-> d.{k}.{p}:")), "c.1", "produced twice by c.{k+p}, at two coordinates"),
        ],
    )
    def test_duplicate_keys_are_found(self, rows, location, text):
        check = check_alone(tiny(rows=rows))
        assert ("key", location) in result(check)
        assert text in {finding.text for finding in check.findings}
        assert check.layouts == ()

    def test_duplicate_keys_are_found_when_scanned(self):
        groups = (
            Layers("l.{k}", "d_{k}", "d", ("k",), (X,)),
            Layers("m.{j}", "e_{j}", "d", ("j",), (X,)),
        )
        check = check_alone(tiny(layers=groups))
        assert result(check) == {("key", "d.a")}
        assert [layout.name for layout in check.layouts] == ["unscanned"]

    def test_duplicate_keys_are_found_in_one_spelling(self):
        rows = (X, row("c: x <-> d: x"))
        spellings = (Spelling(), Spelling({"b": "bb", "d": "bb"}, name="other"))
        assert ("key", "bb") in result(check_alone(tiny(rows=rows, spellings=spellings)))

    def test_duplicate_keys_are_found_with_one_flag(self):
        rows = (X, row("a: x <-> c: x, when f"))
        check = check_alone(tiny(rows=rows, flags={"f": FlagRule(("n",), (3,))}))
        assert ("key", "a") in result(check)
        apart = (replace(X, unless="f"), rows[1])
        assert check_alone(tiny(rows=apart, flags={"f": FlagRule(("n",), (3,))})).sound

    def test_unknown_sizes_are_found(self):
        check = check_alone(tiny(rows=(X, row("c: (y z) <-> d: (z y)"))))
        (finding,) = {(item.kind, item.text.split(";")[0]) for item in check.findings}
        assert finding == ("size", "the size of y, z cannot be inferred")

    def test_merged_axis_needs_a_size(self):
        rows = (X, row("c: y z <-> d: (y z)"))
        assert "size" in {finding.kind for finding in check_alone(tiny(rows=rows)).findings}
        assert check_alone(tiny(rows=rows, sizes={"y": ("n_y",)})).sound

    def test_all_problems_are_found_at_once(self):
        rows = (X, row("c: x <-> d: x, when f", op=Scale("z", 1.0)))
        check = check_alone(tiny(rows=rows, derived={"n": "m"}, spellings=(Spelling({"z": "y"}),)))
        assert {finding.kind for finding in check.findings} == {"flag", "op", "formula", "spelling"}

    def test_conditional_rows_do_not_hide_findings(self):
        rows = (X, row("c: x <-> d: x, when f"))
        check = check_against(tiny(rows=rows, spellings=(Spelling({"z": "y"}),)), tree(b=(3,), e=(3,)))
        assert [finding.kind for finding in check.findings] == ["flag", "spelling", "not expected"]


class TestReferences:
    def test_all_findings_are_listed(self):
        rows = tuple(row(f"a{k}: x <-> b{k}: x") for k in range(300))
        check = check_against(tiny(rows=rows), tree(b0=(3,), c=(3,)))
        assert len(check.findings) == 300
        assert result(check) == {("missing", f"b{k}") for k in range(1, 300)} | {("not expected", "c")}

    def test_contradicting_config_is_a_finding(self):
        config = config_of("llama3.1") | {"hidden_size": 65}
        check = check_against(families()["llama"], hugging_face("llama3.1"), config)
        assert {finding.kind for finding in check.findings} == {"shape"}
        assert "embed 65 from config.json: hidden_size" in check.findings[0].text

    @pytest.mark.parametrize("config", [{"hidden_size": "x"}, {"num_hidden_layers": -1}])
    def test_invalid_config_is_a_finding(self, config):
        for check in (
            check_against(families()["llama"], hugging_face("llama3.1"), config_of("llama3.1") | config),
            check_on_config(families()["llama"], config_of("llama3.1") | config, "config.json"),
        ):
            assert [finding.kind for finding in check.findings] == ["size"]
            assert "must be an integer of at least" in check.findings[0].text

    def test_incomplete_blocks_are_a_finding(self):
        config = config_of("gpt-oss") | {"num_hidden_layers": 3}
        check = check_on_config(families()["gpt-oss"], config, "config.json")
        assert check.sound and [layout.name for layout in check.layouts] == ["unscanned"]
        config = config_of("gemma2") | {"num_hidden_layers": 3}
        check = check_on_config(families()["gemma2"], config, "config.json")
        assert "3 is not a multiple of 2" in check.findings[0].text

    def test_hint_names_the_deciding_flag(self):
        config = config_of("llama3.1") | {"tie_word_embeddings": True}
        check = check_against(families()["llama"], hugging_face("llama3.1"), config)
        assert result(check) == {("not expected", "lm_head.weight")}
        assert any("tie_word_embeddings is true" in hint for hint in check.hints)

    def test_unrelated_model_fails_the_check(self):
        check = check_against(families()["deepseek"], hugging_face("llama3.1"), config_of("llama3.1"))
        assert not check.sound
