"""Plans in files, which many processes can run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain

from ckpttools.api.output_file import check_output_file
from ckpttools.api.prepared import Prepared
from ckpttools.api.publication_marks import marks_of
from ckpttools.core.argument_checks import validate_arguments
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import DestinationExistsError, FormatError, UsageError
from ckpttools.core.message_terms import action, option
from ckpttools.core.text import first_names, plural
from ckpttools.core.version import __version__
from ckpttools.formats.sidecar import sidecar_versions
from ckpttools.plan.plan_file import Header, PlanFile, decoded, encoded, read_plan
from ckpttools.run.fingerprint import fingerprint, source_of
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import staging_of
from ckpttools.stores.registry import LocationLike, parse
from ckpttools.stores.relocation import AS_PLANNED, Relocation, Roots
from ckpttools.stores.shares import shared_staging

# Number of paths in a message.
_MAX_ROOTS = 4
Planned = LocationLike | PlanFile
"""A plan: the location of its file, or the result of `read_plan`."""


@dataclass(frozen=True, slots=True, repr=False)
class PlanWritten:
    """A plan that was written to a file.

    Attributes:
        file: Location of the file, which has `nbytes` bytes.
        destination: Destination of the conversion.
        plan: Fingerprint of the plan.
        tasks, bytes_in, bytes_out: Totals of the plan.
        groups: Number of groups of tasks; additional parts would have nothing to do.
        has_tasks: Whether parts run without planning again.
        has_call: Whether any process can repeat the planning, which publishing requires; otherwise pass the
            prepared conversion.
    """

    file: Location
    nbytes: int
    destination: Location
    plan: str
    tasks: int
    groups: int
    bytes_in: int
    bytes_out: int
    has_tasks: bool
    has_call: bool

    def __repr__(self) -> str:
        moved = f"{self.bytes_in:,} bytes to read, {self.bytes_out:,} to write"
        return (
            f"<PlanWritten {self.file} of {self.destination}: {plural(self.tasks, 'task')}, {moved}, "
            f"at most {plural(self.groups, 'part')}>"
        )


@validate_arguments
def write_plan(prepared: Prepared, file: LocationLike) -> PlanWritten:
    """Write a prepared conversion to a file from which many processes can run it.

    Nothing else is written. The file records the current state of the sources, and every task. Its locations
    are absolute.

    Args:
        prepared: The conversion: the result of `.plan` of a function that writes.
        file: Path of the plan file. A file that contains the same plan is rewritten.

    Raises:
        UsageError: The conversion must run in one process.
        DestinationExistsError: `file` exists and is not the same plan.
        CheckpointError: An error that would stop the conversion before it writes anything.
    """
    location = parse(file, is_written=True)
    location.check_accepts_files()
    check_output_file(location, prepared.plan.tree.metadata.location, prepared.destination)
    content = content_of(prepared)
    built = decoded(content, location)
    declared = built.header
    _check_free(location, declared)
    location.put(content)
    return PlanWritten(
        location,
        len(content),
        prepared.destination,
        declared.plan,
        declared.tasks,
        len(built.groups),
        declared.bytes_in,
        declared.bytes_out,
        declared.has_tasks,
        declared.call is not None,
    )


def content_of(prepared: Prepared) -> bytes:
    """Return the content of a plan file; see `write_plan` for arguments and errors."""
    _check_shareable(prepared)
    call = prepared.call
    if call is not None and call.is_relative:
        # Plan again with absolute locations, because parts may run in other directories.
        prepared = replace(call.made_again(prepared.jobs), call=replace(call, is_relative=False))
    header = header_of(prepared)
    prepared.check(header.plan)
    content = encoded(prepared.plan, header)
    if header.call is None and not decoded(content, "the plan").header.has_tasks:
        raise UsageError(
            "each part has to plan this again, which another process cannot",
            got=call.unsaid if call else "a conversion that no call has prepared",
            expected="arguments that can be written as text: paths, names, a function as file.py:function",
        )
    return content


def header_of(prepared: Prepared) -> Header:
    """Parse the first line of a plan file."""
    plan, writer = prepared.plan, prepared.writer
    return Header(
        version=__version__,
        call=_call_of(prepared),
        directory=str(parse(".").absolute()),
        jobs=prepared.jobs,
        source=source_of(plan),
        destination=str(prepared.destination.absolute()),
        plan=fingerprint(plan, writer),
        overwrite=prepared.options.overwrite,
        memory=plan.memory,
        requests=prepared.options.requests,
        nbytes=plan.layout.nbytes,
        **plan.totals,
        buffer_bytes=plan.buffer_bytes,
        scratch_bytes=plan.scratch_bytes,
        built=time.time(),
        replaced=marks_of(prepared.destination) if prepared.options.overwrite else {},
        sidecars=sidecar_versions(writer),
    )


def _call_of(prepared: Prepared) -> Mapping[str, object] | None:
    call = prepared.call
    if call is None or call.unsaid:
        return None
    return {"name": call.name, "arguments": call.arguments}


def opened_plan(plan: Planned) -> PlanFile:
    """Read a plan from its file.

    Raises:
        FormatError: The file is not a plan, or is damaged.
        StorageError: The file cannot be read.
    """
    return plan if isinstance(plan, PlanFile) else read_plan(parse(plan))


def destination_of(header: Header, relocation: Relocation = AS_PLANNED) -> Location:
    """Return the destination of a plan on this machine.

    Raises:
        UsageError: The destination is in another kind of store, for which the plan would be different.
    """
    planned, here = parse(header.destination, is_written=True), relocation.there(header.destination)
    destination = parse(here, is_written=True)
    if destination.store.scheme != planned.store.scheme:
        raise UsageError(
            f"the plan was made for {planned.store.scheme}://, where files are written in a different way",
            location=destination,
            expected=f"a destination as {planned} is",
            hint=f"leave {option('root')} out for the destination, or plan for this destination",
        )
    return destination


def relocation_of(file: PlanFile, root: Roots) -> Relocation:
    """Parse new roots for the paths of a plan.

    Raises:
        UsageError: A root is malformed, or matches no path of the plan.
    """
    relocation, header = Relocation.of(root), file.header
    sources = [source.path for source in file.sources if not source.is_inline]
    roots = dict.fromkeys([header.source, header.destination, *(str(parse(path).parent) for path in sources)])
    paths = [*roots, *sources, header.directory, *_texts(header.call)]
    for old, new in relocation.roots:
        if not any(Relocation(((old, new),)).there(path) != path for path in paths if path) and old != new:
            raise UsageError(
                f"no path of the plan begins with {old}",
                got=option("root", f"{old}={new}"),
                expected="a prefix of one of: " + first_names([root for root in roots if root], _MAX_ROOTS),
                hint="correct or remove this root",
            )
    return relocation


def _texts(value: object) -> Iterator[str]:
    """Iterate over all texts in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(map(_texts, value.values()))
    elif isinstance(value, list | tuple):
        yield from chain.from_iterable(map(_texts, value))


