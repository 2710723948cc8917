"""Flags that no configuration decides: the names of the arrays tell them, or nothing does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.errors import ConfigError
from ckpttools.mapping.flags import refuse_open, told_by_names
from ckpttools.mapping.row import row

ROWS = (
    row("embedding", "embed", "embed", "embed"),
    row("head", "embed", "head", "embed", unless="tied"),
    row("layers_{layer}.gate", "embed", "layers.{layer}.gate", "embed", when="experts"),
    row("layers_{layer}.wi", "embed", "layers.{layer}.up", "embed", unless="experts"),
    row("layers_{layer}.bias", "embed", "layers.{layer}.bias", "embed", when="experts biased"),
    row("layers_{layer}.query", "embed", "layers.{layer}.q", "embed", when="interleaved"),
    row("layers_{layer}.query", "embed", "layers.{layer}.q", "embed", unless="interleaved"),
)
SIDES = [(each, each.left) for each in ROWS]


def told(names, keys):
    return told_by_names(names, SIDES, keys)


@given(tied=st.booleans(), experts=st.booleans(), biased=st.booleans(), layers=st.integers(1, 3))
def test_the_names_of_a_model_tell_its_flags(tied, experts, biased, layers):
    present = {
        name for name, there in (("tied", tied), ("experts", experts), ("biased", biased)) if there
    } | {"interleaved"}
    sizes = {"layer": layers, "embed": 2}
    keys = [key for each in ROWS if each.applies(present) for key in each.left.keys(sizes)]
    flags = told(["biased", "experts", "tied"], keys)
    assert {name: flag.value for name, flag in flags.items()} == {
        "tied": tied,
        "experts": experts,
        "biased": experts and biased,
    }
    assert all(flag.source for flag in flags.values())


def test_who_says_so():
    keys = ["embedding", "layers_0.wi", "layers_0.query"]
    flags = told(["tied", "experts"], keys)
    assert flags["tied"].source == "head, which is not there"
    assert flags["experts"].source == "layers_0.wi, which is there"
    assert told(["tied"], ["embedding", "head"])["tied"].source == "head, which is there"


def test_a_flag_that_changes_no_name_is_open():
    flags = told(["interleaved", "tied"], ["embedding", "layers_0.query"])
    assert flags["interleaved"].open_key == "layers_0.query"
    assert flags["tied"].open_key is None
    with pytest.raises(ConfigError, match="do not tell whether the model is interleaved") as caught:
        refuse_open(flags, "here")
    assert caught.value.got == "layers_0.query, which is there either way"
    assert caught.value.place == "here"
    assert "--like" in caught.value.hint
    refuse_open({"tied": flags["tied"]}, "here")


def test_nothing_is_told_where_nothing_is_asked():
    assert told([], ["layers_0.query"]) == {}
