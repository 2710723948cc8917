"""Steps for one model and one form of its layers: convert, load, train, convert back, and compare.

A step is a function of a `Bench` that returns the entry of the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oracle import images, settings
from oracle.cases import (
    DEVIATIONS,
    LIMIT,
    NEVER_SCANNED,
    NONE,
    QUANTIZED,
    STACKED_AS,
    TEXT_WHERE_SCANNED,
    Deviation,
)
from oracle.commands import ckpt
from oracle.worker import StepError

STEPS = 4
MORE_STEPS = 6
LARGEST_KL = 1e-5
# Two sides, each with the rounding of every product and sum and not that of weights alone.
LARGEST_SHAKE = 4


@dataclass(frozen=True)
class Bench:
    """The model, workers and directories of a row.

    Attributes:
        family: Name of the case.
        scanned: Whether layers are scanned.
        model: Directory of the model that transformers created.
        directory: Output directory; empty at first.
        torch: Calls functions of `in_torch`.
        maxtext: Calls functions of `in_maxtext`.
    """

    family: str
    scanned: bool
    model: Path
    directory: Path
    torch: Callable[..., Any]
    maxtext: Callable[..., Any]

    @property
    def converted(self) -> Path:
        return self.directory / "converted"

    @property
    def text_alone(self) -> bool:
        return self.scanned and self.family in TEXT_WHERE_SCANNED

    @property
    def run(self) -> Path:
        """MaxText's run directory."""
        return self.directory / "runs" / "run"

    def settings(self, scanned: bool | None = None, directory: str = "runs", **more: Any) -> list[str]:
        form = self.scanned if scanned is None else scanned
        text = self.converted if self.text_alone else None
        return settings.of(self.model, form, self.directory / directory, text, **more)


def convert(bench: Bench) -> str:
    form = ["--scan"] if bench.scanned else ["--no-scan"]
    if bench.text_alone:
        form.append("--text-only")
    ckpt("convert", "hf-to-maxtext", bench.model, bench.converted, *form, "--carry")
    return ""


def load(bench: Bench) -> str:
    return loaded(bench, bench.converted, bench.scanned)


def loaded(bench: Bench, checkpoint: Path, scanned: bool, **more: Any) -> str:
    """Load a checkpoint in each of MaxText's ways, and require the same weights of all."""
    asked = bench.settings(scanned, load_parameters_path=checkpoint / "0" / "items", **more)
    found = bench.maxtext("loads", settings=asked)
    if refused := {way: each["refused"] for way, each in found.items() if "refused" in each}:
        raise StepError("; ".join(f"{way}: {why}" for way, why in refused.items()))
    if len({each["digest"] for each in found.values()}) > 1:
        raise StepError("MaxText's ways of loading return different weights")
    return ", ".join(found)


def tokens(family: str) -> list[int]:
    """Return the tokens to compare, which every vocabulary contains."""
    return np.random.default_rng(0).integers(3, 86, DEVIATIONS.get(family, NONE).tokens).tolist()


def compare(bench: Bench) -> str:
    return compared(bench, bench.model, bench.converted)


def compared(bench: Bench, model: Path, checkpoint: Path) -> str:
    """Return the largest difference of the logits of the same tokens."""
    deviation = DEVIATIONS.get(bench.family, NONE)
    text = tokens(bench.family)
    expected, made = bench.directory / "wanted.npy", bench.directory / "made.npy"
    shown = {"directory": model, "tokens": text}
    if missing := bench.torch("logits", target=expected, **shown):
        raise StepError(f"transformers: {missing}")
    asked = bench.settings(load_parameters_path=checkpoint / "0" / "items", max_target_length=len(text))
    bench.maxtext("logits", settings=asked, tokens=text, target=made, mends=deviation.mends)
    return difference(np.load(expected), np.load(made), limit(bench, deviation, **shown))


def limit(bench: Bench, deviation: Deviation, **shown: Any) -> float:
    """Return the limit for the difference of logits; larger for a model that magnifies rounding."""
    return max(LIMIT, LARGEST_SHAKE * bench.torch("shaken", **shown)) if deviation.steep else LIMIT


def difference(one: np.ndarray, other: np.ndarray, limit: float) -> str:
    """Return the largest difference; MaxText may pad its vocabulary on the right."""
    other = other[:, : one.shape[1]]
    apart, divergence = float(np.abs(one - other).max()), kl(one, other)
    if not (apart <= limit and divergence <= LARGEST_KL):
        raise StepError(f"logits {apart:.1e} apart (KL {divergence:.1e}, deviation {one.std():.1f})")
    return f"{apart:.0e}"