def check_version(header: Header) -> None:
    """Raise UsageError if the meaning of tasks may have changed since the plan was written."""
    if header.version != __version__:
        raise UsageError(
            "the plan was made by another version of ckpttools",
            got=header.version,
            expected=__version__,
            hint="use that version for all parts, or make the plan again",
        )


def _check_shareable(prepared: Prepared) -> None:
    """Raise UsageError if the complete conversion must run in one process."""
    shared_staging(staging_of(prepared.destination), prepared.destination)
    options = prepared.options
    if options.manifest is not None:
        hashing = action("hash", prepared.destination, manifest=options.manifest)
        raise UsageError(
            f"{option('manifest')} requires a single process that writes everything",
            expected="the plan without it",
            hint=f"hash the output: {hashing}",
        )
    if options.download:
        raise UsageError(
            f"{option('download', True)} copies to one machine",
            expected="the plan without it: each part reads what it needs from the hub",
        )


def _check_free(location: Location, planned: Header) -> None:
    """Refuse to replace anything but the same plan, because only an equal plan can resume the work."""
    if not location.lexists():
        return
    try:
        result = read_plan(location).header
    except FormatError as error:
        raise DestinationExistsError(
            f"{location} exists and is not a plan", hint="choose another name for the plan"
        ) from error
    if (result.plan, result.destination) != (planned.plan, planned.destination):
        raise DestinationExistsError(
            f"{location} exists and is another plan",
            got=f"from {result.source} to {result.destination}, plan {result.plan[:12]}",
            expected=f"a new name, or plan {planned.plan[:12]} to {planned.destination}",
            hint="choose another name; or delete the plan, if its work need not be resumed",
        )
