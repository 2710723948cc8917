"""The table of what is supported and how each was proved, made of the golden data and of docs/oracle.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from oracle.cases import configurations
from oracle.results import PASSED, Row, read

from ckpttools.families.family import Family
from ckpttools.families.registry import families, family_of

FIXTURES = Path(__file__).parents[1] / "fixtures"
# MaxText's version -> where the models lie that its own converter made.
GOLDEN = {"e591f30": "golden", "0.2.5": "golden-0.2.5"}
# The version that the oracle runs.
RUN = "0.2.5"
LAYERS = ("scanned", "unscanned")
HEAD = """## How it was proved

For each version of MaxText and each form of the layers: *golden*, every array of a tiny model is bit for
bit what MaxText's own converter made of it; *logits*, MaxText's model computes what transformers' does,
with the largest difference, or **logits differ**, and [the oracle](oracle.md) says why; *refused*,
MaxText has no such form, and neither has `ckpt`. In an empty cell the rows alone say it: MaxText's
converter refuses such models or knows none, or it was not run. Of every family, models of random sizes
come back to the bit in all forms; *back* says what more was tried: *golden*, all tensors of golden
models; *trained*, MaxText's own training before the way back, and logits after it. *Towers* are
converted like all else; *left out* is what MaxText has no place for, or no row takes: `--carry` keeps it.

Sources that are quantised are refused, whatever the family.
"""


def proofs() -> str:
    columns = [f"{version}, {layers}" for version in GOLDEN for layers in LAYERS]
    head = ("family", *columns, "back", "towers", "left out")
    lines = [head, ("---",) * len(head), *map(_line, families().values())]
    return "\n".join([HEAD, *(f"| {' | '.join(line)} |" for line in lines)])


def _line(family: Family) -> tuple[str, ...]:
    cells = [_cell(family, version, layers) for version in GOLDEN for layers in LAYERS]
    left_out = ", ".join(f"`{each}`" for each in family.homeless)
    return (family.name, *cells, _back(family), ", ".join(family.towers), left_out)


def _cell(family: Family, version: str, layers: str) -> str:
    if layers == "scanned" and family.never_scanned:
        return "refused"
    proved = ["golden"] if any(_made(case, layers) for case in _cases(version) if _of(case) is family) else []
    proved += list(_logits(family, layers)) if version == RUN else []
    return ", ".join(proved)


def _logits(family: Family, layers: str) -> Iterator[str]:
    found = [row.findings["logits"] for row in _rows(family, layers) if "logits" in row.findings]
    if found and all(each.state == PASSED for each in found):
        yield f"logits {max((each.said for each in found), key=float)}"
    elif found:
        yield "**logits differ**"


def _back(family: Family) -> str:
    golden = any(_of(case) is family for version in GOLDEN for case in _cases(version))
    rows = [row for layers in LAYERS for row in _rows(family, layers)]
    exports = [row.findings["export"].state for row in rows if "export" in row.findings]
    trained = bool(exports) and set(exports) == {PASSED}
    return ", ".join(["golden"] * golden + ["trained"] * trained)


def _rows(family: Family, layers: str) -> list[Row]:
    cases = {name for name, config in configurations().items() if _of(config) is family}
    return [row for row in read().values() if row.family in cases and row.layers == layers]


@cache
def _cases(version: str) -> tuple[Path, ...]:
    return tuple(sorted((FIXTURES / GOLDEN[version]).glob("*/hf/config.json")))


@cache
def _of(config: Path) -> Family:
    return family_of(json.loads(config.read_bytes()), str(config))


def _made(config: Path, layers: str) -> bool:
    return (config.parents[1] / f"leaves_{layers}.json").is_file()
