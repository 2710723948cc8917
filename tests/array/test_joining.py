"""Arrays of several parts: numpy's concatenation is the oracle, the way back gives every bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.internals import Size, Stored, Table, parse_side, row

from ckpttools import DTYPES, CoverageError, MappingError
from ckpttools.mapping.row import rows
from ckpttools.mapping.row_conversion import with_parts
from ckpttools.testing.strategies import UnreadableFile, stored

F32 = DTYPES["float32"]
LENGTHS = st.integers(1, 6)
# One array on the left, a part of it in each on the right.
SEVERAL = """
    all: embed (heads +query) <-> q: (heads query) embed
    all: embed (heads +key)   <-> k: embed heads key
    all: embed (heads +value) <-> v: heads embed value
"""
# The same array in two that are cut otherwise.
REGROUPED = """
    all: embed (heads +query) <-> qk: +(heads query) embed
    all: embed (heads +key)   <-> qk: +(heads key) embed
    all: embed (heads +value) <-> v:  (heads value) embed
"""


def table(text, **lengths):
    return Table(
        with_parts(rows(text)), {axis: Size(n, axis) for axis, n in lengths.items()}, location="model"
    )


def lazy(**arrays):
    return {name: stored(np.ascontiguousarray(a).view(F32.carrier), F32, name) for name, a in arrays.items()}


def read(arrays):
    return {name: array.read().view(np.float32) for name, array in arrays.items()}


def parts(embed, heads, **lengths):
    random = np.random.default_rng(0)
    return {axis: random.random((embed, heads, n), np.float32) for axis, n in lengths.items()}


@settings(max_examples=40)
@given(embed=LENGTHS, heads=LENGTHS, query=LENGTHS, key=LENGTHS, value=LENGTHS)
def test_parts_are_joined_and_split(embed, heads, query, key, value):
    lengths = {"embed": embed, "heads": heads, "query": query, "key": key, "value": value}
    q, k, v = parts(**lengths).values()
    whole = np.concatenate([q, k, v], axis=2).reshape(embed, -1)
    flat = [item.transpose(1, 2, 0).reshape(-1, embed) for item in (q, k, v)]
    right = {"q": flat[0], "k": k, "v": v.transpose(1, 0, 2)}
    regrouped = {"qk": np.concatenate(flat[:2]), "v": flat[2]}
    for text, arrays in ((SEVERAL, right), (REGROUPED, regrouped)):
        there = table(text, **lengths).to_left(lazy(**arrays)).arrays
        assert read(there)["all"].tobytes() == whole.tobytes()
        back = read(table(text, **lengths).to_right(there).arrays)
        assert {name: a.tobytes() for name, a in back.items()} == {n: a.tobytes() for n, a in arrays.items()}
        some = table(text, **lengths).to_left_partly(lazy(**arrays)).arrays
        assert read(some)["all"].tobytes() == whole.tobytes()


def test_missing_part_leaves_array_out():
    lengths = {"embed": 2, "heads": 3, "query": 1, "key": 4, "value": 2}
    arrays = lazy(q=np.ones((3, 2), np.float32))
    assert table(SEVERAL, **lengths).to_left_partly(arrays).arrays == {}


@pytest.mark.parametrize("shape", [(2, 20), (2, 21, 1), (21, 2)])
def test_joined_shape_is_checked_before_reading(shape):
    """Nothing is read of an array that is not as long as its parts."""
    lengths = {"embed": 2, "heads": 3, "query": 1, "key": 4, "value": 2}
    with pytest.raises(CoverageError, match=r"expected \[2, 21\]"):
        table(SEVERAL, **lengths).to_right({"all": Stored(shape, F32, UnreadableFile("all"), 0)})


def test_part_lengths_come_from_other_arrays():
    """The other arrays do; a length that nothing says is asked for."""
    known = {"embed": 2, "heads": 3}
    q, k, v = parts(**known, query=1, key=4, value=2).values()
    there = table(SEVERAL, **known).to_left(lazy(q=q.reshape(-1, 2), k=k, v=v.transpose(1, 0, 2)))
    assert there.sizes == {**known, "query": 1, "key": 4, "value": 2}


@pytest.mark.parametrize("axes", ["+embed", "embed +(heads query)", "(heads +query) embed", "(a b +c d)"])
def test_parts_round_trip_through_text(axes):
    assert str(parse_side("all", axes)) == f"all: {axes}"
    assert parse_side("all", axes).join is not None


@pytest.mark.parametrize("axes", ["+a +b", "+(a +b)", "(a +b +c)", "a+b", "+", "++a", "+ a"])
def test_invalid_part_is_refused(axes):
    with pytest.raises(MappingError):
        parse_side("all", axes)


def test_layers_are_stacked_around_parts():
    side = row("all: embed (heads +query) <-> q: embed heads query").left
    below = side.below(parse_side("layers", "").key, ("layer",), 1)
    assert str(below) == "layers.all: embed layer (heads +query)"
