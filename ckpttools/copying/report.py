"""What a copy did, or would do."""

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
    """What became of a step, an item, a model, or of what lies beside the steps of a run.

    Attributes:
        name: below the destination; "" where it is the destination.
        step: its number, where it is one.
        outcome: whether it was copied, is to be copied, or was there already.
        files, bytes: of it.
        bytes_resumed: copied by an earlier run.
        bytes_by_store: copied by the store itself, from one place in it to another.
        bytes_verified: read again where they were written, or compared with what was there already.
        files_compared: number of existing copies whose content was compared.
        files_unchanged: number of existing copies that were not read: source and copy have the inode, size
            and times, or the generation or ETag, that they had when they were last copied or compared.
        commits_added: names of the commit files that were written and that the source lacks.
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
    """What a copy did, or would do.

    Attributes:
        source: where it lies, wherever the process is; of a repository on the hub with its commit.
        destination: as it was named.
        parts: in the order in which they become visible.
        left_out: what lies in the source and is not copied, with the reason.
        remarks: what the user should know.
        files, bytes: that were copied, those of earlier runs as well.
        seconds: wall time.
        peak_bytes: resident memory at its highest, or None where the system does not tell.
        traffic: requests to stores behind a network, and the bytes that came, by address; of the copying, not
            of looking for what to copy.
        published: what it has become in a repository of the hub; None elsewhere, or if nothing was copied.
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
