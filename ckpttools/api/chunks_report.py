"""How a checkpoint lies in its files: one call, one report."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from ckpttools.api.mesh_gain import rule_specs
from ckpttools.api.sources import Opening, Source, opened, read_options
from ckpttools.array.tree import Tree, spelled
from ckpttools.core.errors import UsageError
from ckpttools.core.wording import option
from ckpttools.formats.registry import storage_of
from ckpttools.inspect.advice import advice
from ckpttools.inspect.chunks import ChunksReport, inspect_chunks, layer_axis
from ckpttools.inspect.meshes import PathSpecs, Specs, parse_spec
from ckpttools.sharding.applied_rules import AppliedRules
from ckpttools.sharding.mesh import MeshShape, parse_mesh
from ckpttools.sharding.predict import ProcessLoading, process_loading
from ckpttools.sharding.rules import Rules, RulesLike, rules_of


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
    """Data files, chunk grids and codecs, and what loading would read; only indexes and metadata are.

    Args:
        source: a file, an item, a step or a run directory, or a tree.
        filter: shell pattern of the paths to report; files are always all of them.
        mesh: devices that would load it: "8", "4x2" or "data=4,fsdp=2".
        spec: how the devices share each array: "axis0", "layer", "replicated", "axis0=0,axis1=1" or
            "P('fsdp', None)". Goes with `mesh`.
        rules: the same for each array: "maxtext", a file, or pairs, as of `ckpttools.load`.
        processes: that have these devices, in the order of the mesh, and load together.
        reading: how a path is opened, see `ckpttools.api.sources.Opening`.

    Raises:
        CheckpointError: nothing is there, or an index is damaged or cannot be read.
        UsageError: there are arrays and none matches the pattern, or a mesh, spec or rules are invalid.
    """
    if spec is not None and rules is not None:
        raise UsageError(f"{option('spec')} and {option('rules')} say the same", hint="leave one of them out")
    if (mesh is None) != (spec is None and rules is None):
        raise UsageError("a mesh and a spec, or rules, go together", hint="mesh='8', spec='axis0'")
    if processes is not None and mesh is None:
        raise UsageError(f"{option('processes')} are of a mesh", hint="mesh='8', spec='axis0', processes=2")
    read = read_options(reading)
    tree = opened(source, read)
    if mesh is None:
        report = inspect_chunks(tree, storage_of(tree, read), filter)
        return replace(report, advice=advice(report))
    devices = parse_mesh(mesh)
    made = None if rules is None else rules_of(rules)
    cuts = parse_spec(spec or "", devices) if made is None else _by_path(tree, made, devices)
    report = inspect_chunks(tree, storage_of(tree, read), filter, devices, cuts)
    found = None if processes is None else _of_processes(tree, report, cuts, devices, processes)
    return replace(report, advice=advice(report), processes=found)


def _by_path(tree: Tree, rules: Rules, mesh: MeshShape) -> PathSpecs:
    rules.check_patterns(tree.arrays)
    return rule_specs(AppliedRules(rules, tree, mesh))


def _of_processes(
    tree: Tree, report: ChunksReport, cuts: Specs, mesh: MeshShape, processes: int
) -> ProcessLoading:
    """What processes read of the arrays of a report."""
    wanted = {each.path for each in report.arrays}
    arrays = {spelled(path): array for path, array in tree.arrays.items() if spelled(path) in wanted}
    specs = {
        path: cuts.of(path).entries(array.ndim, layer_axis(tree, path)) for path, array in arrays.items()
    }
    return process_loading(arrays, specs, mesh, processes)
