import itertools
import re
from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.internals import (
    Layers,
    Multiply,
    Scale,
    Shift,
    Size,
    Stored,
    Table,
    Whole,
    parse_key,
    parse_side,
    row,
)

from ckpttools import DTYPES, MappingError
from ckpttools.mapping.factor import Factor
from ckpttools.mapping.row import Row, rows, rows_text
from ckpttools.mapping.row_conversion import RowConversion
from ckpttools.mapping.values import Fill
from ckpttools.testing.strategies import UnreadableFile, dtypes, noise, regions, statements, stored


def tensor(sizes, dtype, seed):
    """Draw one tensor with every axis of `sizes`, in alphabetical order."""
    return noise([sizes[axis] for axis in sorted(sizes)], dtype, seed)


def spelled(side, sizes, full):
    """Return the arrays of one side, computed without the tested code except for the text of keys."""
    axes = sorted(sizes)
    arrays = {}
    for index in itertools.product(*(range(sizes[axis]) for axis in side.key.axes)):
        where = dict(zip(side.key.axes, index, strict=True))
        part = full[tuple(where.get(axis, slice(None)) for axis in axes)]
        left = [axis for axis in axes if axis not in where]
        order = [left.index(axis) for group in side.groups for axis in group]
        shape = [prod(sizes[axis] for axis in group) for group in side.groups]
        arrays[side.key.format(where, sizes)] = np.ascontiguousarray(part.transpose(order)).reshape(shape)
    return arrays


def respelled(source, target, sizes, arrays):
    conversion = RowConversion(source, target, sizes)
    return {target.key.format(index, sizes): conversion.at(index, arrays) for index in target.indices(sizes)}


def same(arrays, truths):
    assert list(arrays) == list(truths)
    for key, truth in truths.items():
        assert arrays[key].shape == truth.shape
        assert arrays[key].read().tobytes() == truth.tobytes(), key


@settings(max_examples=300)
@given(statements(), dtypes(packed=True))
def test_row_moves_every_value_in_both_directions(statement, dtype):
    built = row(statement.text)
    full = tensor(statement.sizes, dtype, 3)
    left = spelled(built.left, statement.sizes, full)
    right = spelled(built.right, statement.sizes, full)
    stored_right = {key: stored(truth, dtype, key) for key, truth in right.items()}
    lefts = respelled(built.right, built.left, statement.sizes, stored_right)
    same(lefts, left)
    same(respelled(built.left, built.right, statement.sizes, lefts), right)


@settings(max_examples=150)
@given(statements(), st.data())
def test_region_of_respelled_array_equals_slice(statement, data):
    built = row(statement.text)
    dtype = DTYPES["bfloat16"]
    full = tensor(statement.sizes, dtype, 5)
    sources = {k: stored(v, dtype, k) for k, v in spelled(built.right, statement.sizes, full).items()}
    lefts = respelled(built.right, built.left, statement.sizes, sources)
    truths = spelled(built.left, statement.sizes, full)
    key = data.draw(st.sampled_from(sorted(lefts)))
    region = data.draw(regions(lefts[key].shape))
    assert lefts[key].read(region).tobytes() == truths[key][region.slices].tobytes()


@given(statements(most_axes=4), st.sampled_from((None, 0, 1, 4)))
def test_layers_keep_every_value_at_its_coordinates(statement, scan_axis):
    """Return a group of two blocks of two layers, with one index on the right."""
    built = row(statement.text)
    prefixes = ("layers.{2*block+kind}", "layers_{block}.part_{kind:a,b}", "layers.part_{kind:a,b}")
    (spelled_row,) = Layers(*prefixes, ("block",), (built,)).all_rows(scan_axis)
    sizes = {**statement.sizes, "block": 2, "kind": 2}
    dtype = DTYPES["float32"]
    full = tensor(sizes, dtype, 7)
    right = {k: stored(v, dtype, k) for k, v in spelled(spelled_row.right, sizes, full).items()}
    assert len(right) == 4 * len(list(built.right.keys(statement.sizes)))
    left = respelled(spelled_row.right, spelled_row.left, sizes, right)
    same(left, spelled(spelled_row.left, sizes, full))
    assert len(left) == (4 if scan_axis is None else 2) * len(list(built.left.keys(statement.sizes)))


