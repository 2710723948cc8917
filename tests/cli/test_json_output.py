"""Every command's `--json` has its published schema, errors are JSON too, and `--jsonl` prints events."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from support.command_line import ckpt
from support.json_output import COMMANDS, SCHEMAS, mismatches, schemas_of, validator
from support.locations import DOCS, FIXTURES, GOLDEN, ORBAX, ROOT, TRAINED

from ckpttools.cli import signals
from ckpttools.cli.main import main

MODEL, MAXTEXT = GOLDEN / "qwen3" / "hf", GOLDEN / "llama3.1" / "maxtext_scanned"
PATHS = {
    "M": MODEL,
    "X": MAXTEXT,
    "T": TRAINED,
    "N": FIXTURES / "torch" / "trainers" / "verl",
    "F": FIXTURES,
    "G": ORBAX,
}
# Command lines and the schema of what each prints; O is a new path.
LINES: dict[str, str] = {
    "M": "summary",
    "T": "summary",
    "F/golden": "summary",
    "M/model.safetensors": "summary",
    "average M M O": "receipt",
    "cast M O --dtype float16": "receipt",
    "cast M O --dtype float16 --dry-run": "plan",
    "cat M lm_head.weight[0,:4]": "array-values",
    "cat M lm_head.weight --stats": "array-values",
    "convert M O": "receipt",
    "convert to-zarr3 M X --into O --dry-run": "reports",
    "convert hf-to-maxtext M O --exact": "receipt",
    "convert maxtext-to-hf X O --like F/golden/llama3.1/hf": "receipt",
    "convert to-orbax M O": "receipt",
    "convert to-safetensors T O --strip-optimizer": "receipt",
    "convert to-zarr3 M O": "receipt",
    "copy M O": "copy",
    "copy T O --dry-run": "copy",
    "diff M X": "diff",
    "diff M M --atol 1": "diff",
    "doctor M --values": "diagnosis",
    "doctor G/unfinished_commit_file": "diagnosis",
    "doctor --list": "doctor-list",
    "families": "families",
    "families check qwen3 --against M": "family-check",
    "families show qwen3": "family",
    "formats": "formats",
    "hash M": "hash",
    "inspect chunks X --mesh fsdp=2": "chunks-and-advice",
    "inspect report M -o O.html --no-stats": "page",
    "inspect stats M --histogram": "stats",
    "inspect stats X --per-layer": "stats",
    "inspect tree F/golden/deepseek2/hf": "tree",
    "inspect tree F/torch/trainers/verl": "run",
    "inspect tree M --against llama": "tree",
    "inspect tree T --sharding": "tree",
    "inspect tree F/golden": "collection",
    "ls F/golden": "collection",
    "ls M T": "listings",
    "ls N": "run",
    "ls T": "run",
    "maxtext-config M": "maxtext-config",
    "maxtext-config M --check base_emb_dim=3": "maxtext-config",
    "plan convert to-orbax M O -o O.plan": "plan-written",
    "plan-training M --hosts 2": "plan-training",
    "prune G/maxtext_run --keep-last 1": "prune",
    "quantize M O": "receipt",
    "remap M O --map O.toml": "receipt",
    "reshard X O --mesh fsdp=2": "resharded",
    "resolve load_parameters_path=/no/items": "resolution",
    "select M O --keep '*norm*'": "receipt",
    "shrink M O --layers 2": "receipt",
    "stack F/golden/llama3.1/maxtext_unscanned O": "receipt",
    "strip-optimizer T O": "receipt",
    "synth M/config.json O": "receipt",
    "unstack X O": "receipt",
    "verify M --against M": "verification",
    "verify M --against X": "verification",
}
# Commands whose output other tests validate, because they need several steps.
ELSEWHERE = {
    "adapter extract",
    "adapter merge",
    "adapter to-maxtext",
    "adapter to-peft",
    "assemble",
    "run",
    "stitch",
}


def commands_with_json(group: click.Group, words: tuple[str, ...] = ()) -> set[str]:
    context, result = click.Context(group, info_name="ckpt"), set()
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if any("--json" in param.opts for param in command.params):
            result.add(" ".join((*words, name)))
        if isinstance(command, click.Group):
            result |= commands_with_json(command, (*words, name))
    return result


def command_of(line: str) -> str:
    known = (name for name in COMMANDS if f"{line} ".startswith(f"{name} "))
    inferred = "convert hf-to-maxtext" if line.startswith("convert ") else "PATH"
    return max(known, key=len, default=inferred)


def run_json(line: str, new: Path, *more: str) -> Any:
    """Run a command line and parse what it prints."""
    words = []
    for word in shlex.split(line):
        head, slash, rest = word.partition("/")
        if word == "O" or word.startswith("O."):
            words.append(str(new) + word[1:])
        else:
            words.append(str(PATHS[head]) + slash + rest if head in PATHS and word[:1].isupper() else word)
    done = ckpt(*words, *(more or ("--json",)))
    assert done.exit_code in (0, 1), done.output
    assert "Error" not in done.stderr
    return done.stdout


@pytest.mark.parametrize("line", LINES)
def test_output_of_each_command_has_its_schema(line, tmp_path):
    (tmp_path / "new.toml").write_text('[[rules]]\nfrom = "model.norm.weight"\nto = "norm"\n')
    value = json.loads(run_json(line, tmp_path / "new"))
    assert LINES[line] in COMMANDS[command_of(line)]
    assert mismatches(LINES[line], value) == []


def test_every_command_with_json_has_schemas_and_a_validated_line():
    known = commands_with_json(main) | {"PATH"}
    assert known == COMMANDS.keys()
    assert {command_of(line) for line in LINES} | ELSEWHERE == known


def test_published_schemas_are_valid_and_fresh():
    sys.path.insert(0, str(DOCS))
    try:
        from schemas import NAMES, schema_text
    finally:
        sys.path.remove(str(DOCS))
    names = [*NAMES, "commands"]
    assert {path.stem for path in SCHEMAS.glob("*.json")} == {*names}
    for name in names:
        assert (SCHEMAS / f"{name}.json").read_text() == schema_text(name), "run `make docs`"
        if name != "commands":
            validator(name).check_schema(json.loads(schema_text(name)))


def test_adapter_commands_print_receipts(tmp_path):
    base, adapter = FIXTURES / "peft" / "bases" / "llama-float32", FIXTURES / "peft" / "plain"
    merged = tmp_path / "merged"
    for words in (
        ("merge", base, adapter, merged),
        ("to-maxtext", adapter, tmp_path / "maxtext", "--base", base),
        ("to-peft", tmp_path / "maxtext", tmp_path / "peft", "--base", base),
        ("extract", base, merged, tmp_path / "extracted", "--rank", 2),
    ):
        done = ckpt("adapter", *words, "--json")
        assert done.exit_code == 0, done.output
        assert mismatches("receipt", json.loads(done.stdout)) == []


def test_output_of_a_plan_has_one_object_for_each_mode(tmp_path):
    plan = tmp_path / "x.plan"
    assert ckpt("plan", "convert", "to-zarr3", MODEL, tmp_path / "out", "-o", plan).exit_code == 0
    expected = {
        ("--status",): "plan-status",
        ("--part", "0/2"): "part",
        ("--part", "1/2", "--publish"): "part-and-published",
        ("--publish",): "published-plan",
    }
    for words, name in expected.items():
        done = ckpt("run", plan, *words, "--json")
        assert done.exit_code == 0, done.output
        assert name in schemas_of(json.loads(done.stdout), COMMANDS["run"])


ERRORS = {
    "cat M no.such": 2,
    "inspect tree /no/such/path": 2,
    "convert F/golden O": 3,
    "convert maxtext-to-hf M O": 3,
    "stack O": 2,
    "cast M O --dtype x": 2,
    "cast M O --bogus": 2,
    "nocommand": 2,
    "cast M O --dtype float16 --memory 1MB": 4,
    "copy M M": 2,
    "cast M M --dry-run": 2,
}


@pytest.mark.parametrize("line", ERRORS)
@pytest.mark.parametrize("flag", ["--json", "--jsonl"])
def test_error_is_one_json_object(line, flag, tmp_path):
    words = [str(PATHS[word[0]]) + word[1:] if word[:1] in PATHS else word for word in shlex.split(line)]
    words = [str(tmp_path / "new") if word == "O" else word for word in words]
    done = ckpt(*words, flag)
    value = json.loads(done.stdout)
    assert mismatches("error", value) == []
    assert (done.exit_code, value["error"]["exit_code"]) == (ERRORS[line], ERRORS[line])
    assert value["error"]["what"].split("\n")[0] in done.stderr
    assert ("event" in value) == (flag == "--jsonl")


def test_interruption_and_internal_errors_are_json(monkeypatch, tmp_path):
    ends = {RuntimeError("defect"): 70, signals.Stopped(2): 130}
    for end, code in ends.items():

        def fail(*_: object, end: BaseException = end, **__: object) -> None:
            raise end

        with monkeypatch.context() as patch:
            patch.setattr("ckpttools.Prepared.run", fail)
            done = ckpt("convert", MODEL, tmp_path / "out", "--json")
        assert done.exit_code == code
        value = json.loads(done.stdout)
        assert mismatches("error", value) == [] and value["error"]["exit_code"] == code


def test_environment_selects_json_for_results_and_errors(tmp_path):
    assert json.loads(ckpt("formats", CKPT_JSON="1").stdout)
    assert json.loads(ckpt("hash", tmp_path / "none", CKPT_JSON="1").stdout)["error"]["exit_code"] == 2


@pytest.mark.parametrize(
    "line", ["convert M O", "inspect stats M", "hash M", "diff M M", "copy M O", "doctor M --values"]
)
def test_events_are_lines_of_json_that_end_with_the_result(line, tmp_path):
    events = [json.loads(text) for text in run_json(line, tmp_path / "new", "--jsonl").splitlines()]
    *before, result = events
    assert result["event"] == "result"
    assert schemas_of(result, COMMANDS[command_of(line)])
    assert before[0]["event"] == "start"
    done = -1
    for event in before:
        assert mismatches("progress", event) == []
        done = -1 if event["event"] == "start" else done
        assert done <= event["done"] <= event["total"]
        done = event["done"]


def test_no_progress_leaves_the_result_alone(tmp_path):
    done = ckpt("convert", MODEL, tmp_path / "x", "--jsonl", "--no-progress")
    assert json.loads(done.stdout)["event"] == "result"


def skill_lines() -> list[str]:
    text = ckpt("skill").stdout
    blocks = [part.partition("```")[0] for part in text.split("```console\n")[1:]]
    return [line.removeprefix("$ ckpt ") for block in blocks for line in block.splitlines()]


def test_examples_of_the_skill_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(MODEL, "MODEL")
    shutil.copytree(TRAINED, "RUN")
    for line in skill_lines():
        words = shlex.split(line)
        done = ckpt(*words)
        assert done.exit_code == 0, f"{line}\n{done.output}"
        if "--json" in words:
            value = json.loads(done.stdout)
            assert schemas_of(value, COMMANDS[command_of(line)])


def test_skill_begins_with_its_name_and_description():
    text = ckpt("skill").stdout
    _, head, body = text.split("---\n", 2)
    assert head.startswith("name: ckpttools\ndescription: ") and len(head) < 1024
    assert body.lstrip().startswith("# ")


def test_index_for_language_models_lists_every_page():
    text = (DOCS / "llms.txt").read_text()
    for page in DOCS.glob("*.md"):
        assert f"]({page.name}): " in text, page
    assert (ROOT / "docs" / "json.md").is_file()
