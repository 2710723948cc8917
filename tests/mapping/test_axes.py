import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.internals import parse_key, parse_side

from ckpttools import MappingError
from ckpttools.mapping.axes import Side, parse_groups
from ckpttools.mapping.keys import Field, Key
from ckpttools.testing.strategies import statements

NAMES = st.sampled_from(("layer", "expert", "repeat", "block", "heads", "head_dim"))
SOME_NAMES = st.lists(NAMES, unique=True, max_size=4)
LITERALS = st.text("abc_.0123", min_size=1, max_size=6)
KINDS, KINDS_OF_ONE = st.sampled_from(("merged", "sum")), st.sampled_from(("merged", "sum", "words"))
COUNTS = st.sampled_from(((), ("dense",), ("dense", "rest")))
CHANGES = st.sampled_from(("", "0", "1", "7", "12", ".", "q", "a"))


def field(draw, names):
    """Draw a field over these axes: merged, with labels, or a sum."""
    kind = draw(KINDS_OF_ONE if len(names) == 1 else KINDS)
    if kind == "words":
        return Field(names, labels=("q", "k", "v"))
    if kind == "merged":
        return Field(names)
    strides = tuple(draw(st.integers(1, 12)) for _ in names)
    counts = draw(COUNTS)
    offset = draw(st.integers(0, 12))
    # One axis by itself is a sum of nothing: it parses as a merged one.
    plain = strides == (1,) and not counts and not offset
    return Field(names) if plain else Field(names, strides, offset, counts)


@st.composite
def keys(draw):
    names = draw(SOME_NAMES)
    parts = []
    while names:
        count = draw(st.integers(1, min(2, len(names))))
        parts += [draw(LITERALS), field(draw, tuple(names[:count]))]
        names = names[count:]
    parts += [draw(LITERALS)] * draw(st.integers(0, 1))
    return Key(tuple(parts))


@given(keys())
def test_spelled_key_parses_to_itself(key):
    assert parse_key(str(key)) == key


def lengths(draw, key):
    """Draw a length for each axis that a key needs; labels fix theirs."""
    words = {field.axes[0]: len(field.labels) for field in key.fields if field.labels}
    return {axis: words.get(axis) or draw(st.integers(0, 4)) for axis in sorted(key.needs)}


@given(keys(), st.data())
def test_key_match_inverts_format(key, data):
    sizes = lengths(data.draw, key)
    index = {axis: data.draw(st.integers(0, max(0, sizes[axis] - 1))) for axis in key.axes}
    name = key.format(index, sizes)
    result = key.match(name, sizes)
    if any(index[axis] >= sizes[axis] for axis in key.axes):
        assert result is None or key.format(result, sizes) == name
        return
    assert result is not None
    assert key.format(result, sizes) == name
    assert all(0 <= result[axis] < sizes[axis] for axis in key.axes)
    numbers = key.numbers(name)
    assert numbers is not None
    assert key.filled(numbers) == name


@given(keys(), st.data())
def test_key_matches_exactly_its_formatted_names(key, data):
    sizes = lengths(data.draw, key)
    names = set(Side(key, ()).keys(sizes))
    near = data.draw(st.sampled_from(sorted(names))) if names else str(key)
    at = data.draw(st.integers(0, len(near)))
    change = data.draw(CHANGES)
    cut = data.draw(st.integers(0, 2))
    name = near[:at] + change + near[at + cut :]
    assert (key.match(name, sizes) is not None) == (name in names)


