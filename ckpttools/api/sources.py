"""Arguments of functions that read: a path or open tree, and resource limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict, Unpack

from ckpttools.api.options import OPENING
from ckpttools.array.fingerprint import sources
from ckpttools.array.tree import Tree
from ckpttools.core.argument_checks import validate_arguments
from ckpttools.core.budget import limit_memory
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError
from ckpttools.core.options import declare, parse_size_option
from ckpttools.formats.base import ReadOptions
from ckpttools.formats.detect import is_checkpoint
from ckpttools.formats.foreign import has_weights
from ckpttools.formats.registry import open_tree, require_ranks, require_step
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.stores.concurrency import use_concurrency
from ckpttools.stores.fetching import fetch
from ckpttools.stores.location import Location
from ckpttools.stores.registry import LocationLike, parse

Source = LocationLike | Tree
"""A checkpoint: its location, or an open tree."""

Observe = Callable[[int, int], None]
"""Called with the bytes read so far and the bytes to read in all; the first call has 0."""

DEFAULT_MEMORY = "1GiB"
_SIZES = ("max_header_bytes", "max_index_bytes")
_RESOURCES = ("memory", "jobs", "requests", "observe", "download")


class PathReading(TypedDict, total=False):
    """Types of the options of how a path is read: `ckpttools.api.options.READING`."""

    max_header_bytes: int | str
    max_index_bytes: int | str
    with_optimizer: bool
    prefer_rank: int | Sequence[int]


class Opening(PathReading, total=False):
    """Types of the options of how a path is opened: `ckpttools.api.options.OPENING`."""

    step: int | None


class Scanning(Opening, total=False):
    """Types of the options of functions that read all elements: `ckpttools.api.options.SCANNING`."""

    memory: int | str
    jobs: int | None
    requests: int | None
    observe: Observe | None
    download: bool


def read_options(declared: Mapping[str, Any]) -> ReadOptions:
    """Return the options of `Opening`.

    Raises:
        UsageError: a text is not a size.
    """
    sizes = {name: parse_size_option(name, declared[name]) for name in _SIZES if name in declared}
    return ReadOptions(**{**declared, **sizes})


def part_of(declared: Mapping[str, Any], group: type) -> dict[str, Any]:
    """Return the keyword arguments of one `TypedDict`."""
    return {name: declared[name] for name in group.__annotations__ if name in declared}


def rest_of(declared: Mapping[str, Any], *groups: type) -> dict[str, Any]:
    """Return the keyword arguments of none of these groups."""
    of_groups = {name for group in groups for name in group.__annotations__}
    return {name: declared[name] for name in declared if name not in of_groups}


def opened(source: Source, read: ReadOptions | None = None, *others: Source) -> Tree:
    """Open the source as a tree; reads headers and indexes, but no array.

    Args:
        source: a path, or a tree.
        read: how a path is opened.
        others: other inputs opened in the same way; one of them must have files of a preferred process.

    Raises:
        CheckpointError: nothing is there, or it cannot be read.
        UsageError: opening options are given for an open tree, or a process is preferred for inputs without
            process files.
    """
    if not isinstance(source, Tree):
        tree = open_tree(parse(source), read)
        locations = (parse(other) for other in (source, *others) if not isinstance(other, Tree))
        require_ranks(read or ReadOptions(), *locations)
        return tree
    if read is not None and read not in (ReadOptions(), ReadOptions(source.metadata.step)):
        raise UsageError(
            "the source is a tree, which is open already",
            location=source.metadata.location or None,
            got=", ".join(
                f"{name} {value}"
                for name, value in vars(read).items()
                if value != getattr(ReadOptions(), name)
            ),
            hint="pass the options to ckpttools.open, or give the path",
        )
    return source


@validate_arguments
@declare(*OPENING)
def open(path: LocationLike, step: int | None = None, **reading: Unpack[PathReading]) -> Tree:
    """Open the checkpoint at `path` in any format. Reads headers and indexes, but no array.

    Args:
        path: a file, an item, a step or a run directory.

    Raises:
        CheckpointError: nothing is there, or it cannot be read.
    """
    return opened(path, read_options({"step": step, **reading}))


def config_alone(
    source: LocationLike, read: ReadOptions, suffixes: tuple[str, ...] = (".json",)
) -> Location | None:
    """Return the configuration of a model directory without weights; None with weights.

    Args:
        source: a configuration, or a directory.
        read: how a path is opened, which may say nothing that is of weights alone.
        suffixes: of the names of configurations.

    Raises:
        UsageError: a step or a process is chosen for a configuration.
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
    """Settings of how all elements are read.

    Attributes:
        memory: bytes that may be resident at most.
        jobs: workers at a time; None for as many as suit what is read.
        observe: called with the progress, or None.
        read: how paths are opened.
        download: whether to read copies on this machine.
    """

    memory: int
    jobs: int | None
    observe: Observe | None
    read: ReadOptions
    download: bool = False

    def fetch(self, *trees: Tree) -> None:
        """Copy the sources to this machine, if requested.

        Raises:
            CheckpointError: as `ckpttools.stores.fetching.fetch`.
        """
        if self.download:
            arrays = (array for tree in trees for array in tree.arrays.values())
            fetch(sources(arrays), self.observe or (lambda done, total: None))

    def observer(self, total: int) -> Callable[[int], None]:
        """Return the `observe` of `ckpttools.run.scanning.scan` for `total` bytes."""
        if self.observe is None:
            return lambda nbytes: None
        tell, done = self.observe, 0
        tell(0, total)

        def observe(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            tell(done, total)

        return observe


@contextmanager
def scanning(declared: Scanning) -> Iterator[ScanSettings]:
    """Yield scan settings; the memory of trees opened inside the `with` counts.

    Raises:
        UsageError: a text is not a size.
    """
    opening = {name: value for name, value in declared.items() if name not in _RESOURCES}
    memory, download = (
        parse_size_option("memory", declared.get("memory", DEFAULT_MEMORY)),
        declared.get("download", False),
    )
    with limit_memory(memory), use_concurrency(declared.get("requests")):
        yield ScanSettings(
            memory, declared.get("jobs"), declared.get("observe"), read_options(opening), download
        )
