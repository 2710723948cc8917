import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.errors import MappingError
from ckpttools.mapping.axes import Field, Key, Side, parse_groups, parse_key, parse_side
from ckpttools.testing.profile import use_profile
from ckpttools.testing.strategies import statements

use_profile()
NAMES = st.sampled_from(("layer", "expert", "repeat", "block", "heads", "head_dim"))
LITERALS = st.text("abc_.0123", min_size=1, max_size=6)


def spelled_key(key):
    """The text of a key as a table would hold it."""
    text = ""
    for part in key.parts:
        if isinstance(part, str):
            text += part
        else:
            suffix = f"+{part.offset}" if part.offset else ""
            suffix += ":" + ",".join(part.labels) if part.labels else ""
            text += "{" + " ".join(part.axes) + suffix + "}"
    return text


@st.composite
def keys(draw):
    names = draw(st.lists(NAMES, unique=True, max_size=4))
    parts = []
    while names:
        count = draw(st.integers(1, min(2, len(names))))
        offset = draw(st.integers(0, 12))
        labels = ("q", "k", "v") if count == 1 and not offset and draw(st.booleans()) else ()
        parts += [draw(LITERALS), Field(tuple(names[:count]), offset, labels)]
        names = names[count:]
    parts += [draw(LITERALS)] * draw(st.integers(0, 1))
    return Key(tuple(parts))


@given(keys())
def test_parsing_a_spelled_key_gives_it_back(key):
    assert parse_key(spelled_key(key)) == key


@given(st.lists(st.lists(NAMES, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple))
def test_parsing_spelled_groups_gives_them_back(groups):
    text = "  ".join(g[0] if len(g) == 1 else f"( {' '.join(g)})" for g in groups)
    assert parse_groups(text) == groups


@given(statements())
def test_every_key_is_another_and_there_are_as_many_as_coordinates(statement):
    side = parse_side(statement.left, statement.left_axes)
    keys = list(side.keys(statement.sizes))
    count = 1
    for axis in side.key.axes:
        count *= statement.sizes[axis]
    assert len(keys) == count == len(set(keys))
    assert keys == [side.key.spell(index, statement.sizes) for index in side.indices(statement.sizes)]


def test_the_language():
    side = parse_side("model.layers.{layer}.self_attn.q_proj.weight", "(heads head_dim) embed")
    assert side.groups == (("heads", "head_dim"), ("embed",))
    assert side.key.axes == ("layer",)
    assert side.axes == ("layer", "heads", "head_dim", "embed")
    assert side.shape({"layer": 9, "heads": 3, "head_dim": 5, "embed": 7}) == (15, 7)
    assert list(side.keys({"layer": 2})) == [f"model.layers.{k}.self_attn.q_proj.weight" for k in (0, 1)]
    assert str(side) == "model.layers.{layer}.self_attn.q_proj.weight [(heads head_dim) embed]"


@pytest.mark.parametrize(
    ("key", "sizes", "spelled"),
    [
        ("a{x}b", {"x": 3}, ["a0b", "a1b", "a2b"]),
        ("a{x+3}b", {"x": 2}, ["a3b", "a4b"]),
        ("a{x y}", {"x": 2, "y": 3}, ["a0", "a1", "a2", "a3", "a4", "a5"]),
        ("{x y}.{z}", {"x": 1, "y": 2, "z": 2}, ["0.0", "0.1", "1.0", "1.1"]),
        ("{x y+1}", {"x": 2, "y": 2}, ["1", "2", "3", "4"]),
        ("{part:query,key,value}.w", {"part": 3}, ["query.w", "key.w", "value.w"]),
        ("plain", {}, ["plain"]),
    ],
)
def test_fields(key, sizes, spelled):
    assert list(parse_side(key, "embed").keys(sizes)) == spelled


@pytest.mark.parametrize(
    ("key", "axes", "message"),
    [
        ("a.{layer", "embed", "a brace is not closed"),
        ("a.layer}", "embed", "a brace is not opened"),
        ("{x}.b}", "embed", "a brace is not opened"),
        ("a.{}", "embed", "a field must hold axis names"),
        ("a.{ }", "embed", "a field must hold axis names"),
        ("a.{3}", "embed", "a field must hold axis names"),
        ("a.{layer-1}", "embed", "a field must hold axis names"),
        ("a.{layer+}", "embed", "a field must hold axis names"),
        ("a.{layer+x}", "embed", "a field must hold axis names"),
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
def test_what_is_not_in_the_language_is_refused(key, axes, message):
    with pytest.raises(MappingError, match=message) as caught:
        parse_side(key, axes)
    assert caught.value.place is not None


def test_an_axis_that_occurs_twice_is_named():
    with pytest.raises(MappingError) as caught:
        parse_side("a.{layer}", "embed layer")
    assert caught.value.got == "layer"


@pytest.mark.parametrize(
    ("key", "left"),
    [
        ("decoder.layers_{layer}.mlp.kernel", "decoder.layers.mlp.kernel"),
        ("decoder.layers.{layer}.mlp.kernel", "decoder.layers.mlp.kernel"),
        ("layers{layer}.kernel", "layers.kernel"),
        ("{layer}.kernel", ".kernel"),
        ("a_{expert}.b_{layer}", "a_{expert}.b"),
        ("plain", "plain"),
    ],
)
def test_a_key_loses_the_axis_and_what_led_to_it(key, left):
    assert str(parse_key(key).without("layer")) == left


def test_a_merged_axis_cannot_leave_the_key():
    with pytest.raises(MappingError, match="merged with others"):
        parse_key("layers_{repeat layer}").without("layer")


@given(statements(), st.integers(0, 6), st.data())
def test_stacking_moves_one_axis_from_the_key_into_the_array(statement, at, data):
    side = parse_side(statement.left, statement.left_axes)
    alone = [field.axes[0] for field in side.key.fields if len(field.axes) == 1]
    if not alone:
        return
    axis = data.draw(st.sampled_from(alone))
    stacked = side.stacked(axis, at)
    assert set(stacked.axes) == set(side.axes)
    assert stacked.key.axes == tuple(name for name in side.key.axes if name != axis)
    at = min(at, len(side.groups))
    assert stacked.groups[at] == (axis,)
    assert stacked.groups[:at] + stacked.groups[at + 1 :] == side.groups
    assert stacked.shape(statement.sizes)[at] == statement.sizes[axis]


def test_a_side_without_axes_is_a_scalar():
    side = parse_side("step", "")
    assert side == Side(Key(("step",)), ())
    assert side.shape({}) == ()
    assert list(side.keys({})) == ["step"]
