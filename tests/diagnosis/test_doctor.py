"""`ckpt doctor`: each fault planted and named, sound checkpoints left in peace, fixes that lose nothing."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from support.command_line import ckpt, examine, hint_of
from support.internals import ReadOptions, entries_of, keystr, parse
from support.locations import FIXTURES, GOLDEN, HF, ORBAX
from support.object_stores import files_in
from support.orbax_items import (
    EXPECTED,
    LITTLE,
    ZSTD,
    change_index,
    change_json,
    damage_node,
    sharded,
    values_of,
    write_item,
    zarr3,
)

import ckpttools
from ckpttools import CheckpointError, FormatError, StorageError, UsageError
from ckpttools.diagnosis import checks as checks_room
from ckpttools.diagnosis.base import LEVELS, quote_path
from ckpttools.diagnosis.examine import apply_fixes, checks, fixes

SHARDED = GOLDEN / "llama3.1" / "hf_sharded"
F32 = np.dtype("float32")
# What is not sound in the fixtures: level and check.
UNSOUND = {
    "emergency": {("warning", "chunks")},
    "replicator": {("warning", "chunks")},
    "handmade_bare": {("info", "commit")},
    "v1_checkpointables": {("info", "items")},
    "unfinished_atomic_rename": {("warning", "leftovers")},
    "unfinished_commit_file": {("error", "unfinished")},
}


def told(path, level=None):
    """(level, check) of what is found, or the checks of one level."""
    findings = examine(path).findings
    assert not any("stopped" in finding.what for finding in findings), findings
    result = {(finding.level, finding.check) for finding in findings}
    return result if level is None else {check for entry, check in result if entry == level}


def only(path, check):
    """The one error at a path, which must come from this check."""
    errors = [finding for finding in examine(path).findings if finding.level == "error"]
    assert [error.check for error in errors] == [check], errors
    return errors[0]


def copy(source, tmp_path, name="copy"):
    return Path(shutil.copytree(source, tmp_path / name))


def content(top):
    """Every file and directory with its bytes."""
    return {path.relative_to(top): path.read_bytes() if path.is_file() else None for path in top.rglob("*")}


class TestHealthyCheckpoints:
    @pytest.mark.parametrize("name", sorted(path.name for path in ORBAX.iterdir() if path.is_dir()))
    def test_orbax_fixtures_have_expected_findings(self, name):
        assert told(ORBAX / name) == UNSOUND.get(name, set())

    @pytest.mark.parametrize("path", sorted(GOLDEN.iterdir()), ids=lambda path: path.name)
    def test_golden_checkpoints_are_healthy(self, path):
        assert told(path) == set()

    def test_expected_findings_name_existing_fixtures(self):
        assert {name.split("/")[0] for name in EXPECTED} - {path.name for path in ORBAX.iterdir()} == set()
        assert set(UNSOUND) <= {path.name for path in ORBAX.iterdir()}

    def test_every_level_of_a_run_is_healthy(self):
        run = ORBAX / "maxtext_run"
        for path in (run, run / "checkpoints", run / "checkpoints/4", run / "checkpoints/4/items"):
            assert examine(path).findings == ()

    def test_relative_path_gives_same_diagnosis(self, monkeypatch):
        """What is above a place counts, however it is written."""
        (item,) = (ORBAX / "emergency").glob("local_host2/*/state")
        expected = examine(item)
        monkeypatch.chdir(item)
        result = examine(Path())
        assert expected.findings and result.findings == expected.findings

    def test_single_file_is_examined(self):
        assert examine(HF / "model.safetensors").findings == ()
        assert examine(SHARDED / "model.safetensors.index.json").findings == ()

    def test_chunks_left_out_of_foreign_zarr_are_info(self, tmp_path):
        import zarr

        group = zarr.open_group(str(tmp_path / "z"), mode="w")
        group.create_array("a/b", shape=(8, 4), chunks=(4, 4), dtype="f4")[:4] = 1
        assert told(tmp_path / "z") == {("info", "chunks")}

    def test_missing_chunk_of_own_zarr_output_is_an_error(self, tmp_path):
        """Reading refuses one that lacks any, and sends the user to the doctor."""
        assert ckpt("convert", "to-zarr3", HF, tmp_path / "z").exit_code == 0
        assert told(tmp_path / "z") == set()
        chunk = next(path for path in sorted(tmp_path.glob("z/**/c/0*")) if path.is_file())
        chunk.unlink()
        assert "`ckpt doctor" in ckpt("hash", tmp_path / "z").stderr
        assert "chunks are missing" in only(tmp_path / "z", "chunks").what


class TestOrbax:
    def item(self, tmp_path, created=None, use_ocdbt=True, **more):
        values = values_of(F32, (600, 2))
        arrays = {("w",): (created or zarr3([LITTLE], [300, 2]), values)}
        return write_item(tmp_path / "item", arrays, use_ocdbt=use_ocdbt, **more)

    def test_unmerged_processes_are_reported_with_merge_fix(self, tmp_path):
        item = copy(ORBAX / "lazy_2proc", tmp_path) / "7" / "items"
        (item / "manifest.ocdbt").unlink()
        result = only(item, "unmerged")
        assert result.fix == "merge"
        assert f"ckpt doctor {item} --fix merge" in result.hint

    def test_partial_merge_is_reported(self, tmp_path):
        item = copy(ORBAX / "lazy_2proc", tmp_path) / "7" / "items"
        change_index(item, lambda entries: entries.pop(b"params.params.w/c/1/0"))
        checks_that_speak = told(item, "error")
        assert checks_that_speak == {"chunks", "unmerged"}

    def test_damaged_manifest_is_reported(self, tmp_path):
        item = self.item(tmp_path)
        (item / "manifest.ocdbt").write_bytes((item / "manifest.ocdbt").read_bytes()[:30])
        result = only(item, "index")
        assert "truncated" in result.what
        assert result.location == str(item / "manifest.ocdbt")

    def test_damaged_node_is_reported(self, tmp_path):
        item = self.item(tmp_path)
        assert [damage_node(file) for file in item.glob("d/*")]
        assert "CRC-32C" in only(item, "index").what

    def test_truncated_data_file_is_reported(self, tmp_path):
        item = self.item(tmp_path)
        change_index(item, lambda entries: None)
        last = max(extents(item), key=lambda extent: extent.offset)
        file = item / last.file
        os.truncate(file, last.offset + last.length - 1)
        cut = [finding for finding in examine(item).findings if finding.level == "error"]
        assert [entry.location for entry in cut] == [str(file)]
        assert "end beyond its" in cut[0].what
        assert "truncated" in cut[0].consequence and "deleted" not in cut[0].hint

    def test_deleted_data_file_is_reported(self, tmp_path):
        item = self.item(tmp_path)
        change_index(item, lambda entries: None)
        file = item / extents(item)[0].file
        file.unlink()
        result = only(item, "chunks")
        assert (result.location, "missing" in result.what) == (str(file), True)

    def test_unreferenced_data_file_is_reported(self, tmp_path):
        item = self.item(tmp_path)
        (item / "d" / "stray").write_bytes(bytes(500))
        result = examine(item).findings
        assert ("warning", "index") in {(entry.level, entry.check) for entry in result}
        assert any("500 bytes, the largest d/stray" in entry.what for entry in result)

    @pytest.mark.parametrize("use_ocdbt", [True, False])
    def test_missing_chunk_is_reported(self, tmp_path, use_ocdbt):
        item = self.item(tmp_path, use_ocdbt=use_ocdbt)
        if use_ocdbt:
            change_index(item, lambda entries: entries.pop(b"w/c/1/0"))
        else:
            (item / "w" / "c" / "1" / "0").unlink()
        assert "1 of 2 chunks are missing, such as w/c/1/0" in only(item, "chunks").what

    def test_omitted_fill_value_chunks_are_accepted(self, tmp_path):
        arrays = {("w",): (zarr3([LITTLE], [300, 2]), np.zeros((600, 2), F32))}
        item = write_item(tmp_path / "item", arrays, all_chunks=False)
        assert told(item, "error") == set()
        assert "chunks" in told(item, "info")
        change_json(item / "_METADATA", store_array_data_equal_to_fill_value=True)
        only(item, "chunks")

    @pytest.mark.parametrize(
        ("codecs", "length"),
        [([LITTLE], 2399), ([LITTLE], 2401), ([LITTLE, ZSTD], 0), ([sharded([300, 2], [LITTLE])], 19)],
    )
    def test_chunk_of_wrong_length_is_reported(self, tmp_path, codecs, length):
        item = self.item(tmp_path, zarr3(codecs, [300, 2]), use_ocdbt=False)
        (item / "w" / "c" / "1" / "0").write_bytes(bytes(length))
        assert "1 of 2 chunks, such as w/c/1/0, have the wrong length" in only(item, "chunks").what

    @pytest.mark.parametrize("says", [True, False])
    def test_wrong_zarr_version_is_reported_with_a_fix(self, tmp_path, says):
        source = ORBAX / ("pytree_ocdbt1_zarr30" if says else "pytree_ocdbt1_zarr31")
        item = copy(source, tmp_path)
        change_json(item / "_METADATA", use_zarr3=says)
        result = only(item, "chunks")
        assert f"use_zarr3 {str(says).lower()}" in result.what
        assert os.system(result.hint) == 0
        assert examine(item).findings == ()

    @pytest.mark.parametrize("says", [True, False])
    def test_wrong_use_ocdbt_field_is_reported_with_a_fix(self, tmp_path, says):
        item = copy(ORBAX / ("pytree_ocdbt0_zarr31" if says else "pytree_ocdbt1_zarr31"), tmp_path)
        change_json(item / "_METADATA", use_ocdbt=says)
        result = only(item, "chunks")
        assert os.system(result.hint) == 0
        assert examine(item).findings == ()

    def test_missing_index_is_reported(self, tmp_path):
        item = copy(ORBAX / "maxtext_converted", tmp_path)
        for path in [*item.rglob("*.ocdbt"), *item.rglob("ocdbt.process_*")]:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        assert "index" in told(item, "error")

    def test_copy_without_dot_files_is_reported(self, tmp_path):
        item = copy(ORBAX / "pytree_ocdbt0_zarr30", tmp_path)
        for file in item.rglob(".*"):
            file.unlink()
        assert "start with a dot" in only(item, "chunks").hint

    def test_unnamed_array_is_reported(self, tmp_path):
        item = self.item(tmp_path)
        change_json(item / "_METADATA", tree_metadata={})
        assert any("does not contain (1): w" in finding.what for finding in examine(item).findings)

    @pytest.mark.parametrize("changed", [{"shape": [300, 2]}, {"data_type": "float128"}, {"codecs": 3}])
    def test_metadata_of_another_array_is_reported(self, tmp_path, changed):
        item = self.item(tmp_path, use_ocdbt=False)
        change_json(item / "w" / "zarr.json", **changed)
        assert told(item, "error") == {"chunks"}

    def test_huge_shape_is_diagnosed_quickly(self, tmp_path):
        item = self.item(tmp_path, use_ocdbt=False)
        change_json(item / "w" / "zarr.json", shape=[10**15, 2])
        started = time.monotonic()
        assert told(item, "error") >= {"chunks"}
        assert time.monotonic() - started < 5

    @pytest.mark.parametrize("file", ["_METADATA", "_sharding", "array_metadatas/process_0"])
    @pytest.mark.parametrize("text", [b"{", b"\xff\xfe", b"[]", b"[" * 100_000, b""])
    def test_unreadable_json_is_reported(self, tmp_path, file, text):
        item = copy(ORBAX / "pytree_ocdbt1_zarr31", tmp_path)
        (item / file).write_bytes(text)
        assert told(item, "error") == {"metadata"}

    def test_unreadable_step_metadata_is_reported(self, tmp_path):
        run = copy(ORBAX / "maxtext_run", tmp_path)
        (run / "checkpoints/4/_CHECKPOINT_METADATA").write_text("{")
        assert told(run, "error") == {"metadata"}

    def test_colliding_names_are_reported(self, tmp_path):
        item = self.item(tmp_path)
        entry = json.loads((item / "_METADATA").read_bytes())["tree_metadata"]["('w',)"]
        change_json(item / "_METADATA", tree_metadata={"1": entry, "2": entry})
        assert "both stored as 'w'" in only(item, "metadata").what

    def test_missing_strings_are_reported(self, tmp_path):
        item = copy(ORBAX / "tree_zoo", tmp_path)
        (item / "_strings.json").write_text("{}")
        assert "no text for" in only(item, "metadata").what

    def test_host_part_is_a_warning(self):
        result = examine(ORBAX / "replicator").findings
        assert [entry.level for entry in result] == ["warning"]
        assert "one host" in result[0].consequence


def beginning_of(path):
    """What a process that was killed leaves of a file that it was writing."""
    return path.with_name(f".ckpttools-unfinished-{zlib.crc32(path.name.encode()):08x}-0123456789abcdef")


class TestSteps:
    def test_missing_commit_marker_is_fixed(self, tmp_path):
        run = copy(ORBAX / "cm_default", tmp_path)
        for path in run.rglob("commit_success.txt"):
            path.unlink()
        result = examine(run)
        assert result.healthy
        assert {(finding.level, finding.check, finding.fix) for finding in result.findings} == {
            ("warning", "commit", "commit-marker")
        }
        assert len(apply_fixes(run, "commit-marker").applied_fixes) == len(result.findings) > 1
        assert examine(run).findings == ()

    def test_v1_items_need_no_commit_marker(self):
        item = ORBAX / "v1_save_pytree" / "state"
        assert not (item / "commit_success.txt").exists()
        assert examine(item.parent).findings == ()

    def test_damaged_step_is_not_marked_complete(self, tmp_path):
        step = copy(ORBAX / "maxtext_run" / "checkpoints" / "4", tmp_path)
        (step / "commit_success.txt").unlink()
        (step / "items" / "_METADATA").write_text("{")
        with pytest.raises(FormatError, match="cannot be marked as finished"):
            apply_fixes(step, "commit-marker")
        assert not (step / "commit_success.txt").exists()

    def unmarked(self, tmp_path):
        """Two steps without markers; the first that is mended is whole, the second is not."""
        run = copy(ORBAX / "cm_default", tmp_path)
        for path in run.rglob("commit_success.txt"):
            path.unlink()
        (run / "5" / "default" / "_METADATA").write_text("{")
        return run

    def test_fix_continues_after_one_refusal(self, tmp_path):
        run = self.unmarked(tmp_path)
        diagnosis = apply_fixes(run, "commit-marker")
        assert (run / "0" / "commit_success.txt").exists()
        assert all(f"{run}/0" in line for line in diagnosis.applied_fixes)
        assert {entry.location for entry in diagnosis.refused_fixes} == {f"{run}/5", f"{run}/5/default"}
        assert all("cannot be marked as finished" in entry.what for entry in diagnosis.refused_fixes)
        with pytest.raises(FormatError, match="could repair nothing") as caught:
            apply_fixes(run, "commit-marker")
        assert f"{run}/5/default" in caught.value.message

    def test_refusals_are_reported_with_fixes(self, tmp_path):
        run = self.unmarked(tmp_path / "text")
        result = ckpt("doctor", run, "--fix", "commit-marker")
        assert (result.exit_code, result.stderr) == (3, "")
        assert f"fixed: {run}/0/commit_success.txt was written" in result.stdout
        assert f"refused: {run}/5:\n" in result.stdout
        run = self.unmarked(tmp_path / "json")
        result = ckpt("doctor", run, "--fix", "commit-marker", "--json")
        report = json.loads(result.stdout)
        assert (result.exit_code, report["healthy"]) == (3, False)
        assert [len(report["applied_fixes"]), len(report["refused_fixes"])] == [2, 2]
        assert report["refused_fixes"][0]["hint"]

    def test_forbidden_fix_is_refused(self, tmp_path, monkeypatch):
        run = self.unmarked(tmp_path)
        replaced = Path.replace

        def refuse(path, target):
            if target.name == "commit_success.txt" and "default" not in target.parts:
                raise OSError(30, "Read-only file system", str(target))
            return replaced(path, target)

        monkeypatch.setattr(Path, "replace", refuse)
        diagnosis = apply_fixes(run, "commit-marker")
        assert (diagnosis.exit_code, len(diagnosis.applied_fixes)) == (5, 1)
        assert "Read-only file system" in diagnosis.refused_fixes[0].what

    def test_unfinished_step_is_set_aside(self, tmp_path):
        import orbax.checkpoint as ocp

        run = copy(ORBAX / "unfinished_commit_file", tmp_path)
        before = content(run)
        (run / "2" / "items").touch()
        with pytest.raises(FormatError, match="may still be running"):
            apply_fixes(run, "set-aside")
        assert content(run) == before
        for path in (run / "2", *(run / "2").rglob("*")):
            os.utime(path, (0, 0))
        assert apply_fixes(run, "set-aside").applied_fixes == (f"{run / '2'} is now {run / '2.unfinished'}",)
        assert {path for path in before if path.parts[0] != "2"} == {
            path for path in content(run) if path.parts[0] != "2.unfinished"
        }
        assert ocp.CheckpointManager(run).latest_step() == 1

    @pytest.mark.parametrize("has_file", [True, False])
    def test_unfinished_step_in_a_bucket_gets_a_command(self, gcs, tmp_path, has_file):
        """Nothing is renamed there: a file less, and Orbax skips it. `ckpt resolve` says the same."""
        run = copy(ORBAX / "maxtext_run", tmp_path) / "checkpoints"
        shutil.copytree(run / "4", run / "10")
        metadata = run / "10" / "_CHECKPOINT_METADATA"
        metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {"commit_timestamp_nsecs": None}))
        if not has_file:
            (run / "10" / "commit_success.txt").unlink()
        location = gcs.filled({f"x/checkpoints/{name}": entry for name, entry in files_in(run).items()})
        step = location / "x" / "checkpoints" / "10"
        (result,) = [finding for finding in examine(location).findings if finding.check == "unfinished"]
        resolved = ckpttools.resolve(base_output_directory=str(location), run_name="x")
        assert resolved.step == (10 if has_file else 4)
        assert result.fix is None and result.location == str(step)
        removed = step / "commit_success.txt" if has_file else step
        assert result.command == f"gcloud storage rm -r {shlex.quote(str(removed))}"
        if has_file:
            assert result.level == "error" and resolved.outcome == "fails"
            assert result.command in resolved.problems[0].hint and "step 4" in resolved.problems[0].hint
        else:
            assert told(location, "error") == set() and resolved.loads
            assert "10 is skipped: no commit_success.txt, commit timestamp null" in repr(resolved.rules)
            assert told(step, "error") == {"unfinished"}

    def test_steps_are_reported_in_numeric_order(self, tmp_path):
        run = copy(ORBAX / "maxtext_run", tmp_path) / "checkpoints"
        for name in ("10", "9"):
            shutil.copytree(run / "4", run / name)
            (run / name / "commit_success.txt").unlink()
        assert [Path(finding.location).name for finding in examine(run).findings] == ["9", "10"]

    def test_renamed_unfinished_step_is_still_reported(self, tmp_path):
        run = copy(ORBAX / "unfinished_commit_file", tmp_path)
        (run / "2").rename(run / "2.unfinished")
        assert told(run) == {("warning", "leftovers")}
        assert "set aside" in examine(run).findings[0].what

    @pytest.mark.parametrize("lost", ["_CHECKPOINT_METADATA", "items/_METADATA"])
    def test_damaged_latest_step_is_reported(self, tmp_path, lost):
        """Whatever is an error in it, the run is what users give to commands."""
        run = copy(ORBAX / "maxtext_run", tmp_path) / "checkpoints"
        (run / "4" / lost).write_text("{") if lost[0] == "_" else (run / "4" / lost).unlink()
        result = [finding for finding in examine(run).findings if finding.check == "latest"]
        assert [(entry.level, entry.location, entry.fix) for entry in result] == [
            ("warning", str(run / "4"), "set-aside")
        ]
        assert "the latest step is damaged" in result[0].what and "--fix set-aside" in result[0].command
        assert result[0].what in [finding.what for finding in examine(run / "4").findings]

    @pytest.mark.parametrize("is_lost", [True, False])
    def test_latest_step_with_a_damaged_index_is_set_aside(self, tmp_path, is_lost):
        run = copy(ORBAX / "maxtext_run", tmp_path) / "checkpoints"
        for path in (run / "4" / "items" / "d").iterdir():
            path.unlink() if is_lost else path.write_bytes(path.read_bytes()[:-9])
        for path in (run / "4", *(run / "4").rglob("*")):
            os.utime(path, (0, 0))
        assert ("warning", "latest") in told(run)
        assert apply_fixes(run, "set-aside").applied_fixes == (f"{run / '4'} is now {run / '4.unfinished'}",)
        assert ckpttools.ls(run).resume_step == 0

    @pytest.mark.parametrize("step", ["2", "4"])
    @pytest.mark.parametrize("named", [False, True])
    @pytest.mark.parametrize(
        "lost",
        ["_CHECKPOINT_METADATA", "items/_METADATA", "items/manifest.ocdbt", "items", "all but metadata"],
    )
    def test_damaged_step_is_set_aside(self, tmp_path, lost, step, named):
        """`ls`, `doctor` and `copy` agree on each step, and `--fix set-aside` makes the run usable again."""
        run = tmp_path / "run"
        for name in ("2", "3", "4"):
            shutil.copytree(ORBAX / "maxtext_run/checkpoints/4", run / name)
        location = run / step / ("items" if lost == "all but metadata" else lost)
        if lost == "_CHECKPOINT_METADATA":
            location.write_text("{")
        elif lost == "all but metadata":
            for path in [path for path in location.iterdir() if path.name != "_METADATA"]:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        elif lost == "items":
            shutil.rmtree(location)
        else:
            location.unlink()
            for directory in location.parent.glob("ocdbt.process_*" if "manifest" in lost else "none"):
                shutil.rmtree(directory)
        assert [entry.name for entry in ckpttools.ls(run).steps if entry.is_damaged] == [step]
        with pytest.raises(FormatError, match=f"step {step} was saved completely"):
            ckpttools.copy(run, tmp_path / "copy")
        if step == "4":
            assert ckpttools.summary(run).next == (
                f'ckpttools.doctor("{run}")',
                f'ckpttools.summary("{run / "3"}")',
            )
        assert not any("to-orbax" in finding.hint for finding in examine(run).findings)
        asked = run / step if named else run
        with pytest.raises(FormatError, match="may still be running"):
            apply_fixes(asked, "set-aside")
        for path in (run / step, *(run / step).rglob("*")):
            os.utime(path, (0, 0))
        apply_fixes(asked, "set-aside")
        names = {"2", "3", "4", f"{step}.unfinished"} - {step}
        assert {path.name for path in run.iterdir()} == names
        assert all(entry.unfinished_reason is None for entry in ckpttools.ls(run).steps)
        assert ckpttools.copy(run, tmp_path / "copy") and ckpttools.open(run).arrays

    def test_nearly_empty_step_is_reported(self, tmp_path):
        """Orbax takes it for the latest step; directories with other names are not reported."""
        run = copy(ORBAX / "maxtext_run", tmp_path) / "checkpoints"
        (run / "7" / "items").mkdir(parents=True)
        (run / "finetune_9").mkdir()
        (result,) = (finding for finding in examine(run).findings if finding.check == "latest")
        assert (result.level, result.location, result.fix) == ("error", str(run / "7"), "set-aside")
        (run / "7" / "items").rename(run / "7" / "items.orbax-checkpoint-tmp")
        assert "latest" not in {finding.check for finding in examine(run).findings}

    def test_missing_item_is_reported(self, tmp_path):
        run = copy(ORBAX / "maxtext_run", tmp_path)
        shutil.rmtree(run / "checkpoints/4/items")
        assert "'items' does not exist" in only(run, "unfinished").what

    def test_item_without_metadata_is_unfinished(self, tmp_path):
        run = copy(ORBAX / "maxtext_run", tmp_path)
        (run / "checkpoints/4/items/_METADATA").unlink()
        assert told(run, "error") == {"unfinished"}

    @pytest.mark.parametrize("name", ["copy.partial", "run/3.orbax-checkpoint-tmp-17"])
    def test_leftovers_are_reported_with_a_command(self, tmp_path, name):
        run = copy(ORBAX / "cm_default", tmp_path, "run" if name.startswith("run") else "copy")
        (tmp_path / name).mkdir()
        (tmp_path / name / "journal.ckpttools").write_bytes(bytes(77))
        result = [finding for finding in examine(run).findings if finding.check == "leftovers"]
        assert [entry.location for entry in result] == [str(tmp_path / name)]
        assert "77 bytes" in result[0].what
        assert f"rm -r {tmp_path / name}" in result[0].hint

    def test_similarly_named_directory_is_not_a_leftover(self, tmp_path):
        run = copy(ORBAX / "cm_default", tmp_path, "copy")
        (tmp_path / "copy.partial").mkdir()
        (tmp_path / "copy.partial" / "precious").touch()
        assert not [finding for finding in examine(run).findings if finding.check == "leftovers"]

    def test_replaced_checkpoint_is_not_offered_for_deletion(self, tmp_path):
        copy(ORBAX / "cm_default", tmp_path, "copy.partial/replaced")
        (tmp_path / "copy.partial/journal.ckpttools").touch()
        result = ckpt("doctor", tmp_path / "copy")
        assert "replaced holds the previous checkpoint" in " ".join(result.output.split())


class TestSafetensors:
    def folder(self, tmp_path):
        return copy(SHARDED, tmp_path)

    def shards(self, folder):
        return sorted(folder.glob("*.safetensors"))

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 99\n", "Git LFS pointer"),
            (b"<!DOCTYPE html>", "a web page"),
            (b"", "empty"),
            (b"PK\x03\x04" + bytes(100), "zip archive"),
        ],
    )
    def test_other_file_contents_are_reported(self, tmp_path, content, words):
        folder = self.folder(tmp_path)
        self.shards(folder)[0].write_bytes(content)
        assert words in only(folder, "safetensors").what

    def test_truncated_shard_is_reported(self, tmp_path):
        folder = self.folder(tmp_path)
        shard = self.shards(folder)[1]
        shard.write_bytes(shard.read_bytes()[:-10])
        result = only(folder, "safetensors")
        assert (result.location, "10 bytes are missing" in result.what) == (str(shard), True)

    def test_all_faults_are_reported_at_once(self, tmp_path):
        folder = self.folder(tmp_path)
        for shard in self.shards(folder):
            shard.write_bytes(shard.read_bytes()[:-10])
        assert len(examine(folder).findings) == len(self.shards(folder)) > 1

    def test_missing_shard_is_reported(self, tmp_path):
        folder = self.folder(tmp_path)
        shard = self.shards(folder)[0]
        shard.unlink()
        result = only(folder, "safetensors-index")
        assert shard.name in result.what and shard.name in result.hint

    def test_one_command_fetches_all_missing_shards(self, tmp_path):
        folder = self.folder(tmp_path)
        lost = self.shards(folder)[:2]
        for shard in lost:
            shard.unlink()
        names = " ".join(shard.name for shard in lost)
        assert f"hf download REPO {names} --local-dir" in only(folder, "safetensors-index").hint

    def test_missing_shard_without_index_is_reported(self, tmp_path):
        folder = self.folder(tmp_path)
        (folder / "model.safetensors.index.json").unlink()
        shard = self.shards(folder)[0]
        shard.unlink()
        assert shard.name in only(folder, "safetensors-index").what
        with pytest.raises(FormatError, match="no index can be made"):
            fixes()["index"].apply(parse(folder), ReadOptions())

    def test_index_with_absent_tensors_is_reported(self, tmp_path):
        folder = self.folder(tmp_path)
        named = self.named(folder)
        self.rename(folder, {**named, "model.extra": self.shards(folder)[0].name})
        assert "1 tensor that its files do not contain: model.extra" in only(folder, "safetensors-index").what

    def test_incomplete_index_is_reported(self, tmp_path):
        folder = self.folder(tmp_path)
        named = self.named(folder)
        named.pop("model.norm.weight")
        self.rename(folder, named)
        result = [finding for finding in examine(folder).findings if finding.check == "safetensors-index"]
        assert [entry.level for entry in result] == ["warning"]
        assert "does not name 1 tensor of its files: model.norm.weight" in result[0].what

    def test_index_with_path_outside_the_model_is_reported(self, tmp_path):
        folder = self.folder(tmp_path)
        self.rename(folder, {**self.named(folder), "x": "../other.safetensors"})
        assert "outside" in only(folder, "safetensors-index").what

    @pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "<html>"])
    def test_invalid_index_is_reported(self, tmp_path, text):
        folder = self.folder(tmp_path)
        (folder / "model.safetensors.index.json").write_text(text)
        only(folder, "safetensors-index")

    def test_extra_file_next_to_shards_is_a_warning(self, tmp_path):
        folder = self.folder(tmp_path)
        shutil.copy(self.shards(folder)[0], folder / "old.safetensors")
        assert told(folder) == {("warning", "safetensors-index")}

    def test_single_file_next_to_an_index_is_info(self, tmp_path):
        folder = self.folder(tmp_path)
        shutil.copy(HF / "model.safetensors", folder)
        assert told(folder) == {("info", "safetensors-index")}

    def test_fix_writes_missing_index(self, tmp_path):
        folder = self.folder(tmp_path)
        index = folder / "model.safetensors.index.json"
        truth = json.loads(index.read_bytes())
        index.unlink()
        before = content(folder)
        assert told(folder) == {("warning", "safetensors-index")}
        assert len(apply_fixes(folder, "index").applied_fixes) == 1
        assert json.loads(index.read_bytes())["weight_map"] == truth["weight_map"]
        assert examine(folder).findings == ()
        assert {path: data for path, data in content(folder).items() if path.name != index.name} == before

    def test_fix_rewrites_interrupted_index(self, tmp_path):
        folder = self.folder(tmp_path)
        index = folder / "model.safetensors.index.json"
        index.unlink()
        apply_fixes(folder, "index")
        expected = content(folder)
        beginning_of(index).write_bytes(index.read_bytes()[:30])
        index.unlink()
        assert len(apply_fixes(folder, "index").applied_fixes) == 1
        assert content(folder) == expected

    def test_duplicate_tensors_prevent_an_index(self, tmp_path):
        folder = self.folder(tmp_path)
        (folder / "model.safetensors.index.json").unlink()
        shutil.copy(self.shards(folder)[0], folder / "old.safetensors")
        assert [
            finding.fix for finding in examine(folder).findings if finding.check == "safetensors-index"
        ] == [None]
        with pytest.raises(FormatError, match="no index can be made"):
            fixes()["index"].apply(parse(folder), ReadOptions())

    @pytest.mark.parametrize("name", ["adapter_model", "consolidated"])
    def test_other_safetensors_file_is_not_a_shard(self, tmp_path, name):
        folder = copy(HF, tmp_path)
        other = folder / f"{name}.safetensors"
        save_file({"base_model.model.lora_A.weight": np.ones(4, F32)}, other)
        (result,) = examine(folder).findings
        assert (result.level, result.check, result.fix) == ("info", "safetensors-index", None)
        assert other.name in result.what and "read only model.safetensors" in result.consequence
        with pytest.raises(FormatError, match="no index can be made"):
            fixes()["index"].apply(parse(folder), ReadOptions())
        assert not (folder / "model.safetensors.index.json").exists()

    def test_sidecar_file_does_not_affect_quantized_weights(self, tmp_path):
        folder = copy(FIXTURES / "compressed-tensors" / "int4-asymmetric", tmp_path)
        assert len(list(folder.glob("*.safetensors"))) == 2
        assert not [finding for finding in examine(folder).findings if finding.level == "error"]

    def test_shards_and_an_adapter_are_not_joined(self, tmp_path):
        folder = self.folder(tmp_path)
        (folder / "model.safetensors.index.json").unlink()
        save_file({"base_model.model.lora_A.weight": np.ones(4, F32)}, folder / "adapter_model.safetensors")
        (result,) = (finding for finding in examine(folder).findings if finding.check == "safetensors-index")
        assert (result.level, result.fix) == ("warning", None)
        assert "not shards of one model: adapter_model, model" in result.what
        with pytest.raises(FormatError, match="no index can be made"):
            fixes()["index"].apply(parse(folder), ReadOptions())

    def test_missing_config_is_reported(self, tmp_path):
        folder = self.folder(tmp_path)
        (folder / "config.json").unlink()
        assert told(folder) == {("warning", "config")}
        (folder / "config.json").write_text("{,}")
        assert told(folder) == {("error", "config")}

    def named(self, folder):
        return json.loads((folder / "model.safetensors.index.json").read_bytes())["weight_map"]

    def rename(self, folder, named):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))


class TestMergeFix:
    def unmerged(self, tmp_path):
        run = copy(ORBAX / "lazy_2proc", tmp_path)
        item = run / "7" / "items"
        (item / "manifest.ocdbt").unlink()
        for node in (item / "d").iterdir():
            node.unlink()
        return item

    @pytest.mark.filterwarnings("ignore:Sharding info not provided")
    def test_merge_keeps_all_entries(self, tmp_path):
        import orbax.checkpoint as ocp

        truth = entries_of(parse(ORBAX / "lazy_2proc" / "7" / "items")).all
        item = self.unmerged(tmp_path)
        before = content(item)
        diagnosis = apply_fixes(item, "merge")
        assert (diagnosis.healthy, len(diagnosis.applied_fixes)) == (True, 1)
        assert entries_of(parse(item)).all.keys() == truth.keys()
        kept = content(item)
        assert {path: kept[path] for path in before} == before
        restored = ocp.PyTreeCheckpointer().restore(item)
        expected = ocp.PyTreeCheckpointer().restore(ORBAX / "lazy_2proc" / "7" / "items")
        np.testing.assert_array_equal(restored["params"]["params"]["w"], expected["params"]["params"]["w"])
        assert {keystr(path) for path in ckpttools.open(item)} == {"step", "params/params/w"}

    def test_merge_runs_once(self, tmp_path):
        item = self.unmerged(tmp_path)
        apply_fixes(item, "merge")
        before = content(item)
        assert apply_fixes(item, "merge").applied_fixes == ()
        assert content(item) == before
        with pytest.raises(FormatError, match="already exists"):
            fixes()["merge"].apply(parse(item), ReadOptions())

    @pytest.mark.parametrize("left", ["node", "half a node", "half a manifest"])
    def test_interrupted_merge_is_repeated(self, tmp_path, left):
        item = self.unmerged(tmp_path)
        apply_fixes(item, "merge")
        expected = content(item)
        manifest, (node,) = item / "manifest.ocdbt", (item / "d").iterdir()
        half = {"half a node": node, "half a manifest": manifest}.get(left)
        if half:
            beginning_of(half).write_bytes(half.read_bytes()[:20])
        for path in [manifest] + [node] * (left == "half a node"):
            path.unlink()
        assert len(apply_fixes(item, "merge").applied_fixes) == 1
        assert content(item) == expected

    def test_merge_does_not_replace_other_files(self, tmp_path):
        item = self.unmerged(tmp_path)
        apply_fixes(item, "merge")
        (node,) = (item / "d").iterdir()
        for path in (item / "manifest.ocdbt", node):
            path.unlink()
        node.write_bytes(b"something of the user's")
        with pytest.raises(FormatError, match="already exists"):
            apply_fixes(item, "merge")
        assert node.read_bytes() == b"something of the user's"
        assert not (item / "manifest.ocdbt").exists()

    def test_merge_refuses_missing_process(self, tmp_path):
        item = self.unmerged(tmp_path)
        shutil.rmtree(item / "ocdbt.process_1")
        before = content(item)
        with pytest.raises(FormatError, match="would be incomplete"):
            apply_fixes(item, "merge")
        assert content(item) == before

    def test_merge_refuses_differing_processes(self, tmp_path):
        item = self.unmerged(tmp_path)
        shutil.copytree(item / "ocdbt.process_0", item / "ocdbt.process_2")
        mended = apply_fixes(item, "merge")
        assert mended.healthy  # the same bytes twice
        item = self.unmerged(tmp_path / "again")
        other = item / "ocdbt.process_2"
        shutil.copytree(item / "ocdbt.process_0", other)
        change_index(other, lambda entries: entries.update({b"step/c": bytes(len(entries[b"step/c"]))}))
        before = content(item)
        with pytest.raises(FormatError, match="two processes disagree"):
            apply_fixes(item, "merge")
        assert content(item) == before


class TestPastedCommands:
    """A path is one word to the shell, whatever is in it."""

    NAME = "a dir; $(false) 'x"

    def scenes(self, tmp_path):
        """Damaged things under that name, for each check that suggests a command with a path."""
        top = tmp_path / self.NAME
        item = copy(ORBAX / "pytree_ocdbt0_zarr31", top, "ocdbt")
        change_json(item / "_METADATA", use_ocdbt=True)
        weights = copy(SHARDED, top, "weights")
        min(weights.glob("*.safetensors")).unlink()
        (weights / "config.json").unlink()
        unnamed = copy(SHARDED, top, "unnamed")
        (unnamed / "model.safetensors.index.json").write_text('{"weight_map": {"x": "a.safetensors"}}')
        named = copy(SHARDED, top, "named")
        shards = sorted(named.glob("*.safetensors"))
        (named / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": shards[0].name}}))
        bare = copy(ORBAX / "handmade_bare", top, "bare")
        several = copy(ORBAX / "v1_checkpointables", top, "several")
        stray = copy(ORBAX / "standard", top, "stray")
        (stray / "d" / "stray").write_bytes(bytes(50))
        unmerged = copy(ORBAX / "lazy_2proc", top, "unmerged") / "7" / "items"
        (unmerged / "manifest.ocdbt").unlink()
        partly = copy(ORBAX / "lazy_2proc", top, "partly") / "7" / "items"
        change_index(partly, lambda entries: entries.pop(b"params.params.w/c/1/0"))
        left = copy(ORBAX / "unfinished_atomic_rename", top, "left")
        run = copy(ORBAX / "maxtext_run", top, "run") / "checkpoints"
        (run / "4" / "_CHECKPOINT_METADATA").write_text("{")
        return [item, weights, unnamed, named, bare, several, stray, unmerged, partly, left, run]

    def test_commands_quote_paths(self, tmp_path):
        result = [finding for scene in self.scenes(tmp_path) for finding in examine(scene).findings]
        commands = [entry.hint for entry in result if "a dir" in entry.hint]
        assert len(commands) >= 9
        for command in commands:
            words = [word for word in shlex.split(command) if "a dir" in word]
            assert all(word.startswith(f"{tmp_path}/{self.NAME}/") for word in words), command

    def test_error_hints_quote_paths(self, tmp_path):
        *_, run = self.scenes(tmp_path)
        with pytest.raises(FormatError) as caught:
            ckpttools.open(run)
        assert shlex.quote(str(run)) in hint_of(caught.value)

    def test_path_like_an_option_gets_a_prefix(self):
        assert quote_path(Path("-rf x")) == "'./-rf x'"


class TestCommand:
    def run(self, *arguments):
        return ckpt("doctor", *arguments, COLUMNS="80")

    def test_doctor_exits_with_documented_codes(self, tmp_path):
        assert self.run(ORBAX / "standard").exit_code == 0
        assert self.run(ORBAX / "unfinished_atomic_rename").exit_code == 0
        assert self.run(ORBAX / "unfinished_commit_file").exit_code == 1
        assert self.run(tmp_path / "nothing").exit_code == 2
        assert self.run(tmp_path).exit_code == 3
        assert self.run().exit_code == 2
        assert self.run(ORBAX / "standard", "--fix", "everything").exit_code == 2

    def test_doctor_prints_findings_as_text(self):
        output = self.run(ORBAX / "unfinished_commit_file").output
        assert "error  " in output and "  why   " in output and "  next  " in output
        assert output.endswith("1 error; values not checked (--values)\n")
        sound = "structure and configuration OK; values not checked (--values)"
        assert self.run(ORBAX / "standard").output.endswith(f"{sound}\n")
        checked = self.run(ORBAX / "standard", "--checksums").output
        assert checked.endswith(f"{sound}; the files have no checksums of their data\n")

    def test_doctor_prints_findings_as_json(self):
        report = json.loads(self.run(ORBAX / "unfinished_commit_file", "--json").output)
        assert report["healthy"] is False
        assert report["findings"][0]["level"] == "error"
        assert {"location", "what", "consequence", "hint", "fix", "check"} <= report["findings"][0].keys()

    def test_list_option_names_checks_and_fixes(self):
        output = self.run("--list").output
        assert all(f" {check.name} " in output for check in checks())
        assert all(f"fix    {name} " in output for name in fixes())
        assert {load["kind"] for load in json.loads(self.run("--list", "--json").output)} == {"check", "fix"}

    def test_list_option_refuses_other_arguments(self, tmp_path):
        assert self.run("--list", "--fix", "merge").exit_code == 2
        assert self.run(tmp_path, "--list").exit_code == 2

    def test_renamed_step_is_not_called_healthy(self, tmp_path):
        run = copy(ORBAX / "unfinished_commit_file", tmp_path)
        for file in (run / "2").rglob("*"):
            os.utime(file, (0, 0))
        os.utime(run / "2", (0, 0))
        result = self.run(run / "2", "--fix", "set-aside")
        assert "is now" in result.output and "configuration OK" not in result.output

    def test_fix_without_faults_succeeds(self):
        result = self.run(ORBAX / "standard", "--fix", "merge")
        assert (result.exit_code, "nothing here" in result.output) == (0, True)

    def test_interrupted_conversion_alone_is_reported(self, tmp_path):
        (tmp_path / "dst.partial").mkdir()
        (tmp_path / "dst.partial/journal.ckpttools").touch()
        assert "interrupted conversion" in self.run(tmp_path / "dst").output
        itself = self.run(tmp_path / "dst.partial")
        assert itself.exit_code == 0 and "an interrupted conversion" in itself.output

    def test_opening_reports_interrupted_conversion(self, tmp_path):
        copy(ORBAX / "standard", tmp_path, "dst.partial/content")
        (tmp_path / "dst.partial/journal.ckpttools").touch()
        with pytest.raises(StorageError, match="dst does not exist") as caught:
            ckpttools.open(tmp_path / "dst")
        assert caught.value.hint.startswith(f"{tmp_path / 'dst.partial'} is an interrupted conversion")
        with pytest.raises(FormatError, match="interrupted conversion"):
            ckpttools.open(tmp_path / "dst.partial")
        (tmp_path / "dst.partial/replaced").mkdir()
        (result,) = examine(tmp_path / "dst.partial").findings
        assert "rm" not in result.hint and "move it back" in result.hint
        with pytest.raises(StorageError) as caught:
            ckpttools.open(tmp_path / "else")
        assert caught.value.hint == "check the spelling of the path"


def test_missing_permission_is_reported(monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "_METADATA")
    result = [finding for finding in examine(ORBAX / "standard").findings if finding.check == "access"]
    assert [(entry.level, "chmod u+r" in entry.hint) for entry in result] == [("error", True)]


@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_unreadable_data_file_is_reported(tmp_path, monkeypatch, use_ocdbt):
    arrays = {("w",): (zarr3([LITTLE], [300, 2]), values_of(F32, (600, 2)))}
    item = write_item(tmp_path / "item", arrays, use_ocdbt=use_ocdbt)
    if use_ocdbt:
        change_index(item, lambda entries: None)
    denied = extents(item)[0].file if use_ocdbt else "1/0"
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith(denied))
    (result,) = (finding for finding in examine(item).findings if finding.level == "error")
    assert denied in (result.location if use_ocdbt else result.what)
    assert "permission" in result.what or "may not be read" in result.what


def test_unlistable_directory_is_reported(monkeypatch):
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("/items"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    result = examine(ORBAX / "maxtext_run").findings
    assert {"access"} <= {entry.check for entry in result if entry.level == "error"}
    assert not any("stopped" in entry.what for entry in result)


def test_dangling_and_circular_links_are_reported(tmp_path):
    folder = copy(SHARDED, tmp_path)
    shard = min(folder.glob("*.safetensors"))
    shard.unlink()
    shard.symlink_to(tmp_path / "gone")
    (folder / "round").symlink_to(folder)
    assert "access" in told(folder, "error")


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors.index.json", "model-00001-of-00004.safetensors"]
)
def test_named_pipe_does_not_block(tmp_path, name):
    folder = copy(SHARDED, tmp_path)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert any(
        finding.what.startswith("not a file")
        for finding in examine(folder).findings
        if finding.level == "error"
    )
    with pytest.raises(CheckpointError):
        ckpttools.open(folder).metadata.config["model_type"]


@pytest.mark.parametrize("name", ["_strings.json", "_sharding", "array_metadatas/process_0"])
def test_named_pipe_in_an_item_does_not_block(tmp_path, name):
    item = copy(ORBAX / "tree_zoo", tmp_path)
    (item / name).unlink(missing_ok=True)
    os.mkfifo(item / name)
    assert told(item, "error")


@pytest.mark.parametrize("name", ["index", "chunk"])
def test_named_pipes_among_data_files_do_not_block(tmp_path, name):
    arrays = {("w",): (zarr3([LITTLE, ZSTD], [300, 2]), values_of(F32, (600, 2)))}
    item = write_item(tmp_path / "item", arrays, use_ocdbt=name == "index")
    for file in [*item.glob("d/*")] if name == "index" else [item / "w" / "c" / "1" / "0"]:
        file.unlink()
        os.mkfifo(file)
    assert told(item, "error")


def test_check_is_one_file(tmp_path, monkeypatch):
    source = """
