"""Means of checkpoints: numbers against numpy's, the same bits however they are made, refusals."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from support.command_line import ckpt, run
from support.hf_models import write_llama
from support.internals import parse
from support.locations import DOCS, FIXTURES, GOLDEN_0_2_5, HF, TRAINED
from support.object_stores import files_in
from support.pages import run_page
from support.quantized_weights import fp4_experts, fp8_blocks, fp8_rows, int4, mxfp4, nvfp4
from support.stored_trees import contents
from support.trees import lazy, tree_with

import ckpttools
from ckpttools import (
    DTYPES,
    CheckpointError,
    ConfigError,
    CoverageError,
    FormatError,
    MappingError,
    Tree,
    UsageError,
)
from ckpttools.maxtext.average import Average
from ckpttools.testing.strategies import noise, stored
from ckpttools.transforms.mean_weights import DECAYS, MeanWeights

VISION = GOLDEN_0_2_5 / "qwen3-vl" / "hf"
WEIGHTS = st.lists(st.floats(-4, 4, width=16), min_size=1, max_size=6)
NAMES = ("bfloat16", "float16", "float32", "float64")


def mean_of(arrays, **options):
    """The mean of these numbers."""
    trees = [Tree({("w",): array}) for array in arrays]
    dtype = options.pop("dtype", None)
    return Average(MeanWeights(**options), dtype)(trees)["w"].read()


@st.composite
def terms(draw):
    """Arrays of one shape and several dtypes, of magnitudes that are not far apart, with weights."""
    shape = draw(st.sampled_from(((), (7,), (3, 5))))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    weights = [abs(w) + 0.5 for w in draw(WEIGHTS)]
    dtypes = [draw(st.sampled_from(NAMES)) for _ in weights]
    return [rng.uniform(1, 9, shape).astype(DTYPES[d].numpy) for d in dtypes], weights


@settings(max_examples=40)
@given(terms(), st.sampled_from(NAMES[:3]))
def test_mean_is_exact_to_within_one_rounding(known, to):
    arrays, weights = known
    built = mean_of(map(lazy, arrays), weights=weights, dtype=DTYPES[to])
    exact = [Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    for location in np.ndindex(built.shape):
        truth = sum(w * Fraction(float(item[location])) for w, item in zip(exact, arrays, strict=True))
        # Numbers below 16 have a last digit of at most epsilon * 8; half of it is one rounding. Sums of six
        # numbers below 16 in float32 are off by less than a 500th of that of float16.
        assert abs(Fraction(float(built[location])) - truth) <= Fraction(DTYPES[to].epsilon) * 4 * (1 + 2**-9)


@settings(max_examples=25)
@given(
    st.sampled_from((*NAMES, "float8_e5m2")),
    st.integers(0, 99),
    WEIGHTS.map(lambda them: [abs(w) + 0.25 for w in them]),
)
@example("bfloat16", 1, [1.0] * 6)
@example("bfloat16", 1, [2e-45, 1e-42])
@example("float16", 1, [1e300, 1.0])
def test_mean_of_equal_arrays_is_the_array(name, seed, weights):
    dtype = DTYPES[name]
    bits = noise((4, 33), dtype, seed)
    values = bits.view(dtype.numpy)
    # Every NaN becomes the same one; float64 has no digits to spare.
    with np.errstate(invalid="ignore"):
        known = np.isfinite(values)
    weights = [1.0] * 2 if name == "float64" else weights
    if name == "float8_e5m2":
        with pytest.raises(MappingError, match="values with few bits"):
            mean_of([stored(bits, dtype)] * len(weights), weights=weights)
        return
    built = mean_of([stored(bits, dtype)] * len(weights), weights=weights).view(dtype.carrier)
    assert np.array_equal(built[known], bits[known])


LARGEST = float(np.finfo(np.float64).max)


@given(
    st.lists(
        st.tuples(st.floats(-LARGEST, LARGEST, allow_nan=False), st.floats(0.125, 2**40)),
        min_size=1,
        max_size=6,
    )
)
@example([(LARGEST, 1.0), (LARGEST, 1.0)])
@example([(LARGEST, 0.1), (LARGEST, 0.7), (LARGEST, 0.3)])
@example([(1.7e308, 3.0), (-1.7e308, 1.0)])
@example([(-LARGEST, 1e300), (-LARGEST, 1e300)])
def test_float64_mean_does_not_overflow(terms):
    values, weights = zip(*terms, strict=True)
    got = mean_of([lazy(np.array([value, 1.0])) for value in values], weights=list(weights))
    total = sum(map(Fraction, weights))
    exact = sum(Fraction(value) * Fraction(weight) for value, weight in terms) / total
    size = sum(abs(Fraction(value)) * Fraction(weight) for value, weight in terms) / total
    assert np.isfinite(got).all() and got[1] == pytest.approx(1)
    assert abs(Fraction(float(got[0])) - exact) <= (len(terms) + 2) * size / 2**53 + Fraction(1, 2**1070)


@pytest.mark.parametrize("shift", [0, 1, 700])
def test_float64_sum_overflows_only_if_the_result_does(shift):
    values = [LARGEST, LARGEST, -LARGEST]
    weights = [2.0**-shift] * 3
    got = mean_of([lazy(np.array([item])) for item in values], weights=weights, normalize=False)
    assert got == [LARGEST * 2.0**-shift]
    overflowing = mean_of([lazy(np.array([LARGEST]))] * 2, weights=[1.0, 1.0], normalize=False)
    assert np.isposinf(overflowing)


@pytest.mark.parametrize("weights", [[1.0, 1.0], [0.3, 0.7], [1e300, 1.0]])
def test_float64_mean_keeps_infinity_and_nan(weights):
    one, other = np.array([np.inf, -np.inf, np.nan, LARGEST]), np.array([1.0, LARGEST, 1.0, LARGEST])
    got = mean_of([lazy(one), lazy(other)], weights=weights)
    assert np.isposinf(got[0]) and np.isneginf(got[1]) and np.isnan(got[2]) and np.isfinite(got[3])


@given(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=9), st.sampled_from(sorted(DECAYS)))
def test_decay_weights_follow_the_learning_rate_curve(updates, decay):
    weights, total = MeanWeights(decay=decay).of(len(updates))
    states = np.cumsum(updates)
    rates = [DECAYS[decay](k / len(updates)) for k in range(len(updates))]
    assert np.dot(weights, states) / total == pytest.approx(np.dot(rates, updates), abs=1e-12)
    assert sum(weights) == pytest.approx(1) and min(weights) > 0


@given(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=9), st.floats(0, 0.999))
def test_moving_average_matches_training(states, decay):
    kept = states[0]
    for state in states[1:]:
        kept = decay * kept + (1 - decay) * state
    weights, total = MeanWeights(ema=decay).of(len(states))
    assert np.dot(weights, states) / total == pytest.approx(kept, abs=1e-12)


def test_sum_of_differences_is_computed():
    a, b, c = (np.float32([1, 2, 4]) * k for k in (1, 3, 5))
    built = mean_of(map(lazy, (a, b, c)), weights=[1, 0.5, -0.5], normalize=False)
    assert built.tolist() == (a + 0.5 * (b - c)).tolist()
    # Weights that float32 does not have, of products that it has.
    tiny = mean_of(
        [lazy(np.array([2.0**120], DTYPES["bfloat16"].numpy))] * 2, weights=[2.0**-160] * 2, normalize=False
    )
    assert tiny.tolist() == [2.0**-39]


def test_zero_weighted_values_do_not_affect_the_mean():
    odd = lazy(np.float32([np.nan, np.inf, 1]))
    one = lazy(np.float32([1, -0.0, 3]))
    assert mean_of([odd, one], weights=[0, 2]).tobytes() == one.read().tobytes()
    assert mean_of([odd, one, one], weights=[0, 1, -2], normalize=False).tolist() == [-1, 0, -3]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Three models of one shape, the second in other dtypes, and a run of the same as steps."""
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("seed-1", "seed-2", "last-seed")):
        write_llama(root / name, seed=seed, num_hidden_layers=2, dtype="float32" if seed == 1 else "bfloat16")
        ckpttools.hf_to_maxtext(root / name, root / "made")
        (root / "run/checkpoints").mkdir(parents=True, exist_ok=True)
        (root / "made/0").rename(root / f"run/checkpoints/{1000 * (seed + 1)}")
        (root / "made").rmdir()
    write_ema(root / "ema-run")
    return root


