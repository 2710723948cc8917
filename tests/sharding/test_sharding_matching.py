"""Names of a caller's tree are found in a checkpoint, or there is more than one place for them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.internals import parse_mesh, roles
from support.trees import lazy

import ckpttools
from ckpttools import CoverageError, MappingError, Tree, UsageError
from ckpttools.sharding.load_request import match
from ckpttools.sharding.rules import MAXTEXT, resolve_rules

NAMES = [("decoder", "mlp", "kernel"), ("decoder", "norm"), ("embedding",)]
KEYS = st.sampled_from(["params", "state", "model", "0"])


@given(below=st.lists(KEYS, max_size=3), data=st.data())
def test_names_are_found_below_any_prefix(below, data):
    expected = data.draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    result = match(expected, [(*below, *name) for name in NAMES])
    assert result.result == {name: (*below, *name) for name in expected}
    assert not result.missing and not result.others
    assert set(result.unread) == {(*below, *name) for name in NAMES if name not in expected}


def test_all_matching_locations_are_named():
    result = match([("w",), ("b",)], [("one", "w"), ("one", "b"), ("two", "w"), ("two", "b"), ("three", "w")])
    assert set(result.others) == {("one", "w"), ("two", "w")}


def test_ambiguous_moments_are_not_guessed():
    tree = Tree({(key, "w"): lazy(np.ones((4, 4), np.float32)) for key in ("mu", "nu", "params")})
    known = roles(tree)
    assert match([("w",)], tree.arrays, lambda path: known.of(path) == "parameter").others


def test_exact_names_take_precedence():
    result = match([("w",), ("b",), ("c",)], [("w",), ("b",), ("ema", "w"), ("ema", "b")])
    assert result.result == {("w",): ("w",), ("b",): ("b",)} and not result.others


@pytest.mark.parametrize(
    "paths",
    [
        ["opt_state/mu/w", "params/params/w"],
        ["opt_state/0/mu/decoder/w", "opt_state/0/nu/decoder/w", "params/decoder/w"],
    ],
)
def test_parameters_take_precedence_over_moments(paths):
    tree = Tree({tuple(item.split("/")): lazy(np.ones((4, 4), np.float32)) for item in [*paths, "step"]})
    known = roles(tree)
    result = match([("w",)], tree.arrays, lambda path: known.of(path) == "parameter")
    assert result.result["w",][0] == "params" and not result.others


@pytest.mark.parametrize("key", ["ema_params", "mu"])
def test_nested_name_is_a_different_array(key):
    assert match([(key, "w")], [("params", "w")]).missing == ((key, "w"),)
    assert match([("params", "w")], [(key, "w")]).missing == (("params", "w"),)


def test_wrapper_keys_may_be_missing():
    assert match([("params", "params", "w")], [("params", "w")]).result["params", "params", "w"] == (
        "params",
        "w",
    )
    assert match([("params", "w")], [("w",)]).result["params", "w"] == ("w",)


class TestStoredForms:
    def loaded(self, tmp_path, state, like):
        jax = pytest.importorskip("jax")
        ckpttools.save(state, tmp_path / "item", level="item")
        return ckpttools.load(tmp_path / "item", like=like(jax))

    @pytest.mark.parametrize(
        ("stored", "expected"), [(np.float32(1.7), 0), (np.int32(7), True), (np.float32("nan"), 0)]
    )
    def test_values_are_not_rounded(self, tmp_path, stored, expected):
        with pytest.raises(CoverageError, match="expected a"):
            self.loaded(tmp_path, {"a": stored}, lambda jax: {"a": expected})

    def test_integer_is_loaded_exactly_as_float(self, tmp_path):
        assert self.loaded(tmp_path, {"a": 2**53}, lambda jax: {"a": 1.0}) == {"a": 2.0**53}
        with pytest.raises(CoverageError, match="a: 9007199254740993 cannot be a float exactly"):
            ckpttools.save({"a": 2**53 + 1}, tmp_path / "odd", level="item")
            ckpttools.load(tmp_path / "odd", like={"a": 1.0})

    def test_random_keys_need_the_same_generator(self, tmp_path):
        import jax

        with pytest.raises(CoverageError, match="key of rbg, expected one of unsafe_rbg"):
            state = {"k": jax.random.key(3, impl="rbg")}
            self.loaded(tmp_path, state, lambda jax: {"k": jax.random.key(0, impl="unsafe_rbg")})

    def test_lossy_casts_are_left_to_the_caller(self, tmp_path):
        ckpttools.save({"a": np.ones(3, np.float32)}, tmp_path / "item", level="item")
        with pytest.raises(MappingError) as error:
            ckpttools.load(tmp_path / "item", dtype="int8")
        assert "force" not in str(error.value)


@pytest.mark.parametrize("rules", [{"*kernal": "P('fsdp')"}, {"w": "P()", "x": "P()"}])
def test_unmatched_rule_patterns_are_refused(tmp_path, rules):
    ckpttools.save({"w": np.ones((2, 2), np.float32)}, tmp_path / "item", level="item")
    with pytest.raises(UsageError, match="matches no array"):
        ckpttools.load(tmp_path / "item", rules=rules, mesh="fsdp=1")


def test_user_rules_allow_any_mesh_axis_names():
    resolve_rules({"*kernel": "P('model')"}).check(parse_mesh("dp=2,model=4"))
    resolve_rules([("embed", "fsdp")]).check(parse_mesh("fsdp=2,replica=4"))
    with pytest.raises(UsageError, match="did you mean fsdp"):
        resolve_rules([("embed", "fsdp")]).check(parse_mesh("fspd=8"))


def test_default_rules_require_maxtext_mesh_axes():
    with pytest.raises(UsageError, match="fspd=4") as error:
        MAXTEXT.check(parse_mesh("fspd=4,tensor=2"))
    assert "did you mean fsdp" in str(error.value)
