"""Families in user files: TOML with the fields of `Family`, and Python that creates one."""

from __future__ import annotations

import json
import shutil
import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path

import ml_dtypes  # noqa: F401  numpy's bfloat16
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from support.internals import (
    Family,
    FlagRule,
    Layers,
    Multiply,
    Scale,
    Shift,
    families,
    family_from_toml,
    family_to_toml,
    row,
)
from support.locations import GOLDEN

import ckpttools
from ckpttools import (
    DTYPES,
    CheckpointError,
    FormatError,
    MappingError,
    ModelOptions,
    StorageError,
    ToHuggingFace,
    ToMaxText,
    UsageError,
    plan_to_huggingface,
    plan_to_maxtext,
)
from ckpttools.family_check.check import check_against, check_alone, check_on_config
from ckpttools.mapping.axes import Side
from ckpttools.mapping.keys import Key
from ckpttools.mapping.row_text import exactness_of, op_text, parse_op
from ckpttools.model_families.family import Spelling
from ckpttools.model_families.file import family_from_file
from ckpttools.model_families.registry import family_called, names_a_file
from ckpttools.testing.strategies import statements

BUILT_IN = tuple(families())
TOML = {name: family_to_toml(family) for name, family in families().items()}
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
OPS = st.one_of(
    st.builds(Scale, st.sampled_from(("embed", "head_dim")), FLOATS),
    st.builds(Scale, st.just("embed"), FLOATS, st.sampled_from(("bfloat16", "float16"))),
    st.builds(Shift, FLOATS),
)
WORDS = st.text("abcxyz_0", min_size=1, max_size=4).filter(str.isidentifier)
# Any text that TOML can hold, quotes, backslashes and control characters among it.
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SCALARS = st.one_of(st.booleans(), st.integers(-5, 5), TEXTS, FLOATS)


# Strategies are kept: a new one is checked when it is first drawn from, which takes as long as ten draws.
@cache
def some(strategy, least=0):
    return st.lists(strategy, min_size=least, max_size=3).map(tuple)


@cache
def named(values):
    return st.dictionaries(st.one_of(WORDS, TEXTS), values, max_size=3)


PERHAPS_TIED = st.sampled_from(("", "tied"))
MAYBE_OP = st.none() | OPS


@cache
@st.composite
def rows(draw):
    declared = draw(statements())
    op = draw(MAYBE_OP)
    when, unless = (" ".join(draw(some(WORDS))) for _ in range(2))
    return replace(row(declared.text), op=op, when=when, unless=unless)


def a_group(draw, shared):
    """Return a group of layers with some shared rows and some of its own."""
    own = draw(some(rows()))
    kinds = ((), shared, shared[:1], shared[::-1])
    before, after = (kinds[draw(st.integers(0, 3))] for _ in range(2))
    prefixes = ("layers.{block}", "decoder.layers_{block}", "decoder." + draw(WORDS))
    when, unless = draw(WORDS), draw(PERHAPS_TIED)
    return Layers(*prefixes, ("block",), (*before, *own, *after), when, unless)


SIZES = named(st.tuples(TEXTS) | st.tuples(TEXTS, TEXTS) | st.tuples(TEXTS, st.integers(0, 9)))
DERIVED = named(st.sampled_from(("a // 6", "a % 6 + b", "2 * a")))
FLAGS = named(st.builds(FlagRule, some(TEXTS), some(SCALARS), st.booleans(), TEXTS))
LEFT_OUT = some(st.sampled_from(("mtp.*", "layers.{extra+#layers}.*")))
SPELLINGS = some(st.builds(Spelling, named(TEXTS), some(TEXTS), TEXTS), least=1)
VOCABULARIES = st.dictionaries(st.integers(1, 99), st.integers(1, 99), max_size=2)


@st.composite
def any_families(draw):
    shared = draw(some(rows()))
    return Family(
        name=draw(TEXTS),
        model_types=draw(some(TEXTS)),
        models=draw(some(TEXTS)),
        rows=draw(some(rows())),
        layers=tuple(a_group(draw, shared) for _ in range(draw(st.integers(0, 3)))),
        sizes=draw(SIZES),
        derived=draw(DERIVED),
        constants=draw(named(st.integers(1, 9))),
        flags=draw(FLAGS),
        dropped=draw(some(TEXTS)),
        left_out=draw(LEFT_OUT),
        spellings=draw(SPELLINGS),
        maxtext_vocab=draw(VOCABULARIES),
        hints=draw(named(TEXTS)),
    )


