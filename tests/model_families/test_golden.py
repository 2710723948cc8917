"""Conversions equal the output of MaxText's own converter, leaf by leaf, bit by bit.

See fixtures/README.md.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file
from support.golden_data import (
    FAMILIES,
    GOLDEN_VERSION,
    LLAMA_LINE,
    MULTIMODAL,
    SCAN_NAMES,
    SOURCES,
    all_described,
    arrays_by_tensorstore,
    convert,
    described,
    golden_arrays,
    golden_checkpoint,
    golden_leaves,
    leaves_by_package,
)
from support.internals import dotted, family_of
from support.locations import GOLDEN

import ckpttools
from ckpttools import DTYPES, Resources, ToMaxText, plan_to_maxtext
from ckpttools.plan import plan as planning

SCANS = pytest.mark.parametrize("scan", [True, False], ids=SCAN_NAMES.get)
LLAMA_LIKE = pytest.mark.parametrize("family", LLAMA_LINE)
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)
EVERY_SOURCE = pytest.mark.parametrize(
    ("family", "source"), SOURCES, ids=["-".join(element) for element in SOURCES]
)
# A scanned leaf is a stack of what the unscanned ones are, so its tasks cut all that theirs cut: of the
# unscanned ones a plain model, one of experts and one whose layers are of several kinds.
UNSCANNED_TASKS = ("llama3.1", "mixtral-8x7b", "qwen3-next")
SMALL_MEMORY = 128 << 20


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Return the item of a golden model, converted once with little memory."""

    @cache
    def item(family: str, source: str = "hf", scan: bool = True) -> Path:
        options = ToMaxText(scan=scan, text_only=family in MULTIMODAL, maxtext=GOLDEN_VERSION)
        resources = Resources(SMALL_MEMORY, jobs=2)
        conversion = plan_to_maxtext(GOLDEN / family / source, options, resources)
        assert conversion.plan.projected_peak <= SMALL_MEMORY
        location = tmp_path_factory.mktemp(family) / "out"
        conversion.run(location)
        return location / "0" / "items"

    return item


@pytest.fixture
def small_tasks(monkeypatch):
    """Split the tiny arrays into many tasks of 3 KiB; a layer's matrix has 4 to 16 KiB."""
    monkeypatch.setattr(planning, "LARGEST_TASK", 3 << 10)
    monkeypatch.setattr(planning, "_SMALLEST_TASK", 1 << 10)


def assert_golden(item: Path, family: str, scan: bool) -> None:
    """Two independent readers find the content of MaxText's checkpoint."""
    assert leaves_by_package(ckpttools.open(item)) == golden_leaves(family, scan)
    assert all_described(arrays_by_tensorstore(item)) == golden_arrays(family, scan)


def contents(item: Path) -> dict[str, bytes]:
    names = ("d/data", "d/index", "manifest.ocdbt", "_METADATA")
    return {name: (item / name).read_bytes() for name in names}


