"""Common parts of all functions that write: options, checks, the plan, and its execution.

    @command(Writing)
    def save_as(source: Source, destination: LocationLike, **writing: Unpack[Writing]) -> Prepared:
        with WriteRequest(source, destination, **writing) as request:
            return request.complete(plan_tree(opened(source), writer, request.resources))

defines two calls: `save_as(…)` writes and returns a `Receipt`; `save_as.plan(…)` returns the `Prepared` and
writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import field, replace
from functools import partial, wraps
from inspect import BoundArguments, signature
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, Self, TypedDict, TypeVar, Unpack, cast

from ckpttools.api.calls import Call
from ckpttools.api.output_checks import check_output
from ckpttools.api.sources import Size, Source, Storing, location_of
from ckpttools.array.gaps import refuse_incomplete
from ckpttools.array.tree import Tree
from ckpttools.core.argument_checks import Named, argument_validator, validate_fields
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import CheckpointError, StorageError, UsageError
from ckpttools.core.memory_limit import DEFAULT_MEMORY, format_size, limit_memory
from ckpttools.core.message_terms import action, option
from ckpttools.core.notes import Notes
from ckpttools.core.options import parse_size_option
from ckpttools.core.text import array_count, plural
from ckpttools.formats.base import Writer
from ckpttools.formats.sidecar import WithSidecars
from ckpttools.plan.plan import Division, Plan
from ckpttools.plan.task import cores, reading_costs
from ckpttools.run.events import Fetching, Observer, Receipt
from ckpttools.stores.concurrency import use_concurrency
from ckpttools.stores.fetching import check_fetched, fetch
from ckpttools.stores.location import Location
from ckpttools.stores.outside_links import check_outside_links, find_outside_links
from ckpttools.stores.publishing import find_unfinished
from ckpttools.stores.registry import LocationLike, parse
from ckpttools.stores.sharing import RepositoryOptions, shared
from ckpttools.stores.web.hub_name import model_at

if TYPE_CHECKING:
    from ckpttools.api.chunks import MeshReads
    from ckpttools.api.plan_report import Rename

P = ParamSpec("P")
Made = TypeVar("Made")
Made_co = TypeVar("Made_co", covariant=True)
Done = TypeVar("Done")
Done_co = TypeVar("Done_co", covariant=True)


class Writing(TypedDict, total=False):
    """Types of the options of functions that write: `ckpttools.api.options.WRITING_OPTIONS`."""

    memory: Size
    jobs: int | None
    requests: int | None
    overwrite: bool
    resume: bool
    manifest: LocationLike | None
    observe: Observer
    command: str
    download: bool
    public: bool
    model_card: bool
    allow_outside_links: bool


class StoredWriting(Storing, Writing, total=False):
    """Types of the options of functions that write Orbax."""


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """The parsed options of `Writing`: `memory` in bytes, and `manifest` as a location."""

    memory: int = DEFAULT_MEMORY
    jobs: int | None = None
    requests: int | None = None
    overwrite: bool = False
    resume: bool = False
    manifest: Location | None = None
    observe: Observer = field(default=lambda event: None)
    command: str = ""
    download: bool = False
    public: bool = False
    model_card: bool = False
    allow_outside_links: bool = False

    def updated(self, **writing: Unpack[Writing]) -> WriteOptions:
        """Return a copy with other options replaced by those given.

        Raises:
            UsageError: `memory` is not a size.
        """
        changes: dict[str, Any] = {**writing}
        if "memory" in changes:
            changes["memory"] = parse_size_option("memory", changes["memory"])
        if changes.get("manifest") is not None:
            changes["manifest"] = parse(changes["manifest"], is_written=True)
        return replace(self, **changes)


@validate_fields
@dataclass(frozen=True, slots=True)
class Resources:
    """The resources that a conversion may use.

    Attributes:
        memory: Maximum resident bytes.
        jobs: Number of workers; None for as many as suit the work, at most 16.
        manifest: Whether the output is hashed while it is written, which takes memory for every array.
        destination: Location of the output; None for a local directory.
        requests: Concurrent reads in network stores; None to choose the number automatically.
    """

    memory: int = DEFAULT_MEMORY
    jobs: int | None = None
    manifest: bool = False
    destination: Location | None = None
    requests: int | None = None

    @property
    def workers(self) -> int:
        """Return the number of workers for writing: two per core."""
        # A worker that bypasses the page cache waits for the disk. On two cores, 2.47 GB took 1.65 to 2.1 s
        # with two workers, and 1.4 to 1.8 s with four.
        return self.jobs or min(16, 2 * cores())

    def plan(self, tree: Tree, writer: Writer, notes: Notes | None = None) -> Prepared:
        """Plan writing `tree` with `writer`.

        Raises:
            FormatError: See `check_output`.
            CheckpointError: See `ckpttools.plan.plan.build`.
        """
        location = tree.metadata.location if self.destination is None else str(self.destination)
        notes, of_output = notes or Notes(), check_output(tree, writer, location)
        # Most defects of the output were already reported for the source.
        new = tuple(remark for remark in of_output.remarks if remark not in notes.remarks)
        notes += replace(of_output, remarks=new)
        # Imported here because these modules take memory, and the checks above may reject the conversion
        # first.
        from ckpttools.plan.plan import build

        with use_concurrency(self.requests):
            costs = reading_costs(tree.arrays.values())
            reserved = costs.memory + (_hashing_bytes(tree) if self.manifest else 0)
            streams = self.destination.store.streams if self.destination else None
            jobs = self.jobs or max(self.workers, costs.requests or 0, streams.files if streams else 0)
            if self.requests and streams and not self.jobs:
                # A worker writes one file at a time.
                jobs = max(self.requests, costs.requests or 0)
            build_plan = partial(build, tree, writer, memory=self.memory, jobs=jobs)
            build_plan = partial(build_plan, notes=notes, reserved=reserved, streams=streams)
            plan = self._resumable_plan(build_plan, writer) or build_plan()
        options = WriteOptions(self.memory, self.jobs, self.requests)
        return Prepared(plan, writer, self.destination, options, jobs)

    def _resumable_plan(self, build_plan: Callable[..., Plan], writer: Writer) -> Plan | None:
        """Return the plan of an interrupted command at the destination; None if its plan was different.

        The interrupted command may have had more memory or workers, and therefore other tasks.
        """
        unfinished = find_unfinished(self.destination) if self.destination else None
        division = Division.from_text(unfinished.division) if unfinished else None
        if unfinished is None or division is None:
            return None
        from ckpttools.run.source_copies import fingerprint

        try:
            plan = build_plan(division=division)
            return plan if fingerprint(plan, writer) == unfinished.plan else None
        except CheckpointError:
            return None  # Other tasks may fit into the memory, or another source may be readable.


def _hashing_bytes(tree: Tree) -> int:
    from ckpttools.digest.hashing import hashing_bytes

    return hashing_bytes(tree)


@dataclass(frozen=True, slots=True, repr=False)
class Prepared:
    """A planned conversion. Nothing has been written, and no array has been read.

    Attributes:
        plan: Tasks, files, memory and remarks.
        writer: Writer of the format, with its options.
        location: Location of the output; None if it is passed to `run`.
        options: Options for writing.
        jobs: Expected number of workers; fewer may fit.
        call: The call with which another process makes the same plan; None if there is none.
        source: The opened tree, before any change; None if the arrays are of several trees or converted.
    """

    plan: Plan
    writer: Writer
    location: Location | None = None
    options: WriteOptions = field(default_factory=WriteOptions)
    jobs: int = 1
    call: Call | None = None
    source: Tree | None = None

    @property
    def destination(self) -> Location:
        """Location of the output. Raises UsageError if it is only passed to `run`."""
        if self.location is None:
            raise UsageError("the plan has no destination", hint="pass it: run(destination)")
        return self.location

    @property
    def mesh_reads(self) -> MeshReads | None:
        """Return the reads of a mesh's devices before and after; None without a mesh."""
        return None

    @property
    def renames(self) -> tuple[Rename, ...]:
        """Return the arrays with a new name, or whose axes are rearranged; see `Rename`."""
        from ckpttools.api.plan_report import find_renames

        return () if self.source is None else tuple(find_renames(self.source, self.plan.tree))

    def check(self, planned: str = "") -> None:
        """Raise the error that would stop `run` before it writes. `planned` is the fingerprint, if known."""
        from ckpttools.run.executor import check

        check(self.plan, self.writer, self.destination, self.options.overwrite, self._check_replaced, planned)
        if self.options.download:
            check_fetched(self.plan.sources)

    def run(self, destination: LocationLike | None = None, **changes: Unpack[Writing]) -> Receipt:
        """Run the conversion.

        Args:
            destination: Location of the output; None for `self.destination`.
            changes: `overwrite`, `manifest`, `observe` and `command`, which replace those of `self.options`.

        Raises:
            MemoryBudgetError: The plan has no memory for digests, which `Resources.manifest` reserves.
            UsageError: The manifest would be part of the output, or is one of the source's files.
            CheckpointError: See `ckpttools.run.executor.execute`; or the manifest cannot be written.
        """
        location = self.location if destination is None else parse(destination, is_written=True)
        return replace(self, location=location, options=self.options.updated(**changes)).execute()

    def execute(
        self,
        planned: str = "",
        check_replaced: Callable[[], None] = lambda: None,
        finalize: Callable[[], None] = lambda: None,
    ) -> Receipt:
        """Run the conversion; see `run` for errors.

        Args:
            planned: See `ckpttools.run.executor.execute`.
            check_replaced: Called first. Raises an error if the contents of the destination may not be
                replaced.
            finalize: Called when the checkpoint is published, unless there is a manifest.
        """
        from ckpttools.run.executor import execute

        options = self.options
        if options.download:
            self.check()
            fetch(self.plan.sources, lambda done, total: options.observe(Fetching(done, total)))

        def refuse(location: Location) -> None:
            check_replaced()
            self._check_replaced(location)

        run = partial(
            execute,
            self.plan,
            self.writer,
            self.destination,
            overwrite=options.overwrite,
            check_replaced=refuse,
            check_published=self._check_published,
            observe=options.observe,
            command=options.command,
            planned=planned,
        )
        with use_concurrency(options.requests):
            if options.manifest is None:
                return run(finalize=finalize)
            from ckpttools.api.output_file import check_manifest
            from ckpttools.digest.hashing import run_hashing

            source = self.plan.tree.metadata.location
            check_manifest(options.manifest, source, self.destination, overwrite=options.overwrite)
            return run_hashing(self.plan, run, options.manifest, overwrite=options.overwrite)

    def _check_published(self, destination: Location) -> None:
        """Check the published checkpoint before the one that it replaces is deleted.

        Raises:
            CheckpointError: The checkpoint cannot be opened, or its arrays are not those of the plan.
        """
        from ckpttools.formats.registry import open_tree

        published = open_tree(destination)
        refuse_incomplete(published.arrays.values(), str(destination))
        if len(published.arrays) != len(self.plan.tree.arrays):
            raise StorageError(
                f"{destination} is not the checkpoint that was written",
                got=plural(len(published.arrays), "array"),
                expected=plural(len(self.plan.tree.arrays), "array"),
            )

    def _check_replaced(self, destination: Location) -> None:
        from ckpttools.api.output_checks import check_replaceable

        check_replaceable(destination, self.plan.tree, self.writer)

    def __repr__(self) -> str:
        plan, where = self.plan, self.location
        return (
            f"Prepared({self.writer.name if where is None else repr(str(where))}: "
            f"{array_count(plan.tree.arrays)}, {plan.bytes_out:,} bytes, "
            f"{format_size(plan.projected_peak)} of memory at most)"
        )