@st.composite
def damaged_files(draw):
    """Return the file of a built-in family with a few damaged lines."""
    lines = TOML[draw(st.sampled_from(BUILT_IN))].splitlines()
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(lines) - 1))
        kind = draw(st.sampled_from(("drop", "twice", "letter", "value")))
        line = lines[at]
        if kind == "letter" and line:
            location = draw(st.integers(0, len(line) - 1))
            line = line[:location] + draw(st.sampled_from('x"{}[]#=. 0')) + line[location + 1 :]
        elif kind == "value":
            line = line.partition("=")[0] + "= " + draw(st.sampled_from(("3", "[]", "true", "{}", '""')))
        lines[at : at + 1] = [line] * {"drop": 0, "twice": 2}.get(kind, 1)
        lines = lines or [""]
    return "\n".join(lines)


class TestRoundTrip:
    @pytest.mark.parametrize("name", BUILT_IN)
    def test_built_in_families_round_trip(self, name):
        family = families()[name]
        text = family_to_toml(family)
        assert family_from_toml(text, "file") == family
        assert tomllib.loads(text)["name"] == name
        # A row of a tower may take two lines of some length: MaxText's names do.
        assert max(map(len, text.splitlines())) <= 150

    @settings(max_examples=60)
    @given(any_families())
    def test_arbitrary_families_round_trip(self, family):
        assert family_from_toml(family_to_toml(family), "file") == family

    def test_shared_rows_are_written_once(self):
        text = family_to_toml(families()["deepseek"])
        assert text.count("self_attention.kv_norm.scale:") == 1
        assert 'rows = ["shared", "dense_layers"]' in text
        assert 'rows = ["shared", "moe_layers"]' in text

    @given(OPS)
    def test_value_ops_round_trip(self, op):
        assert parse_op(op_text(op)) == op

    def test_handwritten_value_ops_are_parsed(self):
        assert parse_op("scale head_dim -0.5") == Scale("head_dim", -0.5)
        assert parse_op(" scale  embed 0.5 bfloat16 ") == Scale("embed", 0.5, "bfloat16")
        assert parse_op("shift 1") == Shift(1.0)
        assert op_text(Shift(1.0)) == "shift 1"

    @pytest.mark.parametrize(
        ("text", "message", "hint"),
        [
            ("", "not a value op", None),
            ("scale", "not a value op", None),
            ("scale head_dim", "not a value op", None),
            ("scale head-dim 1", "not a value op", None),
            ("shift 1 2", "not a value op", None),
            ("shift one", "not a number", None),
            ("shift nan", "not a number", None),
            ("scale head_dim inf", "not a number", None),
            ("scale head_dim 1 bfloat", "not a floating-point dtype", "did you mean bfloat16?"),
            ("scale head_dim 1 int8", "not a floating-point dtype", None),
            ("whole int32", "not a value op", None),
            ("whole int32 float32", "not an integer dtype", None),
        ],
    )
    def test_invalid_value_op_is_refused(self, text, message, hint):
        with pytest.raises(MappingError, match=message) as caught:
            parse_op(text)
        assert (
            caught.value.expected
            == "scale AXIS POWER [DTYPE], shift AMOUNT, fill NUMBER, factor or whole DTYPE DTYPE"
        )
        assert hint is None or caught.value.hint == hint

    @pytest.mark.parametrize("name", ["a b", "#", "\u2003"])
    def test_row_without_a_text_is_not_written(self, name):
        odd = replace(row("a: <-> b:"), left=Side(Key((name,)), ()))
        family = replace(families()["qwen3"], rows=(odd,))
        if name == "#":
            assert family_from_toml(family_to_toml(family), "file").rows == (odd,)
        else:
            with pytest.raises(MappingError):
                family_to_toml(family)

    def test_plugin_ops_have_no_text(self):
        with pytest.raises(MappingError, match="cannot be written as text"):
            op_text(Multiply(2.0))

    @pytest.mark.parametrize("size", [4, 16, 64, 80, 128, 256])
    @pytest.mark.parametrize("op", [Scale("n", -0.5), Scale("n", 0.5), Shift(1.0)], ids=op_text)
    def test_size_independent_exactness_holds_for_any_size(self, op, size):
        claim, at_size = exactness_of(op), op.bound({"n": size}).exactness(DTYPES["bfloat16"])
        assert at_size.exact or not claim.exact
        if isinstance(op, Scale):
            power_of_two = size in (4, 16, 64, 256)
            assert at_size.exact == power_of_two
            assert "exact if that is a power of two" in claim.reason


