"""Plans in files, which many processes can run, and records of their publication.

PLAN.published   the plan, the destination, and the file there that proves the checkpoint complete
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, chdir, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain, islice

from ckpttools.api.calls import Call
from ckpttools.api.output_file import check_output_file
from ckpttools.api.prepared import Prepared
from ckpttools.array.fingerprint import identity
from ckpttools.array.lazy import ByteSource
from ckpttools.core.argument_checks import validate_arguments
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import (
    CheckpointError,
    DestinationExistsError,
    FormatError,
    SourceChangedError,
    UsageError,
)
from ckpttools.core.message_terms import action, option
from ckpttools.core.text import first_names, plural
from ckpttools.core.version import __version__
from ckpttools.formats.base import Writer
from ckpttools.formats.sidecar import sidecar_versions
from ckpttools.plan.plan_file import Header, PlanFile, PlannedSource, decode_plan, encode_plan, read_plan
from ckpttools.run.source_copies import fingerprint, is_local, source_of
from ckpttools.stores.abilities import SupportsCacheInvalidation
from ckpttools.stores.base import FileKind
from ckpttools.stores.location import Location
from ckpttools.stores.memory import Bytes
from ckpttools.stores.publishing import PLAN_MARK, staging_of
from ckpttools.stores.registry import LocationLike, parse
from ckpttools.stores.relocation import NO_RELOCATION, Relocation, Roots
from ckpttools.stores.shares import PublishedError, shared_staging

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
    result = decode_plan(content, location)
    declared = result.header
    _check_free(location, declared)
    location.put(content)
    return PlanWritten(
        location,
        len(content),
        prepared.destination,
        declared.plan,
        declared.tasks,
        len(result.groups),
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
        prepared = replace(call.replan(prepared.jobs), call=replace(call, is_relative=False))
    header = header_of(prepared)
    prepared.check(header.plan)
    content = encode_plan(prepared.plan, header)
    if header.call is None and not decode_plan(content, "the plan").header.has_tasks:
        raise UsageError(
            "each part has to plan this again, which another process cannot",
            got=call.not_text if call else "a conversion that no call has prepared",
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
    if call is None or call.not_text:
        return None
    return {"name": call.name, "arguments": call.arguments}


def open_plan(plan: Planned) -> PlanFile:
    """Read a plan from its file.

    Raises:
        FormatError: The file is not a plan, or is damaged.
        StorageError: The file cannot be read.
    """
    return plan if isinstance(plan, PlanFile) else read_plan(parse(plan))


def destination_of(header: Header, relocation: Relocation = NO_RELOCATION) -> Location:
    """Return the destination of a plan on this machine.

    Raises:
        UsageError: The destination is in another kind of store, for which the plan would be different.
    """
    planned, local_path = parse(header.destination, is_written=True), relocation.there(header.destination)
    destination = parse(local_path, is_written=True)
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
            expected="the plan without it: each part reads what it needs from the Hub",
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


def replan_file(
    file: PlanFile,
    relocation: Relocation,
    prepared: Prepared | None = None,
    code: Mapping[str, str] | None = None,
) -> Prepared:
    """Repeat the planning of a plan.

    Args:
        file: The plan file.
        relocation: Maps recorded locations to those on this machine.
        prepared: The same conversion, prepared in this process; None to repeat the call in the file, in the
            directory in which it was made, if that exists here.
        code: The code that the user named (`ckpttools.api.calls.user_code`). No other code runs.

    Raises:
        CodeNotAllowedError: The plan names code that is not in `code`.
        SourceChangedError: Sources have changed.
        UsageError: Planning produces another plan, or the file does not record the call.
    """
    sources = {relocation.there(item.path): item for item in file.sources}
    for number, item in enumerate(file.sources):
        if not item.is_inline:
            file.opened_source(number, relocation.there).close()
    result = prepared or _repeat_call(file, relocation, code or {})

    def planned(source: ByteSource) -> PlannedSource | None:
        return None if isinstance(source, Bytes) else sources.get(str(parse(source.path).absolute()))

    def identify(source: ByteSource) -> tuple[str, str]:
        known = planned(source)
        return (known.real, known.version) if known else identity(source)

    def is_timed(source: ByteSource) -> bool:
        known = planned(source)
        return bool(known.sample) if known else is_local(source)

    plan, writer = result.plan, result.writer
    _check_sidecars(file, writer, relocation)
    if fingerprint(plan, writer, identify, relocation.back, is_timed) != file.header.plan:
        raise UsageError(
            "the same conversion now gives a different plan",
            expected=f"plan {file.header.plan[:12]}",
            hint="restore the other files that the command reads, such as rules and the model of "
            f"{option('like')}; or make the plan again",
        )
    return result


def _check_sidecars(file: PlanFile, writer: Writer, relocation: Relocation) -> None:
    """Raise SourceChangedError if a sidecar differs from the planned one. The message names it."""
    planned, current = file.header.sidecars, sidecar_versions(writer, relocation.back)
    for name in sorted(planned.keys() | current.keys()):
        if planned.get(name) != current.get(name):
            copies = f"copy {name} from the planned model to this host"
            raise SourceChangedError(
                f"{name} differs from that in the planned model",
                location=relocation.there(file.header.source),
                got=current.get(name, "no such file"),
                expected=planned.get(name, "no such file"),
                hint=f"{copies if name in planned else f'move {name} away'}, or make the plan again",
            )


def _repeat_call(file: PlanFile, relocation: Relocation, code: Mapping[str, str]) -> Prepared:
    header = file.header
    match header.call:
        case {"name": str(name), "arguments": dict(arguments)}:
            call = Call(name, arguments)
        case None:
            raise UsageError(
                "the plan was made from something that cannot be written as text, such as a tree in memory",
                expected="the same conversion, prepared in this process",
                hint="in Python: ckpttools.publish_plan(plan, prepared=…)",
            )
        case other:
            raise FormatError("the header of the plan is invalid", location=file.location, got=repr(other))
    try:
        with _in_planning_directory(relocation.there(header.directory)):
            return call.replan(header.jobs, relocation.there, code)
    except (ValueError, TypeError) as error:
        raise FormatError(
            "the plan names a call that does not exist", location=file.location, got=error
        ) from error


@contextmanager
def _in_planning_directory(directory: str) -> Iterator[None]:
    """Change to the directory in which a plan was made, if it exists, so that file names mean the same."""
    with ExitStack() as within:
        # Otherwise, relative entries, which an interpreter without a script has, would import from the new
        # directory.
        path = sys.path[:]
        within.callback(sys.path.__setitem__, slice(None), path)
        sys.path[:] = map(os.path.abspath, path)
        try:
            within.enter_context(chdir(directory))
            is_here = True
        except (OSError, ValueError):
            is_here = False
        try:
            yield
        except CheckpointError as error:
            if is_here:
                raise
            more = f"{directory}, where the plan was made, does not exist here: relative paths lead elsewhere"
            raise error.at(hint=f"{error.raw.hint}; {more}" if error.raw.hint else more) from error


SUFFIX = ".published"
# Maximum number of inspected files: those nearest to the top, which are small and written last, and some of
# the rest.
_MAX_FILES = 16


@dataclass(frozen=True, slots=True, repr=False)
class PublishedPlan:
    """A plan whose checkpoint was published.

    Attributes:
        destination: Location of the checkpoint.
        plan: Fingerprint of the plan.
        published: Time of publication in seconds since 1970.
        state: "complete".
    """

    destination: Location
    plan: str
    published: float
    state: str = "complete"

    def __repr__(self) -> str:
        when = datetime.fromtimestamp(self.published, UTC).isoformat(" ", "seconds")
        return f"<Published {self.destination}: complete since {when}>"


def find_published(file: PlanFile, destination: Location) -> PublishedPlan | None:
    """Return the record of a published plan if its checkpoint is still at the destination; otherwise None.

    Raises:
        StorageError: The destination cannot be inspected.
    """
    record = _read_record(file)
    if record.get("plan") != file.checksum:
        return None
    marks, when = record.get("files"), record.get("published")
    if not isinstance(marks, dict) or not isinstance(when, int | float) or not marks:
        return None
    # Another kind of store has the same files with other versions.
    is_same_kind = record.get("scheme") == destination.store.scheme
    compared = 2 if is_same_kind else 1
    result = marks_of(destination, marks)
    if any(result.get(name, [])[:compared] != mark[:compared] for name, mark in marks.items()):
        return None
    return PublishedPlan(destination, file.header.plan, when)


def check_unpublished(file: PlanFile, destination: Location) -> None:
    """Refuse to start a plan whose destination is occupied.

    Raises:
        PublishedError: The plan was published.
        DestinationExistsError: The destination has content, and no record next to the plan shows that the
            plan created it. Either the plan was published without a record, or something else has been
            written there since.
    """
    if find_published(file, destination) is not None:
        raise PublishedError(f"{destination} is already published: all parts are done")
    if is_new(file, destination):
        raise _occupied_error(file, destination)


def is_new(file: PlanFile, destination: Location) -> bool:
    """Return whether the destination was created after the plan was written.

    Raises:
        StorageError: The destination cannot be inspected.
    """
    current = marks_of(destination)
    return current != file.header.replaced and destination.exists()


def _occupied_error(file: PlanFile, destination: Location) -> DestinationExistsError:
    note = "a record next to the plan" if file.location is None else str(_record_location(file.location))
    since = "had other content" if file.header.replaced else "did not exist"
    return DestinationExistsError(
        f"{destination} exists, and {since} when the plan was made",
        got="a checkpoint from a single run of the plan's command, or from another command; or this "
        "plan's output, whose record was lost",
        expected=f"no change since the plan was made, or {note}, which publishing writes",
        hint=f"if {action('summary', str(destination))} shows the expected checkpoint, nothing is left to "
        "do; "
        f"otherwise choose another destination, or {option('overwrite', True)}: it replaces what exists when "
        "it is made",
    )


def note_published(file: PlanFile, destination: Location) -> None:
    """Record next to a plan that its checkpoint was published.

    Raises:
        UsageError, StorageError: Nothing can be written next to the plan.
    """
    if file.location is None:
        return
    record = {
        "plan": file.checksum,
        "destination": str(destination),
        "scheme": destination.store.scheme,
        "published": time.time(),
        "files": marks_of(destination),
    }
    _record_location(file.location).put(json.dumps(record, indent=1).encode())


def marks_of(destination: Location, names: Mapping[str, object] | None = None) -> dict[str, list[object]]:
    """Return size and version of files of a checkpoint by name: the given files, or a few near the top."""
    if isinstance(destination.store, SupportsCacheInvalidation):
        # The cached state of the files may be outdated.
        destination.store.forget(destination.key)
    result: dict[str, list[object]] = {}
    for name in islice(_top_level_names(destination), _MAX_FILES) if names is None else names:
        status = (destination / name).status()
        if status is not None:
            result[name] = [status.size, status.version]
    return result


def _top_level_names(destination: Location) -> list[str]:
    """Return names of files near the top; none if the destination is not a directory."""
    if not destination.is_dir():
        return []
    level, names = [""], list[str]()
    while level and len(names) < _MAX_FILES:
        below: list[str] = []
        for directory in level[:_MAX_FILES]:
            for entry in sorted((destination / directory).entries() if directory else destination.entries()):
                name = f"{directory}/{entry.name}".lstrip("/")
                if entry.kind is FileKind.DIRECTORY:
                    below.append(name)
                elif entry.kind is FileKind.FILE and name != PLAN_MARK:
                    names.append(name)
        level = below
    return names


def _record_location(plan: Location) -> Location:
    return plan.with_name(plan.name + SUFFIX)


def _read_record(file: PlanFile) -> Mapping[str, object]:
    """Return the record next to a plan; empty if it cannot be read."""
    if file.location is None:
        return {}
    with suppress(CheckpointError, ValueError):
        result = json.loads(_record_location(file.location).read_bytes())
        if isinstance(result, dict):
            return result
    return {}
