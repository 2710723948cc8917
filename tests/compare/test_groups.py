"""Differences by layer and by role: which layers moved most, and what is folded to a line."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from support.command_line import ckpt as any_end
from support.command_line import ended
from support.locations import HF, TRAIN
from support.stored_trees import write

import ckpttools
from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Path as TreePath
from ckpttools.array.tree import Tree
from ckpttools.compare.diff import ArrayDiff, diff
from ckpttools.compare.groups import by_layer, by_role, sorted_by
from ckpttools.core.dtypes import DTYPES
from ckpttools.digest.pairing import Pairing
from ckpttools.formats.orbax.write import OrbaxWriter
from ckpttools.formats.safetensors.write import SafetensorsWriter
from ckpttools.testing.strategies import stored

# The search for causes takes most of the time, and finds none here.
ckpt = partial(ended, "diff", "--no-explain")
measured = partial(ckpttools.diff, explain=False)
# How far each of the four layers of the golden models moves.
MOVES = (1, 2, 8, 3)


def moved(path: TreePath, array: LazyArray, random: np.random.Generator) -> LazyArray:
    """An array with noise, of another size in each layer; counters and random states are one further."""
    values = array.read()
    if array.dtype.is_whole:
        return stored((values + 1).astype(values.dtype).view(array.dtype.carrier), array.dtype)
    wide = values.astype(np.float32)
    size = np.full(wide.shape, 0.01 * (np.std(wide) or 1), np.float32)
    if "layers" in path:
        size *= np.array(MOVES).reshape(1, -1, *[1] * (wide.ndim - 2))
    elif ".layers." in str(path[-1]):
        size *= MOVES[int(str(path[-1]).split(".")[2])]
    other = (wide + size * random.standard_normal(wide.shape)).astype(values.dtype)
    return stored(other.view(array.dtype.carrier), array.dtype)


def tuned(tree: Tree) -> Tree:
    random = np.random.default_rng(0)
    return Tree(
        {
            path: moved(path, leaf, random) if isinstance(leaf, LazyArray) else leaf
            for path, leaf in tree.items()
        },
        tree.metadata,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two steps, the second of which has moved."""
    directory = tmp_path_factory.mktemp("run")
    shutil.copytree(TRAIN / "llama_scanned" / "1", directory / "1")
    tree = tuned(ckpttools.open(directory / "1"))
    write(tree.with_metadata(step=2), OrbaxWriter(), directory / "both")
    shutil.move(next((directory / "both").iterdir()), directory / "2")
    (directory / "both").rmdir()
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tuned") / "hf"
    write(tuned(ckpttools.open(HF)), SafetensorsWriter(), directory)
    return directory


def numbers(values: list[float]) -> LazyArray:
    return stored(np.array(values, np.float32).view(np.uint32), DTYPES["float32"])


def compared(a: dict[str, list[float]], b: dict[str, list[float]]) -> tuple[ArrayDiff, ...]:
    sides = ({name: numbers(values) for name, values in side.items()} for side in (a, b))
    return diff(Pairing(*sides), memory=512 << 20, jobs=1)