@pytest.mark.parametrize(
    ("key", "name", "index"),
    [
        ("{layer}", "07", None),
        ("{layer}", "", None),
        ("{layer}", "-1", None),
        ("{layer}", "²", None),
        ("{layer+3}", "2", None),
        ("{layer+3}", "3", {"layer": 0}),
        ("{layer+#dense}", "1", None),
        ("{layer+#dense}", "7", {"layer": 5}),
        ("{2*layer+1}", "2", None),
        ("{2*layer+1}", "123", {"layer": 61}),
        ("{2*pair+kind}", "7", {"pair": 3, "kind": 1}),
        ("{4*layer+6*pair}", "1" + "0" * 298 + "1", None),
        ("{layer kind}", "5", {"layer": 2, "kind": 1}),
        ("{part:q,qk}", "qk", {"part": 1}),
        ("{part:q,qk}k", "qk", {"part": 0}),
        ("{part:q,k}", "v", None),
        ("{layer}0", "100", {"layer": 10}),
        ("{layer}{pair}", "123", {"layer": 12, "pair": 3}),
        ("{layer}.{layer}", "3.3", {"layer": 3}),
        ("{layer}.{layer}", "3.4", None),
        ("{layer}", "1" + "0" * 9999, None),
    ],
)
def test_key_match_returns_coordinates(key, name, index):
    """An unknown length allows any coordinate."""
    assert parse_key(key).match(name, {"dense": 2, "kind": 2}) == index


