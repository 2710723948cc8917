"""Explaining differences: every cause is planted in a converted golden model and named; none is made up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import sqrt
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.internals import (
    OrbaxWriter,
    Pairing,
    Stored,
    Tolerances,
    Zstd,
    align,
    diff,
    keystr,
    render,
    to_maxtext,
)
from support.stored_trees import write
from support.trees import Values, hugging_face, lazy, parameters_of, values_of

import ckpttools
from ckpttools import DTYPES, LazyArray, ModelOptions, ToMaxText, Tree
from ckpttools.compare.causes.axes import reshape, transposes
from ckpttools.compare.diff import ArrayDiff
from ckpttools.compare.explain import explain
from ckpttools.compare.measure import EXACT
from ckpttools.compare.renames import moves
from ckpttools.compare.samples import load_for_sampling
from ckpttools.testing.strategies import noise, shapes, stored

PLENTY = {"memory": 512 << 20, "jobs": 2}
BF16, F32 = DTYPES["bfloat16"], DTYPES["float32"]
LAYERS = range(4)
SCANS = pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unscanned"])
Edit = Callable[[Values], None]


def numbered(name: str) -> list[str]:
    """Names of an array in all layers."""
    return [f"decoder/layers_{k}/{name}" for k in LAYERS]


QUERY, KEY, VALUE = (f"self_attention/{name}/kernel" for name in ("query", "key", "value"))
GATE, UP, DOWN = (f"mlp/{name}/kernel" for name in ("wi_0", "wi_1", "wo"))


def compared(a: Tree, b: Tree, tolerances: Tolerances = EXACT) -> dict[str, ArrayDiff]:
    both = align(a, b)
    result = diff(both, tolerances, **PLENTY)
    return {each.name: each for each in explain(result, both, **PLENTY)}


def explained(a: Mapping[str, LazyArray], b: Mapping[str, LazyArray]) -> tuple[ArrayDiff, ...]:
    both = Pairing(a, b)
    return explain(diff(both, **PLENTY), both, **PLENTY)


def causes(result: Mapping[str, ArrayDiff]) -> dict[str, str | None]:
    """Names of what differs -> names of causes."""
    return {name: each.cause and each.cause.name for name, each in result.items() if not each.is_equal}


def each(name: str, function: Callable[[np.ndarray], np.ndarray]) -> Edit:
    def edit(values: Values) -> None:
        for full in [full for full in values if full.endswith(name)]:
            values[full] = function(values[full])

    return edit


def swap(first: str, second: str) -> Edit:
    def edit(values: Values) -> None:
        for mine, other in zip(numbered(first), numbered(second), strict=True):
            values[mine], values[other] = values[other], values[mine]

    return edit


def times(factor: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda array: (array.astype(np.float32) * np.float32(factor)).astype(array.dtype)


def with_zero_tail(array: np.ndarray) -> np.ndarray:
    flat = array.copy().reshape(-1)
    flat[flat.size // 3 :] = 0
    return flat.reshape(array.shape)


def as_matrix_turned(array: np.ndarray) -> np.ndarray:
    """A square projection of Hugging Face that was not transposed."""
    matrix = array.reshape(array.shape[0], -1)
    return np.ascontiguousarray(matrix.T).reshape(array.shape)


def through(dtype: type) -> Callable[[np.ndarray], np.ndarray]:
    return lambda array: array.astype(dtype).astype(array.dtype)


PLANTED: dict[str, tuple[str, Edit, list[str], str]] = {
    "transposed square": ("llama3.1", each(QUERY, as_matrix_turned), numbered(QUERY), "transposed"),
    "axes in another order": (
        "llama3.1",
        each(GATE, lambda array: np.ascontiguousarray(array.T)),
        numbered(GATE),
        "transposed",
    ),
    "other axes": ("llama3.1", each(QUERY, lambda a: a.reshape(64, 64)), numbered(QUERY), "reshaped"),
    "gate and up": ("llama3.1", swap(GATE, UP), numbered(GATE) + numbered(UP), "swapped"),
    "key and value": ("llama3.1", swap(KEY, VALUE), numbered(KEY) + numbered(VALUE), "swapped"),
    "query scale missing": ("llama3.1", each(QUERY, times(sqrt(16))), numbered(QUERY), "query-scale"),
    "query scale twice": ("llama3.1", each(QUERY, times(1 / sqrt(16))), numbered(QUERY), "query-scale"),
    "some factor": ("llama3.1", each(DOWN, times(0.3)), numbered(DOWN), "factor"),
    "norm": (
        "gemma3",
        each("query_norm/scale", lambda array: array - np.float32(1)),
        [f"decoder/layers_{k}/self_attention/query_norm/scale" for k in range(8)],
        "norm-offset",
    ),
    "embedding": (
        "gemma2",
        each("token_embedder/embedding", times(1 / sqrt(64))),
        ["token_embedder/embedding"],
        "embedding-scale",
    ),
    "zeros": ("llama3.1", each(UP, np.zeros_like), numbered(UP), "zeros"),
    "nan": ("llama3.1", each(UP, lambda array: np.full_like(array, np.nan)), numbered(UP), "nan"),
    "truncated": ("llama3.1", each(DOWN, with_zero_tail), numbered(DOWN), "truncated"),
    "byte order": (
        "llama3.1",
        each(KEY, lambda array: array.view(np.uint16).byteswap().view(array.dtype)),
        numbered(KEY),
        "byte-order",
    ),
    "heads": ("llama3.1", each(QUERY, lambda a: a[:, [2, 0, 3, 1]]), numbered(QUERY), "order"),
    "cast": ("llama3.1", each(VALUE, through(ml_dtypes.float8_e4m3fn)), numbered(VALUE), "cast"),
    "another dtype": (
        "llama3.1",
        each(VALUE, lambda array: array.astype(ml_dtypes.float8_e4m3fn)),
        numbered(VALUE),
        "cast",
    ),
}


class TestPlantedCauses:
    """Each cause, in a converted model against the Hugging Face one it was made from."""

    @SCANS
    @pytest.mark.parametrize("what", PLANTED)
    def test_planted_cause_is_named(self, what: str, scan: bool):
        family, edit, names, cause = PLANTED[what]
        if scan and family != "llama3.1":
            pytest.skip("layers of several kinds are not stacked in one")
        values = values_of(family)
        edit(values)
        here, there = hugging_face(family), parameters_of(values, scan=scan)
        if scan or family != "llama3.1":
            assert causes(compared(here, there)) == dict.fromkeys(names, cause)
        # And the other way round.
        if not scan:
            assert causes(compared(there, here)) == dict.fromkeys(names, cause)

    @SCANS
    @pytest.mark.parametrize("family", ["llama3.1", "mistral-7b"])
    def test_rope_layout_is_explained(self, family: str, scan: bool):
        hf = hugging_face(family)
        other = "halves" if family == "llama3.1" else "interleaved"
        built = to_maxtext(hf, ToMaxText(scan=scan, model=ModelOptions(rope_layout=other))).state
        result = compared(hf, built)
        assert causes(result) == dict.fromkeys([*numbered(QUERY), *numbered(KEY)], "rope-layout")
        own = "interleaved" if other == "halves" else "halves"
        for each_found in result.values():
            if each_found.cause:
                advice = render(each_found.cause.advice)
                assert f'rope_layout="{own}"' in advice
                assert "the Hugging Face model that B came from (or is)" in advice

    def test_last_axis_is_one_head_of_any_width(self):
        """Where no size is known, and 48 is none of the usual widths; on other axes it is any order."""
        pairs = np.random.default_rng(1).random((64, 48), np.float32)
        halves = pairs.reshape(64, 24, 2).swapaxes(1, 2).reshape(64, 48)
        for a, b, cause, text in (
            (pairs, halves, "rope-layout", "heads of 48 are interleaved in A, in halves in B"),
            (pairs.T, halves.T, "order", "entries of axis 0 are in another order"),
        ):
            result = compared(*(Tree({("w",): lazy(each)}) for each in (a, b)))["w"].cause
            assert result is not None and (result.name, text in result.text) == (cause, True), result

    @SCANS
    def test_shifted_layers_are_explained(self, scan: bool):
        values = values_of("llama3.1")
        names = [name.removeprefix("decoder/layers_0/") for name in values if "layers_0" in name]
        for name in names:
            for k in reversed(LAYERS[1:]):
                values[f"decoder/layers_{k}/{name}"] = values[f"decoder/layers_{k - 1}/{name}"]
        result = compared(hugging_face("llama3.1"), parameters_of(values, scan=scan))
        expected = {f"decoder/layers_{k}/{name}" for name in names for k in LAYERS[1:]}
        assert causes(result) == dict.fromkeys(expected, "shifted")
        assert {e.cause.text for e in result.values() if e.cause} == {
            "layers are shifted: number n in B is number n-1 in A"
        }

    def test_reordered_layers_are_explained(self):
        values = values_of("llama3.1")
        layer = {k: {n: v for n, v in values.items() if f"layers_{k}/" in n} for k in LAYERS}
        for k, theirs in zip(LAYERS, (2, 0, 3, 1), strict=True):
            for name in layer[k]:
                values[name] = layer[theirs][name.replace(f"layers_{k}/", f"layers_{theirs}/")]
        result = compared(hugging_face("llama3.1"), parameters_of(values))
        assert set(causes(result).values()) == {"permuted"}
        assert len(causes(result)) == 4 * 9
        assert "0 is 2, 1 is 0, 2 is 3, 3 is 1" in result[numbered(GATE)[0]].cause.text

    @pytest.mark.parametrize("filled", [True, False])
    def test_padded_vocabulary_is_explained(self, filled: bool):
        hf = hugging_face("llama3.2-tied")
        values = values_of("llama3.2-tied", pad_vocab=320)
        if not filled:
            values["token_embedder/embedding"][-64:] = 1
        result = compared(hf, parameters_of(values))
        assert causes(result) == {"token_embedder/embedding": "padded"}
        assert ("all zeros" in result["token_embedder/embedding"].cause.text) == filled
        assert "B has 64 more entries on axis 0" in result["token_embedder/embedding"].cause.text

    def test_tied_head_is_explained(self):
        values = values_of("llama3.2-tied")
        values["decoder/logits_dense/kernel"] = np.ascontiguousarray(values["token_embedder/embedding"].T)
        result = compared(hugging_face("llama3.2-tied"), parameters_of(values))
        assert causes(result) == {"decoder/logits_dense/kernel": "tied"}

    def test_constants_are_not_tied(self):
        zeros = {f"{name}.lora_B": np.zeros((32, 32), np.float32) for name in "ab"}
        a, b = {"w": np.ones((4, 4), np.float32), **zeros}, {"w": np.ones((4, 4), np.float32)}
        assert set(causes(compared(parameters_of(a), parameters_of(b))).values()) == {None}

    def test_constants_are_not_renamed(self):
        """Norms and biases often are all ones or zeros: that two are equal does not make them the same."""
        noise = np.random.default_rng(0).standard_normal(64).astype(np.float32)
        a = {"layers_0/scale": noise, "layers_1/scale": np.ones_like(noise)}
        b = {"layers_0/scale": np.ones_like(noise), "layers_1/scale": np.ones_like(noise)}
        assert causes(compared(parameters_of(a), parameters_of(b))) == {"layers_0/scale": None}

    @pytest.mark.parametrize("dtypes", [("bfloat16", "float16"), ("float16", "bfloat16")], ids=str)
    @pytest.mark.parametrize("back", [False, True])
    def test_casts_between_incomparable_dtypes_are_explained(self, dtypes: tuple[str, str], back: bool):
        mine, other = (DTYPES[name].numpy for name in dtypes)
        a = (np.random.default_rng(0).standard_normal((512, 512)) * 0.02).astype(mine)
        b = a.astype(other).astype(mine) if back else a.astype(other)
        assert causes(compared(parameters_of({"w": a}), parameters_of({"w": b}))) == {"w": "cast"}

    @pytest.mark.parametrize("offset", [1, -1])
    def test_rounded_offset_is_explained(self, offset: int):
        rng = np.random.default_rng(0)
        a = (rng.standard_normal(512) * 0.1 + 0.3).astype(DTYPES["bfloat16"].numpy)
        b = (a.astype(np.float32) + offset).astype(a.dtype)
        assert causes(compared(parameters_of({"norm/scale": a}), parameters_of({"norm/scale": b}))) == {
            "norm/scale": "norm-offset"
        }

    def test_rounding_is_not_an_offset(self):
        rng = np.random.default_rng(0)
        a = rng.uniform(1000, 2000, 512).astype(DTYPES["bfloat16"].numpy)
        b = (a.view(np.uint16) + rng.integers(0, 2, 512).astype(np.uint16)).view(a.dtype)
        assert causes(compared(parameters_of({"w": a}), parameters_of({"w": b}))) == {"w": None}

    def test_rounding_through_float32_is_explained(self):
        a = np.random.default_rng(0).standard_normal((64, 64))
        b = a.astype(np.float32).astype(np.float64)
        result = compared(parameters_of({"w": a}), parameters_of({"w": b}))["w"]
        assert result.cause is not None and result.cause.text == "B is A rounded to float32"

    def test_hugging_face_pairs_are_explained(self):
        """Lengths come from the configuration, as no names are mapped."""
        hf = hugging_face("llama3.1")
        changes: dict[str, Callable[[np.ndarray], np.ndarray]] = {
            "q_proj.weight": times(sqrt(16)),
            "k_proj.weight": lambda array: array.reshape(-1, 2, 8, 64).swapaxes(1, 2).reshape(array.shape),
        }
        leaves = dict(hf)
        for path, array in hf.arrays.items():
            for end, change in changes.items():
                if keystr(path).endswith(end):
                    leaves[path] = lazy(change(array.read()))
        result = causes(compared(hf, Tree(leaves, hf.metadata)))
        layers = [f"model.layers.{k}.self_attn." for k in LAYERS]
        assert result == {f"{each}q_proj.weight": "query-scale" for each in layers} | {
            f"{each}k_proj.weight": "rope-layout" for each in layers
        }

    def test_model_without_an_axis_is_explained(self):
        """DeepSeek V2 Lite has no low rank for its queries: that length is 0."""
        hf = hugging_face("deepseek2")
        leaves = {
            path: lazy(times(0.25)(leaf.read())) if keystr(path).endswith("q_proj.weight") else leaf
            for path, leaf in hf.items()
        }
        result = causes(compared(hf, Tree(leaves, hf.metadata)))
        assert result and set(result.values()) <= {"factor", "query-scale"}

    def test_combined_causes_are_explained(self):
        """Queries of one family converted with the rows of another: neither scaled nor interleaved."""
        values = values_of("llama3.1", model=ModelOptions(rope_layout="halves"))
        each(QUERY, times(4))(values)
        result = compared(hugging_face("llama3.1"), parameters_of(values))
        assert causes(result) == dict.fromkeys(numbered(KEY), "rope-layout") | dict.fromkeys(
            numbered(QUERY), "rope-layout+query-scale"
        )

    def test_cause_in_one_layer_is_explained(self):
        values = values_of("llama3.1")
        name = numbered(UP)[2]
        values[name] = np.zeros_like(values[name])
        assert causes(compared(hugging_face("llama3.1"), parameters_of(values))) == {name: "zeros"}

    def test_different_causes_in_layers_are_explained(self):
        values = values_of("llama3.1")
        first, second, third, fourth = numbered(UP)
        values[first] = np.zeros_like(values[first])
        values[third] = times(3)(values[third])
        random = np.random.default_rng(0).standard_normal(values[second].shape)
        values[second] = random.astype(values[second].dtype)
        result = causes(compared(hugging_face("llama3.1"), parameters_of(values)))
        assert result == {first: "zeros", second: None, third: "factor"}
        assert fourth not in result


def test_sample_only_cause_is_rejected():
    """All but one element agree with a cause."""
    truth = np.random.default_rng(0).standard_normal((300, 300)).astype(np.float32)
    for built in (truth.T.copy(), truth * np.float32(3), truth + np.float32(1), np.zeros_like(truth)):
        built[150, 77] += 0.5
        a, b = {"w": lazy(truth)}, {"w": lazy(built)}
        (result,) = explained(a, b)
        assert result.outcome == "differs" and result.cause is None


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e5m2"])
def test_factor_is_found_in_every_dtype(dtype: str):
    truth = np.random.default_rng(0).standard_normal((64, 32)).astype(DTYPES[dtype].numpy)
    built = (truth.astype(np.float64) * 1.7).astype(truth.dtype)
    a, b = {"w": lazy(truth)}, {"w": lazy(built)}
    (result,) = explained(a, b)
    assert result.cause is not None and result.cause.name == "factor"


@settings(max_examples=40)
@given(pair=st.tuples(*[st.sampled_from(sorted(DTYPES))] * 2), seed=st.integers(0, 99), other=st.booleans())
def test_unrelated_dtype_pairs_have_no_cause(pair: tuple[str, str], seed: int, other: bool):
    """Whatever is compared with whatever: no cause is looked for where it makes no sense."""
    shapes_of = ((8, 6), (12, 4) if other else (8, 6))
    sides = [
        stored(noise(shape, DTYPES[name], seed + k), DTYPES[name])
        for k, (name, shape) in enumerate(zip(pair, shapes_of, strict=True))
    ]
    a, b = ({"w": each} for each in sides)
    (result,) = explained(a, b)
    assert result.cause is None


def test_scalar_constant_is_no_evidence_of_reshaping():
    sides = [{"w": lazy(np.full(shape, 0.5, np.float32))} for shape in ((8, 6), (12, 4))]
    (result,) = explained(*sides)
    assert result.outcome == "shape"
    assert result.cause is None


def test_encoded_arrays_are_sampled_in_memory_if_they_fit(tmp_path: Path):
    truth = np.random.default_rng(0).standard_normal((1024, 1024)).astype(np.float32)
    for name, values in (("a", truth), ("b", truth.T)):
        write(Tree({("w",): lazy(values)}), OrbaxWriter(compression=Zstd(1)), tmp_path / name)
    a, b = (
        {keystr(path): array for path, array in ckpttools.open(tmp_path / name).arrays.items()}
        for name in "ab"
    )
    (result,) = explained(a, b)
    assert result.cause is not None and result.cause.name == "transposed"
    copy = load_for_sampling(a["w"], truth.nbytes)
    assert isinstance(copy, Stored) and np.array_equal(copy.read(), truth)
    assert load_for_sampling(a["w"], truth.nbytes - 1) is a["w"]
    assert load_for_sampling(copy, truth.nbytes) is copy


PERTURBATIONS: dict[str, Callable[[np.ndarray, np.random.Generator], np.ndarray]] = {
    "noise": lambda a, r: a + r.standard_normal(a.shape) * 0.3,
    "small noise": lambda a, r: a * (1 + r.standard_normal(a.shape) * 0.02),
    "other numbers": lambda a, r: r.standard_normal(a.shape),
    "some elements": lambda a, r: np.where(r.random(a.shape) < 0.2, r.standard_normal(a.shape), a),
    "some zeros": lambda a, r: np.where(r.random(a.shape) < 0.3, 0, a),
    "some NaN": lambda a, r: np.where(r.random(a.shape) < 0.3, np.nan, a),
    "a row": lambda a, r: np.concatenate([r.standard_normal(a[:1].shape), a[1:]]),
}


@settings(max_examples=25)
@given(
    kind=st.sampled_from(sorted(PERTURBATIONS)),
    shape=st.sampled_from([(32,), (8, 8), (16, 4), (64, 4, 16), (6, 2, 8), (2, 3, 4, 8)]),
    dtypes=st.tuples(*[st.sampled_from(["float32", "bfloat16", "float16", "float64"])] * 2),
    seed=st.integers(0, 10_000),
)
def test_unrelated_arrays_have_no_cause(
    kind: str, shape: tuple[int, ...], dtypes: tuple[str, str], seed: int
):
    random = np.random.default_rng(seed)
    values = [random.standard_normal(shape) for _ in range(3)]
    changed = PERTURBATIONS[kind](values[0], random)
    a = {f"layers_{k}": lazy(each.astype(DTYPES[dtypes[0]].numpy)) for k, each in enumerate(values)}
    b = dict(a) | {"layers_0": lazy(changed.astype(DTYPES[dtypes[1]].numpy))}
    result = explained(a, b)
    assert [each.cause for each in result] == [None] * 3


@given(shape=shapes(min_rank=1, max_rank=4, limit=400), seed=st.integers(0, 99), data=st.data())
def test_reshapes_and_transposes_match_numpy(shape: tuple[int, ...], seed: int, data: st.DataObject):
    truth = noise(shape, BF16, seed)
    array = stored(truth, BF16)
    target = data.draw(st.permutations(shape)) if len(shape) < 3 else (shape[0] * shape[1], *shape[2:])
    built = reshape(array, tuple(target))
    if built is not None:
        assert np.array_equal(built.read().view(np.uint16), truth.reshape(target))
    for turned, _ in transposes(array, tuple(data.draw(st.permutations(shape)))):
        assert sorted(turned.read().view(np.uint16).reshape(-1)) == sorted(truth.reshape(-1))


def test_moves_are_described():
    assert {each.text for each in moves({"a.wi_0.k": "a.up.k", "a.up.k": "a.wi_0.k"}).values()} == {
        "up and wi_0 are swapped"
    }
    cycle = {"l/q/w": "l/k/w", "l/k/w": "l/v/w", "l/v/w": "l/q/w"}
    assert moves(cycle)["l/q/w"].text == "B's q is A's k"
    assert (
        moves({"experts.3.w": "experts.5.w"})["experts.3.w"].text
        == "experts are shifted: number n in B is number n+2 in A"
    )
