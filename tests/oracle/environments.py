"""Where MaxText and transformers are: in environments of their own, with Python 3.12."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from support.locations import ROOT

HERE = Path(__file__).parent
MADE = ROOT / ".venv-oracle"
MAXTEXT, TORCH = "ORACLE_MAXTEXT", "ORACLE_TORCH"
# As setup.sh names them.
_DIRECTORIES = {MAXTEXT: "maxtext", TORCH: "torch"}


@dataclass(frozen=True)
class Pythons:
    """The Python of each environment."""

    maxtext: Path
    torch: Path


def found() -> Pythons:
    """Those that environment variables name, else those of .venv-oracle, made where one is absent.

    Raises:
        SystemExit: they cannot be made; the script has said why.
    """
    if not all(map(present, (MAXTEXT, TORCH))):
        print(f"makes {MADE}, about 5 minutes", flush=True)
        ended = subprocess.run([HERE / "setup.sh", MADE], check=False).returncode
        if ended:
            sys.exit(ended)
    maxtext, torch = map(present, (MAXTEXT, TORCH))
    assert maxtext is not None and torch is not None
    return Pythons(maxtext, torch)


def present(name: str) -> Path | None:
    """The Python of an environment that can be used as it is: the named one, or that of .venv-oracle."""
    if named := os.environ.get(name):
        return _python(Path(named))
    made = MADE / _DIRECTORIES[name]
    return _python(made) if (made / "ready").is_file() else None


def _python(environment: Path) -> Path:
    return environment / "bin" / "python"
