"""What somebody meets who does not know the tool: what it says, where files go, and what to do next."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from click import Context, Group
from safetensors.numpy import save_file
from support.command_line import ckpt, run, succeed
from support.internals import inspect_tree, main, parse
from support.locations import GOLDEN, ORBAX, TRAINED
from support.orbax_items import change_index
from support.torch_files import save, whole

import ckpttools
from ckpttools.cli.output import format_labeled, wrap
from ckpttools.formats.orbax.runs import mismatch_reason
from ckpttools.maxtext.model_files import sidecar_names

SIDE_FILES = {
    "tokenizer.json": b'{"a":  1}\n',
    "generation_config.json": b"{}",
    "chat_template.jinja": b"{{x}}",
}


@pytest.fixture
def model(tmp_path) -> Path:
    """A model with a tokenizer, in a directory with a space in its name."""
    location = tmp_path / "a model"
    shutil.copytree(GOLDEN / "qwen3" / "hf", location)
    for name, content in SIDE_FILES.items():
        (location / name).write_bytes(content)
    return location


def weights(location: Path, *names: str) -> None:
    save_file({name: np.zeros((4, 4), "f4") for name in names}, location)


def index(model: Path) -> dict[str, object]:
    """The index of all weights of a model in several files."""
    files = {file.name: ckpttools.open(file) for file in model.glob("*.safetensors")}
    return {"weight_map": {path[0]: name for name, tree in files.items() for path in tree}}


class TestRoundTripWithSidecars:
    """Hugging Face's directory through another format is one again, which `transformers` loads."""

    def side_files(self, location: Path) -> dict[str, bytes]:
        names = [path for path in location.iterdir() if not path.name.endswith(".safetensors")]
        return {path.name: path.read_bytes() for path in names}

    def test_files_next_to_weights_round_trip(self, model, tmp_path):
        run("convert", "to-orbax", model, tmp_path / "orbax")
        assert (tmp_path / "orbax/0/items/hf/config.json").is_file()
        run("convert", "to-safetensors", tmp_path / "orbax", tmp_path / "back")
        assert self.side_files(tmp_path / "back") == self.side_files(model)
        run("convert", "to-safetensors", model, tmp_path / "again", "--max-shard-size", "100kB")
        run("convert", "to-orbax", tmp_path / "again", tmp_path / "of shards")
        run("convert", "to-safetensors", tmp_path / "of shards", tmp_path / "whole")
        assert self.side_files(tmp_path / "whole") == self.side_files(model)
        run("convert", "hf-to-maxtext", tmp_path / "back", tmp_path / "maxtext")
        run("verify", tmp_path / "maxtext", "--against", model)

    def test_flat_file_with_maxtext_names_has_no_config(self, model, tmp_path):
        run("convert", "hf-to-maxtext", model, tmp_path / "maxtext")
        run("convert", "to-safetensors", tmp_path / "maxtext", tmp_path / "flat")
        assert not (tmp_path / "flat" / "config.json").exists()
        assert self.side_files(model).items() <= self.side_files(tmp_path / "flat" / "hf").items()

    def test_inspect_lists_sidecars(self, model, tmp_path):
        assert sidecar_names(ckpttools.open(model)) == sorted((*SIDE_FILES, "config.json"))
        run("convert", "hf-to-maxtext", model, tmp_path / "maxtext")
        result = json.loads(succeed("inspect", "tree", tmp_path / "maxtext", "--json").stdout)["sidecars"]
        assert {f"hf/{name}" for name in (*SIDE_FILES, "config.json", "ckpttools.json")} == set(result)
        assert "hf/tokenizer.json" in succeed("inspect", "tree", tmp_path / "maxtext").stdout
        assert inspect_tree(ckpttools.open(model)).sidecars == ()


