"""Where MaxText and transformers are: in environments of their own, with Python 3.12."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from support.places import ROOT

HERE = Path(__file__).parent
MADE = ROOT / ".venv-oracle"
MAXTEXT, TORCH = "ORACLE_MAXTEXT", "ORACLE_TORCH"


@dataclass(frozen=True)
class Pythons:
    """The Python of each environment."""

    maxtext: Path
    torch: Path


def found() -> Pythons:
    """Those that environment variables name, else those of .venv-oracle, made where it is absent.

    Raises:
        SystemExit: they cannot be made; the script has said why.
    """
    there = present()
    if there is None:
        print(f"makes {MADE}, about 5 minutes", flush=True)
        ended = subprocess.run([HERE / "setup.sh", MADE], check=False).returncode
        if ended:
            sys.exit(ended)
        there = present()
    assert there is not None
    return there


def present() -> Pythons | None:
    """Those that can be used as they are."""
    if os.environ.get(MAXTEXT) and os.environ.get(TORCH):
        return _pythons(Path(os.environ[MAXTEXT]), Path(os.environ[TORCH]))
    if (MADE / "ready").is_file():
        return _pythons(MADE / "maxtext", MADE / "torch")
    return None


def _pythons(*environments: Path) -> Pythons:
    return Pythons(*(each / "bin" / "python" for each in environments))
