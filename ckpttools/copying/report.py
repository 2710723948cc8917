"""Reports of copies and dry runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from ckpttools.core.dataclass import dataclass
from ckpttools.core.text import plural
from ckpttools.stores.costs import Traffic
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import Published

Outcome = Literal["copied", "there already", "to be copied"]


@dataclass(frozen=True, slots=True)
class CopiedPart:
    """The result for a step, an item, a model, or the files next to a run's steps.

    Attributes:
        name: Name below the destination; "" for the destination itself.
        step: Number of the step, if it is one.
        outcome: Whether the part was copied, is to be copied, or already existed.
        files, bytes: Number and total size of the files.
        bytes_resumed: Bytes copied by an earlier run.
        bytes_by_store: Bytes copied within the store, without passing through this machine.
        bytes_verified: Bytes read again after writing, or compared with existing content.
        files_compared: Number of existing copies whose content was compared.
        files_unchanged: Number of existing copies that were not read, because source and copy have the inode,
            size and times, or the generation or ETag, from when they were last copied or compared.
        commits_added: Names of the commit files that were written and that the source lacks.
    """

    name: str
    step: int | None
    outcome: Outcome
    files: int
    bytes: int
    bytes_resumed: int = 0
    bytes_by_store: int = 0
    bytes_verified: int = 0
    commits_added: tuple[str, ...] = ()
    files_compared: int = 0
    files_unchanged: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class CopyReport:
    """The result of a copy or a dry run.

    Attributes:
        source: Absolute location of the source; for a Hub repository, with its commit.
        destination: The destination as the user passed it.
        parts: The parts, in the order in which they become visible.
        left_out: Content of the source that is not copied, with reasons.
        remarks: Remarks for the user.
        files, bytes: Number of files and bytes copied, including those of earlier runs.
        seconds: Wall time.
        peak_bytes: Peak resident memory, or None if the system does not report it.
        traffic: Requests to network stores and bytes received, by address, for the copying only and not for
            selecting the content.
        published: The commit in a Hub repository; None elsewhere, or if nothing was copied.
    """

    source: str
    destination: Location
    parts: tuple[CopiedPart, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    files: int = 0
    bytes: int = 0
    seconds: float = 0.0
    peak_bytes: int | None = None
    traffic: Mapping[str, Traffic] = field(default_factory=dict)
    published: Published | None = None

    def __repr__(self) -> str:
        outcomes = Counter(part.outcome for part in self.parts)
        parts = "".join(f"{count:,} {outcome}, " for outcome, count in outcomes.items())
        copied = f"{plural(self.files, 'file')}, {self.bytes:,} bytes"
        return f"<CopyReport of {self.source} to {self.destination}: {parts}{copied}>"