class TestEqualToMaxText:
    @SCANS
    @EVERY_SOURCE
    def test_every_leaf_equals_golden_data(self, converted, family, source, scan):
        assert_golden(converted(family, source, scan), family, scan)

    @pytest.mark.parametrize(
        ("family", "source", "scan"),
        [(*source, True) for source in SOURCES] + [(family, "hf", False) for family in UNSCANNED_TASKS],
        ids=str,
    )
    def test_many_small_tasks_write_the_same_bytes(
        self, converted, tmp_path, small_tasks, family, source, scan
    ):
        """The bytes equal those of few tasks, for any memory limit."""
        options = ToMaxText(scan=scan, text_only=family in MULTIMODAL, maxtext=GOLDEN_VERSION)
        conversion = plan_to_maxtext(GOLDEN / family / source, options, Resources(jobs=2))
        assert len(conversion.plan.tasks) > 2 * len(conversion.plan.tree.arrays)
        conversion.run(tmp_path / "out")
        assert contents(tmp_path / "out" / "0" / "items") == contents(converted(family, source, scan))

    @SCANS
    @EVERY_FAMILY
    def test_tree_metadata_names_maxtext_leaves(self, converted, family, scan):
        """`_METADATA` names the leaves of MaxText's: `step` a number, `opt_state` an empty dict."""
        item = converted(family, scan=scan)
        entries = json.loads((item / "_METADATA").read_bytes())["tree_metadata"].values()
        kinds = {
            "/".join(key["key"] for key in entry["key_metadata"]): entry["value_metadata"]["value_type"]
            for entry in entries
        }
        expected = dict.fromkeys(golden_arrays(family, scan), "np.ndarray")
        assert kinds == expected | {"step": "scalar", "opt_state": "Dict"}

    @SCANS
    def test_tree_metadata_matches_maxtext(self, converted, scan):
        """Only the type differs: MaxText's arrays were on 16 devices, ours have none."""
        ours = converted("llama3.1", scan=scan)
        theirs = golden_checkpoint(scan) / "0" / "items"
        assert tree_entries(ours) == tree_entries(theirs)

    @SCANS
    def test_fixtures_match_recorded_digests(self, scan):
        arrays = arrays_by_tensorstore(golden_checkpoint(scan) / "0" / "items")
        assert all_described(arrays) == golden_arrays("llama3.1", scan)


def tree_entries(item: Path) -> dict[str, object]:
    entries = json.loads((item / "_METADATA").read_bytes())["tree_metadata"]
    for entry in entries.values():
        value = entry["value_metadata"]
        if value["value_type"] == "jax.Array":
            value["value_type"] = "np.ndarray"
        value.pop("write_shape", None)
    return entries


class TestOptions:
    """Options change only what they declare; undoing that by hand gives the golden leaves."""

    ROTATED = ("self_attention/query/kernel", "self_attention/key/kernel")

    @SCANS
    def test_interleaved_mistral_is_the_permuted_golden_model(self, tmp_path, scan):
        item = convert(tmp_path / "out", "mistral-7b", scan=scan, rope_layout="interleaved")
        arrays = arrays_by_tensorstore(item)
        halves = {
            path: as_halves(array) if path.endswith(self.ROTATED) else array for path, array in arrays.items()
        }
        golden = golden_arrays("mistral-7b", scan)
        assert all_described(halves) == golden
        changed = {path for path, array in arrays.items() if described(array) != golden[path]}
        assert changed == {path for path in arrays if path.endswith(self.ROTATED)}

    @SCANS
    def test_half_rotation_is_the_default_for_mistral(self, tmp_path, scan):
        item = convert(tmp_path / "out", "mistral-7b", scan=scan, rope_layout="halves")
        assert_golden(item, "mistral-7b", scan)

    @SCANS
    def test_llama_with_half_rotated_pairs_is_converted(self, tmp_path, scan):
        item = convert(tmp_path / "out", "llama3.1", scan=scan, rope_layout="halves")
        arrays = arrays_by_tensorstore(item)
        interleaved = {
            path: as_pairs(array) if path.endswith(self.ROTATED) else array for path, array in arrays.items()
        }
        assert all_described(interleaved) == golden_arrays("llama3.1", scan)

    def test_llama_with_half_rotated_pairs_matches_numpy(self, tmp_path):
        item = convert(tmp_path / "out", "llama3.1", scan=False, rope_layout="halves")
        arrays = arrays_by_tensorstore(item)
        tensors = load_file(GOLDEN / "llama3.1" / "hf" / "model.safetensors")
        for layer in range(4):
            theirs, ours = f"model.layers.{layer}.self_attn", f"params/params/decoder/layers_{layer}"
            query = tensors[f"{theirs}.q_proj.weight"].astype(np.float32) / np.float32(4)
            query = query.astype(ml_dtypes.bfloat16).reshape(4, 16, 64).transpose(2, 0, 1)
            key = tensors[f"{theirs}.k_proj.weight"].reshape(2, 16, 64).transpose(2, 0, 1)
            assert described(arrays[f"{ours}/self_attention/query/kernel"]) == described(query)
            assert described(arrays[f"{ours}/self_attention/key/kernel"]) == described(key)

    @LLAMA_LIKE
    def test_scan_axis_0_is_the_golden_leaf_with_its_axis_moved(self, tmp_path, family):
        arrays = arrays_by_tensorstore(convert(tmp_path / "out", family, scan_axis=0))
        stacked = [path for path in arrays if "/layers/" in path]
        assert all(arrays[path].shape[0] == 4 for path in stacked)
        moved = {path: np.moveaxis(arrays[path], 0, 1) for path in stacked}
        assert all_described(arrays | moved) == golden_arrays(family, True)

    @SCANS
    @LLAMA_LIKE
    def test_float32_is_an_exact_upcast(self, tmp_path, family, scan):
        item = convert(tmp_path / "out", family, scan=scan, dtype=DTYPES["float32"])
        arrays = arrays_by_tensorstore(item)
        step = arrays.pop("step")
        assert described(step) == golden_arrays(family, scan)["step"]
        assert {array.dtype.name for array in arrays.values()} == {"float32"}
        narrow = {path: array.astype(ml_dtypes.bfloat16) for path, array in arrays.items()}
        assert all_described(narrow | {"step": step}) == golden_arrays(family, scan)
        widened = {path: array.astype(np.float32) for path, array in narrow.items()}
        assert all_described(widened) == all_described(arrays)


