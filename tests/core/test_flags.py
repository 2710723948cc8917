"""Flags that no configuration decides: the names of the arrays tell them, or nothing does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.internals import Constant, Size, Table, row

from ckpttools import DTYPES, ConfigError
from ckpttools.mapping.flags import Flag, inferred_flags, refuse_open

ROWS = (
    row("embedding: embed <-> embed: embed"),
    row("head: embed <-> head: embed, unless tied"),
    row("layers_{layer}.gate: embed <-> layers.{layer}.gate: embed, when experts"),
    row("layers_{layer}.wi: embed <-> layers.{layer}.up: embed, unless experts"),
    row("layers_{layer}.bias: embed <-> layers.{layer}.bias: embed, when experts biased"),
    row("layers_{layer}.query: embed <-> layers.{layer}.q: embed, when interleaved"),
    row("layers_{layer}.query: embed <-> layers.{layer}.q: embed, unless interleaved"),
)
SIDES = [(item, item.left) for item in ROWS]


def infer(names, keys):
    return inferred_flags(names, SIDES, keys)


@given(tied=st.booleans(), experts=st.booleans(), biased=st.booleans(), layers=st.integers(1, 3))
def test_flags_are_inferred_from_names(tied, experts, biased, layers):
    present = {
        name for name, there in (("tied", tied), ("experts", experts), ("biased", biased)) if there
    } | {"interleaved"}
    sizes = {"layer": layers, "embed": 2}
    keys = [key for item in ROWS if item.applies(present) for key in item.left.keys(sizes)]
    flags = infer(["biased", "experts", "tied"], keys)
    assert {name: flag.value for name, flag in flags.items()} == {
        "tied": tied,
        "experts": experts,
        "biased": experts and biased,
    }
    assert all(flag.source for flag in flags.values())


@given(
    rules=st.lists(
        st.tuples(st.sampled_from(("bias", "biased", "as")), st.booleans()), min_size=1, max_size=6
    ),
    present=st.sets(st.sampled_from(("bias", "biased", "as"))),
)
def test_names_contained_in_others_are_not_confused(rules, present):
    rows = [
        row(f"w{k}: embed <-> w{k}: embed, {'when' if when else 'unless'} {name}")
        for k, (name, when) in enumerate(rules)
    ]
    names = sorted({name for name, _ in rules})
    keys = [str(item.left.key) for item in rows if item.applies(present)]
    flags = inferred_flags(names, [(item, item.left) for item in rows], keys)
    assert {name for name in names if flags[name].value} == present & set(names)


def test_rows_with_two_flags_are_resolved():
    rows = [
        row("scale: embed <-> scale: embed, unless tied fused"),
        row("bias: embed <-> bias: embed, when tied fused"),
    ]
    sides = [(item, item.left) for item in rows]
    for name in ("tied", "fused"):
        assert inferred_flags([name], sides, ["scale"])[name] == Flag(False, "scale, which exists")
        assert inferred_flags([name], sides, ["bias"])[name] == Flag(True, "bias, which exists")
        assert inferred_flags([name], sides, [])[name] == Flag(False, "bias, which does not exist")


def test_flag_records_its_source():
    keys = ["embedding", "layers_0.wi", "layers_0.query"]
    flags = infer(["tied", "experts"], keys)
    assert flags["tied"].source == "head, which does not exist"
    assert flags["experts"].source == "layers_0.wi, which exists"
    assert infer(["tied"], ["embedding", "head"])["tied"].source == "head, which exists"


def test_flag_that_changes_no_name_is_undetermined():
    flags = infer(["interleaved", "tied"], ["embedding", "layers_0.query"])
    assert flags["interleaved"].open_key == "layers_0.query"
    assert flags["tied"].open_key is None
    with pytest.raises(ConfigError, match="do not show whether rotary pairs are") as caught:
        refuse_open(flags, "here")
    assert caught.value.got == "layers_0.query, which exists in both cases"
    assert caught.value.location == "here"
    assert caught.value.hint.index("like=") < caught.value.hint.index("rope_layout=")
    refuse_open({"tied": flags["tied"]}, "here")


def test_common_key_does_not_decide_a_flag():
    rows = (
        row("attention: embed <-> attention: embed, when fused"),
        row("attention: embed <-> attention: embed, unless fused"),
        row("scale: embed <-> scale: embed, when fused"),
        row("key: embed <-> key: embed, unless fused"),
    )

    def fused(*keys):
        return inferred_flags(["fused"], [(item, item.left) for item in rows], keys)["fused"]

    assert fused("attention", "scale") == Flag(True, "scale, which exists")
    assert fused("attention", "key") == Flag(False, "key, which exists")
    assert fused("attention").open_key == "attention"
    assert not fused("attention").source


def test_table_refuses_an_undetermined_flag():
    """Its weights are the same either way but for their order: nobody would notice."""
    rows = (
        row("query: embed <-> q: embed, when interleaved"),
        row("query: embed <-> q: embed, unless interleaved"),
    )
    arrays = {"query": Constant((2,), DTYPES["float32"], bytes(4))}
    with pytest.raises(ConfigError, match="do not show whether rotary pairs are"):
        Table(rows, {"embed": Size(2, "said")}).to_right(arrays)


def test_no_flags_are_inferred_when_none_are_requested():
    assert infer([], ["layers_0.query"]) == {}
