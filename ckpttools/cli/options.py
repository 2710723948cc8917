"""Options that several commands share. They have the names of the arguments of the calls of `ckpttools`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ckpttools.cli.output import print_stderr
from ckpttools.core.budget import format_size, limit_memory, parse_size
from ckpttools.core.errors import MemoryBudgetError, UnknownNameError, UsageError
from ckpttools.maxtext.versions import NEWEST, VERSIONS
from ckpttools.stores.location import Location
from ckpttools.stores.models import model_at
from ckpttools.stores.publishing import allowing_unprotected
from ckpttools.stores.registry import parse

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from ckpttools.core.dtypes import DType


Command = Callable[..., Any]
Decorator = Callable[[Command], Command]


class ByteSize(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.2 on
    """A number of bytes: `512MiB`, `2GB`, `1.5GiB`, `1073741824`."""

    name = "size"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_size(value)
        except UsageError as error:
            self.fail(error.message, param, ctx)


class DTypeName(click.ParamType):  # type: ignore[type-arg]
    """The name of an element type, as `ckpttools.core.dtypes.parse_dtype` takes it."""

    name = "dtype"

    def convert(self, value: str | DType, param: click.Parameter | None, ctx: click.Context | None) -> DType:
        from ckpttools.core.dtypes import parse_dtype

        if not isinstance(value, str):
            return value
        try:
            return parse_dtype(value)
        except UnknownNameError as error:
            self.fail(str(error), param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        from ckpttools.core.dtypes import DTYPES

        return [CompletionItem(name) for name in DTYPES if name.startswith(incomplete)]


class LocationType(click.Path):
    """Where something is, there or not; not an empty one, as an unset variable of the shell leaves."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Location:
        if value == "":
            self.fail(_EMPTY_MESSAGE, param, ctx)
        return parse(value, is_written=param is not None and param.name in _DESTINATION_PARAMETERS)


class NonEmptyText(click.ParamType):  # type: ignore[type-arg]
    """Text that is not empty."""

    name = "text"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return value or self.fail(_EMPTY_MESSAGE, param, ctx)


# Parameters that name what is written, so that a refusal does not advise fetching it.
_DESTINATION_PARAMETERS = ("destination", "manifest", "output")
_EMPTY_MESSAGE = "nothing is named: the text is empty"
SIZE = ByteSize()


class ModelLocationType(LocationType):
    """A place that may be named as models of the hub are, org/name, where no such directory is."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Location:
        location = super().convert(value, param, ctx)
        result = model_at(value)
        if result.store is not location.store:
            print_stderr(f"{value} is no directory here: it is taken for {result}")
        return result


DTYPE = DTypeName()
NON_EMPTY_TEXT = NonEmptyText()
ANY_PATH = LocationType()
MODEL = ModelLocationType()


def complete_family(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of model families that begin with what was typed."""
    from ckpttools.model_families.registry import families

    return [name for name in sorted(families()) if name.startswith(incomplete)]


json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


def combine_options(*decorators: Decorator) -> Decorator:
    """One decorator of several, in the order of the help."""

    def decorate(command: Command) -> Command:
        return functools.reduce(lambda built, decorator: decorator(built), reversed(decorators), command)

    return decorate


def patterns_option(flag: str, help: str) -> Decorator:
    """Adds a flag that takes a pattern of names, any number of times."""
    return click.option(flag, metavar="PATTERN", multiple=True, help=f"{help} May be repeated.")


def count_option(flag: str, help: str) -> Decorator:
    """Adds a flag that takes a number, 1 or more."""
    return click.option(flag, type=click.IntRange(min=1), metavar="N", help=help)


def filter_option(more: str = "") -> Decorator:
    """Adds which arrays are meant, as `filter`; `more` ends the sentence of its help."""
    what = f"Only arrays whose whole name matches, such as '*/mlp/*'{more}."
    return click.option("--filter", metavar="GLOB", default="*", help=what)


max_header_option = click.option(
    "--max-header-bytes",
    type=SIZE,
    default="100MB",
    show_default=True,
    help="Longest safetensors header that is accepted.",
)
max_index_option = click.option(
    "--max-index-bytes",
    type=SIZE,
    default="256MiB",
    show_default=True,
    help="Memory that an OCDBT index may take where its size on disk does not account for it.",
)
step_option = click.option(
    "--step",
    type=click.IntRange(min=0),
    metavar="N",
    help="Training step to open; by default the latest finished one.",
)
with_optimizer_option = click.option(
    "--with-optimizer",
    is_flag=True,
    help="Also read the moments that DeepSpeed keeps; in other formats, moments are ordinary arrays.",
)
prefer_rank_option = click.option(
    "--prefer-rank",
    type=click.IntRange(min=0),
    metavar="N",
    multiple=True,
    help="Where files of several processes (verl, SkyRL) have different numbers of a tensor, take those of "
    "process N. May be repeated.",
)
read_options = combine_options(
    step_option, max_header_option, max_index_option, with_optimizer_option, prefer_rank_option
)
"""Adds how a path is opened."""