def see(bench: Bench) -> str:
    """Load the model with its tower in all ways, and compare the logits of tokens with an image."""
    prompt = images.prompt(json.loads((bench.model / "config.json").read_bytes()))
    assert prompt is not None, "no step of this model"
    tower: dict[str, Any] = {"use_multimodal": True, "max_target_length": len(prompt.tokens)}
    loaded(bench, bench.converted, bench.scanned, **tower)
    expected, made = bench.directory / "wanted.npy", bench.directory / "made.npy"
    inputs = {name: _kept(bench, name, array) for name, array in prompt.torch.items()}
    seen = {"directory": bench.model, "tokens": prompt.tokens, "inputs": inputs}
    bench.torch("logits", target=expected, **seen)
    shown = {
        "placeholder": prompt.placeholder,
        "pixels": _kept(bench, "pixels", prompt.pixels),
        "positions": _kept(bench, "positions", prompt.positions),
    }
    if prompt.sound is not None:
        shown |= {"sound": _kept(bench, "sound", prompt.sound.features), "heard": prompt.sound.placeholder}
    asked = bench.settings(load_parameters_path=bench.converted / "0" / "items", **tower)
    deviation = DEVIATIONS.get(bench.family, NONE)
    mends = deviation.mends
    bench.maxtext("logits", settings=asked, tokens=prompt.tokens, target=made, shown=shown, mends=mends)
    return difference(np.load(expected), np.load(made), limit(bench, deviation, **seen))


def _kept(bench: Bench, name: str, array: np.ndarray) -> Path:
    """Write an array to a file that both workers read."""
    file = bench.directory / f"{name}.npy"
    np.save(file, array)
    return file


def quantize(bench: Bench) -> str:
    """Convert quantized weights, and compare with transformers, which gets the dequantized ones."""
    small, meant, item = (bench.directory / name for name in ("quantized", "meant", "from-quantized"))
    ckpt("quantize", bench.model, small, "--scheme", QUANTIZED[bench.family])
    ckpt("cast", small, meant, "--dtype", "float32")
    form = "--scan" if bench.scanned else "--no-scan"
    ckpt("convert", "hf-to-maxtext", small, item, form, "--dtype", "float32")
    return compared(bench, meant, item)


def kl(one: np.ndarray, other: np.ndarray) -> float:
    """Return the largest divergence of the distributions of a position, in nats."""
    logs = [each - np.logaddexp.reduce(each, axis=-1, keepdims=True) for each in (one, other)]
    return float((np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1).max())


def train(bench: Bench) -> str:
    """Train the converted checkpoint with MaxText."""
    item = bench.converted / "0" / "items"
    asked = {**settings.TRAINED, "steps": STEPS, "checkpoint_period": STEPS - 1}
    bench.maxtext("training", settings=bench.settings(load_parameters_path=item, **asked))
    return f"{STEPS} steps"


def export(bench: Bench) -> str:
    """Strip, unstack and convert the trained checkpoint to Hugging Face files, and compare logits."""
    stripped, single = bench.directory / "stripped", bench.directory / "single"
    ckpt("strip-optimizer", bench.run / "checkpoints", stripped)
    if bench.scanned:
        ckpt("unstack", stripped, single)
        loaded(bench, single, scanned=False)
    else:
        single = stripped
    back = bench.directory / "back"
    ckpt("convert", "maxtext-to-hf", single, back, "--like", bench.model, "--carry")
    loaded(bench, stripped, bench.scanned)
    return compared(bench, back, stripped)


def resume(bench: Bench) -> str:
    """Rearrange a run and restore it: it must resume to the same bits as the run itself."""
    there, back = _ways(bench)
    checkpoints = Path("run") / "checkpoints"
    step = str(STEPS - 1)
    ckpt(*there, bench.run / "checkpoints" / step, bench.directory / "rearranged")
    for name in ("itself", "restored"):
        (bench.directory / name / checkpoints).mkdir(parents=True)
    ckpt("copy", bench.run / "checkpoints" / step, bench.directory / "itself" / checkpoints / step)
    ckpt(*back, bench.directory / "rearranged", bench.directory / "restored" / checkpoints)
    digests = set()
    for name in ("itself", "restored"):
        digests.add(gone_on(bench, name))
        if (bench.directory / name / checkpoints / "0").exists():
            raise StepError("MaxText started from step 0 instead of resuming")
    if len(digests) > 1:
        raise StepError(f"after {MORE_STEPS - STEPS} more steps the two runs differ")
    return "same bits"


def _ways(bench: Bench) -> tuple[Sequence[str], Sequence[str]]:
    """Return the commands that rearrange a run and restore it."""
    if bench.family in NEVER_SCANNED:
        return ("reshard", "--mesh", "fsdp=4", "--no-ocdbt"), ("reshard", "--mesh", "fsdp=1")
    if bench.scanned:
        return ("unstack",), ("stack",)
    family = STACKED_AS.get(bench.family)
    return ("stack", *(("--family", family) if family else ())), ("unstack",)


def gone_on(bench: Bench, name: str, **more: Any) -> str:
    """Resume the run in a directory with MaxText; return the digest of its last checkpoint."""
    asked = {**settings.TRAINED, "steps": MORE_STEPS, "checkpoint_period": MORE_STEPS - 1, **more}
    bench.maxtext("training", settings=bench.settings(directory=name, **asked))
    last = bench.directory / name / "run" / "checkpoints" / str(MORE_STEPS - 1) / "items"
    return str(bench.maxtext("stored", item=last))


ALL: dict[str, Callable[[Bench], str]] = {
    "convert": convert,
    "load": load,
    "logits": compare,
    "images": see,
    "quantized": quantize,
    "train": train,
    "export": export,
    "resume": resume,
}
