"""Shared parts of all functions that write: checks, the plan, and its execution.

    @command(Writing)
    def save_as(source: Source, destination: Where, **writing: Unpack[Writing]) -> Prepared:
        return prepare(lambda resources: …, source, destination, **writing)

makes two calls of one function: `save_as(…)` writes and returns a `Receipt`, `save_as.plan(…)` returns what
would be done and does nothing yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import field, replace
from functools import wraps
from inspect import Signature, signature
from shlex import quote
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypedDict, TypeVar, cast

from ckpttools.api.arguments import Size
from ckpttools.api.calls import Call
from ckpttools.api.conversion import Conversion, Resources
from ckpttools.api.sources import Source, location_of
from ckpttools.core.argument_checks import Named, validate_arguments
from ckpttools.core.budget import DEFAULT_MEMORY, format_size, limit_memory
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import option
from ckpttools.core.options import parse_size_option
from ckpttools.core.text import array_count
from ckpttools.formats.sidecar import WithSidecars
from ckpttools.plan.plan import Plan
from ckpttools.run.events import Fetching, Observer, Receipt
from ckpttools.stores.concurrency import use_concurrency
from ckpttools.stores.fetching import check_fetched, fetch
from ckpttools.stores.location import Location
from ckpttools.stores.models import model_at
from ckpttools.stores.outside_links import check_outside_links, find_outside_links
from ckpttools.stores.registry import LocationLike, parse
from ckpttools.stores.sharing import RepositoryOptions, shared

if TYPE_CHECKING:
    from ckpttools.api.mesh_gain import MeshGain

P = ParamSpec("P")
Made = TypeVar("Made")
Made_co = TypeVar("Made_co", covariant=True)
Done = TypeVar("Done")
Done_co = TypeVar("Done_co", covariant=True)


class Writing(TypedDict, total=False):
    """Options of how a function writes.

    Attributes:
        memory: bytes that may be resident at most, such as "512MiB"; by default 1 GiB.
        jobs: workers at a time; None for as many as suit the work.
        requests: reads under way at once in stores behind a network; None for as many as are found good.
        overwrite: replace the existing destination, which is deleted last, after everything is written.
        resume: fail unless there is an interrupted conversion to resume; the same call resumes it anyway.
        manifest: file that gets digests of all arrays, for `ckpt verify`.
        observe: called with every event (`ckpttools.run.events`).
        command: the command line of the user, for messages about unfinished work.
        download: download Hub files into the cache of `huggingface_hub` first, and read them there.
        public: make a new Hub repository public; it is private otherwise.
        model_card: add a README.md that describes the conversion to a Hub repository.
        allow_outside_links: publish files outside the source that its symbolic links lead to.
    """

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


@dataclass(frozen=True, slots=True, repr=False)
class Prepared:
    """A planned conversion; nothing was written, and no array was read.

    Attributes:
        conversion: the plan and the writer that it was made for.
        destination: where the checkpoint will be.
        overwrite, manifest, observe, command, download: as `Writing`.
        call: the call that another process repeats to make the same plan; None if there is none.
    """

    conversion: Conversion
    destination: Location
    overwrite: bool = False
    manifest: Location | None = None
    observe: Observer = field(default=lambda event: None)
    command: str = ""
    download: bool = False
    call: Call | None = None

    @property
    def plan(self) -> Plan:
        """Return the plan: tasks, files, memory and remarks."""
        return self.conversion.plan

    @property
    def gain(self) -> MeshGain | None:
        """Return the reads of a mesh's devices before and after; None without a mesh."""
        return None

    def reported(self, done: Receipt) -> Receipt:
        """Return the receipt with the function's own additions."""
        return done

    def check(self) -> None:
        """Raise the error that would stop `run` before it writes."""
        self.conversion.check(self.destination, overwrite=self.overwrite)
        if self.download:
            check_fetched(self.plan.sources)

    def run(self, observe: Observer | None = None) -> Receipt:
        """Run the conversion; errors as in `Conversion.run`.

        Args:
            observe: called with every event, in place of `self.observe`.
        """
        observe = observe or self.observe
        if self.download:
            self.check()
            fetch(self.plan.sources, lambda done, total: observe(Fetching(done, total)))
        return self.conversion.run(
            self.destination,
            overwrite=self.overwrite,
            observe=observe,
            manifest=self.manifest,
            command=self.command,
        )

    def __repr__(self) -> str:
        plan = self.plan
        return (
            f"Prepared({str(self.destination)!r}: {array_count(plan.tree.arrays)}, {plan.bytes_out:,} bytes, "
            f"{format_size(plan.projected_peak)} of memory at most)"
        )