@given(statements())
def test_single_row_table_round_trips(statement):
    built = row(statement.text)
    table = Table((built,), {axis: Size(n, "test") for axis, n in statement.sizes.items()})
    dtype = DTYPES["uint16"]
    right = spelled(built.right, statement.sizes, tensor(statement.sizes, dtype, 9))
    mapped = table.to_left({key: stored(truth, dtype, key) for key, truth in right.items()})
    assert mapped.sizes == statement.sizes
    assert (mapped.values, mapped.dropped) == ((), ())
    same(table.to_right(mapped.arrays).arrays, right)


@given(statements())
def test_converting_a_row_reads_nothing(statement):
    built = row(statement.text)
    sources = {
        key: Stored(built.right.shape(statement.sizes), DTYPES["int8"], UnreadableFile(key), 0)
        for key in built.right.keys(statement.sizes)
    }
    for array in respelled(built.right, built.left, statement.sizes, sources).values():
        assert array.dtype.name == "int8"


@pytest.mark.parametrize(
    ("left", "left_axes", "right", "right_axes", "odd"),
    [
        ("a", "embed mlp", "b", "embed", "mlp"),
        ("a.{layer}", "embed", "b", "embed", "layer"),
        ("a", "embed", "b.{expert}", "(embed x)", "expert, x"),
    ],
)
def test_sides_with_different_axes_are_refused(left, left_axes, right, right_axes, odd):
    with pytest.raises(MappingError, match="different axes") as caught:
        row(f"{left}: {left_axes} <-> {right}: {right_axes}")
    assert caught.value.got == odd
    assert "<->" in caught.value.location


def test_layer_prefix_axis_is_named_on_mismatch():
    above = row("mlp_{kind:local,global}: embed <-> mlp: embed, above kind")
    (spelled_row,) = Layers("{2*pair+kind}", "layers_{pair}", "layers", ("pair",), (above,)).all_rows(1)
    assert str(spelled_row) == "layers.mlp_{kind:local,global}: embed pair <-> {2*pair+kind}.mlp: embed"
    assert spelled_row.above == ""
    with pytest.raises(MappingError, match="different axes") as caught:
        row("mlp: embed <-> mlp: embed, above kind")
    assert caught.value.got == ""
    with pytest.raises(MappingError, match="different axes") as caught:
        list(Layers("{pair}", "layers_{pair}", "layers", ("pair",), (above,)).all_rows(None))
    assert caught.value.got == "kind"


def test_identity_row_returns_source_array():
    built = row("a: embed mlp <-> b: embed mlp")
    source = stored(noise((2, 3), DTYPES["int8"]), DTYPES["int8"])
    assert RowConversion(built.right, built.left, {"embed": 2, "mlp": 3}).at({}, {"b": source}) is source


def test_flags_choose_rows():
    both = row("a: x <-> b: x, when on, unless off")
    assert [both.applies(frozenset(flags)) for flags in ((), ("on",), ("off",), ("on", "off"))] == [
        False,
        True,
        False,
        False,
    ]
    assert row("a: x <-> b: x").applies(frozenset())
    assert row("a: x <-> b: x").applies(frozenset({"on"}))


def test_value_ops_invert_with_the_direction():
    """Left equals right times the scale; right equals left divided by it."""
    built = row("a: heads head_dim <-> b: (heads head_dim)", op=Scale("head_dim", -0.5))
    table = Table((built,), {"head_dim": Size(16, "test")})
    dtype = DTYPES["float32"]
    numbers = np.arange(48, dtype=np.float32)
    mapped = table.to_left({"b": stored(numbers.view(dtype.carrier), dtype)})
    assert mapped.sizes == {"head_dim": 16, "heads": 3}
    np.testing.assert_array_equal(mapped.arrays["a"].read(), numbers.reshape(3, 16) / 4)
    np.testing.assert_array_equal(table.to_right(mapped.arrays).arrays["b"].read(), numbers)
    (note,) = mapped.values
    assert (note.key, note.exact, note.dtype) == ("a", True, dtype)


