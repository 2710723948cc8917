"""Completion in a shell: the scripts, and what bash itself completes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import ckpt

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
}


def answer(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Return what a process prints for a line that a shell asks to complete."""
    variables = {"_CKPT_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    command = [sys.executable, "-m", "ckpttools"]
    return subprocess.run(
        command,
        env={**os.environ, **variables, **environment},
        cwd=Path(__file__).parents[2],
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


@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
def test_bash_completes_with_the_script(tmp_path: Path):
    (tmp_path / "ckpt").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ckpttools "$@"\n')
    (tmp_path / "ckpt").chmod(0o755)
    lines = [
        'eval "$(ckpt completion bash)"',
        "COMP_WORDS=(ckpt families sho); COMP_CWORD=2",
        '"$(complete -p ckpt | sed "s/.*-F \\([^ ]*\\).*/\\1/")" ckpt',
        'echo "${COMPREPLY[@]}"',
    ]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "--norc", "-c", "\n".join(lines)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("show\n", "")
