"""What is in a checkpoint, without its numbers: one call, one report."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from ckpttools.api.against import compared
from ckpttools.api.sources import Opening, Source, opened, read_options
from ckpttools.array.tree import Tree
from ckpttools.core.checked import checked
from ckpttools.families.registry import families
from ckpttools.formats.registry import other_steps, stored_shardings
from ckpttools.inspect.comparison import arranged
from ckpttools.inspect.folding import sort_arrays
from ckpttools.inspect.tree import TreeReport, inspect_tree
from ckpttools.maxtext.model_files import companion_names
from ckpttools.stores.pace import requesting
from ckpttools.stores.registry import Where
from ckpttools.stores.traffic import counted


@checked
def inspect(
    source: Source,
    *,
    filter: str = "*",
    sort: str | None = None,
    sharding: bool = False,
    against: Where | Tree | None = None,
    requests: int | None = None,
    **reading: Unpack[Opening],
) -> TreeReport:
    """Names, shapes, dtypes and bytes of all arrays, and what kind of checkpoint it is; reads none of them.

    Args:
        source: a file, an item, a step or a run directory, or a tree.
        filter: shell pattern of the paths to report; counts and bytes are of those.
        sort: "size", largest first, or "name"; None for the checkpoint's order.
        sharding: also how arrays were laid out on devices when they were saved.
        against: what to compare with: the name of a family or a file with one, a `config.json`, or another
            checkpoint. `report.comparison` lists what is missing, unexpected, or of another shape.
        requests: requests under way at once to stores behind a network; None for as many as suit them.
        reading: how a path is opened, see `ckpttools.api.sources.Opening`.

    Raises:
        CheckpointError: nothing is there, or it cannot be read.
        UsageError: there are arrays, and none matches the pattern.
    """
    with requesting(requests), counted() as traffic:
        read = read_options(reading)
        everything = read if isinstance(source, Tree) else replace(read, all_items=True)
        tree = opened(source, everything, *([] if against is None else [against]))
        shardings = stored_shardings(tree) if sharding else {}
        beside = other_steps(tree)
        comparison = None if against is None else compared(tree, against, filter, read)
        report = inspect_tree(
            tree,
            filter,
            shardings=shardings,
            unfinished=beside.unfinished,
            damaged=beside.damaged,
            families=families().values(),
            # The pattern may mean what is missing.
            or_none=comparison is not None,
            companions=companion_names(tree),
        )
    report = replace(report, traffic=traffic())
    if sort is not None:
        report = replace(report, arrays=sort_arrays(report.arrays, sort))
        comparison = arranged(comparison, sort) if comparison else None
    return replace(report, comparison=comparison)