class WriteRequest:
    """A request to write a checkpoint.

    It runs the checks that need no plan, then limits the memory of planning.

    Args:
        source, destination: The input and the output, which must not overlap.
        like: Another input.
        writing: Options for writing.

    Attributes:
        options: The parsed options.
        resources: Memory and workers for planning.

    Raises:
        UsageError: The destination cannot be written or overlaps an input, there is nothing to resume, or the
            name of the manifest is invalid.
    """

    def __init__(
        self,
        source: Source,
        destination: LocationLike,
        like: LocationLike | None = None,
        **writing: Unpack[Writing],
    ) -> None:
        from ckpttools.api.output_file import check_manifest
        from ckpttools.run.overlap_check import check_no_overlap
        from ckpttools.stores.publishing import staging_of

        location = parse(destination, is_written=True)
        staging_of(location)  # Raises an error if nothing can be written there.
        self.options = options = WriteOptions().updated(**writing)
        read = location_of(source)
        if read is not None:
            check_no_overlap(read, location)
        if like is not None:
            check_no_overlap(parse(like), location, option("like"))
        if options.resume:
            _require_partial(location)
        if options.manifest is not None:
            check_manifest(options.manifest, read or "", location, overwrite=options.overwrite)
        base = str(parse(like)) if like is not None and options.model_card else ""
        location = shared(location, RepositoryOptions(options.public, options.model_card, base))
        is_hashed = options.manifest is not None
        self.resources = Resources(options.memory, options.jobs, is_hashed, location, options.requests)
        other = None if like is None else parse(like)
        self._inputs = [item for item in (read, other) if item is not None]
        self._limits = ExitStack()

    def __enter__(self) -> Self:
        self._limits.enter_context(limit_memory(self.options.memory))
        self._limits.enter_context(use_concurrency(self.options.requests))
        return self

    def __exit__(self, *error: object) -> None:
        self._limits.close()

    def complete(self, prepared: Prepared) -> Prepared:
        """Return planned work with the destination and options of this request.

        Raises:
            UsageError: Symbolic links lead outside an input, and the output is public.
        """
        links: dict[str, str] = {}
        for root in self._inputs:
            if root.store.scheme == "file":
                links |= find_outside_links(root.folder(), _files_read(root.folder(), prepared))
        is_allowed = self.options.allow_outside_links
        remarks = check_outside_links(links, is_public=self.options.public, is_allowed=is_allowed)
        plan = prepared.plan
        if remarks:
            plan = replace(plan, notes=plan.notes + Notes(remarks=remarks))
        return replace(prepared, plan=plan, location=self.resources.destination, options=self.options)