class TestGroups:
    @given(
        sizes=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=4), min_size=1, max_size=5),
        seed=st.integers(0, 99),
    )
    def test_layer_is_measured_as_one_vector(self, sizes: list[list[int]], seed: int):
        random = np.random.default_rng(seed)
        sides: list[dict[str, list[float]]] = [{}, {}]
        for side in sides:
            for layer, lengths in enumerate(sizes):
                for k, length in enumerate(lengths):
                    values = random.standard_normal(length).astype(np.float32)
                    side[f"model.layers.{layer}.w{k}"] = values.tolist()
        groups = {group.name: group for group in by_layer(compared(*sides))}
        assert groups.keys() == {f"model.layers.{layer}" for layer in range(len(sizes))}
        for layer, lengths in enumerate(sizes):
            x, y = (
                np.concatenate([side[f"model.layers.{layer}.w{k}"] for k in range(len(lengths))])
                for side in sides
            )
            group = groups[f"model.layers.{layer}"]
            assert group.distance is not None
            assert (group.arrays, group.num_differing, group.distance.elements) == (len(lengths),) * 2 + (
                x.size,
            )
            assert group.distance.rel_l2 == pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(x), rel=1e-9)
            assert group.distance.rms == pytest.approx(np.sqrt(np.mean((x - y) ** 2)), rel=1e-9)
            assert group.max_abs == pytest.approx(np.abs(x - y).max())

    def test_equal_layers_and_one_sided_arrays_are_not_listed(self):
        a = {"layers.0.w": [1, 2], "layers.1.w": [1, 2], "layers.2.w": [1], "norm": [4]}
        b = {"layers.0.w": [1, 2], "layers.1.w": [1, 3], "layers.3.w": [1], "norm": [5]}
        assert [group.name for group in by_layer(compared(a, b))] == ["layers.1", "norm"]

    def test_arrays_that_one_side_lacks_come_first(self):
        result = compared({"a": [1], "b": [1], "c": [1]}, {"a": [2], "b": [1], "d": [1]})
        assert [item.name for item in sorted_by(result, "rel-l2")] == ["c", "d", "a", "b"]
        assert [item.name for item in sorted_by(result, "name")] == ["a", "b", "c", "d"]

    def test_zero_arrays_and_nan_are_grouped(self):
        result = compared(
            {"layers.0.a": [0, 0], "layers.0.b": [1]}, {"layers.0.a": [0, 0], "layers.0.b": [np.nan]}
        )
        (group,) = by_layer(result)
        assert group.distance is not None and (group.distance.elements, group.max_abs) == (0, 0)
        assert [item.name for item in by_role(result)] == ["parameter"]


class TestReport:
    def test_layers_that_moved_most_come_first(self, run: Path, model: Path):
        for report in (measured(run / "1", run / "2"), measured(HF, model)):
            layers = [item for item in report.layers if "layers" in item.name]
            assert [int(item.name[-1]) for item in layers] == [2, 3, 1, 0]
            ratio = layers[0].distance.rel_l2 / layers[3].distance.rel_l2
            assert ratio == pytest.approx(8, rel=0.1)
            assert layers[0].most_different.startswith(layers[0].name)
            assert "moved most" in repr(report)

    def test_counts_agree_with_each_other(self, run: Path):
        for options in ({}, {"filter": "decoder/*"}, {"parameters": True}, {"filter": "*norm*"}):
            report = measured(run / "1", run / "2", **options)
            assert sum(report.outcomes.values()) == report.a.arrays == report.b.arrays
            assert sum(role.arrays for role in report.roles) == report.a.arrays
            assert report.a.stored_arrays == len(ckpttools.open(run / "1").arrays)

    def test_top_limits_arrays_of_each_role_and_layers(self, run: Path):
        report = measured(run / "1", run / "2", top=2)
        roles = [item.role for item in report.arrays]
        assert {role: roles.count(role) for role in roles} == {"parameter": 2, "optimizer": 2, "other": 2}
        assert [layer.name[-1] for layer in report.layers] == ["2", "3"]
        assert report.num_layers == 7
        assert measured(run / "1", run / "2", summary=True).arrays == ()

    @pytest.mark.parametrize(
        ("sort", "key"),
        [
            ("rel-l2", lambda item: -item.distance.rel_l2),
            ("max", lambda item: -item.deviation.max_abs),
        ],
    )
    def test_sort_orders_arrays(self, model: Path, sort: str, key):
        arrays = measured(HF, model, sort=sort).arrays
        assert list(map(key, arrays)) == sorted(map(key, arrays))

    def test_unknown_order_is_refused(self, model: Path):
        with pytest.raises(ckpttools.UsageError, match="rel-l2, max, name"):
            measured(HF, model, sort="size")