class TestMissingFiles:
    """One cause, one code: whatever the checkpoint itself names and that is not there is bad input."""

    COMMANDS = (
        ("inspect", "stats"),
        ("hash",),
        ("convert", "to-zarr3", "{}", "{out}"),
        ("convert", "maxtext-to-hf", "{}", "{out}"),
        ("diff", "{}", "{whole}"),
        ("verify", "{whole}", "--against", "{}"),
    )

    @pytest.mark.parametrize("options", [(), ("--no-ocdbt",)])
    def test_lost_file_has_one_exit_code(self, model, tmp_path, options):
        whole = tmp_path / "whole"
        run("convert", "hf-to-maxtext", model, whole, *options)
        lost = ["d/data", "d/index"] if not options else ["params.params.token_embedder.embedding/c/0/0"]
        for name in (*lost, "_METADATA"):
            broken = tmp_path / f"without {Path(name).name}"
            shutil.copytree(whole, broken)
            (broken / "0/items" / name).unlink()
            for command in self.COMMANDS:
                words = command if "{}" in command else (*command, "{}")
                known = {"{}": broken, "{out}": tmp_path / "out", "{whole}": whole}
                result = ckpt(*(known.get(word, word) for word in words))
                assert result.exit_code == 3, (name, command, result.output)
                assert not (tmp_path / "out").exists()

    def test_missing_shard_and_dangling_link_exit_with_3(self, model, tmp_path):
        run("convert", "to-safetensors", model, tmp_path / "shards", "--max-shard-size", "100kB")
        shard = sorted((tmp_path / "shards").glob("model-*"))[1]
        shard.unlink()
        assert "1 of the weight files is missing" in run("hash", tmp_path / "shards", code=3)
        shard.symlink_to("nowhere")
        run("hash", tmp_path / "shards", code=3)
        (model / "config.json").unlink()
        (model / "config.json").symlink_to("nowhere")
        run("hash", model, code=3)

    def test_missing_user_path_exits_with_2(self, model, tmp_path):
        run("hash", tmp_path / "absent", code=2)
        assert ckpt("inspect", "tree", model, "--against", tmp_path / "absent.json").exit_code == 2
        run("convert", "maxtext-to-hf", model, tmp_path / "out", "--like", tmp_path / "absent", code=3)


def damaged_run(model: Path, location: Path) -> Path:
    """A run of three steps without marks, the first of which has lost its data."""
    for step in range(3):
        run("convert", "to-orbax", model, location / f"of {step}", "--as-step", step)
        (location / f"of {step}" / str(step)).rename(location / str(step))
        (location / f"of {step}").rmdir()
    for mark in location.rglob("commit_success.txt"):
        mark.unlink()
    (location / "0/items/d/data").unlink()
    return location


class TestDoctor:
    def unmerged(self, tmp_path: Path) -> Path:
        location = tmp_path / "a run"
        shutil.copytree(ORBAX / "lazy_2proc", location)
        (location / "7/items/manifest.ocdbt").unlink()
        return location

    def test_doctor_applies_fixes_in_order(self, tmp_path):
        location = self.unmerged(tmp_path)
        for mark in location.rglob("commit_success.txt"):
            mark.unlink()
        done = json.loads(
            ckpt("doctor", location, "--fix", "merge", "--fix", "commit-marker", "--json").stdout
        )
        assert (location / "7/items/manifest.ocdbt").is_file()
        assert (location / "7/items/commit_success.txt").is_file()
        assert len(done["applied_fixes"]) >= 2 and not done["refused_fixes"] and done["healthy"]
        again = ckpt("doctor", location, "--fix", "merge", "--fix", "commit-marker")
        assert again.exit_code == 0 and "nothing here" in again.output

    def test_incomplete_index_is_merged_repeatedly(self, tmp_path):
        """What an earlier time has set aside is in nobody's way."""
        location = tmp_path / "a run"
        shutil.copytree(ORBAX / "lazy_2proc", location)
        for _ in range(2):
            change_index(location / "7/items", lambda entries: entries.pop(b"params.params.w/c/1/0"))
            findings = json.loads(ckpt("doctor", location, "--json").stdout)["findings"]
            (told,) = (finding for finding in findings if finding["check"] == "unmerged")
            rename, merge = told["command"].split(" && ")
            subprocess.run(shlex.split(rename), check=True)
            succeed(*shlex.split(merge)[1:])
            assert succeed("doctor", location).exit_code == 0
        ckpttools.open(location).arrays["params", "params", "w"].read()

    def test_unknown_fix_changes_nothing(self, tmp_path):
        location = self.unmerged(tmp_path)
        assert ckpt("doctor", location, "--fix", "merge", "--fix", "none").exit_code == 2
        assert not (location / "7/items/manifest.ocdbt").exists()

    def test_bad_path_does_not_stop_other_fixes(self, model, tmp_path):
        (tmp_path / "run").mkdir()
        location = damaged_run(model, tmp_path / "run")
        result = ckpt("doctor", location, "--fix", "commit-marker", "--json")
        assert result.exit_code == 3
        told = json.loads(result.stdout)
        assert {Path(item["location"]) for item in told["refused_fixes"]} == {
            location / "0",
            location / "0/items",
        }
        assert all((location / name / "commit_success.txt").is_file() for name in ("1", "2/items"))
        assert not (location / "0/commit_success.txt").exists()

    def test_advised_commands_are_complete_shell_lines(self, tmp_path):
        location = self.unmerged(tmp_path)
        (told,) = (
            load for load in json.loads(ckpt("doctor", location, "--json").stdout)["findings"] if load["fix"]
        )
        assert told["command"] in told["hint"]
        assert shlex.split(told["command"])[2] == str(location)
        lines = [line.strip() for line in ckpt("doctor", location).stdout.splitlines()]
        assert any(line.removeprefix("next").strip() == told["command"] for line in lines)


