"""The command line: what it prints, where, and with which exit code."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import click
import pytest
from support.command_line import ckpt, succeed
from support.hf_models import write_llama
from support.internals import Publishing, Started, TaskDone, main, parse_size
from support.locations import HF, ORBAX

import ckpttools
from ckpttools.cli.lazy import LazyGroup
from ckpttools.cli.progress import Lines, Listener
from ckpttools.core import text as texts
from ckpttools.testing import models
from ckpttools.testing.models import LlamaSizes

LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "4" * 64 + "\nsize 12345\n"


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hf") / "llama"
    write_llama(directory, shards=2)
    return directory


@pytest.fixture(scope="module")
def converted(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    destination = tmp_path_factory.mktemp("maxtext") / "llama"
    succeed("convert", "hf-to-maxtext", llama, destination)
    return destination


class TestCommands:
    def test_help_lists_every_command(self):
        output = succeed("--help").stdout
        for name in ("convert", "families", "formats", "inspect"):
            assert f"\n  {name} " in output

    def test_command_list_matches_command_help(self):
        assert isinstance(main, LazyGroup)
        for entry in main.lazy.values():
            assert entry.load().get_short_help_str(100) == entry.help

    def test_every_command_has_an_example_and_every_option_a_help(self):
        for path, command in _commands(main, "ckpt"):
            assert re.search(rf"Examples:\n +\$ {path}", command.help or ""), path
            options = [param for param in command.params if isinstance(param, click.Option)]
            assert all(option.help for option in options), path

    def test_version_is_printed(self):
        assert succeed("--version").stdout == "ckpt 0.1.0\n"

    @pytest.mark.parametrize("group", ["convert", "inspect"])
    def test_group_without_command_shows_help(self, group: str):
        assert "Commands:" in ckpt(group).output

    def test_misspelled_command_gets_a_suggestion(self):
        result = ckpt("inspct")
        assert result.exit_code == 2
        assert "No such command 'inspct'. Did you mean 'inspect'?" in result.stderr

    def test_path_after_a_group_gets_a_hint(self):
        result = ckpt("inspect", HF)
        assert result.exit_code == 2 and f"Did you mean 'ckpt inspect tree {HF}'?" in result.stderr

    def test_misspelled_subcommand_gets_a_suggestion(self):
        result = ckpt("convert", "hf-to-maxtex", "a", "b")
        assert result.exit_code == 2
        assert "hf-to-maxtext" in result.stderr

    def test_misspelled_option_gets_a_suggestion(self):
        result = ckpt("convert", "hf-to-maxtext", "a", "b", "--drpo", "x")
        assert result.exit_code == 2
        assert "--drop" in result.stderr


def _commands(command: click.Command, path: str) -> list[tuple[str, click.Command]]:
    """All commands, groups included, with the words that call them."""
    result = [(path, command)]
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            result += _commands(below, f"{path} {name}")
    return result


class TestImports:
    """What a command need not import, it does not."""

    def imported(self, *arguments: str) -> set[str]:
        code = f"""
import sys
from ckpttools.cli.main import main
try:
    main({list(arguments)!r})
except SystemExit as end:
    assert not end.code, end.code
