"""What a check finds, as plain values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, ConfigError, ShapeError, did_you_mean, listing, near_names
from ckpttools.mapping.coverage import Coverage, NotCoveredError

# Looking for a near name compares with every array that is left over.
_MOST_NEAR = 20


@dataclass(frozen=True, slots=True)
class FamilyFinding:
    """Something that is wrong.

    Attributes:
        kind: "row", "key", "axis", "flag", "size", "formula", "label", "spelling" or "op" where it is the
            family's own; "missing", "not expected" or "shape" where arrays do not fit it.
        location: the row, key, axis or array.
        text: what is wrong with it.
    """

    kind: str
    location: str
    text: str


@dataclass(frozen=True, slots=True)
class TriedLayout:
    """One way in which MaxText lays the layers out.

    Attributes:
        name: "unscanned", "scanned on axis 0" or "scanned on axis 1".
        num_arrays: arrays that the left side has in it.
    """

    name: str
    num_arrays: int


@dataclass(frozen=True)
class FamilyCheck:
    """What a check came to.

    Attributes:
        family: its name.
        against: the checkpoint it was compared with, or None.
        side: "huggingface" or "maxtext", whose names that has, or None.
        config: the configuration that sizes came from, or None where they were made up.
        models: what sets each of the models apart on which rows were tried.
        num_arrays: arrays that the right side has; of the largest model.
        layouts: those in which everything went there and back, of the largest model.
        findings: all that is wrong; none if the family is sound.
        hints: sentences that may explain some of it.
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
        """The verdict, and what is wrong."""
        lines = [f"{finding.kind}: {finding.location}: {finding.text}" for finding in self.findings]
        return f"<FamilyCheck of {self.family}: {'sound' if self.sound else 'not sound'}{listing(lines)}>"

    @property
    def sound(self) -> bool:
        return not self.findings


def findings_of(error: CheckpointError) -> Iterator[FamilyFinding]:
    """What an error of a table says, one by one."""
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
        there = f"; there is {near[0]}" if near else ""
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
    """What to say after a sentence about a name that is not known."""
    question = did_you_mean(name, known)
    return f"; {question}" if question else ""
