"""How a checkpoint lies in its files: one call, one report."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from ckpttools.api.sources import Opening, Source, opened, read_options
from ckpttools.core.errors import UsageError
from ckpttools.formats.registry import storage_of
from ckpttools.inspect.advice import advice
from ckpttools.inspect.chunks import ChunksReport, inspect_chunks
from ckpttools.inspect.meshes import parse_spec
from ckpttools.sharding.mesh import parse_mesh


def chunks(
    source: Source,
    *,
    filter: str = "*",
    mesh: str | None = None,
    spec: str | None = None,
    **reading: Unpack[Opening],
) -> ChunksReport:
    """Data files, chunk grids and codecs, and what loading would read; only indexes and metadata are.

    Args:
        source: a file, an item, a step or a run directory, or a tree.
        filter: shell pattern of the paths to report; files are always all of them.
        mesh: devices that would load it: "8", "4x2" or "data=4,fsdp=2".
        spec: how the devices share each array: "axis0", "layer", "replicated", "axis0=0,axis1=1" or
            "P('fsdp', None)". Goes with `mesh`.
        reading: how a path is opened, see `ckpttools.api.sources.Opening`.

    Raises:
        CheckpointError: nothing is there, or an index is damaged or cannot be read.
        UsageError: there are arrays and none matches the pattern, or a mesh or spec is invalid.
    """
    if (mesh is None) != (spec is None):
        raise UsageError("a mesh and a spec go together", hint="mesh='8', spec='axis0'")
    devices = None if mesh is None else parse_mesh(mesh)
    cuts = None if spec is None or devices is None else parse_spec(spec, devices)
    read = read_options(reading)
    tree = opened(source, read)
    report = inspect_chunks(tree, storage_of(tree, read), filter, devices, cuts)
    return replace(report, advice=advice(report))
