"""Report how the files of a checkpoint store its arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Unpack

from ckpttools.api.options import OPENING
from ckpttools.api.options.inspect import CHUNKS
from ckpttools.api.sources import Opening, Source, opened, read_options
from ckpttools.array.storage import Storage, StoredArray
from ckpttools.array.tree import Tree, keystr
from ckpttools.core.argument_checks import validate_arguments
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import option
from ckpttools.core.options import declare
from ckpttools.core.region import grid_shape
from ckpttools.formats.base import Layout, ReadOptions
from ckpttools.formats.registry import storage_of
from ckpttools.inspection.advice import advice
from ckpttools.inspection.chunks import (
    Advice,
    ChunksReport,
    LoadCost,
    PathSpecs,
    Specs,
    inspect_chunks,
    layer_axis,
    parse_spec,
)
from ckpttools.sharding.load_prediction import ProcessLoading, process_loading
from ckpttools.sharding.mesh import MeshShape, parse_mesh
from ckpttools.sharding.rules import AppliedRules, Rules, RulesLike, resolve_rules


@validate_arguments
@declare(*CHUNKS, *OPENING)
def chunks(
    source: Source,
    *,
    filter: str = "*",
    mesh: str | None = None,
    spec: str | None = None,
    rules: RulesLike | None = None,
    processes: int | None = None,
    **reading: Unpack[Opening],
) -> ChunksReport:
    """Report data files, chunk grids and codecs, and predict reads. Reads only indexes and metadata.

    Args:
        source: A file, item, step or run directory, or a tree.

    Raises:
        CheckpointError: The path does not exist, or an index is damaged or cannot be read.
        UsageError: No array matches the pattern, or the mesh, spec or rules are invalid.
    """
    if spec is not None and rules is not None:
        raise UsageError(
            f"{option('spec')} and {option('rules')} exclude each other", hint="leave one of them out"
        )
    if mesh is None:
        _check_no_mesh(spec, rules, processes)
    read = read_options(reading)
    tree = opened(source, read)
    if mesh is None:
        report = inspect_chunks(tree, storage_of(tree, read), filter)
        return replace(report, advice=advice(report))
    devices = parse_mesh(mesh)
    applied = None if spec is not None else AppliedRules(_rules(rules, devices), tree, devices)
    cuts: Specs = parse_spec(spec or "", devices) if applied is None else _specs_by_path(applied)
    report = inspect_chunks(tree, storage_of(tree, read), filter, devices, cuts)
    result = None if processes is None else _predict_processes(tree, report, cuts, devices, processes)
    remarks = () if applied is None else (Advice("rules", (), text, None) for text in applied.remarks())
    return replace(report, advice=(*advice(report), *remarks), processes=result)


def _check_no_mesh(*others: object) -> None:
    """Raise UsageError for mesh options without a mesh."""
    if any(other is not None for other in others):
        raise UsageError(
            f"{option('spec')}, {option('rules')} and {option('processes')} require a mesh",
            hint=f"also give {option('mesh', 'fsdp=8')}",
        )


def _rules(rules: RulesLike | None, mesh: MeshShape) -> Rules:
    if rules is None and mesh.is_unnamed:
        raise UsageError(
            "a mesh without axis names requires a spec",
            got=option("mesh", str(mesh)),
            hint=f"also give {option('spec', 'axis0')}, or names of axes that rules know: "
            f"{option('mesh', f'fsdp={mesh.size}')}",
        )
    return resolve_rules("maxtext" if rules is None else rules)


def _specs_by_path(applied: AppliedRules) -> PathSpecs:
    applied.rules.check_names(applied.tree)
    return rule_specs(applied)


def _predict_processes(
    tree: Tree, report: ChunksReport, cuts: Specs, mesh: MeshShape, processes: int
) -> ProcessLoading:
    """Predict the reads of processes that load the arrays of a report."""
    expected = {item.path for item in report.arrays}
    arrays = {keystr(path): array for path, array in tree.arrays.items() if keystr(path) in expected}
    specs = {
        path: cuts.of(path).entries(array.ndim, layer_axis(tree, path)) for path, array in arrays.items()
    }
    return process_loading(arrays, specs, mesh, processes)


_NOTABLE_GAIN = 1.01


@dataclass(frozen=True, slots=True)
class MeshReads:
    """Predicted reads of the devices of a mesh, each of which loads its part of a checkpoint.

    Attributes:
        before: Reads from the source.
        after: Reads from the output, in uncompressed bytes even if codecs reduce them.
    """

    before: LoadCost
    after: LoadCost

    @property
    def is_regression(self) -> bool:
        """Return whether devices will fetch at least 1 % more than before."""
        before, after = self.before, self.after
        return (
            after.fetched > _NOTABLE_GAIN * before.fetched
            or after.total_fetched > _NOTABLE_GAIN * before.total_fetched
        )

    @property
    def is_improvement(self) -> bool:
        """Return whether devices will fetch fewer bytes or make fewer reads."""
        before, after = self.before, self.after
        return (
            after.fetched < before.fetched
            or after.total_fetched < before.total_fetched
            or after.reads < before.reads
        )


def predict_mesh_reads(rules: AppliedRules, reading: ReadOptions, tree: Tree, layout: Layout) -> MeshReads:
    """Predict the reads of the same arrays in two layouts. Reads only indexes of the source.

    Args:
        rules: The source, mesh and rules.
        reading: How the source was opened.
        tree: The tree to write; `layout` has the locations of its arrays.

    Raises:
        CheckpointError: An index of the source is damaged or cannot be read.
    """
    stored = storage_of(rules.tree, reading), Storage("", (), (), tuple(_planned(tree, layout)))
    specs = rule_specs(rules)
    return MeshReads(*(_predict_load(rules, specs, item) for item in stored))


def rule_specs(rules: AppliedRules) -> PathSpecs:
    """Return the partition spec of each array according to rules."""
    specs = {keystr(path): spec for path, spec in rules.specs()}
    return PathSpecs(f"rules {rules.rules.name}", specs)


def _predict_load(rules: AppliedRules, specs: PathSpecs, storage: Storage) -> LoadCost:
    result = inspect_chunks(rules.tree, storage, "*", rules.mesh, specs).loading
    assert result is not None  # A mesh is given.
    return result


def _planned(tree: Tree, layout: Layout) -> Iterator[StoredArray]:
    """Yield the arrays with the chunks planned by the layout."""
    for path, array in tree.arrays.items():
        chunk = layout.placements[path].chunk
        chunks = prod(grid_shape(array.shape, chunk))
        yield StoredArray(keystr(path), array.shape, array.dtype, chunk, chunk, (), chunks, 0, array.nbytes)