HEAD = 'name = "tiny"\n'
ROW = 'left = "a"\nleft_axes = "x"\nright = "b"\nright_axes = "x"\n'
ROWS = f"[[rows]]\n{ROW}"
LAYERS = '[[layers]]\nright = "l.{k}"\nleft = "d_{k}"\nscanned = "d"\nstacked = ["k"]\n'

BAD = {
    "no name": (ROWS, "tiny.toml", "the key 'name' is missing", None),
    "no rows": (HEAD, "tiny.toml", "the key 'rows' is missing", None),
    "a number as name": ("name = 3\n" + ROWS, "tiny.toml: name", "wrong type", "an integer, 3"),
    "rows that are a table": (HEAD + "[rows]\n" + ROW, "tiny.toml: rows", "wrong type", "a table"),
    "a row that is a number": (
        HEAD + "rows = [3]",
        "tiny.toml: rows[0]",
        "wrong type",
        "an integer, 3",
    ),
    "an unknown key": (HEAD + 'model_type = ["t"]\n' + ROWS, "tiny.toml", "unknown key 'model_type'", None),
    "an unknown key of a row": (
        HEAD + ROWS + 'wen = "t"',
        "tiny.toml: rows[0] (a)",
        "unknown key 'wen'",
        None,
    ),
    "an unknown key of layers": (HEAD + ROWS + LAYERS + "step = 1", "tiny.toml: layers[0]", "'step'", None),
    "a row without right axes": (
        HEAD + ROWS.replace('right_axes = "x"\n', ""),
        "tiny.toml: rows[0] (a)",
        "the key 'right_axes' is missing",
        None,
    ),
    "axes that differ": (
        HEAD + ROWS.replace('right_axes = "x"', 'right_axes = "y"'),
        "tiny.toml: rows[0] (a)",
        "different axes",
        "a: x <-> b: y, x, y",
    ),
    "an open brace": (
        HEAD + ROWS.replace('left = "a"', 'left = "a{"'),
        "tiny.toml: rows[0] (a{)",
        "not closed",
        "a{",
    ),
    "an op": (HEAD + ROWS + 'op = "halve"', "tiny.toml: rows[0] (a).op", "not a value op", "'halve'"),
    "a constant of zero": (HEAD + ROWS + "[constants]\nx = 0", "tiny.toml: constants.x", "not a length", "0"),
    "a constant that is true": (
        HEAD + ROWS + "[constants]\nx = true",
        "tiny.toml: constants.x",
        "wrong type",
        "true",
    ),
    "a size without a field": (
        HEAD + ROWS + "[sizes]\nx = [3]",
        "tiny.toml: sizes.x",
        "does not give a length",
        "[3]",
    ),
    "a size of nothing": (
        HEAD + ROWS + "[sizes]\nx = []",
        "tiny.toml: sizes.x",
        "does not give a length",
        "[]",
    ),
    "a negative default": (
        HEAD + ROWS + '[sizes]\nx = ["n", -1]',
        "tiny.toml: sizes.x",
        "does not give a length",
        "-1",
    ),
    "a size in between": (HEAD + ROWS + '[sizes]\nx = [1, "n"]', "tiny.toml: sizes.x[0]", "wrong type", "1"),
    "a size that is a date": (
        HEAD + ROWS + "[sizes]\nx = 2020-01-01",
        "tiny.toml: sizes.x[0]",
        "wrong type",
        "a date",
    ),
    "a formula": (HEAD + ROWS + '[derived]\nx = "y ** 2"', "tiny.toml: derived.x", "may only use", "y ** 2"),
    "code": (HEAD + ROWS + '[derived]\nx = "exit(3)"', "tiny.toml: derived.x", "may only use", "exit(3)"),
    "a default of a flag": (
        HEAD + ROWS + "[flags.f]\ndefault = 1",
        "tiny.toml: flags.f.default",
        "wrong type",
        "1",
    ),
    "a list of lists": (
        HEAD + ROWS + "[flags.f]\nequals = [[1]]",
        "tiny.toml: flags.f.equals[0]",
        "wrong type",
        "list",
    ),
    "a flag that is a text": (HEAD + ROWS + '[flags]\nf = "n"', "tiny.toml: flags.f", "wrong type", "'n'"),
    "a vocabulary": (
        HEAD + ROWS + "[maxtext_vocab]\nmany = 3",
        "tiny.toml: maxtext_vocab",
        "number of rows",
        "many",
    ),
    "a template": (HEAD + 'left_out = ["{"]\n' + ROWS, "tiny.toml: left_out[0]", "not closed", "{"),
    "a prefix": (
        HEAD + ROWS + "[[spellings]]\nprefixes = 3",
        "tiny.toml: spellings[0].prefixes",
        "wrong type",
        "3",
    ),
    "a missing set": (
        HEAD + 'rows = ["norm"]\n[[sets.norms]]\n' + ROW,
        "tiny.toml: rows[0]",
        "'norm'",
        None,
    ),
    "a row of text": (
        HEAD + 'rows = """\na: x <-> b: x\nc: x <-> d: x, wen t\n"""',
        "tiny.toml: rows",
        "not a keyword",
        "column 16 of 'c: x <-> d: x, wen t', wen",
    ),
    "a row of text in a list": (
        HEAD + 'rows = ["a: x <-> b: x", "c: 2 <-> d: x"]',
        "tiny.toml: rows[1]",
        "must be a word",
        "column 4 of 'c: 2 <-> d: x', 2",
    ),
    "no set at all": (HEAD + 'rows = ["norm"]\n', "tiny.toml: rows[0]", "'norm'", None),
    "a set within a set": (HEAD + 'rows = []\n[sets]\nb = ["a"]', "tiny.toml: sets.b[0]", "'a'", None),
    "layers without rows": (HEAD + ROWS + LAYERS, "tiny.toml: layers[0]", "'rows' is missing", None),
    "layers that do not go together": (
        HEAD + ROWS + LAYERS.replace('["k"]', '["m"]') + "[[layers.rows]]\n" + ROW,
        "tiny.toml: layers[0]",
        "different axes",
        "k, m",
    ),
    "a prefix of layers": (
        HEAD + ROWS + LAYERS.replace('"d_{k}"', '"d_{k"') + "rows = []",
        "tiny.toml: layers[0].left",
        "not closed",
        "d_{k",
    ),
}


