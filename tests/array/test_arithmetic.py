"""Formulas over axis lengths: what they mean, and that nothing else is run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttools import MappingError
from ckpttools.mapping.arithmetic import DoesNotDivideError, axes_in, value

LENGTHS = {"layers": 26, "block": 4, "heads": 7}


@st.composite
def formulas(draw, depth=3):
    """A formula, what it comes to, and its names; divisors are constants that are not 0."""
    kind = draw(st.sampled_from(["name", "number"] + ["sum"] * 4 * (depth > 0)))
    if kind == "name":
        axis = draw(st.sampled_from(sorted(LENGTHS)))
        return axis, LENGTHS[axis], {axis}
    if kind == "number":
        number = draw(st.integers(0, 30))
        return str(number), number, set()
    left, first, names = draw(formulas(depth - 1))
    operation = draw(st.sampled_from(["+", "-", "*", "//", "%", "/"]))
    if operation in ("//", "%", "/"):
        second = draw(st.integers(1, 9))
        right, more = str(second), set()
        if operation == "/" and first % second:
            operation = "//"
    else:
        right, second, more = draw(formulas(depth - 1))
    results = {
        "+": first + second,
        "-": first - second,
        "*": first * second,
        "//": first // second if second else 0,
        "%": first % second if second else 0,
        "/": first // second if second else 0,
    }
    return f"({left}) {operation} ({right})", results[operation], names | more


@given(formulas())
def test_formula_has_expected_value_and_axes(formula):
    text, expected, names = formula
    assert value(text, LENGTHS) == expected
    assert axes_in(text) == names


@pytest.mark.parametrize("formula", ["layers / none", "layers // none", "layers % none", "3 // (block - 4)"])
def test_division_by_zero_is_refused(formula):
    with pytest.raises(DoesNotDivideError, match="is a division by 0"):
        value(formula, LENGTHS | {"none": 0})


def test_operators_have_usual_precedence():
    assert value("layers - 6 * block", LENGTHS) == 2
    assert value(" layers % 6 ", LENGTHS) == 2


@given(st.integers(0, 200), st.integers(1, 20))
def test_single_slash_refuses_remainders(number, divisor):
    formula = f"layers / {divisor}"
    if number % divisor == 0:
        assert value(formula, {"layers": number}) * divisor == number
        return
    with pytest.raises(DoesNotDivideError, match=f"{number} is not a multiple of {divisor}"):
        value(formula, {"layers": number})


@pytest.mark.parametrize(
    "formula",
    [
        "",
        "layers +",
        "2 ** layers",
        "-layers",
        "layers.real",
        "len(layers)",
        "__import__('os').getcwd()",
        "layers if block else heads",
        "[layers]",
        "1.5 * layers",
        "'a'",
        "layers == 3",
        "layers; block",
        "x := 3",
        "layers // block\nheads",
    ],
)
def test_unsupported_syntax_is_refused(formula):
    for function in (axes_in, lambda text: value(text, LENGTHS)):
        with pytest.raises(MappingError, match="may only use") as caught:
            function(formula)
        assert caught.value.got == formula


def test_min_returns_smaller_operand():
    assert value("min(layers, block + 2)", LENGTHS) == 6
    assert value("heads - min(block, 9)", LENGTHS) == 3
    assert axes_in("min(layers, block)") == {"layers", "block"}


@pytest.mark.parametrize(
    "formula", ["max(layers, 2)", "min(layers)", "min(1, 2, 3)", "min(a=1)", "a.min(1, 2)"]
)
def test_unknown_functions_are_refused(formula):
    with pytest.raises(MappingError):
        axes_in(formula)
