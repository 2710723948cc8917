"""Every layout in which Orbax stores arrays, against what Orbax and tensorstore read in it."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest
from support.command_line import examine
from support.golden_data import described, golden_leaves, leaves_by_package
from support.internals import ReadOptions, entries_of, open_tree, parse
from support.locations import ORBAX
from support.orbax_items import EXPECTED, LITTLE, check_regions, write_item, zarr3

from ckpttools import CheckpointError, Empty, FormatError, LazyArray, StorageError, Text, UsageError
from ckpttools.diagnosis.examine import apply_fixes
from ckpttools.formats.orbax.format import FORMAT

F32 = np.dtype("float32")
ITEMS = pytest.mark.parametrize("name", EXPECTED)
COMPLETE = [name for name, leaves in EXPECTED.items() if not any("missing" in leaf for leaf in leaves)]
PARTIAL = [name for name in EXPECTED if name not in COMPLETE]
EMPTY = {"NamedTuple": "None"}


def as_expected(leaf) -> dict[str, object]:
    """A leaf as `expected.json` spells it."""
    if isinstance(leaf, Empty):
        return {"empty": leaf.kind}
    return {"text": leaf.value} if isinstance(leaf, Text) else described(leaf.read())


def stated(leaf: dict[str, object]) -> dict[str, object]:
    """An entry of `expected.json` without what stands in the tree's metadata."""
    kept = {key: value for key, value in leaf.items() if key not in ("keys", "scalar", "key_impl")}
    return kept | ({"empty": EMPTY.get(kept["empty"], kept["empty"])} if "empty" in kept else {})


class TestWrittenByOrbax:
    @ITEMS
    def test_paths_have_expected_classification(self, name):
        tree, leaves = open_tree(ORBAX / name), EXPECTED[name]
        assert list(tree) == [tuple(leaf["keys"]) for leaf in leaves]
        assert tree.metadata.scalars == {tuple(leaf["keys"]) for leaf in leaves if "scalar" in leaf}
        impls = {tuple(leaf["keys"]): leaf["key_impl"] for leaf in leaves if "key_impl" in leaf}
        assert tree.metadata.key_impls == impls
        assert tree.metadata.location == str(ORBAX / name)

    @pytest.mark.parametrize("name", COMPLETE)
    def test_values_match_orbax(self, name):
        tree = open_tree(ORBAX / name)
        got = [as_expected(leaf) for leaf in tree.values()]
        assert got == [stated(leaf) for leaf in EXPECTED[name]]

    @pytest.mark.parametrize("name", COMPLETE)
    def test_regions_match_the_array(self, name):
        for array in open_tree(ORBAX / name).arrays.values():
            check_regions(array, array.read(), 4)

    @pytest.mark.parametrize("name", PARTIAL)
    def test_missing_chunks_of_other_hosts_are_named(self, name):
        tree = open_tree(ORBAX / name)
        missing = 0
        for leaf, array in zip(EXPECTED[name], tree.values(), strict=True):
            if "missing" not in leaf:
                assert as_expected(array) == stated(leaf)
                continue
            missing += 1
            with pytest.raises(FormatError, match="a chunk is missing") as caught:
                array.read()
            assert str(ORBAX / name) in caught.value.location
            assert "/".join(map(str, leaf["keys"])) + ", chunk c/" in caught.value.location
            with pytest.raises(FormatError, match="a chunk is missing"):
                list(array.sources())
        assert missing

    @pytest.mark.parametrize(
        "layout", ["scanned_zarr2_ocdbt", "scanned_zarr2_noocdbt", "scanned_zarr3_noocdbt", "scanned_1dev"]
    )
    def test_layouts_of_maxtext_are_read(self, layout):
        tree = open_tree(ORBAX / f"llama3.1_{layout}")
        assert leaves_by_package(tree) == golden_leaves("llama3.1", True)
        assert (tree.metadata.step, tree.metadata.custom) == (0, {"scan_layers": True})

    def test_all_fixtures_have_expectations(self):
        assert {path.parent.relative_to(ORBAX).as_posix() for path in ORBAX.rglob("_METADATA")} == set(
            EXPECTED
        )

    def test_nested_values_are_restored(self):
        nested = open_tree(ORBAX / "tree_zoo").nested()
        assert (nested["empty_dict"], nested["empty_list"], nested["str"]) == ({}, [], "hello")
        assert isinstance(nested["list"], list)
        assert isinstance(open_tree(ORBAX / "bare_leaf").nested(), LazyArray)


