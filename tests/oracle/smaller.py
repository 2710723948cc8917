"""Runs MaxText and transformers on what `ckpt shrink` makes: `python tests/oracle/smaller.py [FAMILY ...]`.

A tiny model is converted, and the MaxText checkpoint is cut; MaxText loads that by all of its ways, and
computes the logits that transformers computes with the model cut before; and it goes on with a run that was
cut. Exits with 1 where it does not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from oracle import settings, steps
from oracle.commands import ckpt
from oracle.each_form import checked
from oracle.worker import StepError

# Layers that are kept, and experts where there are some.
FAMILIES = {"llama3.1": ["--layers", "2", "--vocab", "100"], "qwen3-moe": ["--layers", "2", "--experts", "2"]}


def cut(family: str, model: Path, bench: steps.Bench) -> None:
    """The two small models: of Hugging Face's and of MaxText's files."""
    whole = bench.directory / "whole"
    form = "--scan" if bench.scanned else "--no-scan"
    ckpt("shrink", model, bench.model, *FAMILIES[family])
    ckpt("convert", "hf-to-maxtext", model, whole, form)
    ckpt("shrink", whole, bench.converted, *FAMILIES[family])


def resumed(family: str, model: Path, bench: steps.Bench) -> str:
    """A run of the whole model, cut with its moments: MaxText goes on with it as one of the small model."""
    whole = replace(bench, model=model, directory=bench.directory / "trained")
    (whole.directory).mkdir()
    steps.convert(whole)
    steps.train(whole)
    checkpoints = bench.directory / "resumed" / "run" / "checkpoints"
    run = whole.run / "checkpoints" / str(steps.STEPS - 1)
    ckpt("shrink", run, checkpoints, *FAMILIES[family], "--like", model)
    asked = {**settings.TRAINED, "steps": steps.MORE_STEPS, "checkpoint_period": steps.MORE_STEPS - 1}
    bench.maxtext("training", settings=bench.settings(directory="resumed", **asked))
    if (checkpoints / "0").exists() or not (checkpoints / str(steps.MORE_STEPS - 1)).exists():
        raise StepError("MaxText began anew")
    return f"resumed at {steps.STEPS - 1}"


def findings(whole: steps.Bench) -> Iterator[str]:
    """A line for each thing that MaxText does with what was cut.

    Raises:
        StepError: it does not, or computes otherwise than transformers.
    """
    family, model = whole.family, whole.model
    (whole.directory / "small").mkdir()
    bench = replace(whole, model=whole.directory / "small" / "hf")
    cut(family, model, bench)
    yield f"{steps.load(bench)} {steps.compare(bench)}"
    yield resumed(family, model, bench)


if __name__ == "__main__":
    sys.exit(checked(sys.argv[1:] or FAMILIES, findings))
