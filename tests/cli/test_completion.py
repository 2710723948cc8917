"""Completion in a shell: the scripts, and what bash itself completes."""

import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import pytest
from support.command_line import ckpt
from support.locations import ROOT

COMPLETED = {
    "ckpt conv": "convert",
    "ckpt convert hf-to-": "hf-to-maxtext",
    "ckpt convert hf-to-maxtext --dty": "--dtype",
    "ckpt convert hf-to-maxtext --dtype bf": "bfloat16",
    "ckpt convert hf-to-maxtext --tied mat": "materialize",
    "ckpt convert hf-to-maxtext --family gpt": "gpt-oss",
    "ckpt families show gpt": "gpt-oss",
    "ckpt doctor --fix ind": "index",
    "ckpt select --to zar": "zarr3",
    "ckpt cat fixtures/golden/qwen3/hf lm_h": "lm_head.weight",
    "ckpt remap fixtures/golden/qwen3/hf x --rename lm_h": "lm_head.weight",
    "ckpt plan -o p convert hf-to-": "hf-to-maxtext",
    "ckpt plan select fixtures/golden/qwen3/hf x -o p --drop lm_h": "lm_head.weight",
    "ckpt plan cast --outp": "--output",
}


def answer(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Return what a process prints for a line that a shell asks to complete."""
    variables = {"_CKPT_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    command = [sys.executable, "-m", "ckpttools"]
    return subprocess.run(
        command,
        env={**os.environ, **variables, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("line", COMPLETED)
def test_completions_go_to_stdout_only(line):
    done = answer(line)
    assert (done.returncode, done.stderr) == (0, "")
    assert " ".join(item.partition(",")[2] for item in done.stdout.split()) == COMPLETED[line]


@pytest.mark.parametrize(
    ("line", "instruction"), [("ckpt conv", "no such request"), ("ckpt no-such-command -", "bash_complete")]
)
def test_no_completions_print_no_message(line, instruction):
    done = answer(line, _CKPT_COMPLETE=instruction)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_is_valid_in_its_shell(shell):
    script = ckpt("completion", shell).stdout
    assert "_CKPT_COMPLETE" in script
    if shutil.which(shell):
        checked = subprocess.run([shell, "-n"], input=script, text=True, capture_output=True, check=False)
        assert (checked.returncode, checked.stderr) == (0, "")


def test_unknown_shell_is_a_usage_error():
    assert ckpt("completion", "csh").exit_code == 2


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the command `ckpt`."""
    directory = tmp_path_factory.mktemp("bin")
    (directory / "ckpt").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ckpttools "$@"\n')
    (directory / "ckpt").chmod(0o755)
    return directory


# Typed lines, and the words that the line has after TAB.
TYPED = {
    "ckpt families sho": "show",
    "ckpt cast a b --dtype bfl": "bfloat16",
    "ckpt cast a b --dtype=bfl": "--dtype=bfloat16",
    "ckpt cat fixtures/golden/qwen3/hf lm_h": "lm_head.weight",
    "ckpt remap fixtures/golden/qwen3/hf x --rename lm_h": "lm_head.weight",
    "ckpt plan -o p convert hf-to-": "hf-to-maxtext",
    "ckpt plan select fixtures/golden/qwen3/hf x -o p --drop lm_h": "lm_head.weight",
    "ckpt plan cast --outp": "--output",
    "ckpt select fixtures/golden/qwen3/hf b --keep model.nor": "model.norm.weight",
    "ckpt inspect tree fixtures/golden-0": "fixtures/golden-0.2.5",
    "ckpt fixtures/golden/qwen3/h": "fixtures/golden/qwen3/hf",
    "ckpt help exi": "exit-codes",
}
START = {
    "bash": (["bash", "--norc", "-i"], 'bind "set bell-style none"; eval "$(ckpt completion bash)"'),
    "zsh": (["zsh", "-f", "-i"], 'autoload -Uz compinit; compinit -u; eval "$(ckpt completion zsh)"'),
}


@pytest.mark.parametrize("shell", START)
def test_tab_completes_in_the_shell(shell, command, tmp_path):
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    arguments, start = START[shell]
    variables = {
        "PATH": f"{command}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "TERM": "dumb",
        "PS1": "> ",
    }
    with Terminal(arguments, {**os.environ, **variables}) as terminal:
        terminal.type(f"{start}; echo rea''dy\n")
        terminal.wait_for("ready")
        for line, completed in TYPED.items():
            # Control-U clears the line.
            terminal.type(f"{line}\t")
            terminal.wait_for(line + completed.removeprefix(line.split()[-1]))
            terminal.type("\x15")


class Terminal:
    """A shell on a pseudoterminal."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        self.shown = ""
        self.pid, self.descriptor = pty.fork()
        if not self.pid:
            os.chdir(ROOT)
            os.execvpe(arguments[0], arguments, environment)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.descriptor)

    def type(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def wait_for(self, text: str) -> None:
        """Wait until a text is shown; the shell may break lines and move the cursor in it."""
        wanted, deadline = re.sub(r"\s", "", text), time.monotonic() + 30
        while wanted not in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|[\s\x07\x08]", "", self.shown):
            assert time.monotonic() < deadline, (text, self.shown)
            if select.select([self.descriptor], [], [], 1)[0]:
                self.shown += os.read(self.descriptor, 4096).decode(errors="replace")
        self.shown = ""


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed")
def test_fish_completes_with_the_script(command):
    asked = "; ".join(f"complete -C {shlex.quote(line)}" for line in TYPED)
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"ckpt completion fish | source; {asked}"],
        env={**os.environ, "PATH": f"{command}:{os.environ['PATH']}"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    words = [line.partition("\t")[0].rstrip("/") for line in done.stdout.splitlines()]
    assert words == list(TYPED.values()), done.stderr


def test_steps_of_a_run_are_completed():
    done = answer("ckpt inspect tree fixtures/orbax/cm_best_metrics --step ")
    assert done.stdout.split() == ["plain,2", "plain,1"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_install_adds_the_script_once(shell, tmp_path, monkeypatch):
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "ZDOTDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    startup = tmp_path / f".{shell}rc"
    startup.write_text("alias x=y")
    for _ in range(2):
        assert ckpt("completion", "--install").exit_code == 0
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path != startup]
    assert [path.read_text().strip() for path in written] == [ckpt("completion", shell).stdout.strip()]
    lines = startup.read_text().splitlines()
    assert lines[0] == "alias x=y" and len(lines) == (1 if shell == "fish" else 2)
    if shutil.which(shell) and shell != "fish":
        done = subprocess.run([shell, "-c", f". {startup}"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("home", ["it's $(touch pwned) here", "with space"])
def test_install_quotes_the_path_of_the_script(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / home))
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    (tmp_path / home).mkdir()
    assert ckpt("completion", "bash", "--install").exit_code == 0
    trace = f"{tmp_path / home}/.bashrc"
    done = subprocess.run(
        ["bash", "-c", '. "$1"; complete -p ckpt', "bash", trace], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "_ckpt_completion" in done.stdout, done.stderr
    assert [item.name for item in tmp_path.iterdir()] == [home]


def test_install_needs_a_known_shell(monkeypatch):
    monkeypatch.setenv("SHELL", "/bin/csh")
    result = ckpt("completion", "--install")
    assert result.exit_code == 2 and "bash, zsh, fish" in result.stderr