def prepare(
    plan: Callable[[Resources], Conversion],
    source: Source,
    destination: LocationLike,
    *,
    like: LocationLike | None = None,
    memory: Size = DEFAULT_MEMORY,
    jobs: int | None = None,
    requests: int | None = None,
    overwrite: bool = False,
    resume: bool = False,
    manifest: LocationLike | None = None,
    observe: Observer = lambda event: None,
    command: str = "",
    download: bool = False,
    public: bool = False,
    model_card: bool = False,
    allow_outside_links: bool = False,
) -> Prepared:
    """Make all checks that need no plan, then plan.

    Args:
        plan: makes the plan within the resources.
        source, destination: the input and output, which must not overlap.
        like: another input.
        memory, jobs, requests, overwrite, resume, manifest, observe, command, download, public, model_card,
            allow_outside_links: as `Writing`.

    Raises:
        UsageError: the destination cannot be written or overlaps what is read, there is nothing to resume, or
            the manifest cannot have its name.
        CheckpointError: as `plan`.
    """
    from ckpttools.api.output_file import check_manifest
    from ckpttools.run.overlap_check import check_apart
    from ckpttools.stores.publishing import staging_of

    location = parse(destination, is_written=True)
    staging_of(location)  # raises where nothing can be written
    written = None if manifest is None else parse(manifest, is_written=True)
    read = location_of(source)
    if read is not None:
        check_apart(read, location)
    if like is not None:
        check_apart(parse(like), location, option("like"))
    if resume:
        _require_partial(location)
    if written is not None:
        check_manifest(written, read or "", location, overwrite=overwrite)
    base = str(parse(like)) if like is not None and model_card else ""
    location = shared(location, RepositoryOptions(public, model_card, base))
    resources = Resources(parse_size_option("memory", memory), jobs, written is not None, location, requests)
    with limit_memory(resources.memory), use_concurrency(requests):
        conversion = plan(resources)
    links: dict[str, str] = {}
    for root in (read, None if like is None else parse(like)):
        if root is not None and root.store.scheme == "file":
            links |= find_outside_links(root.folder(), _files_read(root.folder(), conversion))
    texts = check_outside_links(links, is_public=public, is_allowed=allow_outside_links)
    conversion = conversion.with_remarks(texts)
    return Prepared(conversion, location, overwrite, written, observe, command, download)


def _files_read(folder: Location, conversion: Conversion) -> Iterator[str]:
    """Yield the local paths of the files that a conversion reads, sidecars included."""
    yield from (source.path for source in conversion.plan.sources)
    if folder.is_dir():
        yield from ((folder / entry.name).key for entry in folder.entries() if entry.name.endswith(".json"))
    writer = conversion.writer
    while isinstance(writer, WithSidecars):
        yield from (file.path for file in writer.sidecars.files.values())
        writer = writer.writer


def _require_partial(destination: Location) -> None:
    from ckpttools.stores.publishing import staging_of

    _, directory = staging_of(parse(destination)).taken
    if not directory.exists() and destination.exists():
        raise UsageError(
            f"there is nothing to resume: {destination} is there, and nothing is left of a conversion to it",
            hint=f"look at it with `ckpt doctor {quote(str(destination))}`; to write it anew, say "
            f"{option('overwrite', True)} and leave {option('resume')} out",
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
        """Write; each function documents its arguments and errors."""

    def plan(self, *args: P.args, **options: P.kwargs) -> Made_co:
        """Return the prepared work of the same call."""


def _carried_out(plan: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return plan(*args, **options).run()


def command(
    *groups: type,
    more: Callable[[], Iterable[Named]] = tuple,
    returns: str = "Receipt",
    carry_out: Callable[..., Any] = _carried_out,
) -> Callable[[Callable[P, Made]], Command[P, Made]]:
    """Create a function that writes from one that plans.

    Args:
        groups: the `TypedDict`s of keyword arguments that the function passes on.
        more: further options that it passes on; called only if a name is in none of the groups.
        returns: the name of the result type.
        carry_out: called with the function and its arguments; plans and runs the work.
    """

    def make(plan: Callable[P, Made]) -> Command[P, Made]:
        own, plan = signature(plan), validate_arguments(plan, *groups, more=more)

        @wraps(plan)
        def planned(*args: P.args, **options: P.kwargs) -> Made:
            return _remembering(plan, own)(*args, **options)

        @wraps(plan)
        def run(*args: P.args, **options: P.kwargs) -> Any:
            return carry_out(planned, *args, **options)

        called = cast(Any, run)
        called.plan, called.__signature__ = planned, own.replace(return_annotation=returns)
        return cast(Command[P, Made], run)

    return make


def _remembering(plan: Callable[P, Made], own: Signature) -> Callable[P, Made]:
    """Wrap a function to accept Hub model names and to record its calls."""

    def called(*args: Any, **options: Any) -> Any:
        for name in ("source", "like", "adapter", "base"):
            if name in options:
                options[name] = _model(options[name])
        args = (*map(_model, args[:1]), *args[1:])
        built = cast(Any, plan)(*args, **options)
        if not isinstance(built, Prepared):
            return built
        given = own.bind(*args, **options)
        rest = next(
            (
                parameter.name
                for parameter in own.parameters.values()
                if parameter.kind is parameter.VAR_KEYWORD
            ),
            "",
        )
        more = given.arguments.pop(rest, {})
        return replace(built, call=Call.of(plan.__name__, {**given.arguments, **more}))

    return cast("Callable[P, Made]", called)


def _model(where: object) -> object:
    return model_at(where) if isinstance(where, str) else where
