"""The tables of what is supported and how each was proved, of the golden data and of docs/oracle.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from oracle.cases import configurations
from oracle.results import PASSED, Row, read

from ckpttools.model_families.family import Family
from ckpttools.model_families.registry import families, family_of
from ckpttools.quantized.config import declared_quantization

FIXTURES = Path(__file__).parents[1] / "fixtures"
# MaxText's version -> where the models lie that its own converter made.
GOLDEN = {"0.2.5": "golden-0.2.5", "e591f30": "golden"}
# The version that the oracle runs.
RUN = "0.2.5"
LAYERS = {"scanned": "scanned", "unscanned": "one by one"}
# What the paths of a tower's parameters in MaxText begin with.
TOWERS = {"vision": "vision_encoder", "audio": "audio_encoder"}
HEAD = """## How it was proved

For each version of MaxText, each form of the layers, each way, and towers by themselves:

* *golden*: tiny models whose arrays are all bit for bit what this version's own converter made; on the way
  back, whose tensors are all bit for bit what they were (with `--exact` where 16 bits would round).
* *logits*, *trained*, *images*: tiny models of random weights that MaxText itself loads and computes like
  transformers: after conversion; after MaxText's own training, on the way back; with images in the prompt.
  The number is the largest difference that [the oracle](oracle.md) found, where you see for which model and
  when; **no** means that it is larger than it should be, or that `ckpt` refused what MaxText made.
* *refused*: MaxText has no such form, and neither has `ckpt`.
* The models that were tried are in brackets. An empty cell was not run, as this version's converter refuses
  such models or knows none: there only the rows say how it goes.

Models of random sizes come back to the bit in all forms, for every family. Models in which layers take what a
tower's inner blocks see are scanned without the tower. *Left out* is what MaxText has no place for, or no row
takes; `--carry` keeps it.

Weights of [quantized sources](quantized.md) become the numbers that they stand for before any row sees them,
whatever the family; tests compare these with products that are made one by one. *Quantized* says where
MaxText then computes as transformers does with these numbers, and which FP8 checkpoints equal those of
MaxText's own converter.
"""


def proofs() -> str:
    return "\n".join([HEAD, *(line for version in GOLDEN for line in _table(version)), *_left_out()]).rstrip()


def _table(version: str) -> Iterator[str]:
    head = ("family", *LAYERS.values(), *(f"back, {form}" for form in LAYERS.values()), "towers", "quantized")
    lines = [_line(family, version) for family in families().values()]
    yield f"### MaxText {version}"
    yield ""
    yield from _rows((head, ("---",) * len(head), *lines))
    yield ""


def _left_out() -> Iterator[str]:
    """What MaxText has no place for, of the families that have such."""
    unplaced = {family.name: family.unplaced_keys for family in families().values() if family.unplaced_keys}
    lines = [(name, ", ".join(f"`{each}`" for each in keys)) for name, keys in unplaced.items()]
    yield "### Left out"
    yield ""
    yield from _rows((("family", "tensors"), ("---", "---"), *lines))


def _rows(lines: Iterable[tuple[str, ...]]) -> Iterator[str]:
    return (f"| {' | '.join(line)} |" for line in lines)


def _line(family: Family, version: str) -> tuple[str, ...]:
    ways = [_cell(family, version, form, step) for step in ("logits", "export") for form in LAYERS]
    return (family.name, *ways, _towers(family, version), _quantized(family, version))


def _cell(family: Family, version: str, form: str, step: str) -> str:
    if form == "scanned" and family.never_scanned:
        return "refused"
    word = {"logits": "logits", "export": "trained"}[step]
    return _joined([_golden(family, version, form), _ran(family, version, [form], step, word)])


def _towers(family: Family, version: str) -> str:
    golden = [
        _said(
            f"{tower} golden",
            [
                each.parents[1].name
                for each in _cases(version)
                if _of(each) is family
                and any(TOWERS[tower] in path for f in LAYERS for path in _leaves(each, f))
            ],
        )
        for tower in family.towers
    ]
    return _joined([*golden, _ran(family, version, list(LAYERS), "images", "images")])


def _quantized(family: Family, version: str) -> str:
    made = [each for each in _cases(version) if _of(each) is family and declared_quantization(_read(each))]
    golden = _said("golden", [each.parents[1].name for each in made])
    return _joined([golden, _ran(family, version, list(LAYERS), "quantized", "logits")])


def _read(config: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(config.read_bytes())
    return found


def _joined(parts: Iterable[str]) -> str:
    return "; ".join(filter(None, parts))


def _said(word: str, models: list[str]) -> str:
    return f"{word} ({', '.join(dict.fromkeys(models))})" if models else ""


def _golden(family: Family, version: str, form: str) -> str:
    made = [each for each in _cases(version) if _of(each) is family and _leaves(each, form)]
    return _said("golden", [each.parents[1].name for each in made])


def _ran(family: Family, version: str, forms: list[str], step: str, word: str) -> str:
    """What the oracle found in a step: of those that passed the largest figure, and those that did not."""
    rows = (
        [row for row in _run(family) if row.layers in forms and step in row.findings]
        if version == RUN
        else []
    )
    passed = [row for row in rows if row.findings[step].state == PASSED]
    figure = max((row.findings[step].said for row in passed), key=float, default="")
    odd = [row.family for row in rows if row not in passed]
    return _joined([_said(f"{word} {figure}", [row.family for row in passed]), _said(f"**{word}: no**", odd)])


def _run(family: Family) -> list[Row]:
    cases = {name for name, config in configurations().items() if _of(config) is family}
    return [row for row in read().values() if row.family in cases]


@cache
def _cases(version: str) -> tuple[Path, ...]:
    return tuple(sorted((FIXTURES / GOLDEN[version]).glob("*/hf/config.json")))


@cache
def _of(config: Path) -> Family:
    return family_of(json.loads(config.read_bytes()), str(config))


@cache
def _leaves(config: Path, form: str) -> frozenset[str]:
    """The paths that MaxText's converter made of a model; none where it made nothing of it."""
    file = config.parents[1] / f"leaves_{form}.json"
    return frozenset(json.loads(file.read_bytes())) if file.is_file() else frozenset()
