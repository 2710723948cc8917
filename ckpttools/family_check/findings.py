"""Findings of a check, as plain values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, ConfigError, ShapeError, did_you_mean, listing, near_names
from ckpttools.mapping.coverage import Coverage, NotCoveredError

# Number of missing keys for which a similar name is suggested; each search compares all unmatched arrays.
_MOST_NEAR = 20


@dataclass(frozen=True, slots=True)
class FamilyFinding:
    """A problem in a family.

    Attributes:
        kind: "row", "key", "axis", "flag", "size", "formula", "label", "spelling" or "op" for a problem in
            the family itself; "missing", "not expected" or "shape" if arrays do not match the family.
        location: The row, key, axis or array.
        text: The description of the problem.
    """

    kind: str
    location: str
    text: str


@dataclass(frozen=True, slots=True)
class TriedLayout:
    """A layout of layers in MaxText that was tried.

    Attributes:
        name: "unscanned", "scanned on axis 0" or "scanned on axis 1".
        num_arrays: Number of arrays on the left side.
    """

    name: str
    num_arrays: int


@dataclass(frozen=True)
class FamilyCheck:
    """The result of a check.

    Attributes:
        family: The name of the family.
        against: The checkpoint that the family was compared with, or None.
        side: The naming scheme of the checkpoint, "huggingface" or "maxtext", or None.
        config: The configuration that gave the sizes, or None for synthetic sizes.
        models: A description of each model that was checked.
        num_arrays: Number of arrays on the right side, for the largest model.
        layouts: The layouts in which the round trip succeeded, for the largest model.
        findings: All problems; empty if the family is correct.
        hints: Sentences that may explain some findings.
    """

    family: str
    against: str | None = None
    side: str | None = None
    config: str | None = None
    models: tuple[str, ...] = ()
    num_arrays: int = 0
    layouts: tuple[TriedLayout, ...] = ()
    findings: tuple[FamilyFinding, ...] = ()
    hints: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Return the verdict and the findings."""
        lines = [f"{finding.kind}: {finding.location}: {finding.text}" for finding in self.findings]
        return f"<FamilyCheck of {self.family}: {'sound' if self.sound else 'not sound'}{listing(lines)}>"

    @property
    def sound(self) -> bool:
        return not self.findings


def findings_of(error: CheckpointError) -> Iterator[FamilyFinding]:
    """Yield the findings in an error from a table."""
    if isinstance(error, NotCoveredError):
        yield from _coverage_findings(error.coverage)
        return
    kind = "size" if isinstance(error, ShapeError | ConfigError) else "row"
    details = [
        f"{label} {text}"
        for label, text in (("got", error.raw.got), ("expected", error.raw.expected))
        if text
    ]
    yield FamilyFinding(kind, error.location or "", "; ".join([error.raw.message, *details]))


def _coverage_findings(coverage: Coverage) -> Iterator[FamilyFinding]:
    for number, (key, shape) in enumerate(coverage.missing.items()):
        near = near_names(key, coverage.extra, 1) if number < _MOST_NEAR else []
        there = f"; {near[0]} exists" if near else ""
        yield FamilyFinding("missing", key, f"an array of shape {list(shape)}{there}")
    for key in coverage.extra:
        yield FamilyFinding("not expected", key, "no row has this key")
    for item in coverage.misshapen:
        yield FamilyFinding(
            "shape", item.key, f"got {list(item.got)}, expected {list(item.expected)} ({item.why})"
        )


def hints_of(error: CheckpointError) -> tuple[str, ...]:
    return error.coverage.reasons if isinstance(error, NotCoveredError) else ()


def near(name: str, known: Iterable[str]) -> str:
    """Return a suggestion to append to a sentence about an unknown name."""
    question = did_you_mean(name, known)
    return f"; {question}" if question else ""