def test_scaling_integers_is_refused():
    built = row("a: x <-> b: x", op=Scale("x", -0.5))
    table = Table((built,), {"x": Size(3, "test")})
    with pytest.raises(MappingError, match="only floating-point"):
        table.to_left({"b": stored(noise((3,), DTYPES["int8"]), DTYPES["int8"])})
    assert Scale("x", -0.5).bound({"x": 4}) == Multiply(0.5)


def test_rope_interleaving_is_a_row():
    built = row("a: (pair half) <-> b: (half pair)")
    side = parse_side("a", "(pair half)")
    assert built.left == side
    dtype = DTYPES["int8"]
    source = stored(np.arange(8, dtype="u1"), dtype)
    array = RowConversion(built.right, built.left, {"pair": 4, "half": 2}).at({}, {"b": source})
    assert array.read().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


WORDS = st.sampled_from(("tied", "biased", "experts"))
OPS = st.sampled_from(
    (
        None,
        Scale("x", -0.5),
        Scale("x", 1 / 3, "bfloat16"),
        Shift(1.0),
        Fill(0.5),
        Factor(),
        Whole("int32", "int64"),
    )
)


@st.composite
def any_rows(draw):
    """Draw rows of every kind with all options, some below prefixes of layers."""
    built = replace(row(draw(statements()).text), op=draw(OPS))
    when, unless = (" ".join(draw(st.lists(WORDS, unique=True))) for _ in range(2))
    built = replace(built, when=when, unless=unless)
    if draw(st.booleans()):
        left, right = parse_key("layers_{block}.part_{kind:a,b}"), parse_key("layers.{2*block+3}.{x: y,z}")
        sides = {"left": built.left.below(left), "right": built.right.below(right)}
        built = replace(built, **sides, above="kind x") if "x" not in built.left.axes else built
    return built