def _files_read(folder: Location, prepared: Prepared) -> Iterator[str]:
    """Yield the local paths of the files that a conversion reads, including sidecars."""
    yield from (source.path for source in prepared.plan.sources)
    if folder.is_dir():
        yield from ((folder / entry.name).key for entry in folder.entries() if entry.name.endswith(".json"))
    writer = prepared.writer
    while isinstance(writer, WithSidecars):
        yield from (file.path for file in writer.sidecars.files.values())
        writer = writer.writer


def _require_partial(destination: Location) -> None:
    from ckpttools.stores.publishing import staging_of

    _, directory = staging_of(parse(destination)).taken
    if not directory.exists() and destination.exists():
        raise UsageError(
            f"there is nothing to resume: {destination} exists, and there is no unfinished conversion to it",
            hint=f"to replace it, use {option('overwrite', True)} instead of {option('resume')}; "
            f"{action('doctor', str(destination))} checks whether it is complete",
        )
    if not directory.exists():
        raise UsageError(
            "there is nothing to resume",
            expected=f"{directory}, which an interrupted conversion leaves",
            hint=f"run the command without {option('resume')}",
        )


class Runs(Protocol[Done_co]):
    """Prepared work with a `run` method."""

    def run(self) -> Done_co:
        """Run the work."""


