"""Generate the tables of tested families from the golden data and docs/oracle.json."""

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
# MaxText version -> the directory of models that its own converter wrote.
GOLDEN = {"0.2.5": "golden-0.2.5", "e591f30": "golden"}
# The version that the oracle runs.
RUN = "0.2.5"
LAYERS = {"scanned": "scanned", "unscanned": "unscanned"}
# The first key of each tower's parameters in MaxText.
TOWERS = {"vision": "vision_encoder", "audio": "audio_encoder"}
HEAD = """## How the families are tested

The tables list the tests for each MaxText version, layer layout, direction and tower. The tested models are
in parentheses.

* *golden*: every array of a tiny model is identical to that of MaxText's own converter. In the reverse
  direction, every tensor is identical to the original (with `--exact` where 16 bits would round).
* *logits*, *trained*, *images*: MaxText loads a tiny, randomly initialized model and computes the same logits
  as transformers: after the conversion, after MaxText's training and the reverse conversion, or with images
  in the prompt. The number is the largest difference; [the oracle](oracle.md) lists it with the model and the
  date.
* **no**: the difference is too large, or `ckpt` refused a checkpoint that MaxText wrote.
* *refused*: neither MaxText nor `ckpt` supports this layout.
* An empty cell was not run, because this version's converter refuses such models or has none.

In addition:

* For every family, models of random sizes are restored exactly in all layouts.
* If text layers use the outputs of a tower's inner blocks, the model is scanned without the tower.
* *Left out* lists tensors without a counterpart in MaxText, or without a row. `--carry` keeps them.
* Weights of [quantized sources](quantized.md) are dequantized before the rows apply. Tests compare them with
  products that are computed one by one. *Quantized* lists the models whose logits then match transformers,
  and the FP8 checkpoints that equal those of MaxText's own converter.
"""


def proofs() -> str:
    return "\n".join([HEAD, *(line for version in GOLDEN for line in _table(version)), *_left_out()]).rstrip()


def _table(version: str) -> Iterator[str]:
    head = (
        "family",
        *LAYERS.values(),
        *(f"reverse, {form}" for form in LAYERS.values()),
        "towers",
        "quantized",
    )
    lines = [_line(family, version) for family in families().values()]
    yield f"### MaxText {version}"
    yield ""
    yield from _rows((head, ("---",) * len(head), *lines))
    yield ""


def _left_out() -> Iterator[str]:
    """Yield the table of tensors without a counterpart in MaxText."""
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
    """Return the largest figure of the models that passed an oracle step, and the models that failed."""
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
    """Return the paths that MaxText's converter wrote for a model; empty if it wrote none."""
    file = config.parents[1] / f"leaves_{form}.json"
    return frozenset(json.loads(file.read_bytes())) if file.is_file() else frozenset()
