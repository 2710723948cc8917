"""Events of a run. The library never prints; the command line observes these events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING

from ckpttools.array.blockwise import QuantizationError
from ckpttools.array.tree import Path as TreePath
from ckpttools.core.dataclass import dataclass
from ckpttools.core.notes import Notes
from ckpttools.core.region import Region
from ckpttools.core.text import plural
from ckpttools.plan.plan import Plan
from ckpttools.stores.costs import Traffic
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import Published

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Fetching:
    """Sources are being copied to this machine before the run starts.

    Attributes:
        done, total: Bytes received so far and in total.
    """

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Comparing:
    """Output that other processes wrote from another copy of the source is being compared with this copy.

    Attributes:
        done, total: Bytes compared so far, and bytes to compare.
    """

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Started:
    """The run starts.

    Attributes:
        plan: The complete plan.
        tasks_done, bytes_done: Work of earlier runs.
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
    """All data is written. The index, the metadata and the publication follow."""


@dataclass(frozen=True, slots=True, repr=False)
class Receipt:
    """The result of a finished run.

    Attributes:
        destination: The published checkpoint.
        arrays: Number of arrays in the destination.
        tasks: Number of tasks in the plan, including `tasks_resumed` of earlier runs.
        bytes_in, bytes_out: Bytes of all tasks; `bytes_resumed` of the output is from earlier runs.
        seconds: Wall time of this run without planning.
        peak_bytes: Peak resident memory; None if the system does not report it.
        bytes_referenced: Bytes of chunks that are shared with the source files instead of being copied.
        bytes_unreferenced: Other bytes in the shared files.
        bytes_unlinked: Referenced bytes that were copied because the store refused links.
        source: Absolute location of the source, with the commit for models on the Hub; "" if unknown.
        counts: Number of values that could not be kept, by array and outcome (see
            `ckpttools.transforms.cast`), including tasks of earlier runs.
        errors: Quantization error of each quantized array, largest first.
        traffic: Network requests after planning, by address such as "gs://".
        published: The published repository on the Hub; None for other destinations.
        notes: Notes of the plan: changed values, dropped arrays and remarks.
        next: Commands and settings that load the checkpoint; empty unless the command line requests them.
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
    bytes_unreferenced: int = 0
    bytes_unlinked: int = 0
    source: str = ""
    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    errors: Mapping[str, QuantizationError] = field(default_factory=dict)
    traffic: Mapping[str, Traffic] = field(default_factory=dict)
    published: Published | None = None
    notes: Notes = field(default_factory=Notes)
    next: tuple[str, ...] = ()

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
"""Receives the path, region and elements of each write.

The elements are carriers of the dtype with any strides, and are valid only during the call. It is called from
several threads, one at a time.
"""
