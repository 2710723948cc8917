"""What becomes of commands while something is mounted where they delete or rename."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.locations import TESTS

# Mounts in a namespace of its own are gone with the process; an ordinary user is root there alone.
_ALONE = ("unshare", "--mount", *(() if os.geteuid() == 0 else ("--map-root-user",)))


def while_mounted(*cases: tuple[Path, Path, Sequence[object]]) -> list[tuple[int, str]]:
    """Exit code and output of commands, each run while a file or directory is mounted at a place.

    Args:
        cases: what is mounted, where, and the arguments of ckpt.
    """
    if not _may_mount():
        pytest.skip("nothing may be mounted here")
    given = [
        (str(what), str(where), [str(argument) for argument in arguments]) for what, where, arguments in cases
    ]
    command = [*_ALONE, sys.executable, "-m", "support.mounting_script"]
    asked = json.dumps(given)
    ended = subprocess.run(command, input=asked, capture_output=True, text=True, cwd=TESTS, check=False)
    assert ended.returncode == 0, ended.stderr
    return [(code, output) for code, output in json.loads(ended.stdout)]


def on_overlay(directory: Path, *cases: Sequence[object]) -> list[tuple[int, str]]:
    """Run commands, one after the other, while a directory is the lower layer of an overlay file system.

    Args:
        directory: what the commands see there is an overlay; its own files are the lower layer.
        cases: the arguments of ckpt of each command, or "sh" and a line for the shell.

    Returns:
        The exit code and the output of each command.
    """
    if not _may_mount(_OVERLAY):
        pytest.skip("no overlay may be mounted here")
    scratch = directory.with_name(directory.name + ".layers")
    scratch.mkdir()
    asked = json.dumps([str(directory), str(scratch), [[str(item) for item in case] for case in cases]])
    command = [*_ALONE, sys.executable, "-m", "support.overlay_script"]
    ended = subprocess.run(command, input=asked, capture_output=True, text=True, cwd=TESTS, check=False)
    assert ended.returncode == 0, ended.stderr
    return [(code, output) for code, output in json.loads(ended.stdout)]


def on_other_system(kind: str, *cases: Sequence[object]) -> list[tuple[int, str]]:
    """Return exit codes and outputs of commands where Linux's own calls do not exist.

    Args:
        kind: "kernel" if system calls are refused, "system" if the functions and /proc do not exist.
        cases: The arguments of ckpt of each command.
    """
    if not _may_mount():
        pytest.skip("nothing may be mounted here")
    command = [*_ALONE, sys.executable, "-m", "support.other_system_script", kind]
    asked = json.dumps([[str(item) for item in case] for case in cases])
    ended = subprocess.run(command, input=asked, capture_output=True, text=True, cwd=TESTS, check=False)
    assert ended.returncode == 0, ended.stderr
    return [(code, output) for code, output in json.loads(ended.stdout)]


def on_a_small_disk(
    disk: Path, *cases: tuple[Path | None, int, Sequence[object]]
) -> list[list[dict[str, Any]]]:
    """What becomes of commands on a disk with little room, and of the same again where there is room.

    Args:
        disk: a directory where it is mounted.
        cases: what is on it, how many pages are free, and the arguments of ckpt, with DISK for its place.

    Returns:
        For each case before, after, and after the second time: `code`, `output`, `files`, as digests of
        their content, and `used`, the bytes that df tells.
    """
    if not _may_mount():
        pytest.skip("nothing may be mounted here")
    given = [
        (str(what or ""), pages, [str(argument) for argument in arguments])
        for what, pages, arguments in cases
    ]
    command = [*_ALONE, sys.executable, "-m", "support.full_disk_script", str(disk)]
    asked = json.dumps(given)
    ended = subprocess.run(command, input=asked, capture_output=True, text=True, cwd=TESTS, check=False)
    assert ended.returncode == 0, ended.stderr
    result: list[list[dict[str, Any]]] = json.loads(ended.stdout)
    return result


_OVERLAY = (
    'd=$(mktemp -d) && mount -t tmpfs tmpfs "$d" && mkdir "$d/l" "$d/u" "$d/w" "$d/o" && '
    'mount -t overlay overlay -o "lowerdir=$d/l,upperdir=$d/u,workdir=$d/w" "$d/o"'
)


@cache
def _may_mount(script: str = 'mount --bind "$0" "$0"') -> bool:
    command = [*_ALONE, "sh", "-c", script, str(TESTS)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