class TestBadToml:
    @pytest.mark.parametrize("case", BAD)
    def test_errors_name_their_location(self, case):
        text, location, message, got = BAD[case]
        with pytest.raises(MappingError, match=message.replace("(", r"\(")) as caught:
            family_from_toml(text, "tiny.toml")
        assert caught.value.location == location
        assert got is None or got in caught.value.got

    @pytest.mark.parametrize(
        ("text", "hint"),
        [
            (HEAD + 'model_type = ["t"]\n' + ROWS, "did you mean model_types?"),
            (HEAD + ROWS + 'unles = "t"', "did you mean unless?"),
            (HEAD + ROWS + LAYERS + 'scaned = "t"', "did you mean scanned?"),
            (HEAD + 'rows = ["norm"]\n[[sets.norms]]\n' + ROW, "did you mean norms?"),
            (HEAD + ROWS + '[flags.f]\nfields = "n"', "did you mean field?"),
        ],
    )
    def test_misspelled_fields_get_a_suggestion(self, text, hint):
        with pytest.raises(MappingError) as caught:
            family_from_toml(text, "tiny.toml")
        assert caught.value.hint == hint

    @pytest.mark.parametrize("text", ["name =", "[[", "a = 1\na = 2", "\0"])
    def test_invalid_toml_is_refused(self, text):
        with pytest.raises(FormatError, match="not a TOML file") as caught:
            family_from_toml(text, "tiny.toml")
        assert "line" in caught.value.got or "column" in caught.value.got or caught.value.got

    @settings(max_examples=150)
    @given(text=damaged_files())
    def test_damaged_file_is_a_family_or_an_error(self, text):
        try:
            family = family_from_toml(text, "file")
        except CheckpointError as error:
            assert (error.location or "").startswith("file")
        else:
            assert isinstance(family, Family)

    @settings(max_examples=10)
    @given(text=damaged_files(), model=st.sampled_from(("llama3.1", "deepseek3", "gemma3")))
    def test_parsed_damaged_files_can_be_checked(self, text, model):
        try:
            family = family_from_toml(text, "file")
        except CheckpointError:
            return
        config = json.loads((GOLDEN / model / "hf" / "config.json").read_text())
        for check in (
            check_alone(family),
            check_on_config(family, config, "config.json"),
            check_against(family, ckpttools.open(GOLDEN / model / "hf"), config),
            check_against(family, ckpttools.open(GOLDEN / model / "hf")),
            check_against(family, ckpttools.open(GOLDEN / "llama3.1" / "maxtext_scanned")),
        ):
            assert all(finding.kind and finding.text for finding in check.findings)

    def test_short_forms_are_accepted(self):
        """A single field means a list of one field, and missing fields are empty."""
        text = HEAD + ROWS + '[sizes]\nx = "n_x"\n[flags.tied]\nfield = "tie"\n'
        family = family_from_toml(text, "file")
        assert family.sizes == {"x": ("n_x",)}
        assert family.flags == {"tied": FlagRule(("tie",))}
        assert (family.model_types, family.models, family.layers) == ((), (), ())

    def test_sets_and_rows_may_be_in_any_order(self):
        text = HEAD + 'rows = ["n", "a: x <-> b: x"]\n[sets]\nn = "n: <-> n:"\n'
        assert family_from_toml(text, "file").rows == (row("n: <-> n:"), row("a: x <-> b: x"))
        named_rows = '[[sets.n]]\nleft = "n"\nleft_axes = ""\nright = "n"\nright_axes = ""\n'
        inline = '{left = "a", left_axes = "x", right = "b", right_axes = "x"}'
        family = family_from_toml(HEAD + f'rows = ["n", {inline}, "n"]\n' + named_rows, "file")
        assert family.rows == (row("n: <-> n:"), row("a: x <-> b: x"), row("n: <-> n:"))


