"""Whether MaxText takes what `ckpt maxtext-config` says of each case, with nothing else: `accepted.py`.

Runs in two environments: this one asks `ckpt`, MaxText's (`ORACLE_MAXTEXT`, or that of .venv-oracle)
initializes a configuration of each answer, on a CPU and without a model. Exits with 1 where one is refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

# What the machine wants, not the model.
MACHINE = (
    "hardware=cpu",
    "skip_jax_distributed_system=true",
    "base_output_directory=/tmp",
    "log_config=false",
)


def asked() -> dict[str, list[str]]:
    """Case and layers -> the settings."""
    import ckpttools
    from oracle.cases import SCANNED, TEXT_WHERE_SCANNED, configurations, forms

    return {
        f"{case} {form}": list(ckpttools.maxtext_config(location.parent, scan=form == SCANNED).arguments())
        for case, location in configurations().items()
        for form in forms(case)
        if form != SCANNED or case not in TEXT_WHERE_SCANNED
    }


def initialized() -> int:
    """Reads the settings of all cases as JSON, and says of each whether MaxText takes them."""
    import maxtext
    from maxtext.configs import pyconfig

    base = str(Path(maxtext.__file__).parent / "configs" / "base.yml")
    refused = 0
    for case, settings in json.load(sys.stdin).items():
        try:
            with contextlib.redirect_stdout(sys.stderr):
                pyconfig.initialize(["accepted", base, *settings, *MACHINE])
            said = "accepted"
        except BaseException as error:  # SystemExit among them
            said = f"refused: {type(error).__name__} {error}"
        refused += said != "accepted"
        print(f"{case}: {said}", flush=True)
    return min(refused, 1)


def main() -> int:
    """Asks, and hands on."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from oracle import environments
    from oracle.worker import ENVIRONMENT

    command = [environments.found().maxtext, __file__, "--within"]
    around = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | ENVIRONMENT
    return subprocess.run(command, input=json.dumps(asked()), text=True, check=False, env=around).returncode


if __name__ == "__main__":
    sys.exit(initialized() if "--within" in sys.argv else main())
