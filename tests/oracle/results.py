"""Results of the oracle in docs/oracle.json: one row for each model and form of its layers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from support.locations import DOCS

RESULTS = DOCS / "oracle.json"
PASSED, FAILED = "passed", "failed"
# The step that each step needs.
NEEDS = {
    "load": "convert",
    "logits": "convert",
    "images": "convert",
    "train": "convert",
    "export": "train",
    "resume": "train",
}


@dataclass(frozen=True)
class Finding:
    """The result of one step.

    Attributes:
        state: "passed" or "failed".
        said: a figure, or why it failed.
        date: when it was run, YYYY-MM-DD.
        commit: of this repository, with "+" where files were changed; "" where that is not known.
    """

    state: str
    said: str = ""
    date: str = ""
    commit: str = ""


@dataclass(frozen=True)
class Row:
    """The results of one model in one form of its layers.

    Attributes:
        family: name of the case.
        layers: "scanned" or "unscanned".
        versions: package -> version of what it was run with.
        findings: Step -> result; steps that were not run are absent.
    """

    family: str
    layers: str
    versions: Mapping[str, str]
    findings: Mapping[str, Finding] = field(default_factory=dict)

    def blocked(self, step: str) -> str:
        """The step that failed, so that this one was not run; "" where that is not why."""
        needed = NEEDS.get(step, "")
        if needed in self.findings and self.findings[needed].state == FAILED:
            return needed
        return self.blocked(needed) if needed else ""

    @property
    def passed(self) -> bool:
        return all(each.state == PASSED for each in self.findings.values())


def read(path: Path = RESULTS) -> dict[tuple[str, str], Row]:
    """Return rows by family and form; none if the file does not exist."""
    if not path.is_file():
        return {}
    rows = [
        Row(**{**row, "findings": {name: Finding(**each) for name, each in row["findings"].items()}})
        for row in json.loads(path.read_bytes())
    ]
    return {(row.family, row.layers): row for row in rows}


def put(row: Row, path: Path = RESULTS) -> None:
    """Write a row; steps that were not run now keep their earlier findings."""
    rows = read(path)
    earlier = rows.get((row.family, row.layers))
    if earlier is not None:
        row = Row(row.family, row.layers, row.versions, {**earlier.findings, **row.findings})
    rows[row.family, row.layers] = row
    path.write_text(json.dumps([asdict(rows[key]) for key in sorted(rows)], indent=1) + "\n")
