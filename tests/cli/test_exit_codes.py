"""One exit code for one cause, whatever the command: all of them meet the same bad input."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import click
import pytest
from click.testing import Result
from support.command_line import ckpt
from support.hf_models import write_llama
from support.internals import main
from support.locations import ORBAX

from ckpttools.core.plugins import entry_points_of

RUN = ORBAX / "maxtext_run"
# SRC is what a cause makes bad, OUT a name that is free; the others are whole checkpoints.
CHECKPOINTS = {
    "average": "average SRC SCANNED OUT",
    "cast": "cast SRC OUT --dtype float16",
    "copy": "copy SRC OUT",
    "hf-to-maxtext": "convert hf-to-maxtext SRC OUT",
    "maxtext-to-hf": "convert maxtext-to-hf SRC OUT",
    "to-orbax": "convert to-orbax SRC OUT",
    "to-safetensors": "convert to-safetensors SRC OUT",
    "to-zarr3": "convert to-zarr3 SRC OUT",
    "remap": "remap SRC OUT --map RULES",
    "reshard": "reshard SRC OUT --mesh fsdp=1",
    "quantize": "quantize SRC OUT",
    "select": "select SRC OUT --keep params",
    "shrink": "shrink SRC OUT --layers 1",
    "stack": "stack SRC OUT",
    "unstack": "unstack SRC OUT",
    "strip-optimizer": "strip-optimizer SRC OUT",
    "diff": "diff SRC SCANNED",
    "diff with": "diff SCANNED SRC",
    "verify": "verify SRC --against SCANNED",
    "verify against": "verify SCANNED --against SRC",
    "hash": "hash SRC",
    "hash as": "hash SRC --as maxtext",
    "inspect tree": "inspect tree SRC",
    "inspect tree against": "inspect tree SCANNED --against SRC",
    "inspect stats": "inspect stats SRC",
    "inspect chunks": "inspect chunks SRC",
    "inspect report": "inspect report SRC -o OUT.html",
    "doctor": "doctor SRC",
    "ls": "ls SRC",
    "plan-training": "plan-training SRC --hosts 1",
    "prune": "prune SRC --keep-last 1",
    "families check": "families check llama --against SRC",
}
FILES = {
    "--config": "families check llama --config SRC",
    "--like": "convert maxtext-to-hf SCANNED OUT --like SRC",
    "--manifest": "verify SCANNED --manifest SRC",
    "--map": "remap SCANNED OUT --map SRC",
}
ALL = CHECKPOINTS | FILES
# What SRC is where nothing is wrong with it.
GOOD = {"hf-to-maxtext": "HF", "ls": "RUN", "prune": "RUN", "stack": "UNSCANNED", "strip-optimizer": "RUN"}
# Commands that open nothing, make what they open, say what MaxText would not open, or have others' work done;
# and those of adapters, hosts and towers, which have tests of their own.
OTHERS = {
    "browse",
    "cat",
    "completion",
    "help",
    "skill",
    "demo",
    "families show",
    "formats",
    "maxtext-config",
    "resolve",
    "plan",
    "run",
    "synth",
    "stitch",
}
OTHERS |= {"assemble", *(f"adapter {name}" for name in ("extract", "merge", "to-maxtext", "to-peft"))}


class Location:
    """Checkpoints in a directory that everybody may enter, and the commands run on them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.names = {"RULES": directory / "rules.toml", "RUN": RUN, "HF": directory / "hf"}
        self.names["RULES"].write_text('[[rules]]\nfrom = "{...}"\nto = "x/{...}"\n')
        write_llama(self.names["HF"])
        for name, options in (("SCANNED", []), ("UNSCANNED", ["--no-scan"])):
            self.names[name] = directory / name.lower()
            words = ["convert", "hf-to-maxtext", self.names["HF"], self.names[name], *options]
            assert ckpt(*words).exit_code == 0

    def good(self, command: str) -> Path:
        return self.names[GOOD.get(command, "SCANNED")]

    def run(self, command: str, source: object = None, *options: object, out: object = None) -> Result:
        """A command on `source`, or on what is good; OUT is free where it is not said."""
        out = self.directory / "out" if out is None else out
        names = {**self.names, "SRC": self.good(command) if source is None else source, "OUT": out}
        names["OUT.html"] = f"{out}.html"
        result = ckpt(*[names.get(word, word) for word in ALL[command].split()], *options)
        if result.exit_code:
            assert not (self.directory / "out").exists(), command
            assert not (self.directory / "out.html").exists(), command
        return result

    def codes(self, commands: Iterable[str], source: object = None, *options: object, out: object = None):
        """The exit code of each command; none may be without words."""
        result = {}
        for command in commands:
            outcome = self.run(command, source, *options, out=out)
            assert outcome.exit_code == 0 or "Error: " in outcome.stderr or command == "doctor", command
            assert "a defect" not in outcome.stderr, outcome.stderr
            result[command] = outcome.exit_code
        return result


