"""`ckpt cat` and `ckpttools.cat`, compared with numpy itself."""

import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from support.command_line import ckpt
from support.trees import lazy

import ckpttools
from ckpttools import MemoryBudgetError, NoSuchPathError, Text, Tree, UsageError

EMBEDDING = np.random.default_rng(0).normal(size=(300, 40)).astype("f4")
SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.1])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    arrays = {
        "model.embed.weight": EMBEDDING,
        "model.norm.weight": np.arange(64).astype(ml_dtypes.bfloat16),
        "special": SPECIAL,
    }
    save_file(arrays, tmp_path / "model.safetensors")
    return tmp_path


@st.composite
def shapes_with_index(draw: st.DrawFn) -> tuple[tuple[int, ...], str]:
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)))
    keys = []
    for length in shape[: draw(st.integers(0, len(shape)))]:
        bound = st.none() | st.integers(-length - 1, length + 1)
        step = st.none() | st.integers(-3, 3).filter(bool)
        slices = st.tuples(bound, bound, step).map(
            lambda parts: ":".join("" if part is None else str(part) for part in parts)
        )
        keys.append(draw(st.integers(-length - 1, length).map(str) | slices))
    if draw(st.booleans()):
        keys.insert(draw(st.integers(0, len(keys))), "...")
    return shape, ", ".join(keys)


@given(shapes_with_index(), st.sampled_from(("64MiB", "1GiB")))
def test_cat_selects_the_same_values_as_numpy(case, memory):
    shape, index = case
    values = np.arange(np.prod(shape), dtype="i4").reshape(shape)
    tree = Tree({("x",): lazy(values)})
    try:
        expected = eval(f"values[{index or '...'}]", {"values": values})
    except IndexError:
        with pytest.raises(UsageError, match="invalid index for x"):
            ckpttools.cat(tree, "x", index=index)
        return
    report = ckpttools.cat(tree, f"x[{index}]", memory=memory, full=True)
    assert report.values == expected.tolist()
    assert report.selected_shape == expected.shape


@given(st.lists(st.integers(1, 20), min_size=1, max_size=3).map(tuple))
def test_excerpt_prints_like_numpy(tmp_path_factory, shape):
    values = np.random.default_rng(1).normal(size=shape).astype("f4")
    directory = tmp_path_factory.mktemp("model")
    save_file({"x": values}, directory / "model.safetensors")
    printed = ckpt("cat", directory, "x", COLUMNS="90").stdout.split("\n\n", 1)[1]
    assert printed == np.array2string(values, max_line_width=90, threshold=1000) + "\n"


def test_cat_reads_only_the_selected_region(tmp_path):
    # 100 GB of holes, of which the command may hold 64 MiB.
    shape = (1_000_000, 25_000)
    header = json.dumps({"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4 * shape[0] * shape[1]]}})
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    os.truncate(file, file.stat().st_size + 4 * shape[0] * shape[1])
    assert ckpttools.cat(tmp_path, "x[-3, 10:20]", memory="64MiB").values == [0.0] * 10
    assert ckpttools.cat(tmp_path, "x[::100000, ::5000]", memory="64MiB").values == [[0.0] * 5] * 10
    assert np.shape(ckpttools.cat(tmp_path, "x", memory="64MiB").values) == (7, 7)


def test_statistics_cover_only_the_selection(model):
    report = ckpttools.cat(model, "model.embed.weight[::7, 3]", stats=True)
    expected = EMBEDDING[::7, 3].astype("f8")
    assert report.statistics.elements == len(expected)
    assert report.statistics.min == expected.min() and report.statistics.max == expected.max()
    assert report.statistics.mean == pytest.approx(expected.mean())
    assert report.statistics.std == pytest.approx(expected.std())


def test_npy_file_has_the_selected_values(model, tmp_path):
    ckpt("cat", model, "model.embed.weight[5:9, ::3]", "-o", tmp_path / "x.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "x.npy"), EMBEDDING[5:9, ::3])
    done = ckpt("cat", model, "model.norm.weight", "-o", tmp_path / "norm.npy")
    assert "stored as float32, without loss" in done.stderr
    assert np.load(tmp_path / "norm.npy").tolist() == list(range(64))


def test_npy_file_is_never_replaced(model, tmp_path):
    (tmp_path / "x.npy").write_bytes(b"mine")
    done = ckpt("cat", model, "special", "-o", tmp_path / "x.npy")
    assert done.exit_code == 2 and (tmp_path / "x.npy").read_bytes() == b"mine"


def test_json_keeps_non_finite_values(model):
    report = json.loads(ckpt("cat", model, "special", "--json").stdout)
    assert report["values"] == ["NaN", "Infinity", "-Infinity", 0.1]


def test_near_names_are_suggested(model):
    with pytest.raises(NoSuchPathError, match=r"did you mean model.norm.weight"):
        ckpttools.cat(model, "norm.weight")
    with pytest.raises(NoSuchPathError, match=r"2 arrays below it, such as model.embed.weight"):
        ckpttools.cat(model, "model")


def test_values_that_do_not_fit_are_refused(tmp_path):
    save_file({"x": np.zeros((4_000_000,), "i1")}, tmp_path / "model.safetensors")
    with pytest.raises(MemoryBudgetError, match="4,000,000 values do not fit"):
        ckpttools.cat(tmp_path, "x", full=True, memory="128MiB")
    assert len(ckpttools.cat(tmp_path, "x", memory="128MiB").values) == 7


def test_quantized_weights_print_as_values_or_as_stored(tmp_path):
    source = Path(__file__).parents[2] / "fixtures/golden/qwen3/hf"
    ckpttools.quantize(source, tmp_path / "fp8")
    name = "model.layers.0.mlp.up_proj.weight[0, :8]"
    expected = np.array(ckpttools.cat(source, name).values)
    values = ckpttools.cat(tmp_path / "fp8", name)
    assert np.abs(np.array(values.values) - expected).max() < 0.05 * np.abs(expected).max()
    assert values.dtype == "bfloat16" and "float8_e4m3fn" in values.remarks[0]
    stored = ckpttools.cat(tmp_path / "fp8", name, raw=True)
    assert stored.dtype == "float8_e4m3fn" and max(map(abs, stored.values)) > 1


def test_strings_are_printed_as_text():
    assert ckpttools.cat(Tree({("a", 0): Text("hello")}), "a/0").values == "hello"


@pytest.mark.parametrize("options", [{"stats": True}, {"output": "x.npy"}, {"index": 0}])
def test_strings_support_no_statistics_indices_or_files(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="a/0 is not an array"):
        ckpttools.cat(Tree({("a", 0): Text("hello")}), "a/0", **options)
    assert not list(tmp_path.iterdir())