from ckpttools.diagnosis.base import INFO, Check, Finding
def look(inventory):
    yield Finding(INFO, str(inventory.path), "hello", "because", "nothing")
CHECK = Check("greeting", "says hello", look)
"""
    (tmp_path / "greeting.py").write_text(source)
    monkeypatch.setattr(checks_room, "__path__", [*checks_room.__path__, str(tmp_path)])
    checks.cache_clear()
    try:
        assert ("info", "greeting") in told(ORBAX / "standard")
    finally:
        checks.cache_clear()


def test_failing_check_is_reported(monkeypatch):
    (failing,) = [check for check in checks() if check.name == "items"]

    def look(inventory):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("ckpttools.diagnosis.examine.checks", lambda: (type(failing)("planted", "", look),))
    result = examine(ORBAX / "standard").findings
    assert ["ZeroDivisionError: planted" in entry.what for entry in result] == [True]


def extents(item):
    return [entry for entry in entries_of(parse(item)).all.values() if not isinstance(entry, bytes)]


SOURCES = [
    ORBAX / "lazy_2proc",
    ORBAX / "maxtext_run",
    ORBAX / "pytree_ocdbt0_zarr30",
    ORBAX / "pytree_ocdbt0_zarr31",
    ORBAX / "pytree_ocdbt1_zarr31",
    ORBAX / "replicator",
    ORBAX / "tree_zoo",
    ORBAX / "unfinished_commit_file",
    ORBAX / "v1_training",
]
damages = st.lists(
    st.tuples(
        st.sampled_from(["cut", "flip", "delete", "zeros", "garbage", "directory", "rename"]),
        st.integers(0, 10_000),
        st.integers(0, 10_000),
    ),
    min_size=1,
    max_size=4,
)


def damage(top, kind, which, where):
    """Does one thing to one file."""
    files = sorted(path for path in top.rglob("*") if path.is_file())
    if not files:
        return
    file = files[which % len(files)]
    data = bytearray(file.read_bytes())
    at = where % (len(data) or 1)
    match kind:
        case "cut":
            file.write_bytes(data[:at])
        case "flip" if data:
            data[at] ^= 1 << where % 8
            file.write_bytes(data)
        case "delete":
            file.unlink()
        case "zeros":
            file.write_bytes(bytes(len(data)))
        case "garbage":
            file.write_bytes(bytes((where * k) % 251 for k in range(100)))
        case "directory":
            file.unlink()
            file.mkdir()
        case "rename":
            file.rename(file.with_name(file.name + ".json"))


@pytest.fixture(scope="module")
def small_safetensors(tmp_path_factory):
    from safetensors.numpy import save_file

    folder = tmp_path_factory.mktemp("weights")
    named = {}
    for number in (1, 2):
        name = f"model-{number:05}-of-00002.safetensors"
        save_file({f"w{number}.{k}": np.full((3, 4), k, F32) for k in range(3)}, folder / name)
        named |= {f"w{number}.{k}": name for k in range(3)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def outcome(top):
    """A report on whatever is there; or that it is nothing."""
    before = content(top)
    try:
        diagnosis = examine(top)
    except FormatError as error:
        assert error.message.endswith(("is not a checkpoint", "is an empty directory", "has no weights"))
        return None
    assert content(top) == before
    for finding in diagnosis.findings:
        assert (
            finding.level in LEVELS
            and finding.location
            and finding.what
            and finding.consequence
            and finding.hint
        )
        assert "stopped" not in finding.what, finding
    json.dumps([finding.location for finding in diagnosis.findings])
    return diagnosis


class TestArbitraryBytes:
    @pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
    @settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
    @given(damages=damages)
    def test_doctor_reports_on_any_garbage(self, source, damages, tmp_path_factory):
        self.check(source, damages, tmp_path_factory)

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(damages=damages)
    def test_doctor_reports_on_any_safetensors_garbage(self, small_safetensors, damages, tmp_path_factory):
        self.check(small_safetensors, damages, tmp_path_factory)

    def check(self, source, damages, tmp_path_factory):
        """A report; and whatever is called healthy can be opened."""
        top = copy(source, tmp_path_factory.mktemp("garbage"))
        try:
            for entry in damages:
                damage(top, *entry)
            diagnosis = outcome(top)
            if diagnosis is not None and diagnosis.healthy and source.name not in ("replicator",):
                ckpttools.open(top)
            result = ckpt("doctor", top)
            assert result.exit_code in (0, 1, 3)
            assert result.exception is None or isinstance(result.exception, SystemExit)
        finally:
            shutil.rmtree(top)

    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    @given(damages=damages)
    def test_fixes_never_lose_anything(self, damages, tmp_path_factory):
        top = copy(ORBAX / "lazy_2proc", tmp_path_factory.mktemp("garbage"))
        try:
            (top / "7" / "items" / "manifest.ocdbt").unlink()
            (top / "7" / "commit_success.txt").unlink()
            for entry in damages:
                damage(top, *entry)
            before = content(top)
            for name in ("merge", "commit-marker", "index"):
                try:
                    apply_fixes(top, name)
                except CheckpointError as error:
                    assert not isinstance(error, UsageError)
            after = content(top)
            assert {path: after.get(path) for path in before} == before
        finally:
            shutil.rmtree(top)
