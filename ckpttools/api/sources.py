"""Arguments of functions that read: a path or open tree, and resource limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypedDict, Unpack

from ckpttools.api.options import OPENING
from ckpttools.array.fingerprint import sources
from ckpttools.array.tree import Tree
from ckpttools.codecs.base import Codec
from ckpttools.core.argument_checks import validate_arguments
from ckpttools.core.dataclass import dataclass
from ckpttools.core.dtypes import DType, parse_dtype
from ckpttools.core.errors import UsageError
from ckpttools.core.memory_limit import limit_memory
from ckpttools.core.message_terms import option
from ckpttools.core.options import declare, parse_size_option
from ckpttools.formats.base import ReadOptions
from ckpttools.formats.detect import is_checkpoint
from ckpttools.formats.foreign import has_weights
from ckpttools.formats.registry import open_tree, require_ranks, require_step
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.formats.zarr.chunking import GivenChunks
from ckpttools.stores.concurrency import use_concurrency
from ckpttools.stores.fetching import fetch, observe_bytes
from ckpttools.stores.location import Location
from ckpttools.stores.registry import LocationLike, parse

Source = LocationLike | Tree
"""A checkpoint: its location, or an open tree."""

Observe = Callable[[int, int], None]
"""Called with the bytes read so far and the total; the first call has 0."""

DEFAULT_MEMORY = "1GiB"
_SIZES = ("max_header_bytes", "max_index_bytes")
_RESOURCES = ("memory", "jobs", "requests", "observe", "download")


class PathReading(TypedDict, total=False):
    """Types of the options for reading a path: `ckpttools.api.options.READING`."""

    max_header_bytes: int | str
    max_index_bytes: int | str
    with_optimizer: bool
    prefer_rank: int | Sequence[int]


class Opening(PathReading, total=False):
    """Types of the options for opening a path: `ckpttools.api.options.OPENING`."""

    step: int | None


class Scanning(Opening, total=False):
    """Types of the options of functions that read all elements: `ckpttools.api.options.SCANNING`."""

    memory: int | str
    jobs: int | None
    requests: int | None
    observe: Observe | None
    download: bool


def read_options(arguments: Mapping[str, Any]) -> ReadOptions:
    """Return the parsed options of `Opening`.

    Raises:
        UsageError: A text is not a size.
    """
    sizes = {name: parse_size_option(name, arguments[name]) for name in _SIZES if name in arguments}
    return ReadOptions(**{**arguments, **sizes})


def part_of(arguments: Mapping[str, Any], group: type) -> dict[str, Any]:
    """Return the keyword arguments that belong to one `TypedDict`."""
    return {name: arguments[name] for name in group.__annotations__ if name in arguments}


def rest_of(arguments: Mapping[str, Any], *groups: type) -> dict[str, Any]:
    """Return the keyword arguments that belong to none of the groups."""
    of_groups = {name for group in groups for name in group.__annotations__}
    return {name: arguments[name] for name in arguments if name not in of_groups}


def opened(source: Source, read: ReadOptions | None = None, *others: Source) -> Tree:
    """Open the source as a tree. Reads headers and indexes, but no arrays.

    Args:
        source: A path or a tree.
        read: How to open a path.
        others: Other inputs that are opened in the same way; one of the inputs must have files of a preferred
            process.

    Raises:
        CheckpointError: The path does not exist or cannot be read.
        UsageError: Opening options are given for an open tree, or a process is preferred for inputs without
            process files.
    """
    if not isinstance(source, Tree):
        tree = open_tree(parse(source), read)
        locations = (parse(other) for other in (source, *others) if not isinstance(other, Tree))
        require_ranks(read or ReadOptions(), *locations)
        return tree
    if read is not None and read not in (ReadOptions(), ReadOptions(source.metadata.step)):
        raise UsageError(
            "the source is a tree, which is already open",
            location=source.metadata.location or None,
            got=", ".join(
                f"{name} {value}"
                for name, value in vars(read).items()
                if value != getattr(ReadOptions(), name)
            ),
            hint="pass the options to ckpttools.open, or give the path",
        )
    return source


def open_both(a: Source, b: Source, read_a: ReadOptions, read_b: ReadOptions) -> tuple[Tree, Tree]:
    """Open two checkpoints to compare, with all items if both are steps with the same items."""
    first, second = _open_all(a, b, read_a), _open_all(b, a, read_b)
    if {*first.metadata.items} != {*second.metadata.items}:
        first = opened(a, read_a, b) if first.metadata.items else first
        second = opened(b, read_b, a) if second.metadata.items else second
    return first, second


def _open_all(source: Source, other: Source, read: ReadOptions) -> Tree:
    return opened(source, read if isinstance(source, Tree) else replace(read, all_items=True), other)


@validate_arguments
@declare(*OPENING)
def open(path: LocationLike, step: int | None = None, **reading: Unpack[PathReading]) -> Tree:
    """Open the checkpoint at `path` in any format. Reads headers and indexes, but no arrays.

    Args:
        path: A file, item, step or run directory.

    Raises:
        CheckpointError: The path does not exist or cannot be read.
    """
    return opened(path, read_options({"step": step, **reading}))


def config_alone(
    source: LocationLike, read: ReadOptions, suffixes: tuple[str, ...] = (".json",)
) -> Location | None:
    """Return the configuration of a model directory without weights; None if there are weights.

    Args:
        source: A configuration file or a directory.
        read: How to open a path; options that apply only to weights are not allowed.
        suffixes: Suffixes of configuration files.

    Raises:
        UsageError: A step or a process is selected for a configuration.
    """
    location = parse(source)
    config = location if location.name.endswith(suffixes) else location / CONFIG
    if config != location and (not config.is_file() or has_weights(location) or is_checkpoint(location)):
        return None
    require_step(read, None, location)
    require_ranks(read, location)
    return config


def location_of(source: Source) -> Location | None:
    """Return the location of a checkpoint; None for a tree that was not read from files."""
    if not isinstance(source, Tree):
        return parse(source)
    location = parse(source.metadata.location)
    return location if source.metadata.location and location.exists() else None


@dataclass(frozen=True, slots=True)
class ScanSettings:
    """Settings for reading all elements.

    Attributes:
        memory: Maximum resident bytes.
        jobs: Number of workers; None for as many as suit the source.
        observe: Called with the progress, or None.
        read: How to open paths.
        download: Whether to copy the sources to this machine first.
    """

    memory: int
    jobs: int | None
    observe: Observe | None
    read: ReadOptions
    download: bool = False

    def fetch(self, *trees: Tree) -> None:
        """Copy the sources to this machine, if requested.

        Raises:
            CheckpointError: See `ckpttools.stores.fetching.fetch`.
        """
        if self.download:
            arrays = (array for tree in trees for array in tree.arrays.values())
            fetch(sources(arrays), self.observe or (lambda done, total: None))

    def observer(self, total: int) -> Callable[[int], None]:
        """Return the `observe` argument of `ckpttools.run.scanning.scan` for `total` bytes."""
        return observe_bytes(self.observe or (lambda done, total: None), total)


@contextmanager
def scanning(options: Scanning) -> Iterator[ScanSettings]:
    """Yield scan settings. The memory of trees opened inside the `with` counts.

    Raises:
        UsageError: A text is not a size.
    """
    opening = {name: value for name, value in options.items() if name not in _RESOURCES}
    memory, download = (
        parse_size_option("memory", options.get("memory", DEFAULT_MEMORY)),
        options.get("download", False),
    )
    with limit_memory(memory), use_concurrency(options.get("requests")):
        yield ScanSettings(
            memory, options.get("jobs"), options.get("observe"), read_options(opening), download
        )


Size = int | str
"""A number of bytes: an integer, or text such as "512MiB" and "2GB"."""
Patterns = str | Sequence[str]
"""A glob of paths, or several globs; see `ckpttools.array.patterns`."""


class Storing(TypedDict, total=False):
    """Types of the options for storing Orbax output: `ckpttools.formats.orbax.options.STORAGE`."""

    ocdbt: bool | None
    zarr3: bool | None
    compression: str | Codec | None
    chunks: str | Mapping[str, Sequence[int | None]] | GivenChunks | None
    target_data_file_size: Size | None
    reference: bool | None


def dtype_of(dtype: DType | str | None) -> DType | None:
    """Return the `DType` for a dtype or its name.

    Raises:
        UnknownNameError: No dtype has this name.
    """
    return None if dtype is None else parse_dtype(dtype)


def float_dtype_of(dtype: DType | str | None) -> DType | None:
    """Return a floating-point dtype. Integer dtypes would round weights to 0.

    Raises:
        UsageError: The dtype is not a floating-point type, or is only for scales (float8_e8m0fnu).
        UnknownNameError: No dtype has this name.
    """
    known = dtype_of(dtype)
    if known is None or known.is_of_weights:
        return known
    raise UsageError(
        "other dtypes would lose the values of weights",
        got=option("dtype", known),
        expected="a floating-point dtype, such as bfloat16",
    )


def patterns_of(patterns: Patterns) -> tuple[str, ...]:
    """Return one pattern or several as a tuple."""
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def text_of(path: LocationLike | None) -> str | None:
    """Return a name or a path as text."""
    return None if path is None else str(path)
