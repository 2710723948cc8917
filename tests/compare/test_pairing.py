"""A pairing leaves nothing out: every array is in a pair, or on one side only."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.internals import Pairing

from ckpttools.digest.digest import Digest
from ckpttools.digest.pairing import Remark, kind_differences

SIDES = st.dictionaries(
    st.sampled_from("pqrst"), st.sampled_from([("int8", (2,)), ("int8", (3,)), ("int4", (2,))])
)


def digests(side: dict[str, tuple[str, tuple[int, ...]]]) -> dict[str, Digest]:
    return {name: Digest(dtype, shape, "", "") for name, (dtype, shape) in side.items()}


@given(SIDES, SIDES, st.sampled_from(["*", "p", "[p-r]", "x"]))
def test_every_array_is_paired_or_unpaired(a: dict, b: dict, pattern: str):  # type: ignore[type-arg]
    both = Pairing(digests(a), digests(b), (Remark("said"),)).matching(pattern)
    paired = [name for name, _, _ in both.pairs]
    assert sorted([*paired, *both.only_a, *both.only_b]) == sorted({**both.a, **both.b})
    assert not {*both.only_a} & {*b} and not {*both.only_b} & {*a}
    assert both.remarks == (Remark("said"),)
    expected = dict.fromkeys(both.only_a, "extra") | dict.fromkeys(both.only_b, "missing")
    for name in paired:
        if a[name] != b[name]:
            expected[name] = "dtype" if a[name][0] != b[name][0] else "shape"
    assert {kind.name: kind.reason for kind in kind_differences(both)} == expected


def test_name_with_brackets_matches_itself():
    both = Pairing(digests({"w[0]": ("int8", (2,)), "w0": ("int8", (2,))}), {}).matching("w[0]")
    assert sorted(both.a) == ["w0", "w[0]"]


def test_remark_names_its_side():
    assert (str(Remark("x")), str(Remark("x", "B"))) == ("x", "B: x")