class TestLocations:
    """A run, a step or an item may be given, however it is named."""

    @pytest.mark.parametrize(
        ("given", "step", "taken"),
        [
            ("cm_default", 5, "5/default"),
            ("cm_composite", 12, "ckpt_00000012/state"),
            ("cm_best_metrics", 2, "2/default"),
            ("maxtext_run", 4, "checkpoints/4/items"),
            ("maxtext_run/checkpoints", 4, "4/items"),
            ("maxtext_run/checkpoints/0", 0, "items"),
            ("maxtext_run/checkpoints/0/items", 0, ""),
            ("standard", None, ""),
            ("handmade_bare", None, ""),
            ("v1_save_pytree", None, "state"),
            ("v1_training", 0, "0/state"),
            ("v1_checkpointables/opt", None, ""),
            ("emergency/persistent", 2, "2/default"),
            ("emergency/local_host3", 3, "3/state"),
            ("unfinished_atomic_rename", 1, "1/items"),
            ("unfinished_commit_file", 1, "1/items"),
        ],
    )
    def test_opened_step_and_item_are_chosen(self, given, step, taken):
        metadata = open_tree(ORBAX / given).metadata
        assert (metadata.step, metadata.location) == (step, str(ORBAX / given / taken))

    def test_step_can_be_chosen(self):
        assert open_tree(ORBAX / "cm_default", ReadOptions(step=0)).metadata.custom == {"hello": 0}

    def test_user_metadata_stored_only_in_the_item_is_read(self):
        assert open_tree(ORBAX / "handmade_bare").metadata.custom == {"scan_layers": True}

    def test_checkpoint_without_commit_files_is_read(self, tmp_path):
        run = shutil.copytree(ORBAX / "cm_default", tmp_path / "run")
        for file in run.rglob("commit_success.txt"):
            file.unlink()
        assert open_tree(run).metadata.step == 5

    @pytest.mark.parametrize(
        ("given", "step", "message"),
        [
            (
                "unfinished_atomic_rename",
                2,
                "step 2 is an unfinished save: temporary name 2.orbax-checkpoint-tmp, no _METADATA, "
                "commit timestamp null",
            ),
            (
                "unfinished_commit_file",
                2,
                "step 2 is an unfinished save: no _METADATA, commit timestamp null",
            ),
            (
                "unfinished_commit_file/2",
                None,
                "step 2 is an unfinished save: no _METADATA, commit timestamp null",
            ),
            ("v1_checkpointables", None, "there are several items"),
        ],
    )
    def test_ambiguous_layouts_are_refused(self, given, step, message):
        with pytest.raises(FormatError) as caught:
            open_tree(ORBAX / given, ReadOptions(step=step))
        assert caught.value.message == message

    def test_several_items_are_listed(self):
        with pytest.raises(FormatError) as caught:
            open_tree(ORBAX / "v1_checkpointables")
        assert caught.value.got == "data, opt, state"
        assert "add one of them to the path" in caught.value.hint

    def test_item_without_metadata_is_described(self):
        with pytest.raises(FormatError, match="an unfinished save, or an incomplete copy"):
            open_tree(ORBAX / "unfinished_commit_file" / "2" / "items")

    def test_error_lists_formats_tried(self, tmp_path):
        (tmp_path / "notes").mkdir()
        with pytest.raises(FormatError) as caught:
            open_tree(tmp_path)
        assert "orbax: no _METADATA here, in a subdirectory or in a step directory" in str(caught.value)
        assert "safetensors: " in str(caught.value)

    def test_deleted_item_is_reported(self, tmp_path):
        step = shutil.copytree(ORBAX / "v1_checkpointables", tmp_path / "3")
        shutil.rmtree(step / "opt")
        shutil.rmtree(step / "data")
        for path in (tmp_path, step):
            with pytest.raises(FormatError, match="step 3 is damaged: no _METADATA in ") as caught:
                open_tree(path, ReadOptions(step=3))
            assert str(step / "state") in caught.value.hint
        assert len(open_tree(step / "state")) == 1

    def test_finished_save_is_preferred_to_unfinished_save(self, tmp_path):
        run = shutil.copytree(ORBAX / "unfinished_atomic_rename", tmp_path / "run")
        (run / "2.orbax-checkpoint-tmp").rename(run / "1.orbax-checkpoint-tmp")
        assert open_tree(run, ReadOptions(step=1)).metadata.location == str(run / "1" / "items")

    def test_unknown_step_is_refused(self):
        with pytest.raises(UsageError, match="step 9 does not exist"):
            open_tree(ORBAX / "cm_default", ReadOptions(step=9))

    def test_denied_listing_is_reported(self, monkeypatch):
        def denied(path):
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(os, "scandir", denied)
        with pytest.raises(StorageError, match="cannot list") as caught:
            open_tree(ORBAX / "cm_default")
        assert caught.value.got == "Permission denied (errno 13)"

    def test_denied_child_directory_is_reported(self, monkeypatch):
        location = ORBAX / "cm_default"
        looked_at = os.stat

        def denied(path, **more):
            if str(path).startswith(f"{location}/"):
                raise PermissionError(13, "Permission denied", str(path))
            return looked_at(path, **more)

        monkeypatch.setattr(os, "stat", denied)
        assert (
            FORMAT.mismatch_reason(parse(location))
            == f"cannot inspect {location / '_METADATA'}: Permission denied"
        )
        with pytest.raises(StorageError, match="cannot inspect") as caught:
            FORMAT.open(parse(location), ReadOptions())
        assert caught.value.got == "Permission denied (errno 13)"


