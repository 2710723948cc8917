"""Run MaxText and transformers on converted models: `python tests/oracle/run.py [FAMILY ...]`.

Exits with 1 if a step fails. Results are written to docs/oracle.json; `make docs` generates docs/oracle.md
from it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.locations import ROOT

from oracle import environments, results, steps
from oracle.cases import LAYERS, SCANNED, configuration, configurations, forms, named, steps_of
from oracle.results import FAILED, PASSED, Finding, Row
from oracle.worker import StepError, Worker

SEED = 20261122


def found(bench: steps.Bench, names: Sequence[str]) -> dict[str, Finding]:
    """Run steps and return their findings; skip a step whose prerequisite failed."""
    findings: dict[str, Finding] = {}
    by = {"date": date.today().isoformat(), "commit": commit()}
    for name in names:
        needed = results.NEEDS.get(name)
        if needed and (needed not in findings or findings[needed].state != PASSED):
            continue
        try:
            findings[name] = Finding(PASSED, steps.ALL[name](bench), **by)
        except StepError as refusal:
            findings[name] = Finding(FAILED, str(refusal), **by)
        print(f"  {name:<8} {findings[name].state}  {findings[name].said}", flush=True)
    return findings


def commit() -> str:
    """Return the commit that is checked out, with "+" for changed files; "" without git."""
    head = _git("rev-parse", "--short=9", "HEAD")
    return head + "+" * bool(head and _git("status", "--porcelain", "--", "ckpttools", "tests", "fixtures"))


def _git(*words: str) -> str:
    asked = subprocess.run(
        ["git", "--no-optional-locks", *words], capture_output=True, text=True, cwd=ROOT, check=False
    )
    return "" if asked.returncode else asked.stdout.strip()


def made(family: str, directory: Path, torch: Worker) -> Path:
    """Create a tiny model with transformers."""
    model = directory / family / "hf"
    if model.is_dir():
        return model
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(configuration(family), indent=1))
    torch("make", directory=model, seed=SEED)
    return model


def run(asked: argparse.Namespace, directory: Path) -> int:
    failed = 0
    pythons = environments.found()
    with (
        Worker(pythons.torch, "in_torch", directory) as torch,
        Worker(pythons.maxtext, "in_maxtext", directory) as maxtext,
    ):
        versions = {**maxtext("versions"), **torch("versions")}
        for layers, family in product(asked.layers, asked.families):
            if layers not in forms(family):
                continue
            print(family, layers, flush=True)
            work = directory / family / layers
            try:
                model = made(family, directory, torch)
                work.mkdir()
                bench = steps.Bench(family, layers == SCANNED, model, work, torch, maxtext)
                findings = found(bench, [each for each in asked.steps if each in steps_of(family, layers)])
            except StepError as refusal:
                why = f"transformers: {refusal}"
                findings = {"convert": Finding(FAILED, why, date.today().isoformat(), commit())}
            row = Row(family, layers, versions, findings)
            failed += not row.passed
            results.put(row, asked.results)
            if not asked.keep:
                shutil.rmtree(work)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "families", nargs="*", metavar="FAMILY", help=f"or how several begin: {', '.join(configurations())}"
    )
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=LAYERS)
    parser.add_argument("--steps", nargs="+", choices=steps.ALL, default=list(steps.ALL))
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="where rows are kept")
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="work there, and leave everything")
    asked = parser.parse_args()
    try:
        asked.families = named([each for words in asked.families for each in words.split(",")])
    except KeyError as unknown:
        parser.error(f"no such family: {unknown}")
    with tempfile.TemporaryDirectory() as temporary:
        return bool(run(asked, asked.keep or Path(temporary)))


if __name__ == "__main__":
    sys.exit(main())