requests_option = count_option(
    "--requests",
    "Requests under way at once to buckets, the hub and web servers; by default 4 to 32 reads, as many as "
    "are found to bring more.",
)


# Below it the libraries that numpy loads end the process without an error that could be caught: with OpenBLAS
# in one thread and no work to do 150,000 KiB were enough.
_MIN_ADDRESS_SPACE = 256 << 20


def _require_address_space() -> None:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY and soft < _MIN_ADDRESS_SPACE:
        raise MemoryBudgetError(
            "the limit on this process's memory is too low",
            got=f"a limit of {format_size(soft)} of address space",
            expected=f"at least {format_size(_MIN_ADDRESS_SPACE)}",
            hint="raise it with ulimit -v",
        )


def _limit_process_memory(command: Command) -> Command:
    @functools.wraps(command)
    def limited(*, memory: int, **options: Any) -> Any:
        _require_address_space()
        # What is opened meanwhile counts from the first byte on.
        click.get_current_context().with_resource(limit_memory(memory))
        return command(memory=memory, **options)

    return limited


_limit_parameters = combine_options(
    click.option(
        "--memory",
        type=SIZE,
        default="1GiB",
        show_default=True,
        help="Most memory that may be resident, whatever the model's size: 512MiB, 2GB, …",
    ),
    count_option(
        "--jobs",
        "Parallel workers; by default one per core, two per core where something is written, at most 16.",
    ),
    requests_option,
)
limit_options = combine_options(_limit_parameters, _limit_process_memory)
"""Adds what any call may take; the command runs within this memory."""
resource_options = combine_options(
    _limit_parameters,
    click.option(
        "--download",
        is_flag=True,
        help="Copy what is read from hf:// into the cache of huggingface_hub, check it, and read it there.",
    ),
    _limit_process_memory,
)
"""The same of a call that opens a checkpoint, and may copy it first."""


def _allow_unprotected(context: click.Context, option: click.Parameter, is_allowed: bool) -> None:
    if is_allowed:
        context.with_resource(allowing_unprotected())


unprotected_option = click.option(
    "--allow-unprotected",
    is_flag=True,
    expose_value=False,
    callback=_allow_unprotected,
    help="Accept a bucket whose server does not detect a second writer; make sure that there is only one.",
)
public_option = combine_options(
    click.option(
        "--public",
        is_flag=True,
        help="Make the new Hub repository public.",
    ),
    click.option(
        "--allow-outside-links",
        is_flag=True,
        help="With --public, also publish files outside of SRC that symbolic links in SRC lead to.",
    ),
)
output_options = combine_options(
    click.option("--dry-run", is_flag=True, help="Print the plan and write nothing."),
    click.option(
        "--overwrite",
        is_flag=True,
        help="Replace DST if it exists; the old one is removed last, once everything is written. Missing "
        "parent directories are created in any case.",
    ),
    click.option(
        "--resume",
        is_flag=True,
        help="Insist on resuming an interrupted conversion. The same command resumes it anyway.",
    ),
    click.option("--progress/--no-progress", default=True, help="Report progress on stderr."),
    click.option(
        "--manifest",
        type=ANY_PATH,
        metavar="FILE",
        help="Also write digests of all arrays to FILE, for ckpt verify DST --manifest FILE.",
    ),
    click.option(
        "--distributed",
        is_flag=True,
        help="Share the work among the processes of a job of jax.distributed; each runs this command.",
    ),
    click.option(
        "--coordinator",
        metavar="HOST:PORT",
        help="Where process 0 of that job listens; by default as GKE, TPU, SLURM or MPI say.",
    ),
    click.option(
        "--process",
        metavar="I/N",
        help="This is process I of N of that job, counted from 0; by default as they say.",
    ),
    unprotected_option,
    public_option,
    click.option(
        "--model-card", is_flag=True, help="Also write a stub of a README.md to DST, a repository of the hub."
    ),
    json_option,
)
"""Adds how a command that writes should go about it, and what it should print."""


def like_option(help: str) -> Decorator:
    """Adds the model that a checkpoint came from, as `like`."""
    return click.option("--like", type=MODEL, metavar="HF_DIR|CONFIG", help=help)


def maxtext_option(help: str) -> Decorator:
    """Adds a version of MaxText, by default the newest, as `maxtext`."""
    kind = click.Choice(list(VERSIONS))
    return click.option("--maxtext", type=kind, default=NEWEST, show_default=True, help=help)
