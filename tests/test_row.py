import itertools
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttools.array.nodes import Stored
from ckpttools.core.dtypes import DTYPES
from ckpttools.core.errors import MappingError
from ckpttools.mapping.axes import parse_side
from ckpttools.mapping.layers import Layers
from ckpttools.mapping.row import Respelling, row
from ckpttools.mapping.sizes import Size
from ckpttools.mapping.table import Table
from ckpttools.mapping.values import Multiply, Scale
from ckpttools.testing.refusing import Refusing
from ckpttools.testing.strategies import dtypes, noise, regions, statements, stored


def tensor(sizes, dtype, seed):
    """One tensor with every axis of `sizes`, in alphabetical order."""
    return noise([sizes[axis] for axis in sorted(sizes)], dtype, seed)


def spelled(side, sizes, full):
    """The arrays of one side, written down without any of the code under test but the keys' text."""
    axes = sorted(sizes)
    arrays = {}
    for index in itertools.product(*(range(sizes[axis]) for axis in side.key.axes)):
        where = dict(zip(side.key.axes, index, strict=True))
        part = full[tuple(where.get(axis, slice(None)) for axis in axes)]
        left = [axis for axis in axes if axis not in where]
        order = [left.index(axis) for group in side.groups for axis in group]
        shape = [prod(sizes[axis] for axis in group) for group in side.groups]
        arrays[side.key.spell(where, sizes)] = np.ascontiguousarray(part.transpose(order)).reshape(shape)
    return arrays


def respelled(source, target, sizes, arrays):
    respelling = Respelling(source, target, sizes)
    return {target.key.spell(index, sizes): respelling.at(index, arrays) for index in target.indices(sizes)}


def same(arrays, truths):
    assert list(arrays) == list(truths)
    for key, truth in truths.items():
        assert arrays[key].shape == truth.shape
        assert arrays[key].read().tobytes() == truth.tobytes(), key


@settings(max_examples=300)
@given(statements(), dtypes(packed=True))
def test_both_directions_of_any_row_move_every_number_to_its_coordinates(statement, dtype):
    made = row(statement.left, statement.left_axes, statement.right, statement.right_axes)
    full = tensor(statement.sizes, dtype, 3)
    left = spelled(made.left, statement.sizes, full)
    right = spelled(made.right, statement.sizes, full)
    stored_right = {key: stored(truth, dtype, key) for key, truth in right.items()}
    lefts = respelled(made.right, made.left, statement.sizes, stored_right)
    same(lefts, left)
    same(respelled(made.left, made.right, statement.sizes, lefts), right)


@settings(max_examples=150)
@given(statements(), st.data())
def test_a_region_of_a_respelled_array_is_the_region_of_the_whole(statement, data):
    made = row(statement.left, statement.left_axes, statement.right, statement.right_axes)
    dtype = DTYPES["bfloat16"]
    full = tensor(statement.sizes, dtype, 5)
    sources = {k: stored(v, dtype, k) for k, v in spelled(made.right, statement.sizes, full).items()}
    lefts = respelled(made.right, made.left, statement.sizes, sources)
    truths = spelled(made.left, statement.sizes, full)
    key = data.draw(st.sampled_from(sorted(lefts)))
    region = data.draw(regions(lefts[key].shape))
    assert lefts[key].read(region).tobytes() == truths[key][region.slices].tobytes()


@given(statements(most_axes=4), st.sampled_from((None, 0, 1, 4)))
def test_layers_keep_every_number_at_its_coordinates(statement, scan_axis):
    """A group of two blocks of two layers, with one number on the right, stacked or not on the left."""
    made = row(statement.left, statement.left_axes, statement.right, statement.right_axes)
    prefixes = ("layers.{2*block+kind}", "layers_{block}.part_{kind:a,b}", "layers.part_{kind:a,b}")
    (spelled_row,) = Layers(*prefixes, ("block",), (made,)).spelled(scan_axis)
    sizes = {**statement.sizes, "block": 2, "kind": 2}
    dtype = DTYPES["float32"]
    full = tensor(sizes, dtype, 7)
    right = {k: stored(v, dtype, k) for k, v in spelled(spelled_row.right, sizes, full).items()}
    assert len(right) == 4 * len(list(made.right.keys(statement.sizes)))
    left = respelled(spelled_row.right, spelled_row.left, sizes, right)
    same(left, spelled(spelled_row.left, sizes, full))
    assert len(left) == (4 if scan_axis is None else 2) * len(list(made.left.keys(statement.sizes)))


