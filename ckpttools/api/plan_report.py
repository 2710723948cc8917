"""Plans as data, for dry runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ckpttools.api.prepared import Prepared
from ckpttools.array.tree import keystr
from ckpttools.core.dataclass import dataclass
from ckpttools.core.notes import Note
from ckpttools.plan.plan import Plan
from ckpttools.roles.of_tree import roles
from ckpttools.stores.location import Location

if TYPE_CHECKING:
    from ckpttools.api.chunks import MeshGain


@dataclass(frozen=True, slots=True)
class PlannedArray:
    """An array of the destination."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    chunk: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A description of a plan.

    Attributes:
        parameters: Number of elements of all parameters.
        memory: Memory limit in bytes; at most `projected_peak` of it will be used.
        inexact, values: Value changes that cannot and that can be undone bit for bit.
        dropped: Source arrays that are omitted on purpose.
        files: Data files of the destination with their sizes.
        bytes_referenced: Bytes that are shared with source files instead of being copied.
        bytes_dead: Other bytes in the shared files, which exist as long as the destination does.
        links: The shared files, by their names in the destination.
        remarks: Other remarks for the user.
        gain: Reads of the devices of a mesh before and after; None without a mesh.
    """

    source: Location
    destination: Location
    arrays: int
    parameters: int
    bytes_in: int
    bytes_out: int
    tasks: int
    jobs: int
    memory: int
    projected_peak: int
    inexact: tuple[Note, ...]
    values: tuple[Note, ...]
    dropped: tuple[str, ...]
    files: Mapping[str, int]
    bytes_referenced: int
    bytes_dead: int
    links: Mapping[str, str]
    remarks: tuple[str, ...]
    array_list: tuple[PlannedArray, ...]
    gain: MeshGain | None = None


def describe(prepared: Prepared, source: Location) -> PlanReport:
    """Describe a plan as data; `source` is the location of its input."""
    plan, destination = prepared.plan, prepared.destination
    arrays, known = plan.tree.arrays, roles(plan.tree)
    return PlanReport(
        source=source,
        destination=destination,
        **plan.totals,
        parameters=sum(array.size for path, array in arrays.items() if known.of(path) == "parameter"),
        jobs=plan.jobs,
        memory=plan.memory,
        projected_peak=plan.projected_peak,
        inexact=plan.notes.inexact,
        values=plan.notes.values,
        dropped=plan.notes.dropped,
        files=plan.layout.files,
        bytes_referenced=plan.bytes_referenced,
        bytes_dead=plan.bytes_dead,
        links={name: source.path for name, source in plan.layout.links.items()},
        remarks=(*plan.raw_remarks, *new_parent_remarks(destination)),
        array_list=tuple(_planned_arrays(plan)),
        gain=prepared.gain,
    )


def new_parent_remarks(destination: Location) -> Iterator[str]:
    """Yield a remark about missing parent directories, which may be a typo."""
    if destination.store.streams:
        return  # Buckets do not have directories.
    missing = [location for location in destination.absolute().parents if not location.exists()]
    if missing:
        yield f"{missing[-1]} does not exist and will be created"


def _planned_arrays(plan: Plan) -> Iterator[PlannedArray]:
    for path, array in plan.tree.arrays.items():
        chunk = plan.layout.placements[path].chunk
        yield PlannedArray(keystr(path), array.shape, array.dtype.name, array.nbytes, chunk)
