"""Checks and their findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from shlex import quote

from ckpttools.checks.base import ModelFinding
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError
from ckpttools.core.message_terms import call, has_call
from ckpttools.diagnosis.inventory import Inventory
from ckpttools.formats.base import ReadOptions
from ckpttools.stores.location import Location

ERROR, WARNING, INFO = LEVELS = ("error", "warning", "info")


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault, or a fact worth knowing.

    Attributes:
        level: "error": something cannot be read, or would be read wrongly; "warning": some tool will not find
            or accept it, or space is wasted; "info": worth knowing.
        location: File or directory.
        what: Description of the finding.
        consequence: Consequence of the finding.
        hint: Next step, with the exact command if there is one.
        command: The command in `hint`, or None.
        fix: Name of the fix that performs the step, or None.
        check: Name of the check; filled in by the caller of the check.
    """

    level: str
    location: str
    what: str
    consequence: str
    hint: str
    fix: str | None = None
    check: str = ""
    command: str | None = None


@dataclass(frozen=True, slots=True)
class Fix:
    """A change that loses no data: it creates files, or renames a directory.

    Attributes:
        name: Name that users see.
        summary: One-line summary.
        apply: Applies the fix to one location within the given limits and returns what was done; raises
            CheckpointError with the reason if the fix is not safe or not possible.
        needs_health: Whether the fix is refused if there is an error at or below the location.
    """

    name: str
    summary: str
    apply: Callable[[Location, ReadOptions], str]
    needs_health: bool = False


@dataclass(frozen=True, slots=True)
class Check:
    """A check for one kind of fault.

    Attributes:
        name: Name that users see.
        summary: One-line description of the faults.
        look: Yields the findings.
        fix: Repairs the findings; None if there is no safe fix.
    """

    name: str
    summary: str
    look: Callable[[Inventory], Iterator[Finding]]
    fix: Fix | None = None


def fix_command(inventory: Inventory, fix: str) -> str:
    """Return the command that applies a fix to the inventory's path."""
    return call("doctor", inventory.path, fix=fix)


def quote_path(path: Location) -> str:
    """Return a path quoted for a command line of `ckpt`."""
    return quote(f"./{path}" if str(path).startswith("-") else str(path))


def quote_local_path(path: Location) -> str:
    """Return a path quoted for a command that works on local files only."""
    return quote_path(path) if path.as_local() == str(path) else "LOCAL_COPY"


def set_aside_command(path: Location) -> str:
    """Return the command that renames a file without replacing another one."""
    names = (path.with_name(f"{path.name}.aside{number or ''}") for number in count())
    free = next(name for name in names if not name.lexists())
    return f"mv -n {quote_local_path(path)} {quote_local_path(free)}"


def as_finding(found: ModelFinding) -> Finding:
    """Convert the finding of a model check to one of doctor."""
    finding = Finding(found.level, found.location, found.what, found.why, found.hint, command=found.command)
    return replace(finding, check=found.check)


def finding_of(error: CheckpointError, location: Location, level: str = ERROR, reason: str = "") -> Finding:
    """Convert an error of the package to a finding."""
    details = [f"{label} {text}" for label, text in error.raw.details() if label in ("got", "expected")]
    problem = "; ".join([error.raw.line, *details])
    # A hint to run ckpt doctor is not useful in its own output.
    hint = error.raw.hint if error.raw.hint and not has_call(error.raw.hint, "doctor") else None
    do = hint or "fetch it again, or restore it from another copy"
    return Finding(level, error.location or str(location), problem, reason or "it cannot be read", do)
