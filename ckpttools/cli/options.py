"""Options that several commands share, named like the arguments of `ckpttools` functions."""

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
    """The name of an element type, parsed by `ckpttools.core.dtypes.parse_dtype`."""

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
    """A path or URL that may not exist; empty text, as from an unset shell variable, is refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Location:
        if value == "":
            self.fail(_EMPTY_MESSAGE, param, ctx)
        return parse(value, is_written=param is not None and param.name in _DESTINATION_PARAMETERS)


class NonEmptyText(click.ParamType):  # type: ignore[type-arg]
    """Text that is not empty."""

    name = "text"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return value or self.fail(_EMPTY_MESSAGE, param, ctx)


# Parameters that name outputs; errors about them do not suggest a download.
_DESTINATION_PARAMETERS = ("destination", "manifest", "output")
_EMPTY_MESSAGE = "nothing is named: the text is empty"
SIZE = ByteSize()


class ModelLocationType(LocationType):
    """A path, URL or Hub model: org/name is a Hub model unless such a directory exists."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Location:
        location = super().convert(value, param, ctx)
        result = model_at(value)
        if result.store is not location.store:
            print_stderr(f"{value} is not a local directory; using {result}")
        return result


DTYPE = DTypeName()
NON_EMPTY_TEXT = NonEmptyText()
ANY_PATH = LocationType()
MODEL = ModelLocationType()


def complete_family(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of model families that start with the typed text."""
    from ckpttools.model_families.registry import families

    return [name for name in sorted(families()) if name.startswith(incomplete)]


json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


def combine_options(*decorators: Decorator) -> Decorator:
    """Combine decorators into one, in the order of the help."""

    def decorate(command: Command) -> Command:
        return functools.reduce(lambda built, decorator: decorator(built), reversed(decorators), command)

    return decorate


def patterns_option(flag: str, help: str) -> Decorator:
    """Add a flag that takes a glob and may be repeated."""
    return click.option(flag, metavar="PATTERN", multiple=True, help=f"{help} May be repeated.")


def count_option(flag: str, help: str) -> Decorator:
    """Add a flag that takes an integer from 1."""
    return click.option(flag, type=click.IntRange(min=1), metavar="N", help=help)


def filter_option(more: str = "") -> Decorator:
    """Add `--filter`; `more` completes the sentence of its help."""
    what = f"Only arrays whose whole name matches, such as '*/mlp/*'{more}."
    return click.option("--filter", metavar="GLOB", default="*", help=what)


max_header_option = click.option(
    "--max-header-bytes",
    type=SIZE,
    default="100MB",
    show_default=True,
    help="Reject safetensors headers larger than this.",
)
max_index_option = click.option(
    "--max-index-bytes",
    type=SIZE,
    default="256MiB",
    show_default=True,
    help="Memory limit for OCDBT index nodes that decode to more than their file size.",
)
step_option = click.option(
    "--step",
    type=click.IntRange(min=0),
    metavar="N",
    help="Training step to open. Default: the latest finished one.",
)
with_optimizer_option = click.option(
    "--with-optimizer",
    is_flag=True,
    help="Also read DeepSpeed's optimizer state; other formats always include it.",
)
prefer_rank_option = click.option(
    "--prefer-rank",
    type=click.IntRange(min=0),
    metavar="N",
    multiple=True,
    help="If ranks disagree about a tensor (verl, SkyRL), use the copy of rank N. May be repeated.",
)
read_options = combine_options(
    step_option, max_header_option, max_index_option, with_optimizer_option, prefer_rank_option
)
"""Add options of how a path is opened."""


requests_option = count_option(
    "--requests",
    "Concurrent network requests. Default: adjusted between 4 and 32.",
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


def _limit_process_memory(context: click.Context, option: click.Parameter, memory: int) -> int:
    if not context.resilient_parsing:
        _require_address_space()
        # Counts everything that is opened from now on. The context of the command itself is not closed if
        # another of its options is wrong.
        context.find_root().with_resource(limit_memory(memory))
    return memory


limit_options = combine_options(
    click.option(
        "--memory",
        type=SIZE,
        default="1GiB",
        show_default=True,
        callback=_limit_process_memory,
        help="Peak memory limit: 512MiB, 2GB, …",
    ),
    count_option(
        "--jobs",
        "Parallel workers. Default: one per core, two per core when writing, at most 16.",
    ),
    requests_option,
)
"""Add memory and concurrency limits; the command runs within this memory."""
resource_options = combine_options(
    limit_options,
    click.option(
        "--download",
        is_flag=True,
        help="Download hf:// inputs to the Hugging Face cache first, and verify them.",
    ),
)
"""Add the limits of commands that open a checkpoint, and `--download`."""


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
        help="With --public, also publish files outside of SRC that symbolic links in SRC point to.",
    ),
)
output_options = combine_options(
    click.option("--dry-run", is_flag=True, help="Print the plan and write nothing."),
    click.option(
        "--overwrite",
        is_flag=True,
        help="Replace DST if it exists; the old one is deleted only after the new one is complete.",
    ),
    click.option(
        "--resume",
        is_flag=True,
        help="Fail unless there is an interrupted conversion to resume.",
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
        help="Share the work among the processes of a jax.distributed job; each runs this command.",
    ),
    click.option(
        "--coordinator",
        metavar="HOST:PORT",
        help="Coordinator address of the job. Default: detected on GKE, TPU, SLURM and MPI.",
    ),
    click.option(
        "--process",
        metavar="I/N",
        help="Process index, from 0, and process count. Default: detected as above.",
    ),
    unprotected_option,
    public_option,
    click.option("--model-card", is_flag=True, help="Also write a stub README.md to DST on the Hub."),
    json_option,
)
"""Add options of how a command writes, and what it prints."""


def like_option(help: str) -> Decorator:
    """Add `--like`, the model that a checkpoint came from."""
    return click.option("--like", type=MODEL, metavar="HF_DIR|CONFIG", help=help)


def maxtext_option(help: str) -> Decorator:
    """Add `--maxtext`, a MaxText version (default: the newest)."""
    kind = click.Choice(list(VERSIONS))
    return click.option("--maxtext", type=kind, default=NEWEST, show_default=True, help=help)
