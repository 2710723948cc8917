"""Runs commands while something is mounted, in a mount namespace of this process alone.

Reads from stdin, as JSON, a list of [what is mounted, where, arguments of ckpt]; where the first argument is
"remove_tree", that is called with the second. Prints exit code and output of each, as JSON.
"""

import json
import subprocess
import sys
from pathlib import Path

from ckpttools import StorageError
from ckpttools.stores.local.files import remove_tree
from support.command_line import ckpt


def _run(arguments: list[str]) -> tuple[int, str]:
    if arguments[0] != "remove_tree":
        result = ckpt(*arguments)
        return result.exit_code, " ".join(result.output.split())
    try:
        remove_tree(Path(arguments[1]))
    except StorageError as error:
        return error.exit_code, str(error)
    return 0, ""


result = []
for mounted, location, arguments in json.load(sys.stdin):
    subprocess.run(["mount", "--bind", mounted, location], check=True)
    result.append(_run(arguments))
    subprocess.run(["umount", location], check=True)
sys.stdout.write(json.dumps(result))