def write_ema(directory):
    """A training state with the average that optax.ema keeps."""
    rng = np.random.default_rng(0)
    model = {("decoder", "w"): (4, 3), ("decoder", "norm", "scale"): (4,)}
    values = {("step",): np.int32(7), ("opt_state", 1, "count"): np.int32(7)}
    for head in (("params", "params"), *(("opt_state", 0, name, "params") for name in ("mu", "nu"))):
        values |= {(*head, *path): rng.standard_normal(shape) for path, shape in model.items()}
    values |= {
        ("opt_state", 1, "ema", "params", *path): rng.standard_normal(shape) for path, shape in model.items()
    }
    values["opt_state", 0, "count"] = np.int32(7)
    wide = {path: np.asarray(item, np.float32 if item.ndim else np.int32) for path, item in values.items()}
    ckpttools.save(tree_with(wide, step=7), directory, format="orbax")


def test_average_page_is_correct(models, tmp_path, monkeypatch):
    for item in models.iterdir():
        (tmp_path / item.name).symlink_to(item)
    monkeypatch.chdir(tmp_path)
    run_page("average.md")
    (block,) = re.findall(r"```python\n(.*?)```", (DOCS / "average.md").read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(block, names)
    one, two = (load_file(models / name / "model.safetensors") for name in ("seed-1", "seed-2"))
    soup = load_file("soup/model.safetensors")
    for name, built in soup.items():
        expected = ((one[name].astype(np.float64) + two[name]) / 2).astype(np.float32)
        assert built.dtype == np.float32 and built.tobytes() == expected.tobytes(), name
    assert json.loads(Path("soup/config.json").read_text())["torch_dtype"] == "float32"
    mean, last = ckpttools.open("mean"), ckpttools.open("run/checkpoints/3000")
    assert mean.metadata.step == 3000 and mean.keys() == last.keys()
    kept, ema = ckpttools.open("ema-model"), ckpttools.open("ema-run")
    for path in (("decoder", "w"), ("decoder", "norm", "scale")):
        expected = ema["opt_state", 1, "ema", "params", *path].read()
        assert np.array_equal(kept["params", "params", *path].read(), expected)
    assert kept["step"].read() == 7 and not any("ema" in path for path in kept)


@pytest.mark.parametrize("format", ["safetensors", "orbax"])
def test_average_bytes_do_not_depend_on_tasks(models, tmp_path, format):
    paths = [models / name for name in ("seed-1", "seed-2", "last-seed")]
    for jobs, memory in ((1, "1GiB"), (4, "110MiB")):
        options = ["--jobs", jobs, "--memory", memory, "--to", format, "--weights", "1,2,5"]
        run("average", *paths, tmp_path / str(jobs), *options)
    assert contents(tmp_path / "1") == contents(tmp_path / "4")
    run(
        "plan",
        "average",
        *paths,
        tmp_path / "dealt",
        "--weights",
        "1,2,5",
        "--to",
        format,
        "--jobs",
        "1",
        "-o",
        tmp_path / "plan",
    )
    for part in ("0/2", "1/2"):
        run("run", tmp_path / "plan", "--part", part)
    run("run", tmp_path / "plan", "--publish")
    dealt, whole = (ckpttools.open(tmp_path / name) for name in ("dealt", "1"))
    assert all(dealt[path].read().tobytes() == array.read().tobytes() for path, array in whole.arrays.items())


def test_mean_of_training_states_averages_parameters(tmp_path):
    declared = run("average", TRAINED, TRAINED, tmp_path / "out", "--ema", "0.5")
    run("strip-optimizer", TRAINED, tmp_path / "stripped", "--keep-step")
    assert ckpt("diff", tmp_path / "out", tmp_path / "stripped").exit_code == 0
    assert "rounded once to" in declared


def test_checkpoint_with_weight_zero_is_not_read(models):
    paths = [models / "seed-1", models / "last-seed"]
    built = ckpttools.average.plan(paths[0], "nowhere", others=paths[1:], weights=[0, 1])
    assert not built.plan.notes.inexact
    assert {Path(source.path).parent.name for source in built.plan.sources} == {"last-seed"}


REFUSED = [
    (["seed-1"], 2, "an average needs at least two checkpoints"),
    (["seed-1", "seed-2", "--weights", "1"], 2, "each checkpoint needs a finite weight"),
    (["seed-1", "seed-2", "--weights", "1,-1"], 2, "add up to 0"),
    (["seed-1", "seed-2", "--weights", "1,x"], 2, "not a list of numbers"),
    (["seed-1", "seed-2", "--weights", "1e308,1e308"], 2, "overflows"),
    (["seed-1", "seed-2", "--weights", "1,nan"], 2, "a finite weight"),
    (["seed-1", "seed-2", "--weights", "0,-0", "--no-normalize"], 2, "all weights are 0"),
    (["seed-1", "seed-2", "--ema", "1"], 2, "between 0 and 1"),
    (["seed-1", "seed-2", "--ema", ".5", "--decay", "sqrt"], 2, "pass only one of them"),
    (["seed-1", "seed-2", "--last", "2"], 2, "steps can be selected only from one run"),
    (["run", "--steps", "1000..3000/500"], 2, "there are no steps 1500, 2500"),
    (["run", "--steps", "1000..3000/500"], 2, "expected some of 1000, 2000, 3000"),
    (["run", "--steps", "4000"], 2, "there is no step 4000"),
    (["run", "--steps", "2000"], 2, "got step 2000 of 1000, 2000, 3000"),
    (
        ["run", "--steps", "1..999999999999999/1"],
        2,
        "there are no steps 1, 2, 3, 4, 5, 6, 7, 8 and 999,999,999,999,988 more",
    ),
    (["run", "--steps", "1000..3000/x"], 2, "'1000..3000/x' names no steps"),
    (["run", "--steps", "1000..3000/0"], 2, "names no steps"),
    (["run", "--steps", "..3000/1000"], 2, "names no steps"),
    (["run", "--steps", "1" * 200], 2, "names no steps"),
    (["run", "--steps", "3000..1000/1000"], 2, "no steps are named"),
    (["run", "--steps", "1000..2000,2000.."], 2, "hint pass 1000,2000,3000 instead"),
    (["run", "--steps", "1000,2000", "--last", "2"], 2, "two options select steps"),
    (["seed-1", "--steps", "1000,2000"], 2, "has no steps"),
    (["run", "--steps", "4000.."], 2, "no finished steps in 4000.."),
    (["run", "--steps", "1000/2"], 2, "names no steps"),
    (["run", "--steps", "2000,1000"], 2, "in ascending order"),
    (["run", "--last", "4"], 2, "fewer finished steps"),
    (["nowhere", "--last", "2"], 2, "check the spelling of the path"),
    (["seed-1", "run"], 3, "extra"),
    (["seed-1", "--parameters", "ema"], 2, "ema does not exist in the state"),
    (["ema-run", "--parameters", "opt_state/0"], 3, "are not the parameters"),
]


@pytest.mark.parametrize(("words", "code", "declared"), REFUSED, ids=lambda item: str(item)[:40])
def test_invalid_averages_are_refused(models, tmp_path, words, code, declared):
    words = [models / word if (models / word).exists() else word for word in words]
    at = next((k for k, item in enumerate(words) if str(item).startswith("--")), len(words))
    output = run("average", *words[:at], tmp_path / "out", *words[at:], code=code)
    assert declared in " ".join(output.split()) and not (tmp_path / "out").exists()


def test_step_named_twice_counts_once(models, tmp_path):
    for steps in ([1000, 1000], [2000, 1000], "1000,1000"):
        with pytest.raises(UsageError, match="each step must be named once"):
            ckpttools.average(models / "run", tmp_path / "out", steps=steps)


QUANTIZED = [
    lambda rng: fp8_blocks(rng, (24, 16), (8, 8)),
    lambda rng: fp8_rows(rng, (24, 16)),
    lambda rng: nvfp4(rng, 8, 4, divides=False),
    lambda rng: int4(rng, 8, 4, 8),
    lambda rng: fp4_experts(rng, 8, 3),
    lambda rng: mxfp4(rng, 2, 8, 3),
]


@pytest.mark.parametrize("make", QUANTIZED)
def test_quantized_weights_are_dequantized_and_rounded_once(make):
    one, other = (make(np.random.default_rng(seed)) for seed in (1, 2))
    exact = (one.product.astype(np.float64) + other.product) / 2
    built = Average()([one.tree, other.tree])[one.name]
    assert built.dtype.name == "bfloat16"
    assert np.array_equal(built.read(), exact.astype(np.float32).astype(built.dtype.numpy))
    rest = {(name,): item for name, item in one.arrays.items() if name.endswith("_bias")}
    plain = tree_with({(one.name,): one.product, **rest})
    for mixed in ([plain, other.tree], [other.tree, plain]):
        mean = Average()(mixed)
        assert np.array_equal(mean[one.name].read(), exact.astype(np.float32))
        assert "dequantized" in str(mean.metadata.notes)
    codes = one.tree.with_metadata(config={})
    with pytest.raises(CheckpointError):
        Average()([codes, Tree({path: codes[path] for path in list(codes)[:1]}, codes.metadata)])


def test_integers_must_agree_to_be_averaged():
    one, other = (tree_with({("w",): np.float32([1]), ("table",): np.int32([1, k])}) for k in (2, 3))
    assert Average()([one, one])["table"].read().tolist() == [1, 2]
    with pytest.raises(MappingError, match="only floating-point arrays are averaged"):
        Average()([one, other])


def test_stored_average_needs_a_decision(models):
    state = {("params", "params", "w"): np.ones(3, np.float32), ("ema_params", "params", "w"): np.ones(3)}
    state |= {("opt_state", 0, m, "params", "w"): np.ones(3, np.float32) for m in ("mu", "nu")}
    state |= {("step",): np.int32(1), ("opt_state", 0, "count"): np.int32(1)}
    tree = tree_with({path: np.asarray(item) for path, item in state.items()})
    with pytest.raises(FormatError) as refused:
        Average()([tree, tree])
    assert "run `ckpttools.strip_optimizer` on each checkpoint first" in (refused.value.hint or "")
    assert Average(parameters="ema_params")([tree, tree])["params/params/w"].dtype.name == "float64"


def test_shapes_and_names_must_agree():
    one = tree_with({("w",): np.zeros((2, 3), np.float32), ("a",): np.zeros(2, np.float32)})
    other = tree_with({("w",): np.zeros((3, 2), np.float32), ("b",): np.zeros(2, np.float32)})
    with pytest.raises(CoverageError) as refused:
        Average()([one, other])
    assert all(
        part in str(refused.value) for part in ("b: missing", "a: extra", "w: [2, 3], expected [3, 2]")
    )


def test_duplicate_array_names_are_refused():
    tree = tree_with({("a.b",): np.zeros(2, np.float32), ("a", "b"): np.ones(2, np.float32)})
    with pytest.raises(FormatError, match="several arrays have one name"):
        Average()([tree, tree])


def test_errors_are_library_errors():
    with pytest.raises(UsageError, match="needs at least two"):
        ckpttools.average.plan(HF, "out")
    with pytest.raises(CheckpointError):
        ckpttools.average.plan(HF, HF, others=[HF])


def test_average_in_buckets_equals_local_average(gcs, tmp_path, monkeypatch):
    """Means, models that are cut and models of two: from a bucket to one, with the same bytes."""
    monkeypatch.chdir(tmp_path)
    run("synth", HF / "config.json", "noise", "--seed", 4)
    run("synth", VISION / "config.json", "eyes", "--seed", 4)
    locations = {"a": HF, "noise": tmp_path / "noise", "vision": VISION, "eyes": tmp_path / "eyes"}
    top = gcs.filled(
        {f"{name}/{file}": b for name, at in locations.items() for file, b in files_in(at).items()}
    )
    for number, words in enumerate(
        (
            ["average", "{a}", "{noise}", "{out}", "--weights", "1,3"],
            ["shrink", "{a}", "{out}", "--layers", "0,2", "--vocab", "100"],
            ["stitch", "{vision}", "{eyes}", "{out}"],
        )
    ):
        there = {name: f"{top}/{name}" for name in locations} | {"out": f"{top}/out{number}"}
        run(*[word.format(**there) for word in words])
        run(*[word.format(**locations, out=f"out{number}") for word in words])
        built = {name: (parse(there["out"]) / name).read_bytes() for name, _ in parse(there["out"]).walk()}
        assert built == files_in(tmp_path / f"out{number}")


def test_plan_locations_do_not_depend_on_the_directory(tmp_path, monkeypatch):
    for name, seed in (("here/a", 1), ("here/b", 2), ("there/b", 3)):
        run("synth", HF / "config.json", tmp_path / name, "--seed", seed)
    monkeypatch.chdir(tmp_path / "here")
    prepared = ckpttools.average.plan("a", "mean", others=["b"])
    ckpttools.write_plan(prepared, "plan")
    monkeypatch.chdir(tmp_path / "there")
    run("run", "../here/plan", "--part", "0/1")
    run("run", "../here/plan", "--publish")
    ckpttools.average(tmp_path / "here/a", tmp_path / "expected", others=[tmp_path / "here/b"])
    assert ckpt("diff", tmp_path / "here/mean", tmp_path / "expected").exit_code == 0


def test_weights_separated_by_spaces_are_refused(tmp_path):
    told = ckpt("average", HF, HF, tmp_path / "out", "--weights", "0.5", "0.3", "0.2").output
    assert "weights are separated by commas" in told and "--weights 0.5,0.3,0.2" in told


def test_averaging_adapters_warns_about_products(tmp_path):
    adapters = [FIXTURES / "peft/plain"] * 2
    told = " ".join(run("average", *adapters, tmp_path / "mean").split())
    assert "factors of adapters are averaged separately" in told
    models = [tmp_path / name for name in ("one", "other")]
    for model, adapter in zip(models, adapters, strict=True):
        run("adapter", "merge", FIXTURES / "peft/bases/llama-float32", adapter, model)
    assert "factors of adapters" not in run("average", *models, tmp_path / "of-models")


@pytest.mark.parametrize("lacking", [0, 1])
def test_average_notes_a_model_without_configuration(tmp_path, lacking):
    names = [tmp_path / "a", tmp_path / "b"]
    for seed, name in enumerate(names):
        write_llama(name, seed=seed, num_hidden_layers=1)
    (names[lacking] / "config.json").unlink()
    planned = ckpttools.average.plan(names[0], tmp_path / "mean", others=[names[1]])
    assert f"{names[lacking]} has no config.json" in " ".join(planned.plan.notes.remarks)
    ckpttools.average(names[0], tmp_path / "mean", others=[names[1]])
    config = (tmp_path / "mean" / "config.json").read_bytes()
    assert config == (names[1 - lacking] / "config.json").read_bytes()


def test_average_shows_the_default_rope_type(tmp_path):
    scaled = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
    write_llama(tmp_path / "a", num_hidden_layers=1, rope_scaling=scaled)
    write_llama(tmp_path / "b", num_hidden_layers=1, rope_parameters={"rope_type": "default"})
    with pytest.raises(ConfigError, match=r"rope_parameters\.rope_type: llama3 and default"):
        ckpttools.average(tmp_path / "a", tmp_path / "mean", others=[tmp_path / "b"])
