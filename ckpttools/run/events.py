"""What a run tells whoever listens. The library never prints; the command line listens and does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING

from ckpttools.array.tree import Path as TreePath
from ckpttools.core.dataclass import dataclass
from ckpttools.core.region import Region
from ckpttools.core.text import plural
from ckpttools.plan.plan import Plan
from ckpttools.quantized.errors import QuantizationError
from ckpttools.stores.costs import Traffic
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import Published

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Fetching:
    """Sources are being copied to this machine, before work begins.

    Attributes:
        done, total: bytes that have come, and that will have come.
    """

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Comparing:
    """The output of parts that read another copy of the source is being compared with this copy.

    Attributes:
        done, total: bytes compared so far, and bytes to compare.
    """

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Started:
    """Work begins.

    Attributes:
        plan: all of it.
        tasks_done, bytes_done: what an earlier run had finished.
    """

    plan: Plan
    tasks_done: int
    bytes_done: int


@dataclass(frozen=True, slots=True)
class TaskDone:
    """A task has written all its bytes."""

    bytes_in: int
    bytes_out: int


@dataclass(frozen=True, slots=True)
class Publishing:
    """All data is written; index and metadata follow, then the final name."""


@dataclass(frozen=True, slots=True, repr=False)
class Receipt:
    """What a finished run did.

    Attributes:
        destination: the final name.
        arrays: arrays in the destination.
        tasks: tasks of the plan; `tasks_resumed` of them were done by an earlier run.
        bytes_in, bytes_out: bytes of all tasks; `bytes_resumed` of the output by an earlier run.
        seconds: wall time of this run, planning left out.
        peak_bytes: resident memory at its highest, or None where the system does not tell.
        bytes_referenced: bytes of chunks that were not moved but are shared with the files they came from.
        bytes_dead: bytes that those files hold beside.
        bytes_unlinked: of the bytes referenced, those that were copied after all, since links were refused.
        source: what was converted, wherever the process is; of a model of the hub with its commit. "" where
            it is not known.
        counts: for each array of which values could not be kept, how many, by what became of them (see
            `ckpttools.transforms.conversion`); of all tasks, those of an earlier run as well.
        errors: for each array that was quantised how far its values are from what they were, the worst first.
        traffic: what stores were asked over a network, planning left out, by address: "gs://".
        published: what the checkpoint has become in a repository of the hub; None elsewhere.
    """

    destination: Location
    arrays: int
    tasks: int
    tasks_resumed: int
    bytes_in: int
    bytes_out: int
    bytes_resumed: int
    seconds: float
    peak_bytes: int | None
    bytes_referenced: int = 0
    bytes_dead: int = 0
    bytes_unlinked: int = 0
    source: str = ""
    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    errors: Mapping[str, QuantizationError] = field(default_factory=dict)
    traffic: Mapping[str, Traffic] = field(default_factory=dict)
    published: Published | None = None

    def __repr__(self) -> str:
        parts = [f"{self.arrays:,} array{'s' * (self.arrays != 1)}"]
        parts.append(f"{self.bytes_out:,} bytes in {self.seconds:.2f} s")
        if self.bytes_referenced:
            parts.append(f"{self.bytes_referenced:,} bytes shared")
        if self.tasks_resumed:
            verb = "was" if self.tasks_resumed == 1 else "were"
            parts.append(f"{self.tasks_resumed} of {plural(self.tasks, 'task')} {verb} done before")
        if self.counts:
            parts.append(f"values lost in {len(self.counts):,} array{'s' * (len(self.counts) != 1)}")
        return f"Receipt({str(self.destination)!r}: {', '.join(parts)})"


Event = Fetching | Comparing | Started | TaskDone | Publishing | Receipt
Observer = Callable[[Event], None]
Watch = Callable[[TreePath, Region, "np.ndarray"], None]
"""Sees what is written, an array's path, region and elements, as carriers of its dtype and in any strides, as
long as it is called; from several threads at once."""
