"""Report the arrays of a checkpoint without reading their values."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from ckpttools.api.options import OPENING, REQUESTS
from ckpttools.api.options.inspect import TREE
from ckpttools.api.sources import Opening, Source, opened, read_options
from ckpttools.array.tree import Tree
from ckpttools.core.argument_checks import validate_arguments
from ckpttools.core.options import declare
from ckpttools.formats.base import ReadOptions
from ckpttools.formats.registry import other_steps, stored_shardings
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.inspection.comparison import Comparison, sort_comparison
from ckpttools.inspection.folding import sort_arrays
from ckpttools.inspection.tree import TreeReport, inspect_tree
from ckpttools.maxtext.model_files import sidecar_names
from ckpttools.model_families.registry import families
from ckpttools.quantized.view import make_comparable, quantized_view
from ckpttools.stores.concurrency import use_concurrency
from ckpttools.stores.location import Location
from ckpttools.stores.registry import LocationLike, count_traffic, parse


@validate_arguments
@declare(*TREE, *OPENING, REQUESTS)
def inspect(
    source: Source,
    *,
    filter: str = "*",
    sort: str | None = None,
    sharding: bool = False,
    against: LocationLike | Tree | None = None,
    requests: int | None = None,
    **reading: Unpack[Opening],
) -> TreeReport:
    """Report names, shapes, dtypes and sizes of all arrays, and the kind of checkpoint. Reads no arrays.

    Args:
        source: A file, item, step or run directory, or a tree.

    Raises:
        CheckpointError: The path does not exist or cannot be read.
        UsageError: No array matches the pattern.
    """
    with use_concurrency(requests), count_traffic() as traffic:
        read = read_options(reading)
        everything = read if isinstance(source, Tree) else replace(read, all_items=True)
        tree = opened(source, everything, *([] if against is None else [against]))
        shardings = stored_shardings(tree) if sharding else {}
        neighbors = other_steps(tree)
        comparison = None if against is None else compare_with_reference(tree, against, filter, read)
        report = inspect_tree(
            tree,
            filter,
            shardings=shardings,
            unfinished=neighbors.unfinished,
            damaged=neighbors.damaged,
            with_families=True,
            # The pattern may match only missing arrays.
            or_none=comparison is not None,
            sidecars=sidecar_names(tree),
        )
    report = replace(report, traffic=traffic())
    if sort is not None:
        report = replace(report, arrays=sort_arrays(report.arrays, sort))
        comparison = sort_comparison(comparison, sort) if comparison else None
    return replace(report, comparison=comparison)


def compare_with_reference(
    tree: Tree, reference: LocationLike | Tree, pattern: str = "*", read: ReadOptions | None = None
) -> Comparison:
    """Compare the arrays that match a pattern with a reference.

    Args:
        tree: Any checkpoint.
        reference: Name of a family, a file that describes one, a configuration, or another checkpoint; for an
            adapter, the base model.
        pattern: Shell pattern of paths.
        read: How to open the other checkpoint.

    Raises:
        CheckpointError: The reference is none of these, or cannot be read.
        UsageError: No array matches, or the pattern cannot be applied to missing arrays.
    """
    from ckpttools.adapters.bases import open_base
    from ckpttools.adapters.config import is_number
    from ckpttools.adapters.from_jax import adapter_of_jax, recorded_settings
    from ckpttools.adapters.report import adapter_report, is_maxtext_adapter, peft_adapter
    from ckpttools.formats.json_file import read_json
    from ckpttools.formats.registry import open_tree
    from ckpttools.inspection.against import compare_with_base, compare_with_family, compare_with_tree
    from ckpttools.model_families.registry import SUFFIXES, family_called, family_of

    if isinstance(reference, Tree):
        return compare_with_tree(*_dequantize_alike(tree, reference), pattern)
    name, path = str(reference), parse(reference)
    if adapter_report(tree) is not None:
        base = open_base(open_tree(path, read))
        if not is_maxtext_adapter(tree):
            return compare_with_base(peft_adapter(tree), base)
        # Only names and shapes are compared, so any alpha will do if none is recorded.
        alpha = None if is_number(recorded_settings(tree).get("lora_alpha")) else 1
        return compare_with_base(adapter_of_jax(base, tree, alpha), base)
    own_arrays = quantized_view(tree).plain_where_possible().tree
    if name in families() or path.suffix in SUFFIXES or not (path.exists() or "/" in name):
        family, own = family_called(name), tree.metadata.config
        if own is None or own.get("model_type") not in family.model_types:
            return compare_with_family(own_arrays, family, pattern=pattern)
        return compare_with_family(own_arrays, family, own, "the config.json next to it", pattern)
    config = _config_at(path)
    if config is None:
        return compare_with_tree(*_dequantize_alike(tree, open_tree(path, read)), pattern)
    document = read_json(config.require_exists())
    return compare_with_family(own_arrays, family_of(document, str(config)), document, str(config), pattern)


def _dequantize_alike(tree: Tree, other: Tree) -> tuple[Tree, Tree]:
    """Dequantize both trees if they store quantized weights differently."""
    view, other_view = make_comparable(tree, other)
    return view.tree, other_view.tree


def _config_at(path: Location) -> Location | None:
    """Return the configuration at a path; None if the path is a checkpoint."""
    if path.suffix == ".json":
        return path
    inside = path / CONFIG
    return inside if inside.is_file() and not any(path.glob("*.safetensors")) else None