class TestText:
    @given(any_rows())
    def test_row_round_trips_through_text(self, built):
        assert row(str(built)) == built
        assert row(" \n ".join(re.split(r" (?![^{]*})", str(built)))) == built

    @given(st.lists(any_rows(), max_size=4), st.integers(1, 200))
    def test_rows_round_trip_through_text(self, built, width):
        text = rows_text(built, width)
        assert rows(text) == tuple(built)
        assert rows("# a: x\n\n" + text.replace("\n", "\n\n  ")) == tuple(built)

    def test_row_accepts_every_clause(self):
        built = row("a.{k+3}: (x y) <-> b.{k}: y x, shift 1, when f g, unless h")
        assert built == Row(
            parse_side("a.{k+3}", "(x y)"), parse_side("b.{k}", "y x"), Shift(1.0), "f g", "h"
        )
        assert row("step: <-> step:") == Row(parse_side("step", ""), parse_side("step", ""))
        assert row("a:b: x <-> c,d: x").left.key.first() == "a:b"

    def test_op_without_text_is_passed_as_argument(self):
        built = row("a: x <-> b: x, when f", op=Multiply(2.0))
        assert built == Row(parse_side("a", "x"), parse_side("b", "x"), Multiply(2.0), "f")
        assert "Multiply" in str(built)
        with pytest.raises(MappingError, match="already has an op"):
            row("a: x <-> b: x, shift 1", op=Multiply(2.0))

    def test_headings_apply_to_following_rows(self):
        built = rows("""
            first: x <-> uno: x
            below at_{kind:l,g} <-> attn, above kind, when f
            # The other side has the kind in its layers' number.
            query:  x y <-> q: (x y), scale x -0.5, when g
            out: y x
                <-> o: (y x), unless h
            unless f
            last: <-> fin:
        """)
        assert list(map(str, built)) == [
            "first: x <-> uno: x",
            "at_{kind:l,g}.query: x y <-> attn.q: (x y), scale x -0.5, when f g, above kind",
            "at_{kind:l,g}.out: y x <-> attn.o: (y x), when f, unless h, above kind",
            "last: <-> fin:, unless f",
        ]
        (one_side,) = rows("below a <->\nb: x <-> c: x")
        assert str(one_side) == "a.b: x <-> c: x"

    @pytest.mark.parametrize(
        ("text", "column", "message", "got"),
        [
            ("", 1, "two sides", "one side"),
            ("a: x", 1, "two sides", "one side"),
            ("a: x <-> b: x <-> c: x", 19, "two sides", "3 sides"),
            ("a x <-> b: x", 1, "no colon", "a x"),
            ("a: x <-> b x", 10, "no colon", "b x"),
            ("a:x <-> b: x", 1, "no colon", "a:x"),
            ("mlp a: x <-> b: x", 1, "contains a space", "mlp a"),
            (": x <-> b: x", 1, "key is empty", None),
            ("a: x 2y  <-> b: x", 6, "must be a word", "2y"),
            ("a: x, y <-> b: x", 4, "must be a word", "x,"),
            ("a: x <-> b.{: x", 12, "not closed", "{"),
            ("a.x}: x <-> b: x", 1, "not opened", "a.x}"),
            ("a: x <-> b: (x", 13, "not closed", "(x"),
            ("ax.{x}: x <-> b: x", 9, "occurs twice", "x"),
            ("a: x <-> b.{x-1}: x", 12, "axis names", "{x-1}"),
            ("a: x <-> b: x, unles tied", 16, "not a keyword", "unles"),
            ("a: x <-> b: x, tied", 16, "not a keyword", "tied"),
            ("a: x <-> b: x,", 15, "not a keyword", ""),
            ("a: x <-> b: x, below c <-> d", 28, "two sides", "3 sides"),
            ("a: x <-> b: x, when", 16, "a name is missing", "when"),
            ("a: x <-> b: x, when f unless g", 23, "comma is missing", "unless"),
            ("a: x <-> b: x, when f, when g", 24, "twice", "when g"),
            ("a: x <-> b: x, shift 1, scale x 2", 25, "twice", "scale x 2"),
            ("a: x <-> b: x, scale x half", 24, "not a number", "half"),
            ("a: x <-> b: x, scale x 1 bf", 26, "not a floating-point dtype", "bf"),
        ],
    )
    def test_invalid_row_is_refused_with_its_column(self, text, column, message, got):
        for read in (row, rows):
            if read is row or text:
                with pytest.raises(MappingError, match=message) as caught:
                    read(text)
                assert caught.value.location == f"column {column} of {' '.join(text.split())!r}"
                assert caught.value.got == got

    @pytest.mark.parametrize(
        ("heading", "column", "message"),
        [
            ("below a", 1, "takes two prefixes"),
            ("below a b <-> c", 1, "takes two prefixes"),
            ("below a <-> b.{x", 15, "not closed"),
            ("when f, shift 1", 9, "not a keyword"),
            ("when", 1, "a name is missing"),
            ("above k below a <-> b", 9, "comma is missing"),
        ],
    )
    def test_invalid_heading_is_refused(self, heading, column, message):
        with pytest.raises(MappingError, match=message) as caught:
            rows(f"a: x <-> b: x\n  {heading}\nc: x <-> d: x")
        assert caught.value.location == f"column {column} of {heading!r}"

    def test_misspelled_keyword_gets_a_hint(self):
        with pytest.raises(MappingError) as caught:
            row("a: x <-> b: x, unles tied")
        assert caught.value.hint == "did you mean unless?"
        assert caught.value.expected == "one of scale, shift, fill, factor, whole, when, unless, above"