@given(st.lists(st.lists(NAMES, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple))
def test_spelled_groups_parse_to_themselves(groups):
    text = "  ".join(g[0] if len(g) == 1 else f"( {' '.join(g)})" for g in groups)
    assert parse_groups(text) == groups


@given(statements())
def test_keys_are_distinct_and_one_per_coordinate(statement):
    side = parse_side(statement.left, statement.left_axes)
    keys = list(side.keys(statement.sizes))
    count = 1
    for axis in side.key.axes:
        count *= statement.sizes[axis]
    assert len(keys) == count == len(set(keys))
    assert keys == [side.key.format(index, statement.sizes) for index in side.indices(statement.sizes)]


def test_side_parses_key_and_groups():
    side = parse_side("model.layers.{layer}.self_attn.q_proj.weight", "(heads head_dim) embed")
    assert side.groups == (("heads", "head_dim"), ("embed",))
    assert side.key.axes == ("layer",)
    assert side.axes == ("layer", "heads", "head_dim", "embed")
    assert side.shape({"layer": 9, "heads": 3, "head_dim": 5, "embed": 7}) == (15, 7)
    assert list(side.keys({"layer": 2})) == [f"model.layers.{k}.self_attn.q_proj.weight" for k in (0, 1)]
    assert str(side) == "model.layers.{layer}.self_attn.q_proj.weight: (heads head_dim) embed"


@pytest.mark.parametrize(
    ("key", "sizes", "spelled"),
    [
        ("a{x}b", {"x": 3}, ["a0b", "a1b", "a2b"]),
        ("a{x+3}b", {"x": 2}, ["a3b", "a4b"]),
        ("a{x y}", {"x": 2, "y": 3}, ["a0", "a1", "a2", "a3", "a4", "a5"]),
        ("{x y}.{z}", {"x": 1, "y": 2, "z": 2}, ["0.0", "0.1", "1.0", "1.1"]),
        ("{3*x+y}", {"x": 2, "y": 3}, ["0", "1", "2", "3", "4", "5"]),
        ("{4*x+2*y+1}", {"x": 2, "y": 2}, ["1", "3", "5", "7"]),
        ("{ 2*x + 1 }", {"x": 2}, ["1", "3"]),
        ("{x+#y}.{y}", {"x": 2, "y": 3}, [f"{k}.{j}" for k in (3, 4) for j in range(3)]),
        ("{x+#n+1}", {"x": 2, "n": 5}, ["6", "7"]),
        ("{part:query,key,value}.w", {"part": 3}, ["query.w", "key.w", "value.w"]),
        ("plain", {}, ["plain"]),
    ],
)
def test_fields_expand_to_keys(key, sizes, spelled):
    assert list(parse_side(key, "embed").keys(sizes)) == spelled


@pytest.mark.parametrize(
    ("key", "axes", "message"),
    [
        ("", "embed", "a key is empty"),
        ("a.{layer", "embed", "a brace is not closed"),
        ("a.layer}", "embed", "a brace is not opened"),
        ("{x}.b}", "embed", "a brace is not opened"),
        ("a.{}", "embed", "a field must hold axis names"),
        ("a.{ }", "embed", "a field must hold axis names"),
        ("a.{3}", "embed", "a field must hold axis names"),
        ("a.{layer-1}", "embed", "a field must hold axis names"),
        ("a.{layer+}", "embed", "a field must hold axis names"),
        ("a.{x y+1}", "embed", "a field must hold axis names"),
        ("a.{x*y}", "embed", "a field must hold axis names"),
        ("a.{*y}", "embed", "a field must hold axis names"),
        ("a.{0*y}", "embed", "a field must hold axis names"),
        ("a.{#y}", "embed", "a field must hold axis names"),
        ("a.{x+#}", "embed", "a field must hold axis names"),
        ("a.{2+3}", "embed", "a field must hold axis names"),
        ("a.{kind side:ul,ur}", "embed", "labels need a single plain axis"),
        ("a.{kind+1:q,k}", "embed", "labels need a single plain axis"),
        ("a.{part:q,,k}", "embed", "labels need a single plain axis"),
        ("a.{:q,k}", "embed", "a field must hold axis names"),
        ("a", "(heads head_dim", "a bracket is not closed"),
        ("a", "heads) embed", "an axis name must be a word"),
        ("a", "(heads (head_dim))", "an axis name must be a word"),
        ("a", "2 embed", "an axis name must be a word"),
        ("a", "embed, mlp", "an axis name must be a word"),
        ("a.{layer}", "layer embed", "an axis occurs twice on one side"),
        ("a.{layer}.{layer}", "embed", "an axis occurs twice on one side"),
        ("a.{layer layer}", "embed", "an axis occurs twice on one side"),
        ("a", "(embed embed)", "an axis occurs twice on one side"),
        ("a", "embed heads embed", "an axis occurs twice on one side"),
    ],
)
def test_invalid_side_is_refused(key, axes, message):
    with pytest.raises(MappingError, match=message) as caught:
        parse_side(key, axes)
    assert caught.value.location is not None


def test_repeated_axis_is_named():
    with pytest.raises(MappingError) as caught:
        parse_side("a.{layer}", "embed layer")
    assert caught.value.got == "layer"


@given(keys(), st.data())
def test_first_key_is_at_coordinate_zero(key, data):
    sizes = dict.fromkeys(key.needs, 3)
    counted = {count for field in key.fields for count in field.counts}
    first = key.format(dict.fromkeys(key.axes, 0), sizes | dict.fromkeys(counted, 0))
    assert key.first() == first


@given(statements(), st.integers(0, 6), st.data())
def test_stacking_moves_prefix_axes_into_array(statement, at, data):
    side = parse_side(statement.left, statement.left_axes)
    unscanned = side.below(parse_key("layers_{6*block+position}"))
    scanned = side.below(parse_key("layers.layers_{position}"), ("block",), at)
    sizes = statement.sizes | {"block": 2, "position": 6}
    assert set(scanned.axes) == set(unscanned.axes) == set(side.axes) | {"block", "position"}
    assert scanned.key.axes == ("position", *side.key.axes)
    assert unscanned.groups == side.groups
    at = min(at, len(side.groups))
    assert scanned.groups[at] == ("block",)
    assert scanned.groups[:at] + scanned.groups[at + 1 :] == side.groups
    assert scanned.shape(sizes)[at] == 2
    keys = [key for item in (scanned, unscanned) for key in item.keys(sizes)]
    assert len(keys) == len(set(keys))


def test_empty_prefix_returns_side_unchanged():
    side = parse_side("a.{layer}", "embed")
    assert side.below(parse_key("")) == side
    assert str(side.below(parse_key("b.{block}")).key) == "b.{block}.a.{layer}"


def test_side_without_axes_is_a_scalar():
    side = parse_side("step", "")
    assert side == Side(Key(("step",)), ())
    assert side.shape({}) == ()
    assert list(side.keys({})) == ["step"]
