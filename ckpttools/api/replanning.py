"""Repeat the planning of a plan file, to publish it or to run tasks that have no text form."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, chdir, contextmanager

from ckpttools.api.calls import Call
from ckpttools.api.prepared import Prepared
from ckpttools.array.fingerprint import identity
from ckpttools.array.lazy import ByteSource
from ckpttools.core.errors import CheckpointError, FormatError, SourceChangedError, UsageError
from ckpttools.core.message_terms import option
from ckpttools.formats.base import Writer
from ckpttools.formats.sidecar import sidecar_versions
from ckpttools.plan.plan_file import PlanFile, PlannedSource
from ckpttools.run.fingerprint import fingerprint, is_local
from ckpttools.stores.memory import Bytes
from ckpttools.stores.registry import parse
from ckpttools.stores.relocation import Relocation


def replanned(
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
    there = {relocation.there(item.path): item for item in file.sources}
    for number, item in enumerate(file.sources):
        if not item.is_inline:
            file.opened_source(number, relocation.there).close()
    built = prepared or _made_again(file, relocation, code or {})

    def planned(source: ByteSource) -> PlannedSource | None:
        return None if isinstance(source, Bytes) else there.get(str(parse(source.path).absolute()))

    def identify(source: ByteSource) -> tuple[str, str]:
        known = planned(source)
        return (known.real, known.version) if known else identity(source)

    def is_timed(source: ByteSource) -> bool:
        known = planned(source)
        return bool(known.sample) if known else is_local(source)

    plan, writer = built.plan, built.writer
    _check_sidecars(file, writer, relocation)
    if fingerprint(plan, writer, identify, relocation.back, is_timed) != file.header.plan:
        raise UsageError(
            "the same conversion now gives a different plan",
            expected=f"plan {file.header.plan[:12]}",
            hint="restore the other files that the command reads, such as rules and the model of "
            f"{option('like')}; or make the plan again",
        )
    return built


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


def _made_again(file: PlanFile, relocation: Relocation, code: Mapping[str, str]) -> Prepared:
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
        with _where_planned(relocation.there(header.directory)):
            return call.made_again(header.jobs, relocation.there, code)
    except (ValueError, TypeError) as error:
        raise FormatError(
            "the plan names a call that does not exist", location=file.location, got=error
        ) from error


@contextmanager
def _where_planned(directory: str) -> Iterator[None]:
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
