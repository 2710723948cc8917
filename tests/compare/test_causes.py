"""Every cause of a difference by itself, and that the order in which they are listed changes nothing."""

from __future__ import annotations

from math import sqrt

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.internals import Pairing, diff
from support.trees import lazy

from ckpttools.compare.causes import DETECTORS
from ckpttools.compare.causes.base import Case, Detector
from ckpttools.compare.causes.others import tied
from ckpttools.compare.explain import explain
from ckpttools.compare.renames import Candidates, _different

PLENTY = {"memory": 512 << 20, "jobs": 1}
BY_NAME = {item.name: item for item in DETECTORS}
NOISE = np.random.default_rng(0).normal(0.3, 0.1, (16, 16)).astype(np.float32)
OTHER = np.random.default_rng(1).normal(0.3, 0.1, (16, 16)).astype(np.float32)
CUT = np.where(np.arange(256).reshape(16, 16) < 100, NOISE, 0)
PAIRS = NOISE.reshape(16, 2, 2, 4).swapaxes(2, 3).reshape(16, 16)

# What B holds where A holds NOISE -> the words in which its cause, and no other, is told.
PLANTED: dict[str, tuple[np.ndarray, str]] = {
    "zeros": (np.zeros_like(NOISE), "B is all zeros"),
    "nan": (np.full_like(NOISE, np.nan), "B is all NaN"),
    "truncated": (CUT, "B is zeros from [6, 4] on"),
    "cast": (NOISE.astype(ml_dtypes.bfloat16).astype(np.float32), "B is A rounded to bfloat16"),
    "byte-order": (NOISE.byteswap(), "bytes are swapped"),
    "rope-layout": (PAIRS, "rotary pairs of heads of 8 are in halves in A, interleaved in B"),
    "transposed": (NOISE.T.copy(), "B is A transposed (axes 1, 0)"),
    "reshaped": (NOISE.reshape(8, 32), "the same elements in the same order, with other axes"),
    "padded": (np.pad(NOISE, ((0, 4), (0, 0))), "B has 4 more entries on axis 0, all zeros"),
    "norm-offset": (NOISE + np.float32(1), "B is A + 1"),
    "factor": (NOISE * np.float32(0.7), "B is A times 0.7"),
    "renamed": (OTHER, "B has A's other under this name"),
    "order": (NOISE[np.random.default_rng(2).permutation(16)], "the entries of axis 0 are in another order"),
    "moved-and-changed": (NOISE.T * np.float32(0.7), "transposed (axes 1, 0), and then B is A times 0.7"),
}


def case_of(built: np.ndarray) -> Case:
    a, b = lazy(NOISE), lazy(built)
    first = None
    if a.shape == b.shape:
        first = tuple(map(int, np.argwhere(~np.equal(NOISE, built))[0]))
    return Case("w", a, b, first, {"head_dim": 8}, Candidates({"w": a, "other": lazy(OTHER)}))


@np.errstate(invalid="ignore")
def holding(detector: Detector, case: Case) -> list[str]:
    """The causes of which every pair is the same, read to the last element."""
    built = detector.hypotheses(case) if detector.applies_to(case) else ()
    return [
        item.cause.text
        for item in built
        if all(
            np.allclose(
                left.read().astype(np.float64),
                right.read().astype(np.float64),
                rtol=1e-6 if item.ulps else 0,
                atol=0,
                equal_nan=True,
            )
            for left, right in item.pairs
        )
    ]


def test_every_detector_has_a_planted_case():
    assert BY_NAME.keys() == PLANTED.keys()
    assert len(BY_NAME) == len(DETECTORS)
    assert len({detector.rank for detector in DETECTORS}) == len(DETECTORS)


@pytest.mark.parametrize("name", PLANTED)
def test_detector_finds_only_its_cause(name: str):
    built, text = PLANTED[name]
    case = case_of(built)
    assert text in "\n".join(holding(BY_NAME[name], case))
    assert holding(BY_NAME[name], case_of(np.random.default_rng(3).random(built.shape, np.float32))) == []


@pytest.mark.parametrize("back", [False, True])
def test_causes_are_found_on_either_side(back: bool):
    for name in ("zeros", "nan", "truncated", "cast", "norm-offset"):
        built, _ = PLANTED[name]
        a, b = (lazy(built), lazy(NOISE)) if back else (lazy(NOISE), lazy(built))
        texts = holding(BY_NAME[name], Case("w", a, b, case_of(built).first))
        assert texts and all(text.startswith("A" if back else "B") for text in texts[:1]), (name, texts)


def test_tied_head_is_detected():
    wide = NOISE.reshape(8, 32)
    own = {"embed": lazy(wide), "head": lazy(wide.T.copy()), "other": lazy(OTHER.reshape(8, 32))}
    (text,) = [
        item.cause.text
        for item in tied("head", "A", own)
        if all(np.array_equal(left.read(), right.read()) for left, right in item.pairs)
    ]
    assert text == "it is A's embed"


@pytest.mark.parametrize(("name", "factor"), [("query", sqrt(8)), ("embed", 1 / 4.0), ("x", 4.0)])
def test_square_root_factor_is_explained(name: str, factor: float):
    case = Case(name, lazy(NOISE), lazy(NOISE * np.float32(factor)), (0, 0), {"head_dim": 8})
    (cause,) = (hypothese.cause for hypothese in BY_NAME["factor"].hypotheses(case))
    expected = {"query": "sqrt(8), the scale of the query", "embed": "1/sqrt(16), the scale of the embedding"}
    assert expected.get(name, "sqrt(16), where axis 0 has that length") in cause.text


# Two causes fit each of these: which is told must not depend on the list.
AMBIGUOUS = {
    "zeros from the second element on, and all zeros": (NOISE, np.zeros_like(NOISE), "zeros"),
    "one factor or one more": (np.ones((4, 4), np.float32), np.full((4, 4), 2, np.float32), "norm-offset"),
    "a column laid down": (NOISE.reshape(-1, 1), NOISE.reshape(-1), "transposed"),
    "rounded to zeros": (np.full((4, 4), 2.0**-140, np.float32), np.zeros((4, 4), np.float32), "zeros"),
    "another array, or entries in another order": (NOISE, NOISE[::-1].copy(), "renamed"),
    "another array, in another layout": (NOISE, PAIRS, "renamed"),
}


@settings(max_examples=10, deadline=None)
@given(order=st.permutations(DETECTORS))
def test_detector_order_does_not_change_the_result(order: list[Detector]):
    a = {name: lazy(mine) for name, (mine, _, _) in AMBIGUOUS.items()}
    b = {name: lazy(other) for name, (_, other, _) in AMBIGUOUS.items()}
    for side in (a, b):
        side |= {"upside down": lazy(NOISE[::-1].copy()), "in pairs": lazy(PAIRS)}
    both = Pairing(a, b)
    result = explain(diff(both, **PLENTY), both, detectors=order, **PLENTY)
    causes = {item.name: item.cause.name for item in result if item.cause}
    assert causes == {name: cause for name, (_, _, cause) in AMBIGUOUS.items()}


@pytest.mark.parametrize(
    ("names", "keys"),
    [
        (("a.b.c", "a.x.c"), ("b", "x")),
        (("a.b", "a"), ("a.b", "a")),
        (("a", "a.b"), ("a", "a.b")),
        (("a/b.c/d", "x/b.c/d"), ("a", "x")),
        (("a.b.c", "b.c"), ("a.b", "b")),
    ],
)
def test_differing_name_keys_are_found(names, keys):
    assert _different(*names) == keys