class TestUnmergedIndexes:
    """Without the merged index the databases of the processes are read together."""

    @pytest.mark.parametrize(
        "name",
        ["multihost_plain/5/items", "lazy_2proc/7/items", "lazy_workers/1/items", "pytree_ocdbt1_zarr30"],
    )
    def test_unmerged_values_match_orbax(self, tmp_path, name):
        item = shutil.copytree(ORBAX / name, tmp_path / "item")
        (item / "manifest.ocdbt").unlink()
        shutil.rmtree(item / "d")
        assert [as_expected(leaf) for leaf in open_tree(item).values()] == [
            stated(leaf) for leaf in EXPECTED[name]
        ]

    def test_disagreeing_processes_are_refused(self, tmp_path):
        item = write_item(tmp_path / "item", {("w",): (zarr3([LITTLE], [4]), np.arange(4.0))})
        other = write_item(tmp_path / "other", {("w",): (zarr3([LITTLE], [2]), np.arange(4.0))})
        for number, location in enumerate((item, other)):
            process = item / f"ocdbt.process_{number}"
            process.mkdir()
            (location / "manifest.ocdbt").rename(process / "manifest.ocdbt")
            (location / "d").rename(process / "d")
        with pytest.raises(FormatError, match="two processes disagree") as caught:
            open_tree(item)
        assert "ocdbt.process_1: w/" in caught.value.location

    @pytest.mark.parametrize("difference", [0, 1])
    def test_all_readers_agree_on_chunks_of_several_processes(self, tmp_path, difference):
        """Reading, listing and merging have one opinion of it; a length that agrees is not enough."""
        item = tmp_path / "item"
        for number in range(2):
            values = np.arange(4000.0) + difference * number
            write_item(item, {("w",): (zarr3([LITTLE], [4000]), values)})
            process = item / f"ocdbt.process_{number}"
            process.mkdir()
            for name in ("manifest.ocdbt", "d"):
                (item / name).rename(process / name)
        ways = (
            lambda: open_tree(item),
            lambda: entries_of(parse(item)),
            lambda: [fail(finding) for finding in examine(item).findings if "disagree" in finding.what],
            lambda: apply_fixes(item, "merge"),
        )
        refused = [isinstance(raised_by(way), FormatError) for way in ways]
        assert refused == [bool(difference)] * len(ways)

    def test_merge_compares_chunks_completely(self, tmp_path):
        """Opening looks at the ends of what several processes have: each may have all of the checkpoint."""
        item = tmp_path / "item"
        for number in range(2):
            values = np.arange(100_000.0)
            values[50_000] += number
            write_item(item, {("w",): (zarr3([LITTLE], [100_000]), values)})
            process = item / f"ocdbt.process_{number}"
            process.mkdir()
            for name in ("manifest.ocdbt", "d"):
                (item / name).rename(process / name)
        open_tree(item)
        assert isinstance(raised_by(lambda: apply_fixes(item, "merge")), FormatError)


def fail(finding):
    raise FormatError(finding.what, location=finding.location)


def raised_by(way):
    try:
        way()
    except CheckpointError as error:
        assert "two processes disagree" in error.message and "ocdbt.process_1: w/" in error.location
        return error
    return None
