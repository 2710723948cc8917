"""Runs cases with the package that is on the path, all in one process, and notes what became of each."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from ckpttools.cli.main import main as ckpt

_TIMES = re.compile(rb'("(?:init|commit)_timestamp_nsecs":) *\d+')


def main() -> None:
    """Arguments: a file with cases, a directory to work in, and where the results go, a line for each."""
    cases, work, results = map(Path, sys.argv[1:])
    os.fsync = os.fdatasync = lambda descriptor: None  # nothing of this must outlive a crash
    with results.open("w") as file:
        for number, case in enumerate(json.loads(cases.read_bytes())):
            out = work / str(number)
            file.write(json.dumps(_run([str(out) if word == "OUT" else word for word in case], out)) + "\n")
            file.flush()


def _run(words: list[str], out: Path) -> dict[str, Any]:
    began = time.process_time()
    result = CliRunner(env={"COLUMNS": "120"}).invoke(ckpt, words)
    is_crash = result.exception is not None and not isinstance(result.exception, SystemExit)
    built = {
        "code": result.exit_code,
        "crash": repr(result.exception) if is_crash else "",
        "stdout": result.stdout,
        "stderr": result.stderr,
        "files": _digests(out),
        "seconds": time.process_time() - began,
    }
    partial = out.with_name(out.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    return built


def _digests(out: Path) -> dict[str, str]:
    if out.is_file():
        return {"": "a file"}
    paths = sorted(path for path in out.rglob("*") if path.is_file()) if out.exists() else []
    return {str(path.relative_to(out)): hashlib.sha256(_timeless(path)).hexdigest() for path in paths}


def _timeless(path: Path) -> bytes:
    """The bytes of a file, without the times at which Orbax's checkpoints were begun and committed."""
    content = path.read_bytes()
    return _TIMES.sub(rb"\1 0", content) if path.name == "_CHECKPOINT_METADATA" else content


if __name__ == "__main__":
    main()
