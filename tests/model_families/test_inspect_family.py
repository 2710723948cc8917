"""`ckpttools.maxtext.recognition`: the family that a tree matches on either side, with reasons."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.golden_data import FAMILIES
from support.internals import Constant, Path, families
from support.locations import GOLDEN
from support.trees import maxtext_tree, right_one, without

import ckpttools
from ckpttools import DTYPES, Tree
from ckpttools.maxtext.recognition import FamilyGuess, guess_families

# Families that have all names of another, and nothing that would tell which.
ALIKE = ({"llama", "mistral"}, {"gemma", "llama", "mistral"}, {"deepseek", "kimi-k2.5"})
NUMBERS = re.compile("[0-9]+")


def guessed(tree: Tree) -> dict[str, FamilyGuess]:
    return {family.name: family for family in guess_families(tree, families().values())}


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unscanned"])
@pytest.mark.parametrize("model", FAMILIES)
def test_family_is_recognized_from_maxtext_names(model: str, scan: bool):
    result = guessed(maxtext_tree(model, scan))
    assert right_one(model) in result
    assert set(result) <= {right_one(model)} or set(result) in ALIKE
    for guess in result.values():
        assert (guess.side, guess.matches_model_type, guess.missing, guess.unmatched) == (
            "maxtext",
            False,
            (),
            (),
        )
        assert guess.num_matched == guess.num_expected > 5


@pytest.mark.parametrize("model", FAMILIES)
def test_family_is_recognized_from_hugging_face_names(model: str):
    tree = ckpttools.open(GOLDEN / model / "hf")
    result = guessed(tree.with_metadata(config=None))
    assert right_one(model) in result
    assert set(result) <= {right_one(model)} or set(result) in ALIKE
    assert all(
        (item.side, item.missing, item.unmatched) == ("huggingface", (), ()) for item in result.values()
    )


@pytest.mark.parametrize("model", ["llama3.1", "mistral-7b"])
def test_config_decides_between_equal_matches(model: str):
    (guess,) = guessed(ckpttools.open(GOLDEN / model / "hf")).values()
    assert (guess.name, guess.matches_model_type) == (right_one(model), True)


def test_missing_arrays_are_shown_as_a_template():
    tree = maxtext_tree("llama3.1", scan=False)
    for layer in range(4):
        tree = without(tree, ("params", "params", "decoder", f"layers_{layer}", "mlp", "wi_1", "kernel"))
    guess = guessed(tree)["llama"]
    assert guess.missing == ("decoder.layers_{layer}.mlp.wi_1.kernel",)
    assert (guess.num_matched, guess.num_expected) == (10, 11)


def test_extra_arrays_are_folded():
    tree = maxtext_tree("llama3.1", scan=False)
    extra: dict[Path, Constant] = {
        ("params", "params", "decoder", f"layers_{layer}", "mlp", "wi_7", "kernel"): Constant(
            (1,), DTYPES["int8"], b"\0"
        )
        for layer in range(4)
    }
    guess = guessed(Tree({**tree, **extra}))["llama"]
    assert guess.unmatched == ("decoder.layers_{0..3}.mlp.wi_7.kernel",)
    assert guess.num_unmatched == 4


def test_unknown_tree_has_no_family():
    assert guessed(Tree({("a", "b"): Constant((1,), DTYPES["int8"], b"\0")})) == {}
    assert guessed(Tree({})) == {}


def test_incomplete_model_is_not_recognized():
    tree = maxtext_tree("llama3.1", scan=True)
    kept = {path: leaf for path, leaf in tree.items() if "layers" not in path or "norm" in str(path)}
    assert guessed(Tree(kept)) == {}


@given(st.data())
def test_removed_arrays_are_not_matched(data: st.DataObject):
    tree = maxtext_tree("qwen3", scan=True)
    parameters = [path for path in tree if path[0] == "params"]
    gone = data.draw(st.sets(st.sampled_from(parameters), max_size=5))
    left = Tree({path: leaf for path, leaf in tree.items() if path not in gone})
    fits = guess_families(left, [families()["qwen3"]])
    # The head is there or not, as the model is tied or not: that it is gone is no fault.
    needed = [path for path in gone if "logits_dense" not in path]
    (guess,) = fits
    assert guess.num_expected - guess.num_matched == len(needed) == len(guess.missing)
    assert not guess.unmatched


@settings(max_examples=40)
@given(
    st.dictionaries(
        st.lists(st.text("a#.0129{}*layers_decoder", max_size=12), min_size=1, max_size=4).map(tuple),
        st.just(Constant((1,), DTYPES["int8"], b"\0")),
        max_size=12,
    )
)
def test_arbitrary_names_are_accepted(leaves: dict[Path, Constant]):
    for guess in guessed(Tree(leaves)).values():
        assert 0 <= guess.num_matched <= guess.num_expected
        assert len(guess.missing) == guess.num_expected - guess.num_matched
