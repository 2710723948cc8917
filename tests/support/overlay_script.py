"""Run commands while a directory is the lower layer of an overlay, in a separate mount namespace.

Reads from stdin, as JSON, the directory, a scratch directory, and a list of arguments of ckpt, or of "sh"
and a line. Prints the exit code and the output of each, as JSON.
"""

import json
import subprocess
import sys

from support.command_line import ckpt


def _run(arguments: list[str]) -> tuple[int, str]:
    if arguments[0] == "sh":
        ended = subprocess.run(["sh", "-c", arguments[1]], capture_output=True, text=True, check=False)
        return ended.returncode, ended.stdout
    result = ckpt(*arguments)
    return result.exit_code, " ".join(result.output.split())


directory, scratch, cases = json.load(sys.stdin)
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", scratch], check=True)
subprocess.run(["mkdir", f"{scratch}/upper", f"{scratch}/work"], check=True)
layers = f"lowerdir={directory},upperdir={scratch}/upper,workdir={scratch}/work"
subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layers, directory], check=True)
sys.stdout.write(json.dumps([_run(item) for item in cases]))