@given(statements())
def test_a_table_of_one_row_goes_there_and_back(statement):
    made = row(statement.left, statement.left_axes, statement.right, statement.right_axes)
    table = Table((made,), {axis: Size(n, "test") for axis, n in statement.sizes.items()})
    dtype = DTYPES["uint16"]
    right = spelled(made.right, statement.sizes, tensor(statement.sizes, dtype, 9))
    mapped = table.to_left({key: stored(truth, dtype, key) for key, truth in right.items()})
    assert mapped.sizes == statement.sizes
    assert (mapped.values, mapped.dropped) == ((), ())
    same(table.to_right(mapped.arrays).arrays, right)


@given(statements())
def test_respelling_reads_nothing(statement):
    made = row(statement.left, statement.left_axes, statement.right, statement.right_axes)
    sources = {
        key: Stored(made.right.shape(statement.sizes), DTYPES["int8"], Refusing(key), 0)
        for key in made.right.keys(statement.sizes)
    }
    for array in respelled(made.right, made.left, statement.sizes, sources).values():
        assert array.dtype.name == "int8"


@pytest.mark.parametrize(
    ("left", "left_axes", "right", "right_axes", "odd"),
    [
        ("a", "embed mlp", "b", "embed", "mlp"),
        ("a.{layer}", "embed", "b", "embed", "layer"),
        ("a", "embed", "b.{expert}", "(embed x)", "expert, x"),
    ],
)
def test_sides_that_name_different_axes_are_refused(left, left_axes, right, right_axes, odd):
    with pytest.raises(MappingError, match="different axes") as caught:
        row(left, left_axes, right, right_axes)
    assert caught.value.got == odd
    assert "<->" in caught.value.place


def test_an_axis_that_is_in_the_prefix_of_the_layers_is_named():
    above = row("mlp_{kind:local,global}", "embed", "mlp", "embed", above="kind")
    (spelled_row,) = Layers("{2*pair+kind}", "layers_{pair}", "layers", ("pair",), (above,)).spelled(1)
    assert str(spelled_row) == "layers.mlp_{kind:local,global} [embed pair]  <->  {2*pair+kind}.mlp [embed]"
    assert spelled_row.above == ""
    with pytest.raises(MappingError, match="different axes") as caught:
        row("mlp", "embed", "mlp", "embed", above="kind")
    assert caught.value.got == ""
    with pytest.raises(MappingError, match="different axes") as caught:
        list(Layers("{pair}", "layers_{pair}", "layers", ("pair",), (above,)).spelled(None))
    assert caught.value.got == "kind"


def test_an_identity_is_the_source_array_itself():
    made = row("a", "embed mlp", "b", "embed mlp")
    source = stored(noise((2, 3), DTYPES["int8"]), DTYPES["int8"])
    assert Respelling(made.right, made.left, {"embed": 2, "mlp": 3}).at({}, {"b": source}) is source


def test_flags_choose_rows():
    both = row("a", "x", "b", "x", when="on", unless="off")
    assert [both.applies(frozenset(flags)) for flags in ((), ("on",), ("off",), ("on", "off"))] == [
        False,
        True,
        False,
        False,
    ]
    assert row("a", "x", "b", "x").applies(frozenset())
    assert row("a", "x", "b", "x").applies(frozenset({"on"}))


def test_value_ops_follow_the_direction():
    """Left is right times the scale, right is left divided by it."""
    made = row("a", "heads head_dim", "b", "(heads head_dim)", op=Scale("head_dim", -0.5))
    table = Table((made,), {"head_dim": Size(16, "test")})
    dtype = DTYPES["float32"]
    numbers = np.arange(48, dtype=np.float32)
    mapped = table.to_left({"b": stored(numbers.view(dtype.carrier), dtype)})
    assert mapped.sizes == {"head_dim": 16, "heads": 3}
    np.testing.assert_array_equal(mapped.arrays["a"].read(), numbers.reshape(3, 16) / 4)
    np.testing.assert_array_equal(table.to_right(mapped.arrays).arrays["b"].read(), numbers)
    (note,) = mapped.values
    assert (note.key, note.exact, note.dtype) == ("a", True, dtype)


def test_scaling_whole_numbers_is_refused():
    made = row("a", "x", "b", "x", op=Scale("x", -0.5))
    table = Table((made,), {"x": Size(3, "test")})
    with pytest.raises(MappingError, match="only floating-point"):
        table.to_left({"b": stored(noise((3,), DTYPES["int8"]), DTYPES["int8"])})
    assert Scale("x", -0.5).bound({"x": 4}) == Multiply(0.5)


def test_rope_interleaving_is_a_row():
    made = row("a", "(pair half)", "b", "(half pair)")
    side = parse_side("a", "(pair half)")
    assert made.left == side
    dtype = DTYPES["int8"]
    source = stored(np.arange(8, dtype="u1"), dtype)
    array = Respelling(made.right, made.left, {"pair": 4, "half": 2}).at({}, {"b": source})
    assert array.read().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
