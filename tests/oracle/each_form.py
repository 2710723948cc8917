"""A check of every form of layers of tiny models, in which MaxText and transformers take part."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from oracle import environments, steps
from oracle.cases import SCANNED, forms
from oracle.run import made
from oracle.worker import StepError, Worker


def checked(families: Iterable[str], findings: Callable[[steps.Bench], Iterator[str]]) -> int:
    """Prints what a check finds of each family and form.

    Args:
        families: names of models.
        findings: gives lines; raises StepError where the check fails.

    Returns:
        1 where one has failed, else 0.
    """
    failed = 0
    pythons = environments.found()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with (
            Worker(pythons.torch, "in_torch", directory) as torch,
            Worker(pythons.maxtext, "in_maxtext", directory) as maxtext,
        ):
            print(maxtext("versions"), flush=True)
            for family in families:
                model = made(family, directory, torch)
                for layers in forms(family):
                    work = directory / family / layers
                    work.mkdir()
                    bench = steps.Bench(family, layers == SCANNED, model, work, torch, maxtext)
                    try:
                        for line in findings(bench):
                            print(family, layers, line, flush=True)
                    except StepError as refusal:
                        failed = 1
                        print(family, layers, "FAILED", refusal, flush=True)
    return failed