class Command(Protocol[P, Made_co]):
    """A function that writes, with a `plan` attribute."""

    __name__: str

    def __call__(self: Command[P, Runs[Done]], *args: P.args, **options: P.kwargs) -> Done:
        """Plan and run the work. Each function documents its arguments and errors."""

    def plan(self, *args: P.args, **options: P.kwargs) -> Made_co:
        """Return the prepared work of the same call."""


def _run_plan(plan: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return plan(*args, **options).run()


def command(
    *groups: type,
    more: Callable[[], Iterable[Named]] = tuple,
    returns: str = "Receipt",
    carry_out: Callable[..., Any] = _run_plan,
) -> Callable[[Callable[P, Made]], Command[P, Made]]:
    """Create a function that writes from one that plans.

    Args:
        groups: `TypedDict` classes of the keyword arguments that the function passes on.
        more: Returns further options that the function passes on; called only if a name is in none of the
            groups.
        returns: Name of the result type.
        carry_out: Plans and runs the work; called with the function and its arguments.
    """

    def make(plan: Callable[P, Made]) -> Command[P, Made]:
        own, validate = signature(plan), argument_validator(plan, *groups, more=more)

        @wraps(plan)
        def planned(*args: P.args, **options: P.kwargs) -> Made:
            for name in _MODELS & options.keys():
                options[name] = _model(options[name])
            given, named = validate((*map(_model, args[:1]), *args[1:]), options)
            unchecked: Callable[..., Made] = plan
            result = unchecked(*given, **named)
            if isinstance(result, Prepared):
                return cast(Made, replace(result, call=_call_of(plan.__name__, own.bind(*given, **named))))
            return result

        @wraps(plan)
        def run(*args: P.args, **options: P.kwargs) -> Any:
            return carry_out(planned, *args, **options)

        called = cast(Any, run)
        called.plan, called.__signature__ = planned, own.replace(return_annotation=returns)
        return cast(Command[P, Made], run)

    return make


# Arguments that may name a model on the Hub, besides the first one.
_MODELS = frozenset(("source", "like", "adapter", "base"))


def _model(where: object) -> object:
    return model_at(where) if isinstance(where, str) else where


def _call_of(name: str, given: BoundArguments) -> Call:
    """Record a call. Further keyword arguments are recorded like named ones."""
    arguments = dict(given.arguments)
    for parameter in given.signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= arguments.pop(parameter.name, {})
    return Call.of(name, arguments)