class TestRecognizedInputs:
    """What a command does not take is told to be what it is, with the command that fits."""

    def test_hint_names_the_reverse_conversion(self, model, tmp_path):
        out = tmp_path / "out"
        told = run("convert", "maxtext-to-hf", model, out, code=3)
        assert "this is already a Hugging Face checkpoint" in told
        self.obeyed(told, out)
        told = run("convert", "hf-to-maxtext", out, tmp_path / "back", code=3)
        assert "this is already a MaxText checkpoint" in told
        self.obeyed(told, tmp_path / "back")

    def obeyed(self, told: str, destination: Path) -> None:
        """Runs the first command of the next step, as it is written down."""
        command = told.partition("  hint     `ckpt ")[2].partition("` converts it to a ")[0]
        run(*(str(destination) if word == "DST" else word for word in shlex.split(command)))

    @pytest.mark.parametrize("command", ["stack", "unstack"])
    def test_stack_hint_names_hf_to_maxtext(self, model, tmp_path, command):
        told = run(command, model, tmp_path / "out", code=3)
        command = f"ckpt convert hf-to-maxtext {shlex.quote(str(model))} DST"
        assert f"hint     `{command}` converts a Hugging Face model to stacked layers" in told

    @pytest.mark.parametrize("command", ["hf-to-maxtext", "maxtext-to-hf"])
    def test_adapter_is_recognized(self, tmp_path, command):
        save_file(
            {"base_model.model.q_proj.lora_A.weight": np.zeros((2, 4), "f4")}, tmp_path / "a.safetensors"
        )
        declared = {"peft_type": "LORA", "base_model_name_or_path": "me/base"}
        (tmp_path / "adapter_config.json").write_text(json.dumps(declared))
        told = run("convert", command, tmp_path, tmp_path.with_name("out"), code=3)
        assert "this is a LoRA adapter of me/base, not a complete model" in told
        assert "ckpt adapter merge" in told and "config.json" not in told
        findings = json.loads(ckpt("doctor", tmp_path, "--json").stdout)["findings"]
        assert any(finding["check"] == "config" and "LoRA adapter" in finding["what"] for finding in findings)

    def test_similar_model_name_is_not_matched_to_a_family(self, model, tmp_path):
        config = json.loads((model / "config.json").read_text()) | {"model_type": "deepseek_v99"}
        (model / "config.json").write_text(json.dumps(config))
        told = run("convert", "hf-to-maxtext", model, tmp_path / "out", code=3)
        assert "did you mean" not in told
        assert (
            "its arrays have the names of qwen3: if the model computes in the same way, --family qwen3"
            in told
        )
        assert "qwen3, all " in succeed("inspect", "tree", model).stdout
        run("convert", "hf-to-maxtext", model, tmp_path / "out", "--family", "qwen3")
        weights(model / "model.safetensors", "backbone.layers.0.mixer.in_proj.weight", "backbone.norm.weight")
        told = run("convert", "hf-to-maxtext", model, tmp_path / "none", code=3)
        assert "none has these names" in told and "--family FILE.toml" in told
        told = run("convert", "maxtext-to-hf", model, tmp_path / "none", code=3)
        assert "already a Hugging Face checkpoint, and its model cannot be converted" in told

    def test_hint_does_not_drop_parts_of_the_model(self, model, tmp_path):
        """What the model works out anew may be, and what lies beside it."""
        (model / "model.safetensors").rename(model / "first.safetensors")
        for name, word in {
            "model.layers.0.self_attn.sinks": "--family FILE.toml",
            "v_head.summary.weight": "--drop PATTERN",
        }.items():
            weights(model / "more.safetensors", name)
            (model / "model.safetensors.index.json").write_text(json.dumps(index(model)))
            told = run("convert", "hf-to-maxtext", model, tmp_path / "out", code=3)
            assert f"not expected:\n    {name}" in told
            (remedy,) = (line for line in told.splitlines() if line.startswith("  hint"))
            assert word in remedy and ("--drop" in remedy) == ("--drop" in word)

    def test_hint_names_the_step_and_missing_config(self, tmp_path):
        """The command names the step that was looked at, and what it needs that is not carried along."""
        for source, step in ((TRAINED, 1), (ORBAX / "maxtext_run", 4)):
            told = run("convert", "hf-to-maxtext", source, tmp_path / "out", code=3)
            assert "this is already a MaxText checkpoint" in told
            assert "got      stacked-training, linen flavor" in told
            assert f"/{step}/items DST --like HF_DIR` converts it to a Hugging Face checkpoint" in told

    def test_orbax_checkpoints_of_other_programs_are_described(self, model, tmp_path):
        told = run("convert", "hf-to-maxtext", ORBAX / "cm_default", tmp_path / "out", code=3)
        assert "this Orbax checkpoint has neither" in told
        assert "params.dense.kernel" in told and "hint     `ckpt inspect tree" in told

    def test_orbax_with_hub_names_without_config_gets_a_hint(self, model, tmp_path):
        (model / "config.json").rename(tmp_path / "config.json")
        run("convert", "to-orbax", model, tmp_path / "orbax")
        told = run("convert", "hf-to-maxtext", tmp_path / "orbax", tmp_path / "out", code=3)
        location = Path(told.rpartition("source of the weights to ")[2].strip())
        location.mkdir(exist_ok=True)
        (tmp_path / "config.json").rename(location / "config.json")
        run("convert", "hf-to-maxtext", tmp_path / "orbax", tmp_path / "out")

    @pytest.mark.parametrize("command", ["hf-to-maxtext", "maxtext-to-hf"])
    def test_adapter_is_recognized_next_to_other_files(self, model, tmp_path, command):
        weights(model / "model.safetensors", "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight")
        (tmp_path / "pickled").mkdir()
        lora = {"base_model.model.x.lora_A.weight": whole(np.ones((2, 4), "f4"))}
        save(tmp_path / "pickled/adapter_model.bin", lora)
        (tmp_path / "pickled/adapter_config.json").write_text('{"base_model_name_or_path": "me/base"}')
        sources = {model: "", model / "model.safetensors": "", tmp_path / "pickled": " of me/base"}
        for source, base in sources.items():
            told = run("convert", command, source, tmp_path / "out", code=3)
            assert (
                f"this is a LoRA adapter{base}, not a complete model" in told and "ckpt adapter merge" in told
            )

    def test_files_of_other_programs_are_recognized(self, model, tmp_path):
        (model / "model.safetensors").unlink()
        kinds = {
            "model-q4_0.gguf": ("llama.cpp files (GGUF)", "hf download REPO '*.safetensors' '*.json'"),
            "__0_0.distcp": ("parts of a PyTorch distributed checkpoint without .metadata", "too"),
        }
        for name, (what, remedy) in kinds.items():
            (model / name).write_bytes(b"x" * 100)
            told = run("convert", "hf-to-maxtext", model, tmp_path / "out", code=3)
            assert f"these are {what}" in told
            assert f"got      {name}" in told and remedy in told
            told = ckpt("inspect", "tree", model / name).output
            assert f"these are {what}" in told and "config.json" not in told
            (model / name).unlink()
        (model / "config.json").unlink()
        (model / "consolidated.00.pth").write_bytes(b"x")
        told = run("hash", model / "consolidated.00.pth", code=3)
        assert "torch: it does not start like a torch.save file" in told

    def test_hub_name_gets_a_hint(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        told = run("hash", "Qwen/Qwen3-0.6B", code=2)
        assert "a model on the Hugging Face Hub is named hf://Qwen/Qwen3-0.6B" in told
        (tmp_path / "runs").mkdir()
        assert "hf://" not in run("convert", "hf-to-maxtext", "runs/new", "out", code=2)

    def test_diffusers_pipeline_is_recognized(self, model, tmp_path):
        location = tmp_path / "flux"
        shutil.copytree(model, location / "text_encoder")
        (location / "transformer").mkdir()
        weights(location / "transformer/diffusion_pytorch_model.safetensors", "blocks.0.attn.to_q.weight")
        declared = {"_class_name": "FluxTransformer2DModel", "_diffusers_version": "0.30.0"}
        (location / "transformer/config.json").write_text(json.dumps(declared))
        parts = {name: ["diffusers", name] for name in ("scheduler", "text_encoder", "transformer")}
        (location / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline", **parts}))
        for command in ("hf-to-maxtext", "maxtext-to-hf"):
            told = run("convert", command, location, tmp_path / "out", code=3)
            assert "this is a diffusers pipeline (FluxPipeline), not one model" in told
            assert "got      text_encoder, transformer" in told
            told = run("convert", command, location / "transformer", tmp_path / "out", code=3)
            assert (
                "a component of a diffusers pipeline (FluxTransformer2DModel), not a language model" in told
            )
        run("convert", "hf-to-maxtext", location / "text_encoder", tmp_path / "out")

    def hosts(self, tmp_path: Path) -> Path:
        """Two hosts' directories, with a part of a step each, and what was saved whole beside them."""
        top = tmp_path / "local files"
        for number in range(2):
            step = top / f"host{number}" / "7"
            source = ORBAX / "lazy_2proc" / "7"
            shutil.copytree(source, step)
            (step / "items").rename(step / "state")
            (step / "process_metadata").mkdir()
            (step / "state/manifest.ocdbt").unlink()
            shutil.rmtree(step / f"state/ocdbt.process_{1 - number}")
        return top

    @pytest.mark.parametrize("command", [("inspect", "tree"), ("hash",), ("inspect", "stats")])
    def test_host_directories_are_shown_as_one_checkpoint(self, tmp_path, command):
        whole = succeed(*command, self.hosts(tmp_path)).output
        assert "missing" not in whole
        shutil.rmtree(tmp_path / "local files" / "host1")
        result = ckpt(*command, tmp_path / "local files")
        assert result.exit_code == 3
        assert "shares of several hosts" in result.output and "host0" in result.output

    def test_sibling_files_are_not_inspected(self, tmp_path):
        """Of a directory of runs, each with thousands of files, only directories named as steps are."""
        for number in range(4):
            for name in ("logs", "12"):
                (tmp_path / f"run{number}" / name).mkdir(parents=True)
            for at in range(50):
                (tmp_path / f"run{number}" / f"events.{at}").touch()
        looked: list[str] = []
        real = os.stat
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "stat", lambda path, **k: (looked.append(str(path)), real(path, **k))[1])
            assert mismatch_reason(parse(tmp_path))
        assert looked and not [path for path in looked if "events." in path]

    def test_single_host_hint_names_assemble(self, tmp_path):
        """With the command where the others lie beside it; put together alone it is not called lost."""
        top = self.hosts(tmp_path)
        (top / "host1/7/_CHECKPOINT_METADATA").unlink()  # it calls the item by its former name
        told = ckpt("inspect", "tree", top / "host1", COLUMNS="1000").output
        (command,) = re.findall(r"`ckpt (assemble [^`…]+ DST)`", told)
        succeed(*shlex.split(command.replace("DST", str(tmp_path / "NEW"))))
        whole = ckpttools.open(ORBAX / "lazy_2proc").arrays
        built = ckpttools.open(tmp_path / "NEW").arrays
        assert {path: array.read().tobytes() for path, array in built.items()} == {
            path: array.read().tobytes() for path, array in whole.items()
        }


class TestLines:
    """Sentences fit into the terminal, or into 80 columns; what is to be copied is never broken."""

    def test_paths_are_wrapped_only_after_keys(self):
        text = "arrays such as params/params/decoder/layers_with_a_long_name/self_attention/kernel are"
        lines = wrap(text, 30)
        assert "".join(lines).replace(" ", "") == text.replace(" ", "")
        assert all(len(line) <= 30 for line in lines)
        assert all(line[-1] in "/." or line.split()[-1] in text.split() for line in lines)
        assert wrap("x" * 50, 30) == ["x" * 50]
        assert wrap("", 30) == [""]

    def test_commands_in_sentences_are_not_wrapped(self):
        command = "`ckpt doctor '/some where/else' --fix merge`"
        assert wrap(f"it is so: {command}, says more", 30) == ["it is so:", f"{command},", "says more"]

    def test_long_command_gets_its_own_line(self):
        command = "ckpt doctor '/some where/else' --fix merge"
        text = f"mend it: {command}; that is all there is to say of it, and enough"
        lines = format_labeled("  next", text, 8, 60, command=command)
        assert [line[8:] for line in lines][:2] == ["mend it:", command]
        assert all(len(line) <= 60 for line in lines)
        assert format_labeled("  next", f"run {command}", 8, None, command=command) == [
            f"  next  run {command}"
        ]

    @pytest.mark.parametrize("flags", [("--flat",), ("--sharding",), ("--flat", "--sharding"), ()])
    def test_tree_rows_fit_the_terminal(self, flags):
        for room in (44, 60, 80):
            shown = succeed("inspect", "tree", ORBAX / "maxtext_run", *flags, COLUMNS=str(room)).stdout
            # A path has the first line to itself, to be copied.
            assert all(len(line) <= room for line in shown.splitlines()[1:]), (flags, room)

    def test_notes_and_findings_are_wrapped(self, model, tmp_path):
        plan = succeed(
            "convert", "to-orbax", model, tmp_path / "out", "--dtype", "float8_e4m3fn", "--dry-run"
        )
        sentences = [line for line in plan.stdout.splitlines() if not line.startswith(("from", "to "))]
        assert all(len(line) <= 80 for line in sentences)
        (model / "config.json").unlink()
        told = ckpt("doctor", model).stdout.splitlines()
        long = [line for line in told if len(line) > 80]
        assert all(str(model) in line for line in long)
        assert any(line.strip().startswith("hf download REPO config.json") for line in told)

    def test_help_fits_80_columns(self):
        def commands(group: Group, words: tuple[str, ...]) -> list[tuple[str, ...]]:
            context = Context(group)
            result = []
            for name in group.list_commands(context):
                inner = group.get_command(context, name)
                result += commands(inner, (*words, name)) if isinstance(inner, Group) else [(*words, name)]
            return result

        for words in commands(main, ()):
            text = succeed(*words, "--help", COLUMNS="80").stdout
            assert [line for line in text.splitlines() if len(line) > 80] == [], words


def test_report_is_written_to_stdout(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = succeed("inspect", "report", model, "-o", "-", "--no-stats").output
    assert "<!doctype html>" in shown.lower() and not (tmp_path / "-").exists()


def test_against_applies_or_refuses_options(model, tmp_path):
    run("convert", "to-orbax", model, tmp_path / "less", "--drop", "*q_proj*", "--drop", "lm_head*")
    asked = ("inspect", "tree", tmp_path / "less", "--against", model)
    folded, flat = (ckpt(*asked, *more) for more in ((), ("--flat",)))
    assert folded.exit_code == flat.exit_code == 1
    assert "layers.{0..3}.self_attn.q_proj.weight" in folded.stdout
    assert "model.layers.2.self_attn.q_proj.weight" in flat.stdout
    assert "q_proj" not in ckpt(*asked, "--filter", "lm_head*").stdout.partition("Against")[2]
    assert ckpt(*asked, "--filter", "*k_proj*").exit_code == 0
    assert ckpt(*asked, "--depth", "1").exit_code == 2
    narrow = ckpt(*asked, "--flat", COLUMNS="44").stdout.partition("1 array")[2]
    assert all(len(line) <= 44 for line in narrow.splitlines())


def test_hint_names_the_nested_model(model, tmp_path):
    shutil.copytree(model, tmp_path / "other")
    told = ckpt("inspect", "stats", tmp_path).output
    assert f"name one of them: ckpt inspect stats '{model}'" in told and f"    {tmp_path / 'other'}" in told
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").touch()
    told = ckpt("inspect", "tree", tmp_path / "empty").output
    assert "`ckpt formats`" in told and "doctor" not in told
    shutil.copy(model / "config.json", tmp_path / "empty")
    told = ckpt("inspect", "tree", tmp_path / "empty").output
    assert "model's config.json but not its weights" in told and f"--local-dir {tmp_path}/empty" in told
    assert "Did you mean 'adapter extract'?" in ckpt("extract", model).output
    assert "Commands: extract, merge, to-maxtext, to-peft." in ckpt("adapter", "convert", model).output
    told = run("select", model, tmp_path / "out", "--keep", "self_attn", code=2)
    assert "did you mean '*self_attn*'" in told


def test_dropped_arrays_are_counted_by_kind(tmp_path):
    source = ORBAX.parent / "train" / "llama_scanned"
    told = run("strip-optimizer", source, tmp_path / "out")
    assert "dropped, by kind: 26 of the optimizer, 30 of random states" in " ".join(told.split())
    told = run("strip-optimizer", source, tmp_path / "out", code=2)
    assert [line.split()[0] for line in told.splitlines()] == ["Error:", "expected", "hint"]


def test_size_without_unit_gets_a_suggestion(tmp_path):
    source = ORBAX.parent / "train" / "llama_scanned"
    told = run("strip-optimizer", source, tmp_path / "out", "--memory", "64", code=4)
    assert "got      --memory 64 bytes" in told and "did you mean" not in told
    told = run("strip-optimizer", source, tmp_path / "out", "--memory", "640", code=4)
    run(
        "strip-optimizer",
        source,
        tmp_path / "out",
        "--memory",
        told.partition("mean --memory ")[2].split()[0],
    )
    # Its unit is there: no other is meant.
    told = run("strip-optimizer", source, tmp_path / "other", "--memory", "1MB", code=4)
    assert "did you mean" not in told


def test_unmapped_arrays_hint_names_carry(tmp_path):
    source = GOLDEN / "gemma3" / "hf"
    told = " ".join(run("convert", "hf-to-maxtext", source, tmp_path / "out").split())
    assert "with --carry the reverse conversion restores them" in told
    kept = run("convert", "hf-to-maxtext", source, tmp_path / "kept", "--carry")
    assert "--carry" not in kept


def test_dry_run_reports_interrupted_conversion(model, tmp_path):
    planned = ("convert", "to-zarr3", model, tmp_path / "out", "--dry-run")
    assert "out.partial" not in succeed(*planned).output
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial/journal.ckpttools").touch()
    assert "out.partial exists" in succeed(*planned).output


def test_doctor_advice_on_casts_works(tmp_path):
    module = "model.layers.0.self_attn.q_proj"
    packed = {
        f"{module}.qweight": np.zeros((8, 64), "i4"),
        f"{module}.qzeros": np.zeros((1, 8), "i4"),
        f"{module}.scales": np.ones((1, 64), "f2"),
        f"{module}.g_idx": np.zeros(64, "i4"),
        "model.norm.weight": np.ones(64, "f2"),
    }
    source = tmp_path / "gptq"
    source.mkdir()
    save_file(packed, source / "model.safetensors")
    declared = {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (source / "config.json").write_text(json.dumps(declared))
    findings = json.loads(ckpt("doctor", source, "--json").stdout)["findings"]
    (result,) = [finding for finding in findings if finding["check"] == "quantization"]
    assert "1 weight, each" in result["what"] and "casts do not change them" in result["consequence"]
    run("cast", source, tmp_path / "cast", "--dtype", "bfloat16")
    dtypes = {path[-1]: array.dtype.name for path, array in ckpttools.open(tmp_path / "cast").arrays.items()}
    assert dtypes[f"{module}.scales"] == "float16" and dtypes["model.norm.weight"] == "bfloat16"