def all_of(commands: Iterable[str], code: int) -> dict[str, int]:
    return dict.fromkeys(commands, code)


@pytest.fixture(scope="module")
def location() -> Iterator[Location]:
    # Not pytest's own, which only its owner may enter.
    directory = Path(tempfile.mkdtemp(prefix="ckpttools-"))
    directory.chmod(0o755)
    yield Location(directory)
    shutil.rmtree(directory)


@pytest.fixture
def nobody() -> Iterator[None]:
    """As root everything can be read: be somebody else, who may not be able to import anything more."""
    importlib.import_module("importlib.readers")
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    yield
    if root:
        os.seteuid(0)


def leaves(command: click.Command, path: str = "") -> dict[str, click.Command]:
    """All commands that do something, by the words that call them."""
    if not isinstance(command, click.Group):
        return {path: command}
    context = click.Context(command)
    below = {name: command.get_command(context, name) for name in command.list_commands(context)}
    result = {}
    for name, item in below.items():
        assert item is not None
        result |= leaves(item, f"{path} {name}".strip())
    return result


@cache
def commands() -> dict[str, click.Command]:
    """All commands of ckpt."""
    return leaves(main)


def having(option: str) -> list[str]:
    """The commands of the table whose command has an option."""
    names = {name: {part for param in one.params for part in param.opts} for name, one in commands().items()}
    return [name for name, words in ALL.items() if option in names[called(words)]]


def called(words: str) -> str:
    """The name of the command that is called."""
    return next(name for name in commands() if f"{words} ".startswith(f"{name} "))


def test_every_command_is_in_the_table():
    assert {called(words) for words in ALL.values()} | OTHERS == set(commands())


def test_success_exits_with_0(location):
    for command in ALL:
        if command != "--manifest":
            good = {
                "--map": location.names["RULES"],
                "--config": location.names["HF"],
                "--like": location.names["HF"],
            }
            out = location.directory / f"good {command}"
            result = location.run(command, good.get(command), out=out)
            assert result.exit_code == 0, result.output


