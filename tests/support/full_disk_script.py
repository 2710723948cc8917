"""Runs commands on a disk that is too small, in a mount namespace of this process alone, and again with room.

Reads from stdin, as JSON, a list of [directory that is copied to the disk, or "", pages that are free then,
arguments of ckpt, in which DISK is the disk's]. Prints for each what became of it, as JSON: before, after the
command and after the same command with room, exit code, output, files below the disk and bytes in use there.
"""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

from support.command_line import ckpt

_PAGE, _ROOM = 4096, 64 << 20
# What two saves of the same say differently.
_OF_ITS_TIME = ("_CHECKPOINT_METADATA", "commit_success.txt")


def _state(disk: Path, code: int = 0, output: str = "") -> dict[str, object]:
    used = int(subprocess.run(["df", "--output=used", "-B1", disk], capture_output=True).stdout.split()[-1])
    files = {
        str(path.relative_to(disk)): ""
        if path.name in _OF_ITS_TIME
        else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in disk.rglob("*")
        if path.is_file()
    }
    return {"code": code, "output": " ".join(output.split()), "files": files, "used": used}


def _run(disk: Path, copied: str, pages: int, arguments: list[str]) -> list[dict[str, object]]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_ROOM}", "none", disk], check=True)
    try:
        if copied:
            subprocess.run(["cp", "-a", copied, disk], check=True)
        words = [argument.replace("DISK", str(disk)) for argument in arguments]
        states = [_state(disk)]
        for size in (int(str(states[0]["used"])) + pages * _PAGE, _ROOM):
            subprocess.run(["mount", "-o", f"remount,size={size}", disk], check=True)
            result = ckpt(*words)
            states.append(_state(disk, result.exit_code, result.output))
        return states
    finally:
        subprocess.run(["umount", disk], check=True)


disk = Path(sys.argv[1])
sys.stdout.write(json.dumps([_run(disk, *case) for case in json.load(sys.stdin)]))