class TestCommand:
    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_layer_that_is_not_finite_comes_first(self, bad: float, tmp_path: Path):
        for name, values in (("a", [1.0, 2.0]), ("b", [bad, bad])):
            (tmp_path / name).mkdir()
            arrays = {
                "damaged": np.array(values, np.float32),
                "moved": np.array([5.0, name == "a"], np.float32),
            }
            save_file(arrays, tmp_path / name / "model.safetensors")
        for sort in ("rel-l2", "max"):
            output = ckpt(tmp_path / "a", tmp_path / "b", "--sort", sort, "--summary", code=1).output
            rows = output[output.index("layer ") :].splitlines()
            assert rows[1].split()[:2] == ["damaged", str(bad)] and rows[2].startswith("moved"), output

    @pytest.mark.parametrize("options", [(), ("--top", "10"), ("--sort", "rel-l2", "--top", "5")])
    def test_summary_fits_one_screen(self, run: Path, model: Path, options: tuple[str, ...]):
        for sides in ((run / "1", run / "2"), (HF, model)):
            output = ckpt(*sides, "--summary", *options, code=1, COLUMNS="80").output
            lines = [line for line in output.splitlines() if not line.startswith(("A  ", "B  "))]
            assert len(lines) + 2 <= 24 and max(map(len, lines)) <= 80
            first = next(line for line in lines if "layers" in line and "e-" not in line and "0." in line)
            assert first.split()[0][-1] == "2"

    def test_optimizer_gets_one_line(self, run: Path):
        lines = ckpt(run / "1", run / "2", code=1).output.splitlines()
        (line,) = (line for line in lines if "optimizer" in line)
        assert "80 of 80 arrays differ, rel L2 0." in line and "--filter 'opt_state/*' lists them" in line
        assert not any(line.startswith(("opt_state", "nnx_aux")) for line in lines)
        assert any(
            "/mu/" in line
            for line in ckpt(run / "1", run / "2", "--filter", "opt_state/*", code=1).output.splitlines()
        )

    def test_parameters_leave_no_line_of_the_optimizer(self, run: Path):
        output = ckpt(run / "1", run / "2", "--parameters", code=1).output
        assert "optimizer" not in output and "Different: 39 arrays with different values" in output

    def test_counts_of_a_filter_are_reconciled(self, run: Path):
        output = ckpt(run / "1", run / "2", "--filter", "decoder/*", code=1).output
        assert "69 arrays, 1.45 MB; compared: 38 arrays, 658 kB" in output
        assert "69 arrays become 204" in output
        assert "Different: 38 arrays with different values" in output

    def test_steps_of_distant_values_are_not_counted(self, run: Path):
        header, *rows = ckpt(run / "1", run / "2", "--parameters", code=1).output.splitlines()[7:18]
        assert "max ulp" in header
        assert not any("," in row.split()[-2] for row in rows)

    def test_arrays_are_listed_one_by_one_when_sorted(self, model: Path):
        output = ckpt(HF, model, "--sort", "name", code=1).output
        names = [line.split()[0] for line in output.splitlines() if ".self_attn.q_proj" in line]
        assert names == [f"model.layers.{k}.self_attn.q_proj.weight" for k in range(4)]

    def test_json_has_distances_layers_and_roles(self, run: Path):
        report = json.loads(ckpt(run / "1", run / "2", "--json", "--top", "3", code=1).output)
        assert {item["name"] for item in report["roles"]} == {"parameter", "optimizer", "other"}
        assert [len(report["layers"]), report["num_layers"]] == [3, 7]
        (first, *_) = (item for item in report["arrays"] if item["role"] == "parameter")
        assert first["distance"].keys() == {
            "elements",
            "norm_a",
            "norm_b",
            "norm_difference",
            "rel_l2",
            "rms",
            "cosine",
        }

    def test_run_alone_is_answered_with_two_steps(self, run: Path):
        result = any_end("diff", run)
        assert result.exit_code == 2
        assert f"compare two steps: ckpt diff {run}/1 {run}/2" in result.stderr
        assert "name the other checkpoint after it" in any_end("diff", HF).stderr