class TestPaths:
    @pytest.mark.parametrize("name", ["nothing", "rules.toml/below"])
    def test_missing_paths_exit_with_2(self, location, name):
        assert location.codes(ALL, location.directory / name) == all_of(ALL, 2)

    @pytest.mark.parametrize(
        "line",
        [
            *("NONE", "info NONE", "cat NONE x", "doctor NONE --fix index", "run NONE", "run NONE --status"),
            *("maxtext-config NONE", "maxtext-config HF --like NONE", "maxtext-config HF --check NONE.yml"),
            *("resolve NONE.yml", "synth NONE OUT", "stitch NONE HF OUT", "stitch HF NONE OUT"),
            *("plan convert hf-to-maxtext NONE OUT -o OUT.json", "convert NONE HF --into OUT"),
            *("assemble NONE OUT", "assemble NONE --list", "adapter merge NONE HF OUT"),
            *("adapter merge HF NONE OUT", "adapter extract HF NONE OUT --rank 2"),
            *(
                "adapter to-maxtext NONE OUT --base HF",
                "adapter to-peft NONE OUT --base HF",
                "families check NONE.toml",
            ),
            *("reshard HF OUT --mesh fsdp=2 --rules NONE.toml", "convert hf-to-maxtext NONE OUT --json"),
            *("inspect chunks HF --mesh fsdp=2 --rules NONE.toml", "prune NONE --undo"),
        ],
    )
    def test_missing_paths_of_other_commands_exit_with_2(self, line, location):
        names = {"HF": str(location.names["HF"]), "OUT": f"{location.directory}/out"}
        words = line.replace("NONE", f"{location.directory}/nothing/x").split()
        done = ckpt(*(names.get(word, word) for word in words))
        assert done.exit_code == 2, done.output
        assert "nothing/x" in done.output

    def test_empty_name_is_refused(self, location):
        assert location.codes(ALL, "") == all_of(ALL, 2)

    def test_non_checkpoints_exit_with_3(self, location):
        empty = location.directory / "empty"
        empty.mkdir(exist_ok=True)
        assert location.codes(CHECKPOINTS, empty) == all_of(CHECKPOINTS, 3)
        other = location.directory / "other"
        other.mkdir(exist_ok=True)
        (other / "file").write_text("a plain file\n")
        assert location.codes(CHECKPOINTS, other) == all_of(CHECKPOINTS, 3)
        assert location.codes(ALL, other / "file") == all_of(ALL, 3)
        assert location.codes(["--config", "--like"], empty) == all_of(["--config", "--like"], 3)

    @pytest.mark.parametrize("name", ["bare_leaf", "tree_zoo", "v1_checkpointables"])
    def test_trees_without_a_model_exit_with_documented_codes(self, location, name):
        """One array without a name, trees of any shape: what cannot be done with them is said."""
        for number, command in enumerate(checkpoint for checkpoint in CHECKPOINTS if checkpoint != "prune"):
            result = location.run(command, ORBAX / name, out=location.directory / f"{name} {number}")
            assert result.exit_code in range(6), (command, result.stderr)

    def test_damaged_checkpoints_exit_with_3(self, location):
        codes = {}
        for command in CHECKPOINTS:
            copy = shutil.copytree(location.good(command), location.directory / "damaged")
            for path in [*copy.rglob("manifest.ocdbt"), *copy.rglob("model.safetensors")]:
                path.write_bytes(path.read_bytes()[:20])
            codes |= location.codes([command], copy)
            shutil.rmtree(copy)
        # The doctor has found what it looks for.
        # What lists steps says which cannot be read.
        assert codes == all_of(CHECKPOINTS, 3) | {"doctor": 1, "ls": 0}

    def test_unreadable_paths_exit_with_5(self, location, request):
        locked = shutil.copytree(location.names["SCANNED"], location.directory / "locked")
        files = location.directory / "files"
        files.mkdir()
        for name in ("config.json", "rules.toml", "manifest.json"):
            (files / name).write_text("{}")
            (files / name).chmod(0)
        sealed = shutil.copytree(location.names["HF"], location.directory / "sealed")
        (sealed / "model.safetensors").chmod(0)
        locked.chmod(0)
        location.codes(ALL, location.directory / "nothing")  # imports what somebody else may not be able to
        request.getfixturevalue("nobody")
        assert location.codes(CHECKPOINTS, locked) == all_of(CHECKPOINTS, 5)
        assert location.codes(["--like"], locked) == {"--like": 5}
        for command, name in (("--config", "config.json"), ("--map", "rules.toml")):
            assert location.codes([command], files / name) == {command: 5}
        assert location.codes(["--manifest"], files / "manifest.json") == {"--manifest": 5}
        readers = [
            checkpoint
            for checkpoint in CHECKPOINTS
            if GOOD.get(checkpoint) == "HF" or checkpoint in ("hash", "to-orbax")
        ]
        assert location.codes(readers, sealed) == all_of(readers, 5)

    def test_inaccessible_module_directories_are_skipped(self, location, monkeypatch, request):
        locked = location.directory / "no modules"
        locked.mkdir()
        locked.chmod(0)
        request.getfixturevalue("nobody")
        monkeypatch.setattr(sys, "path", [str(locked), str(locked / "below")])
        assert entry_points_of("ckpttools.stores") == []


