"""Commands as processes of their own that tell their peak of resident memory (`VmHWM`) when they end."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass

RUN = """
import atexit, sys
from ckpttools.core.process_memory import peak_bytes
atexit.register(lambda: print("peak", peak_bytes(), file=sys.stderr))
from ckpttools.cli.main import main
main()
"""


@dataclass
class Ended:
    """How a command ended: its exit code, its peak in bytes, what it said on stderr."""

    code: int
    peak: int
    declared: str

    @property
    def hint(self):
        """The number that the refusal names, in MiB."""
        return int(re.search(r"try --memory (\d+)MiB$", self.declared, re.MULTILINE)[1])


def within(*words, mib, limit=""):
    """Runs a command with so much memory."""
    return measured(*words, "--memory", f"{mib}MiB", "--no-progress", limit=limit)


def measured(*words, limit=""):
    """Runs a command."""
    command = [sys.executable, "-c", limit + RUN, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    # A library may have something to say after that, as OpenBLAS has of memory that it does not get.
    peaks = re.findall(r"^peak (\d+)$", done.stderr, re.MULTILINE)
    declared = re.sub(r"^peak \d+\n", "", done.stderr, flags=re.MULTILINE)
    assert "Traceback" not in declared, declared
    return Ended(done.returncode, int(peaks[-1]) if peaks else 0, declared)