print(*sys.modules, file=sys.stderr)
"""
        process = python("-c", code)
        assert process.returncode == 0, process.stderr
        return set(process.stderr.split())

    HEAVY = frozenset({"jax", "orbax", "tensorstore", "huggingface_hub", "safetensors", "ml_dtypes"})

    def test_help_imports_no_heavy_packages(self):
        assert not self.imported("--help") & {
            *self.HEAVY,
            "numpy",
            "rich",
            "json",
            "ckpttools.api.prepared",
        }

    def test_command_help_imports_no_heavy_packages(self):
        assert not self.imported("convert", "hf-to-maxtext", "--help") & {*self.HEAVY, "numpy", "rich"}

    @pytest.mark.parametrize("option", ["--json", "--flat", "--depth=2"])
    def test_inspect_imports_no_heavy_packages(self, llama: Path, option: str):
        imported = self.imported("inspect", "tree", str(llama), option)
        assert not imported & {*self.HEAVY, "numpy", "rich"}

    def test_dry_run_imports_no_heavy_packages(self, llama: Path, tmp_path: Path):
        imported = self.imported("convert", "hf-to-maxtext", str(llama), str(tmp_path / "x"), "--dry-run")
        assert not imported & {*self.HEAVY - {"ml_dtypes"}, "rich"}

    def test_conversion_imports_no_heavy_packages(self, llama: Path, tmp_path: Path):
        imported = self.imported("convert", "hf-to-maxtext", str(llama), str(tmp_path / "x"))
        assert not imported & {"jax", "orbax", "tensorstore", "huggingface_hub", "rich", "yaml"}
        # What is of other formats, of adapters, of meshes and of digests: a quarter of the start.
        rooms = {"adapters", "digest", "inspection", "sharding", "formats.torch", "formats.flax"}
        assert not imported & {f"ckpttools.{room}" for room in rooms}


def _start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from ckpttools.cli.main import main; main(prog_name='ckpt')"]
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


class TestConvert:
    def test_conversion_prints_result_and_next_step(self, llama: Path, tmp_path: Path):
        result = succeed("convert", "hf-to-maxtext", llama, tmp_path / "new")
        assert result.stdout.startswith(f"{tmp_path}/new: 13 arrays, 362 kB in ")
        assert "B/s), peak memory " in result.stdout
        assert result.stdout.count("\n") == 1
        assert result.stderr.startswith("next     load_parameters_path=")

    def test_conversion_prints_receipt_as_json(self, llama: Path, tmp_path: Path):
        receipt = json.loads(succeed("convert", "hf-to-maxtext", llama, tmp_path / "new", "--json").stdout)
        assert receipt.pop("seconds") > 0
        assert receipt.pop("peak_bytes") > 1 << 20
        assert receipt.pop("tasks") >= 13
        notes = receipt["notes"]
        assert receipt == {
            "schema": 1,
            "destination": f"{tmp_path}/new",
            "source": str(llama),
            "arrays": 13,
            "tasks_resumed": 0,
            "bytes_in": 361_600,
            "bytes_out": 361_608,
            "bytes_resumed": 0,
            "bytes_referenced": 0,
            "bytes_unlinked": 0,
            "bytes_unreferenced": 0,
            "counts": {},
            "errors": {},
            "traffic": {},
            "published": None,
            "notes": {
                "inexact": [],
                "values": notes["values"],
                "dropped": [],
                "remarks": notes["remarks"],
                "advice": [],
            },
            "next": [
                f"load_parameters_path={tmp_path}/new/0/items scan_layers=true",
                f"all settings: `ckpt maxtext-config {tmp_path}/new`",
            ],
        }
        assert [item["text"].partition(",")[0] for item in notes["values"]] == ["times 0.25"]

    @pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
    def test_every_family_converts(self, model_type: str, tmp_path: Path):
        tensors = write_llama(tmp_path / "hf", model_type=model_type, tie_word_embeddings=True)
        succeed("convert", "hf-to-maxtext", tmp_path / "hf", tmp_path / "new", "--no-scan")
        result = json.loads(succeed("inspect", "tree", tmp_path / "new", "--json").stdout)
        assert result["kind"] == "unstacked-inference"
        assert result["custom_metadata"] == {"scan_layers": False}
        assert result["num_parameters"] == sum(tensor.size for tensor in tensors.values())

    def test_options_are_passed_to_the_conversion(self, llama: Path, tmp_path: Path):
        options = ("--scan-axis", 0, "--dtype", "float32", "--rope-layout", "interleaved", "--jobs", 1)
        succeed("convert", "hf-to-maxtext", llama, tmp_path / "new", *options)
        result = json.loads(succeed("inspect", "tree", tmp_path / "new", "--json").stdout)
        shapes = {item["path"]: (item["shape"], item["dtype"]) for item in result["arrays"]}
        query = shapes["params/params/decoder/layers/self_attention/query/kernel"]
        assert query == ([4, 64, 4, 16], "float32")
        assert result["scan_axis"] == 0

    def test_inexact_and_dropped_arrays_are_reported_on_stderr(self, tmp_path: Path):
        write_llama(tmp_path / "hf")
        options = ("--dtype", "float16", "--family", "llama", "--drop", "lm_head.*", "--dry-run")
        result = succeed("convert", "hf-to-maxtext", tmp_path / "hf", tmp_path / "new", *options)
        assert "lm_head.weight" in result.output
        write_llama(tmp_path / "tied", tie_word_embeddings=True, vocab_size=512)
        result = succeed("convert", "hf-to-maxtext", tmp_path / "tied", tmp_path / "new", "--dtype=fp16")
        inexact, next_step, *_ = result.stderr.splitlines()
        assert inexact == "INEXACT  11 arrays: cast from bfloat16 to float16: rounded"
        assert next_step.startswith("next ")

    def test_overwrite_replaces_a_checkpoint(self, llama: Path, tmp_path: Path):
        succeed("convert", "hf-to-maxtext", llama, tmp_path / "old", "--no-scan")
        result = ckpt("convert", "hf-to-maxtext", llama, tmp_path / "old")
        assert result.exit_code == 2 and "--overwrite" in result.stderr
        succeed("convert", "hf-to-maxtext", llama, tmp_path / "old", "--overwrite")
        assert json.loads(succeed("inspect", "tree", tmp_path / "old", "--json").stdout)["scan_axis"] == 1

    def test_interrupted_conversion_resumes(self, llama: Path, tmp_path: Path):
        (tmp_path / "new.partial").mkdir()
        succeed("convert", "hf-to-maxtext", llama, tmp_path / "new", "--resume")
        assert not (tmp_path / "new.partial").exists()

    def test_command_body_is_at_most_seven_frames_below_main(
        self, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        def count_callers(*_: object) -> None:
            callers = [frame.filename for frame in traceback.extract_stack()]
            frames.append(sum(name.startswith(package) for name in callers))
            raise ckpttools.CheckpointError("counted")

        frames: list[int] = []
        package = f"{Path(ckpttools.__file__).parent}{os.sep}"
        monkeypatch.setattr("ckpttools.api.hf_to_maxtext.to_maxtext", count_callers)
        ckpt("convert", "hf-to-maxtext", llama, tmp_path / "new")
        assert frames and frames[0] <= 1 + 7  # `main` itself, and the frames below it

    def test_keyboard_interrupt_prints_how_to_resume(
        self, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        def interrupted(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("ckpttools.Prepared.run", interrupted)
        result = ckpt("convert", "hf-to-maxtext", llama, tmp_path / "new")
        assert result.exit_code == 130
        assert result.stderr == "Stopped. Run the same command again to resume.\n"

    def test_sigint_stops_and_the_command_resumes(self, tmp_path: Path):
        sizes = LlamaSizes(layers=8, hidden=512, mlp=8192, heads=4, kv_heads=2, head_dim=64, vocab=256)
        models.write_llama(tmp_path / "hf", sizes, sparse=True)
        process = _start("convert", "hf-to-maxtext", tmp_path / "hf", tmp_path / "new", "--jobs=1")
        deadline = time.monotonic() + 20
        while not (tmp_path / "new.partial").exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
        # It may have finished first; never does it show a traceback.
        assert process.returncode in (0, 130)
        assert "Traceback" not in stderr
        succeed("convert", "hf-to-maxtext", tmp_path / "hf", tmp_path / "new", "--overwrite")


class TestDryRun:
    def test_dry_run_prints_the_plan_as_text(self, llama: Path, tmp_path: Path):
        output = succeed("convert", "hf-to-maxtext", llama, tmp_path / "new", "--dry-run", "--jobs=1").stdout
        lines = dict(line.split(maxsplit=1) for line in output.splitlines() if line)
        assert lines["from"] == str(llama)
        assert lines["to"] == f"{tmp_path}/new"
        assert lines["arrays"] == "13 arrays, 181 k parameters"
        assert lines["read"] == "362 kB (361,600 bytes)"
        assert lines["write"] == "362 kB (361,608 bytes)"
        assert lines["file"].startswith("0/items/d/data, ")
        assert lines["work"].endswith("tasks, 1 worker")
        assert lines["memory"].endswith(" MiB at most, of 1.00 GiB allowed")
        assert lines["changed"].startswith("decoder.layers.self_attention.query.kernel: ")
        assert not (tmp_path / "new").exists() and not (tmp_path / "new.partial").exists()

    def test_dry_run_prints_the_plan_as_json(self, llama: Path, tmp_path: Path):
        options = ("--dry-run", "--json", "--memory", "512MiB", "--jobs", 2, "--dtype", "float16")
        plan = json.loads(succeed("convert", "hf-to-maxtext", llama, tmp_path / "new", *options).stdout)
        arrays = {item["path"]: item for item in plan.pop("array_list")}
        assert arrays["params/params/decoder/decoder_norm/scale"] == {
            "path": "params/params/decoder/decoder_norm/scale",
            "shape": [64],
            "dtype": "float16",
            "nbytes": 128,
            "chunk": [64],
        }
        assert plan.pop("tasks") >= 13
        assert 0 < plan.pop("projected_peak") <= plan["memory"]
        assert list(plan.pop("files")) == ["0/items/d/data"]
        assert [item["subject"] for item in plan.pop("values")] == [
            "decoder.layers.self_attention.query.kernel"
        ]
        assert plan == {
            "schema": 1,
            "source": str(llama),
            "destination": f"{tmp_path}/new",
            "arrays": 13,
            "parameters": 180_800,
            "bytes_in": 361_600,
            "bytes_out": 361_608,
            "jobs": 2,
            "memory": 512 << 20,
            "inexact": [
                {"subject": "12 arrays", "text": "cast from bfloat16 to float16: rounded", "arrays": 12}
            ],
            "dropped": [],
            "renames": [],
            "bytes_referenced": 0,
            "bytes_unreferenced": 0,
            "links": {},
            "remarks": [],
            "mesh_reads": None,
        }

    def test_dropped_arrays_are_counted_and_named(self, llama: Path, tmp_path: Path):
        write_llama(tmp_path / "hf", tie_word_embeddings=False)
        config = json.loads((tmp_path / "hf/config.json").read_text()) | {"tie_word_embeddings": True}
        (tmp_path / "hf/config.json").write_text(json.dumps(config))
        options = ("--dry-run", "--drop", "lm_head.weight")
        output = succeed("convert", "hf-to-maxtext", tmp_path / "hf", tmp_path / "new", *options).stdout
        assert "\ndropped  1 array: lm_head.weight\n" in output

    def test_dry_run_refuses_the_same_inputs_as_the_run(self, llama: Path, tmp_path: Path):
        (tmp_path / "new").write_text("")
        result = ckpt("convert", "hf-to-maxtext", llama, tmp_path / "new", "--dry-run")
        assert result.exit_code == 2
        assert "Dry run: nothing was written" in result.stdout


class TestErrors:
    """Exit codes and the whole text, for the errors that users meet first."""

    def fails(self, code: int, *arguments: object) -> str:
        result = ckpt(*arguments)
        assert result.exit_code == code, result.output
        assert result.stdout == ""
        assert "Traceback" not in result.stderr
        return result.stderr

    def converts(self, code: int, source: Path, destination: Path, *options: object) -> str:
        return self.fails(code, "convert", "hf-to-maxtext", source, destination, *options)

    def test_missing_source_is_refused(self, tmp_path: Path):
        text = self.converts(2, tmp_path / "nothing", tmp_path / "new")
        hint = "check the spelling of the path"
        assert text == f"Error: {tmp_path}/nothing does not exist\n  hint     {hint}\n"

    def test_non_checkpoint_source_is_refused(self, tmp_path: Path):
        source = tmp_path / "source"
        source.mkdir()
        text = self.converts(3, source, tmp_path / "new")
        assert text == f"Error: {source} is an empty directory\n  hint     name one with a checkpoint in it\n"
        (source / "notes.txt").touch()
        text = self.converts(3, source, tmp_path / "new")
        assert text.startswith(f"Error: {source} is not a checkpoint of a known format\n")
        assert "\n    safetensors: " in text

    def test_missing_config_is_reported(self, tmp_path: Path):
        write_llama(tmp_path / "hf")
        (tmp_path / "hf/config.json").unlink()
        text = self.converts(3, tmp_path / "hf", tmp_path / "new")
        assert text.startswith("Error: config.json does not exist next to the weights\n  at       ")

    def test_unknown_model_type_is_refused(self, tmp_path: Path):
        write_llama(tmp_path / "hf", model_type="lama")
        text = self.converts(3, tmp_path / "hf", tmp_path / "new")
        assert text.startswith("Error: no family has model_type 'lama'\n")
        assert "the names of gemma, llama, mistral" in text and "--family NAME" in text
        assert "did you mean" not in text

    def test_unknown_family_is_refused(self, llama: Path, tmp_path: Path):
        assert "unknown family 'nope'" in self.converts(2, llama, tmp_path / "new", "--family", "nope")

    def test_unknown_dtype_is_refused_with_a_suggestion(self, llama: Path, tmp_path: Path):
        text = self.converts(2, llama, tmp_path / "new", "--dtype", "bfloat61")
        assert "Invalid value for '--dtype': unknown dtype 'bfloat61'" in text
        assert "did you mean bfloat16?" in text and "expected" not in text

    def test_existing_destination_is_refused(self, llama: Path, converted: Path):
        text = self.converts(2, llama, converted)
        assert text.startswith(f"Error: {converted} exists\n")
        assert "--overwrite" in text

    def test_too_little_memory_is_refused(self, llama: Path, tmp_path: Path):
        text = self.converts(4, llama, tmp_path / "new", "--memory", "20MiB")
        assert text.startswith("Error: the conversion does not fit into the memory allowed\n")
        assert "hint     try --memory " in text

    @pytest.mark.parametrize("size", ["lots", "", "-1", "1 XB", "0"])
    def test_invalid_memory_size_is_refused(self, llama: Path, tmp_path: Path, size: str):
        assert "'--memory'" in self.converts(2, llama, tmp_path / "new", "--memory", size)

    def test_resume_refuses_complete_destination(self, llama: Path, converted: Path):
        text = self.converts(2, llama, converted, "--resume")
        assert text.startswith(
            f"Error: there is nothing to resume: {converted} exists, and there is no unfinished"
        )
        assert f"ckpt doctor {converted}" in text and ".partial" not in text

    def test_resume_refuses_new_destination(self, llama: Path, tmp_path: Path):
        text = self.converts(2, llama, tmp_path / "new", "--resume")
        assert text == (
            "Error: there is nothing to resume\n"
            f"  expected {tmp_path}/new.partial, which an interrupted conversion leaves\n"
            "  hint     run the command without --resume\n"
        )

    @pytest.mark.parametrize("command", ["inspect", "convert"])
    def test_git_lfs_pointer_is_refused(self, tmp_path: Path, command: str):
        (tmp_path / "hf").mkdir()
        (tmp_path / "hf" / "model.safetensors").write_text(LFS_POINTER)
        words = ("inspect", "tree") if command == "inspect" else ("convert", "hf-to-maxtext")
        target = () if command == "inspect" else (tmp_path / "new",)
        assert "Git LFS pointer" in self.fails(3, *words, tmp_path / "hf", *target)

    def test_oversized_header_is_refused(self, llama: Path, tmp_path: Path):
        text = self.converts(3, llama, tmp_path / "new", "--max-header-bytes", 100)
        assert "header" in text

    def test_uncreatable_destination_is_refused(self, llama: Path, tmp_path: Path):
        (tmp_path / "file").touch()
        assert self.converts(5, llama, tmp_path / "file" / "new").startswith("Error: ")

    def test_traceback_option_shows_the_traceback(self, tmp_path: Path):
        result = ckpt("--traceback", "inspect", "tree", tmp_path / "nothing")
        assert result.exit_code == 2
        assert "registry.py" in result.stderr
        assert "Error: " in result.stderr


class TestListings:
    def test_formats_command_lists_formats(self):
        assert succeed("formats").stdout.splitlines() == [
            "format               written",
            "deepspeed-universal  no",
            "deepspeed-zero       no",
            "flax-msgpack         no",
            "orbax                yes",
            "safetensors          yes",
            "torch                no",
            "torch-distributed    no",
            "torch-ranks          no",
            "zarr-tree            no",
            "zarr3                yes",
        ]

    def test_formats_command_prints_json(self):
        assert {"name": "orbax", "written": True} in json.loads(succeed("formats", "--json").stdout)


class TestUnits:
    @pytest.mark.parametrize(
        ("text", "nbytes"),
        [
            ("512MiB", 512 << 20),
            ("2GB", 2_000_000_000),
            ("1.5GiB", 3 << 29),
            ("1 gib", 1 << 30),
            ("4k", 4000),
            ("100B", 100),
            ("1073741824", 1 << 30),
        ],
    )
    def test_parse_size_accepts_units(self, text: str, nbytes: int):
        assert parse_size(text) == nbytes

    @pytest.mark.parametrize(
        ("nbytes", "text"),
        [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "1.00 kB"),
            (9_996, "10.0 kB"),
            (99_960, "100 kB"),
            (999_499, "999 kB"),
            (999_500, "1.00 MB"),
            (2_471_645_184, "2.47 GB"),
            (1_340_000_000_000, "1.34 TB"),
        ],
    )
    def test_format_disk_uses_decimal_units(self, nbytes: int, text: str):
        assert texts.format_disk(nbytes) == text

    @pytest.mark.parametrize(
        ("nbytes", "text"), [(12, "12 B"), (1 << 30, "1.00 GiB"), (100 << 20, "100 MiB"), (2048, "2.00 KiB")]
    )
    def test_format_memory_uses_binary_units(self, nbytes: int, text: str):
        assert texts.format_memory(nbytes) == text

    @pytest.mark.parametrize(
        ("number", "text"), [(12, "12"), (1_235_814_400, "1.24 B"), (671_000_000_000, "671 B")]
    )
    def test_format_count_abbreviates_numbers(self, number: int, text: str):
        assert texts.format_count(number) == text

    def test_format_duration_prints_hours_minutes_seconds(self):
        assert texts.format_duration(0.4) == "0:00:00"
        assert texts.format_duration(3725) == "1:02:05"


class TestLines:
    def test_progress_prints_at_most_one_line_in_five_seconds(
        self, llama: Path, capsys: pytest.CaptureFixture[str]
    ):
        from ckpttools import plan_to_maxtext

        plan = plan_to_maxtext(llama).plan
        clock = iter([0.0, 1.0, 6.0, 7.0, 12.0, 13.0])
        lines = Listener(Lines(clock=lambda: next(clock)))
        lines(Started(plan, 0, 0))
        for _ in range(4):
            lines(TaskDone(90_402, 90_402))
        lines(Publishing())
        declared = capsys.readouterr()
        assert declared.out == ""
        first, second = declared.err.splitlines()
        assert first.startswith("50 %  181 of 362 kB  30.1 kB/s  0:00:06 left  ")
        assert second.startswith("100 %  362 of 362 kB  30.1 kB/s  0:00:00 left  ")

    def test_progress_rate_counts_only_this_run(self, llama: Path, capsys: pytest.CaptureFixture[str]):
        from ckpttools import plan_to_maxtext

        plan = plan_to_maxtext(llama).plan
        clock = iter([0.0, 10.0])
        lines = Listener(Lines(clock=lambda: next(clock)))
        lines(Started(plan, 5, 261_608))
        lines(TaskDone(50_000, 50_000))
        assert capsys.readouterr().err.startswith("86 %  312 of 362 kB  5.00 kB/s  0:00:10 left")


class TestLaterSteps:
    """Whatever command opens a run says on stderr which later step it has passed over."""

    RUN = ORBAX / "unfinished_commit_file"
    COMMANDS = (
        ("inspect", "tree"),
        ("inspect", "stats"),
        ("inspect", "chunks"),
        ("hash",),
        ("diff", RUN / "1"),
        ("verify", "--against", RUN / "1"),
    )

    @pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
    def test_unfinished_later_step_causes_a_warning(self, command: tuple[object, ...]):
        result = succeed(*command, self.RUN, "--json")
        assert result.stderr.startswith(f"Warning: step 1 of {self.RUN} is opened; later ones have no")
        assert "step 2: no _METADATA, commit timestamp null" in result.stderr
        json.loads(result.stdout)
        if command[0] not in ("diff", "verify"):
            assert "Warning" not in succeed(*command, self.RUN, "--json", "--step", 1).stderr

    def test_conversion_warns_about_an_unfinished_later_step(self, tmp_path: Path):
        assert "no finished tree" in succeed("convert", "to-zarr3", self.RUN, tmp_path / "out").stderr

    def test_damaged_later_step_causes_a_warning(self, tmp_path: Path):
        run = shutil.copytree(self.RUN.parent / "cm_default", tmp_path / "a run")
        (run / "5" / "_CHECKPOINT_METADATA").write_text("{")
        result = ckpt("convert", "to-zarr3", run, tmp_path / "out")
        assert (result.exit_code, (tmp_path / "out").exists()) == (3, False)
        assert f"ckpt doctor '{run}'" in result.stderr and f"'{run}/0'" in result.stderr
        succeed("convert", "to-zarr3", run, tmp_path / "out", "--step", 0)
