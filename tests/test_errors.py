import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttools import errors
from ckpttools.errors import CheckpointError, listing, near_names

CODES = {
    "UsageError": 2,
    "DestinationExistsError": 2,
    "FormatError": 3,
    "ConfigError": 3,
    "UnknownNameError": 2,
    "MappingError": 3,
    "ShapeError": 3,
    "CoverageError": 3,
    "MemoryBudgetError": 4,
    "NoSpaceError": 4,
    "StorageError": 5,
}
LEAVES = {
    name: each
    for name, each in vars(errors).items()
    if isinstance(each, type) and issubclass(each, CheckpointError) and each is not CheckpointError
}


def test_every_error_has_its_exit_code():
    assert {name: each.exit_code for name, each in LEAVES.items()} == CODES


@pytest.mark.parametrize("kind", LEAVES.values(), ids=LEAVES)
def test_the_full_text(kind):
    error = kind("it is wrong", place="model.safetensors", got=3, wanted=[4], hint="fetch it again")
    assert str(error) == (
        "it is wrong\n  at     model.safetensors\n  got    3\n  wanted [4]\n  next   fetch it again"
    )
    assert (error.message, error.place, error.got, error.wanted) == (
        "it is wrong",
        "model.safetensors",
        "3",
        "[4]",
    )
    assert error.args == ("it is wrong",)
    assert kind.__doc__


def test_what_is_not_said_takes_no_line():
    assert str(CheckpointError("it is wrong")) == "it is wrong"
    assert CheckpointError("it is wrong", got=0, hint="go on").details() == [("got", "0"), ("next", "go on")]


@given(st.lists(st.text("ab", min_size=1, max_size=3), max_size=40), st.integers(1, 30))
def test_a_listing_names_or_counts_all(items, most):
    lines = listing(items, most).split("\n")[1:]
    assert [line.strip() for line in lines[:most]] == items[:most]
    left = [line.strip() for line in lines[most:]]
    assert len(left) == (len(items) > most)
    assert not left or left[0].startswith(f"… and {len(items) - most} more")


def test_near_names():
    assert near_names("lama", ["qwen2", "llama"]) == ["llama"]
    assert near_names("zzz", ["qwen2", "llama"]) == []
    assert len(near_names("qwen", ["qwen2", "qwen3", "qwen4", "qwen5"], 2)) == 2
