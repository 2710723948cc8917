"""Help: panels, shared options, topics; options that all commands have; environment variables."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from support.command_line import ckpt, succeed
from support.internals import main
from support.locations import HF

from ckpttools.cli.command import BaseCommand, PanelOption
from ckpttools.cli.help import TOPICS, commands_below
from ckpttools.cli.lazy import LazyGroup
from ckpttools.core.options import PANELS

ROOT = click.Context(main, info_name="ckpt", **main.context_settings)
COMMANDS = {ctx.command_path: ctx for ctx in commands_below(ROOT)}
HEADING = re.compile(r"^(\S.*):$", re.MULTILINE)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_panels_in_order_and_fits_the_terminal(name, monkeypatch):
    monkeypatch.setattr(click.formatting, "FORCED_WIDTH", None)
    words = name.split()[1:]
    for columns in (80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        text = succeed(*words, "--help").stdout
        headings = [item for item in HEADING.findall(text) if item in PANELS]
        assert headings == sorted(headings, key=PANELS.index)
        assert max(map(len, text.splitlines())) <= min(columns, 120)


@pytest.mark.parametrize("name", COMMANDS)
def test_full_help_describes_each_option(name):
    text = succeed("help", *name.split()[1:]).stdout
    for param in COMMANDS[name].command.get_params(COMMANDS[name]):
        if isinstance(param, click.Option) and not param.hidden:
            assert re.search(rf"^  .*{param.opts[-1]}\b", text, re.MULTILINE), param.opts
    assert "Shared options" not in text


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_parse(name):
    """Each example of a command is accepted by its parser."""
    command = COMMANDS[name].command
    assert isinstance(command, BaseCommand) and command.help
    _, _, examples = command.help.partition("Examples:\n")
    lines = [line.strip() for line in examples.splitlines() if line.strip()]
    assert len(lines) >= 2 and all(line.startswith("$ ") for line in lines), lines
    for line in lines:
        words = shlex.split(line.removeprefix("$ "), comments=True)
        if words[0] != "ckpt" or ">" in words:
            continue
        if words[:2] == ["ckpt", "convert"] and words[2].startswith("~"):
            words.insert(2, "hf-to-maxtext")  # the direction is inferred from what is there
        context = main.make_context("ckpt", words[1:], resilient_parsing=False)
        while isinstance(context.command, LazyGroup) and len(words) > 2:
            child, found, rest = context.command.resolve_words(context)
            context = found.make_context(child, rest, parent=context)


def test_options_page_describes_each_shared_option_once():
    text = succeed("help", "options").stdout
    shared = {
        param.opts[-1]
        for ctx in COMMANDS.values()
        for param in ctx.command.get_params(ctx)
        if isinstance(param, PanelOption) and param.is_shared
    }
    assert {"--memory", "--overwrite", "--json", "--quiet", "--chunks"} <= shared
    for name in shared:
        assert len(re.findall(rf"^  (?:-\w, )?{name}\b", text, re.MULTILINE)) == 1, name


@pytest.mark.parametrize("topic", TOPICS)
def test_topic_is_listed(topic):
    assert f"\n  {topic} " in succeed("help", "--help").stdout
    assert succeed("help", topic).stdout


def test_help_suggests_commands():
    result = ckpt("help", "inspect", "tre")
    assert result.exit_code == 2 and "Did you mean 'tree'?" in result.stderr


def test_environment_page_lists_each_variable():
    text = succeed("help", "environment").stdout
    for ctx in COMMANDS.values():
        for param in ctx.command.get_params(ctx):
            assert not param.envvar or re.search(rf"\b{param.envvar}\b", text)


def test_environment_sets_defaults(tmp_path):
    result = ckpt("hash", HF, CKPT_MEMORY="1B")
    assert result.exit_code == 4, result.output
    assert ckpt("hash", HF, "--memory", "1GiB", CKPT_MEMORY="1B").exit_code == 0
    assert json.loads(ckpt("inspect", "tree", HF, CKPT_JSON="1").stdout)
    assert "CKPT_MEMORY" in ckpt("hash", HF, CKPT_MEMORY="much").stderr
    assert json.loads(ckpt("absent", CKPT_JSON="y").stdout)["error"]["exit_code"] == 2


@pytest.mark.parametrize("before", [True, False])
def test_quiet_prints_only_errors(tmp_path, before):
    def quiet(*words: object) -> click.testing.Result:
        return ckpt("-q", *words) if before else ckpt(*words, "--quiet")

    done = quiet("convert", "hf-to-maxtext", HF, tmp_path / "maxtext")
    assert (done.exit_code, done.output) == (0, "")
    assert (tmp_path / "maxtext" / "0" / "items").is_dir()
    assert quiet("verify", tmp_path / "maxtext", "--against", HF).output == ""
    assert (found := quiet("diff", HF, tmp_path / "maxtext")).output == "" and found.exit_code == 0
    failed = quiet("convert", "hf-to-maxtext", HF, tmp_path / "maxtext")
    assert failed.exit_code == 2 and failed.stderr.startswith("Error: ")
    assert json.loads(quiet("verify", tmp_path / "maxtext", "--against", HF, "--json").stdout)["equal"]
    assert quiet("hash", HF).stdout.count("\n") > 3


def test_verbose_prints_files_decisions_and_times_on_stderr(tmp_path):
    done = ckpt("convert", "hf-to-maxtext", HF, tmp_path / "maxtext", "-v")
    plain = ckpt("verify", tmp_path / "maxtext", "--against", HF)
    assert done.exit_code == plain.exit_code == 0
    for text in ("opened file ", "as safetensors", "family llama", "planned ", "published "):
        assert re.search(rf"^ +\d+\.\d{{3}} s  .*{text}", done.stderr, re.MULTILINE), text
    assert "opened file" not in plain.stderr
    failed = ckpt("-v", "-q", "hash", tmp_path / "absent")
    assert failed.stderr.splitlines()[0].startswith("Error: ") and "exit code 2;" in failed.stderr


def test_choices_of_one_command_do_not_reach_the_next():
    assert ckpt("-q", "formats").exit_code == 0
    assert "llama" in ckpt(HF).output


def colored(*words: object, **environment: str) -> bool:
    """Return whether a process whose output is a pipe prints colors."""
    unset = dict.fromkeys(("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "CKPT_COLOR"), "")
    done = subprocess.run(
        [sys.executable, "-m", "ckpttools", *map(str, words)],
        env={**os.environ, **unset, **environment},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        check=False,
    )
    return b"\x1b[" in done.stdout + done.stderr


def test_color_follows_option_then_environment():
    assert not colored("--help")
    assert colored("--color", "always", "--help")
    assert colored("formats", "--help", FORCE_COLOR="1") and colored("nothing", CLICOLOR_FORCE="1")
    assert not colored("formats", "--help", FORCE_COLOR="1", NO_COLOR="1")
    assert not colored("--color=never", "nothing", FORCE_COLOR="1")
    assert colored("diff", HF, HF, CKPT_COLOR="always", NO_COLOR="1")
    assert colored("diff", HF, HF, "--color", "always")


def test_version_has_a_short_flag():
    assert succeed("-V").stdout == succeed("--version").stdout