def as_halves(array: np.ndarray) -> np.ndarray:
    """Reorder the last axis from (a0, b0, a1, b1, …) to (a0, a1, …, b0, b1, …)."""
    return np.concatenate([array[..., 0::2], array[..., 1::2]], axis=-1)


def as_pairs(array: np.ndarray) -> np.ndarray:
    """Apply the inverse of `as_halves`."""
    half = array.shape[-1] // 2
    return np.stack([array[..., :half], array[..., half:]], axis=-1).reshape(array.shape)


class TestReproducible:
    @SCANS
    def test_bytes_do_not_depend_on_jobs_or_tasks(self, tmp_path, monkeypatch, scan):
        one = convert(tmp_path / "one", "qwen2.5", scan=scan, jobs=1)
        monkeypatch.setattr(planning, "LARGEST_TASK", 1500)
        monkeypatch.setattr(planning, "_SMALLEST_TASK", 1000)
        four = convert(tmp_path / "four", "qwen2.5", scan=scan, jobs=4)
        assert contents(one) == contents(four)

    def test_sharded_sources_give_the_same_result(self, converted):
        single, sharded = (converted("llama3.1", name) for name in ("hf", "hf_sharded"))
        assert contents(single) == contents(sharded)


class TestReverseConversion:
    """The rows restore the Hugging Face tensors from MaxText's, bit by bit."""

    @SCANS
    @EVERY_SOURCE
    def test_mapped_arrays_are_described(self, family, source, scan):
        tree = ckpttools.open(GOLDEN / family / source)
        table = table_of(family, scan)
        left = table.to_left({dotted(path): array for path, array in tree.arrays.items()})
        right = table.to_right(left.arrays)
        expected = {key: entry for key, entry in hf_tensors(family).items() if key not in left.dropped}
        built = {key: rounded(array.read(), right.changed, key) for key, array in right.arrays.items()}
        assert all_described(built) == expected


def rounded(array: np.ndarray, changed: frozenset[str], key: str) -> np.ndarray:
    """Changed values are in bfloat16 like all golden tensors; MaxText's norms return in float32."""
    return array.astype(ml_dtypes.bfloat16) if key in changed else array


def table_of(name: str, scan: bool):
    config = json.loads((GOLDEN / name / "hf" / "config.json").read_bytes())
    family = family_of(config, "config.json")
    spelling = family.spelling_of(hf_tensors(name).keys())
    return family.table(config, "config.json", scan_axis=1 if scan else None, spelling=spelling)


def hf_tensors(family: str) -> dict[str, object]:
    with safe_open(GOLDEN / family / "hf" / "model.safetensors", "np") as file:
        return {name: described(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
