"""`ckpt convert SRC DST` infers the direction, and `--into DIR` converts several sources."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.command_line import ckpt, ended
from support.locations import FIXTURES, GOLDEN, TRAINED

import ckpttools

MODEL = GOLDEN / "qwen3" / "hf"
DIRECTIONS = "hf-to-maxtext", "maxtext-to-hf"
MAXTEXT = GOLDEN / "llama3.1" / "maxtext_scanned"


def digests(path: object) -> object:
    return json.loads(ended("hash", path, "--json").stdout)["parameters"]


def test_model_becomes_a_maxtext_checkpoint_and_a_model_again(tmp_path):
    there = ended("convert", MODEL, tmp_path / "maxtext", "--no-scan")
    assert (
        "a Hugging Face model (safetensors): converting to MaxText (ckpt convert hf-to-maxtext)"
        in there.stderr
    )
    back = ended("convert", tmp_path / "maxtext", tmp_path / "hf")
    assert "a MaxText checkpoint (unstacked-inference): converting to Hugging Face" in back.stderr
    assert digests(tmp_path / "hf") == digests(MODEL)


def test_options_may_precede_the_source(tmp_path):
    ended("convert", "--dtype", "float32", "--like", GOLDEN / "llama3.1/hf", MAXTEXT, tmp_path / "hf")
    assert {array.dtype.name for array in ckpttools.open(tmp_path / "hf").arrays.values()} == {"float32"}


def test_step_decides_which_checkpoint_is_examined(tmp_path):
    run = tmp_path / "run"
    ended("convert", "hf-to-maxtext", MODEL, run)
    shutil.copytree(run / "0", run / "9")
    (run / "9/items/_METADATA").unlink()
    done = ended("convert", run, tmp_path / "hf", "--step", 0)
    assert "converting to Hugging Face" in done.stderr


@pytest.mark.parametrize("words", [[], ["maxtext-to-hf"]])
def test_command_name_may_follow_an_option(words, tmp_path):
    ended("convert", "--no-progress", *words, TRAINED, tmp_path / "hf", "--like", GOLDEN / "llama3.1/hf")


def test_sources_of_neither_kind_are_refused_with_both_commands(tmp_path):
    save_file({"a.weight": np.zeros((4, 4), "f4")}, tmp_path / "plain.safetensors")
    done = ended("convert", tmp_path / "plain.safetensors", tmp_path / "x", code=2)
    both = [f"`ckpt convert {name} {tmp_path}/plain.safetensors DST`" for name in DIRECTIONS]
    assert " or ".join(both) in done.stderr


def test_adapters_are_refused_with_their_own_commands(tmp_path):
    done = ended("convert", FIXTURES / "peft/plain", tmp_path / "x", code=3)
    assert "ckpt adapter merge BASE" in done.stderr


def test_directory_of_several_is_not_converted(tmp_path):
    for name in ("a", "b"):
        shutil.copytree(MODEL, tmp_path / "models" / name)
    done = ckpt("convert", tmp_path / "models", tmp_path / "x")
    assert done.exit_code == 3
    assert f"name one of them: ckpt convert {tmp_path}/models/a {tmp_path}/x" in done.stderr


class TestInto:
    def test_each_source_gets_a_directory_of_its_name(self, tmp_path):
        second = tmp_path / "second"
        shutil.copytree(MODEL, second)
        done = ended("convert", MODEL, second, "--into", tmp_path / "out", "--json")
        reports = json.loads(done.stdout)["reports"]
        assert [item["destination"] for item in reports] == [f"{tmp_path}/out/hf", f"{tmp_path}/out/second"]
        assert digests(tmp_path / "out/hf") == digests(tmp_path / "out/second")

    def test_existing_output_is_skipped(self, tmp_path):
        words = "convert", "to-zarr3", MODEL, MAXTEXT, "--into", tmp_path / "out"
        ended(*words[:3], *words[4:])
        done = ended(*words)
        assert "out/hf exists: skipped; --overwrite replaces it (compared: names" in done.stderr
        assert "1 of 2 sources converted" in done.stderr
        skipped = json.loads(ended(*words, "--json").stdout)["skipped"]
        assert skipped == [f"{tmp_path}/out/hf", f"{tmp_path}/out/{MAXTEXT.name}"]

    @pytest.mark.parametrize("at", [-2, -60_001, -150_001])
    def test_output_of_another_source_is_not_skipped(self, at, tmp_path):
        other = tmp_path / "b" / "hf"
        shutil.copytree(MODEL, other)
        weights = other / "model.safetensors"
        data = bytearray(weights.read_bytes())
        data[at] ^= 1
        weights.write_bytes(data)
        ended("convert", MODEL, "--into", tmp_path / "out")
        before = digests(tmp_path / "out/hf")
        done = ended("convert", other, "--into", tmp_path / "out", code=2)
        assert "out/hf comes from another source, or from other options" in done.stderr
        assert "has other values" in done.stderr
        done = ended("convert", MODEL, "--into", tmp_path / "out", "--no-scan", code=2)
        assert "from other options" in done.stderr
        assert digests(tmp_path / "out/hf") == before

    @pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
    def test_output_with_other_files_of_the_model_is_not_skipped(self, name, tmp_path):
        source = tmp_path / "a" / "hf"
        shutil.copytree(MODEL, source)
        ended("convert", "to-safetensors", source, "--into", tmp_path / "out")
        file = source / name
        config = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**config, "rope_theta": 7.0}))
        done = ended("convert", "to-safetensors", source, "--into", tmp_path / "out", code=2)
        assert "other options" in done.stderr and name in done.stderr
        ended("convert", "to-safetensors", source, "--into", tmp_path / "out", "--overwrite")
        done = ended("convert", "to-safetensors", source, "--into", tmp_path / "out")
        assert "skipped" in done.stderr

    def test_manifest_is_of_one_new_output(self, tmp_path):
        words = "convert", "to-zarr3", MODEL, "--into", tmp_path / "out"
        manifest = tmp_path / "manifest.json"
        done = ended(*words, MAXTEXT, "--manifest", manifest, code=2)
        assert "there are several sources" in done.stderr
        assert not (tmp_path / "out").exists()
        ended(*words)
        done = ended(*words, "--manifest", manifest, code=2)
        assert "exists" in done.stderr and not manifest.exists()

    @pytest.mark.parametrize("options", [(), ("--overwrite",)])
    @pytest.mark.parametrize("what", ["file", "notes", "other format"])
    def test_other_content_is_not_an_earlier_output(self, what, options, tmp_path):
        found = tmp_path / "out" / "hf"
        if what == "other format":
            shutil.copytree(MODEL, found)
        else:
            (found.parent if what == "file" else found).mkdir(parents=True)
            (found if what == "file" else found / "notes.txt").write_text("mine")
        done = ended("convert", "hf-to-maxtext", MODEL, "--into", found.parent, *options, code=2)
        assert "skipped" not in done.stderr and f"Error: {found} is " in done.stderr

    def test_one_unusable_source_prevents_all_writing(self, tmp_path):
        done = ended("convert", "hf-to-maxtext", MODEL, MAXTEXT, "--into", tmp_path / "out", code=3)
        assert "this is already a MaxText checkpoint" in done.stderr
        assert not (tmp_path / "out").exists()

    def test_dry_run_prints_each_plan(self, tmp_path):
        shutil.copytree(GOLDEN / "gemma2" / "hf", tmp_path / "gemma")
        done = ended("convert", MODEL, tmp_path / "gemma", "--into", tmp_path / "out", "--dry-run")
        assert done.stdout.count("Dry run: nothing was written.") == 2


def test_receipt_in_json_has_the_notes_and_next_steps_of_the_text(tmp_path):
    text = ended("convert", "hf-to-maxtext", MODEL, tmp_path / "a", COLUMNS="200").stderr
    receipt = json.loads(ended("convert", "hf-to-maxtext", MODEL, tmp_path / "b", "--json").stdout)
    assert receipt["next"][0].startswith("load_parameters_path=")
    for line in (*receipt["notes"]["remarks"], *receipt["next"]):
        assert line.replace(f"{tmp_path}/b", f"{tmp_path}/a") in text