class TestFiles:
    def write(self, tmp_path: Path, name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    def test_toml_family_file_is_read(self, tmp_path):
        path = self.write(tmp_path, "mine.toml", TOML["qwen3"])
        assert family_from_file(path) == families()["qwen3"]
        assert family_called(str(path)) == families()["qwen3"]

    def test_python_family_file_is_read(self, tmp_path):
        text = "from ckpttools.model_families.qwen3 import FAMILY as QWEN\n"
        text += "from dataclasses import replace\nFAMILY = replace(QWEN, name=__name__ and 'mine')\n"
        assert family_from_file(self.write(tmp_path, "mine.py", text)).name == "mine"

    def test_file_names_differ_from_family_names(self):
        assert names_a_file("mine.toml")
        assert names_a_file("./llama")
        assert not names_a_file("llama")
        assert family_called("llama") is families()["llama"]

    @pytest.mark.parametrize(
        ("text", "line", "got"),
        [
            ("\n\nraise ValueError('boom')\n", 3, "ValueError: boom"),
            ("def f():\n    return 1 / 0\n\nf()\n", 2, "ZeroDivisionError"),
            ("x = (\n", 1, "SyntaxError"),
            ("import sys\nsys.exit(3)\n", 2, "SystemExit: 3"),
            ("import no_such_module\n", 1, "ModuleNotFoundError"),
        ],
    )
    def test_failing_python_file_is_reported_with_its_line(self, tmp_path, text, line, got):
        path = self.write(tmp_path, "mine.py", text)
        with pytest.raises(FormatError, match="running the file fails") as caught:
            family_from_file(path)
        assert caught.value.location == f"{path}, line {line}"
        assert got in caught.value.got

    def test_invalid_row_is_reported_with_its_line(self, tmp_path):
        text = "from ckpttools.mapping.row import row\n\nROWS = (\n    row('a: x <-> b: y'),\n)\n"
        path = self.write(tmp_path, "mine.py", text)
        with pytest.raises(MappingError, match="different axes") as caught:
            family_from_file(path)
        assert caught.value.location == f"{path}, line 4"
        assert "x, y" in caught.value.got

    def test_incompatible_layers_are_reported_with_their_file(self, tmp_path):
        text = (
            "from dataclasses import replace\nfrom ckpttools.model_families.qwen3 import FAMILY as QWEN\n"
            "LAYERS = (replace(QWEN.layers[0], stacked=('block',)),)\nFAMILY = replace(QWEN, layers=LAYERS)\n"
        )
        path = self.write(tmp_path, "mine.py", text)
        with pytest.raises(MappingError, match="different axes") as caught:
            family_from_file(path)
        assert caught.value.location == str(path)
        assert "block, layer" in caught.value.got

    @pytest.mark.parametrize(
        ("text", "got"),
        [
            ("", "no family"),
            ("FAMILY = 3\n", "FAMILY of type int"),
            ("from ckpttools.model_families.qwen3 import FAMILY as QWEN\n", "QWEN"),
        ],
    )
    def test_python_file_without_a_family_is_refused(self, tmp_path, text, got):
        with pytest.raises(MappingError, match="does not define a family") as caught:
            family_from_file(self.write(tmp_path, "mine.py", text))
        assert (caught.value.got, caught.value.expected) == (got, "FAMILY = Family(...)")

    def test_unreadable_family_files_are_refused(self, tmp_path):
        for name in ("mine.toml", "mine.py"):
            with pytest.raises(StorageError, match="cannot read"):
                family_from_file(tmp_path / name)
            (tmp_path / name).mkdir()
            with pytest.raises(StorageError, match="cannot read"):
                family_from_file(tmp_path / name)
        (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"\n')
        with pytest.raises(FormatError, match="UTF-8"):
            family_from_file(tmp_path / "latin.toml")
        with pytest.raises(UsageError, match=r"\.toml or \.py"):
            family_from_file(tmp_path / "mine.json")


def model_of_unknown_type(tmp_path: Path) -> Path:
    """Return the golden Llama with an unknown model type."""
    model = tmp_path / "hf"
    shutil.copytree(GOLDEN / "llama3.1" / "hf", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "mine"}))
    return model


