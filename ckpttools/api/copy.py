"""Copy checkpoints between stores."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

from ckpttools.api.options import COMMAND, LIMITS
from ckpttools.api.options.runs import COPY
from ckpttools.api.output_checks import check_copied, optimizer_in
from ckpttools.api.prepared import Resources, command
from ckpttools.api.sources import Observe, Size
from ckpttools.copying.prepared import Effort, PreparedCopy
from ckpttools.copying.selection import check_complete, select_content
from ckpttools.copying.target import CopyTarget
from ckpttools.core.memory_limit import DEFAULT_MEMORY, limit_memory
from ckpttools.core.options import declare, parse_size_option
from ckpttools.run.overlap_check import check_no_overlap
from ckpttools.stores.concurrency import map_concurrently, use_concurrency
from ckpttools.stores.outside_links import check_outside_links, find_outside_links
from ckpttools.stores.publishing import staging_of
from ckpttools.stores.registry import LocationLike, parse
from ckpttools.stores.sharing import RepositoryOptions, shared


@command(returns="CopyReport")
@declare(*COPY, *LIMITS, COMMAND)
def copy(
    source: LocationLike,
    destination: LocationLike,
    *,
    steps: Iterable[int] = (),
    latest: int | None = None,
    verify: bool = False,
    memory: Size = DEFAULT_MEMORY,
    jobs: int | None = None,
    requests: int | None = None,
    overwrite: bool = False,
    public: bool = False,
    allow_outside_links: bool = False,
    observe: Observe | None = None,
    command: str = "",
) -> PreparedCopy:
    """Copy a checkpoint byte for byte between any two stores.

    Copies the finished steps of a run, oldest first. Each step becomes visible when it is complete. Steps
    that already exist at the destination are left unchanged, so repeating the call copies only new steps.

    Args:
        source: A run, step or item, or a checkpoint directory in another format.
        destination: Path of the copy, which is of the same kind as the source.
        observe: Called with the bytes copied so far and the total; the first call has 0.

    Raises:
        DestinationExistsError: Something else exists at the destination.
        FormatError: The source is unfinished or incomplete, or refers to files outside.
        SourceChangedError: The source changed while it was copied.
        CheckpointError: The copy does not fit into the memory or the disk, or reading or writing fails.
    """
    read, target_location = parse(source), parse(destination, is_written=True)
    target_location = shared(target_location, RepositoryOptions(public))
    staging_of(target_location)  # Raises an error if nothing can be written there.
    check_no_overlap(read, target_location)
    resources = Resources(
        parse_size_option("memory", memory), jobs, destination=target_location, requests=requests
    )
    with limit_memory(resources.memory), use_concurrency(requests):
        selection, target = (
            select_content(read, tuple(steps), latest),
            CopyTarget(target_location, overwrite, optimizer_in),
        )
        existing_copy = target.result(selection, verify=verify)
        effort = Effort(resources.memory, jobs, resources.workers, requests)
        links = {name: target for part in selection.parts for name, target in part.outside_links.items()}
        links |= find_outside_links(read, (location.key for location in selection.small.values()))
        check_outside_links(links, is_public=public, is_allowed=allow_outside_links)
        result = PreparedCopy(read, target, selection, existing_copy, effort, verify, observe, command)
        unchecked = [*chain.from_iterable(map_concurrently(read.store, check_complete, result.todo))]
        # Over a network, the tokenizer would be fetched twice.
        if result.todo and selection.model is not None and read.store.scheme == "file":
            unchecked += check_copied(selection.model)
    return replace(result, unchecked=tuple(unchecked))