class TestOptions:
    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("--nonsense", "1"),
            ("--memory", "lots"),
            ("--jobs", "0"),
            ("--dtype", "float61"),
            ("--to", "tape"),
            ("--algorithm", "md5"),
            ("--family", "lama"),
            ("--family", ""),
            ("--map", ""),
            ("--manifest", ""),
            ("--like", ""),
            ("--output", ""),
            ("--against", ""),
            ("--step", "99"),
            ("--filter", "nothing"),
            ("--keep", "nothing"),
            ("--drop", "nothing"),
            ("--fix", "everything"),
        ],
    )
    def test_invalid_option_values_exit_with_2(self, location, option, value):
        commands = list(ALL) if option == "--nonsense" else having(option)
        commands = [command for command in commands if command not in FILES]
        assert commands
        assert location.codes(commands, None, option, value) == all_of(commands, 2)

    @pytest.mark.parametrize("option", ["--family", "--like", "--config", "--map"])
    def test_missing_file_is_refused(self, location, option):
        # What is said of a conversion is looked at only where there is one.
        commands = [item for item in having(option) if item in CHECKPOINTS and "verify" not in item]
        # `remap` takes a family for --maxtext alone.
        commands = [command for command in commands if command not in ("hash", "hash as", "remap")]
        for name in ("x.toml", "x.py:f") if option == "--map" else ("x.toml",):
            missing = location.directory / "nothing" / name
            assert location.codes(commands, None, option, missing) == all_of(commands, 2)

    def test_too_little_memory_exits_with_4(self, location):
        # Doctor needs it for --values only.
        commands = [item for item in having("--memory") if item in CHECKPOINTS and item != "doctor"]
        assert len(commands) > 15
        assert location.codes(commands, None, "--memory", "2MiB") == all_of(commands, 4)

    def test_missing_config_is_an_error(self, location):
        bare = shutil.copytree(location.names["HF"], location.directory / "bare", dirs_exist_ok=True)
        (bare / "config.json").unlink()
        assert location.codes(["hf-to-maxtext"], bare) == {"hf-to-maxtext": 3}
        assert location.codes(["--like", "--config"], bare) == {"--like": 3, "--config": 3}

    def test_unknown_family_exits_with_3(self, location):
        unknown = shutil.copytree(location.names["HF"], location.directory / "unknown", dirs_exist_ok=True)
        config = (unknown / "config.json").read_text()
        (unknown / "config.json").write_text(config.replace('"llama"', '"lama"'))
        assert location.codes(["hf-to-maxtext"], unknown) == {"hf-to-maxtext": 3}


class TestDestinations:
    WRITING = tuple(name for name, words in CHECKPOINTS.items() if " OUT" in words)

    def test_existing_destination_exits_with_2(self, location):
        other = location.directory / "taken"
        other.mkdir()
        (other / "file").touch()
        (location.directory / "taken.html").touch()
        assert location.codes(self.WRITING, out=other) == all_of(self.WRITING, 2)
        assert [item.name for item in other.iterdir()] == ["file"]
        writing = having("--manifest")
        writing = [item for item in writing if item in CHECKPOINTS and "verify" not in item]
        assert location.codes(writing, None, "--manifest", other / "file") == all_of(writing, 2)

    def test_uncreatable_destination_exits_with_5(self, location, request):
        below = location.names["RULES"] / "below"
        assert location.codes(self.WRITING, out=below) == all_of(self.WRITING, 5)
        request.getfixturevalue("nobody")
        assert location.codes(self.WRITING, out=location.directory / "mine") == all_of(self.WRITING, 5)

    @pytest.mark.parametrize("name", ["", ".", "..", "/", "below/..", "./", "../.."])
    def test_invalid_destination_name_exits_with_2(self, location, tmp_path, monkeypatch, name):
        here = tmp_path / "a" / "b" / "c"
        (here / "below").mkdir(parents=True)
        monkeypatch.chdir(here)
        commands = [item for item in self.WRITING if "OUT.html" not in CHECKPOINTS[item]]
        assert len(commands) > 10
        before = sorted(tmp_path.rglob("*"))
        for options in ([], ["--overwrite"], ["--dry-run"]):
            assert location.codes(commands, None, *options, out=name) == all_of(commands, 2)
        assert sorted(tmp_path.rglob("*")) == before
        assert location.codes(["inspect report"], None, "-o", name) == {"inspect report": 2}

    def test_full_stdout_exits_with_4(self):
        command = [sys.executable, "-m", "ckpttools", "formats", "--json"]
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert done.returncode == 4
        assert done.stderr.startswith("Error: the disk of the output is full\n  at       stdout\n")


class TestDemo:
    def test_demo_stops_at_the_first_failing_step(self, location, monkeypatch):
        monkeypatch.setattr("ckpttools.cli.demo._make_model", write_llama)
        monkeypatch.setattr("ckpttools.cli.demo._load", lambda *_: click.get_current_context().exit(3))
        result = ckpt("demo", location.directory / "demo")
        assert result.exit_code == 3
        assert "inspect tree" in result.stdout and "maxtext-to-hf" not in result.stdout

    def test_demo_keeps_existing_files(self, location):
        (location.directory / "there" / "hf").mkdir(parents=True)
        result = ckpt("demo", location.directory / "there")
        assert result.exit_code == 2 and "the directory for the demo already exists" in result.stderr
        assert [*(location.directory / "there").rglob("*")] == [location.directory / "there" / "hf"]