class TestConversion:
    """A model of unknown type with a user's family converts like Llama in both directions."""

    @pytest.fixture(params=["mine.toml", "mine.py"])
    def file(self, request, tmp_path):
        texts = {"mine.toml": TOML["llama"], "mine.py": "from ckpttools.model_families.llama import FAMILY\n"}
        (tmp_path / request.param).write_text(texts[request.param])
        return tmp_path / request.param

    @pytest.mark.parametrize("scan", [True, False])
    def test_user_family_converts_both_ways(self, tmp_path, file, scan):
        model = model_of_unknown_type(tmp_path)
        options = ModelOptions(family=str(file))
        with pytest.raises(CheckpointError, match="no family has model_type 'mine'"):
            plan_to_maxtext(model, ToMaxText(scan=scan))
        plan_to_maxtext(model, ToMaxText(scan=scan, model=options)).run(tmp_path / "out")
        plan_to_maxtext(GOLDEN / "llama3.1" / "hf", ToMaxText(scan=scan)).run(tmp_path / "llama")
        mine, expected = (ckpttools.open(tmp_path / name) for name in ("out", "llama"))
        assert list(mine.arrays) == list(expected.arrays)
        for path, array in expected.arrays.items():
            assert mine.arrays[path].read().tobytes() == array.read().tobytes(), path
        plan_to_huggingface(tmp_path / "out", ToHuggingFace(model=options)).run(tmp_path / "back")
        assert (tmp_path / "back" / "config.json").read_bytes() == (model / "config.json").read_bytes()
        back, truth = (load_file(path / "model.safetensors") for path in (tmp_path / "back", model))
        assert back.keys() == truth.keys()
        assert all(back[name].tobytes() == tensor.tobytes() for name, tensor in truth.items())

    def test_reverse_conversion_works_without_config(self, tmp_path, file):
        """The rows and the arrays show everything except the order of rotary pairs, which the user sets."""
        checkpoint = GOLDEN / "llama3.1" / "maxtext_scanned"
        options = ModelOptions(family=str(file), rope_layout="interleaved")
        plan_to_huggingface(checkpoint, ToHuggingFace(model=options)).run(tmp_path / "back")
        back = load_file(tmp_path / "back" / "model.safetensors")
        truth = load_file(GOLDEN / "llama3.1" / "hf" / "model.safetensors")
        assert back.keys() == truth.keys()
        assert all(back[name].tobytes() == tensor.tobytes() for name, tensor in truth.items())
