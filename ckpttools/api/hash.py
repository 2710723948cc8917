"""Compute digests of a checkpoint's arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Unpack

from ckpttools.api.options import SCANNING
from ckpttools.api.options.inspect import HASH
from ckpttools.api.output_file import check_output_file
from ckpttools.api.sources import (
    Scanning,
    Source,
    location_of,
    opened,
    scanning,
)
from ckpttools.api.verify import conversion_options
from ckpttools.array.tree import Tree
from ckpttools.core.argument_checks import validate_arguments
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import option
from ckpttools.core.options import declare
from ckpttools.core.region import Shape
from ckpttools.core.tabular import Tabular
from ckpttools.digest.canonical import Selection, drop_step, with_carried
from ckpttools.digest.digest import DEFAULT_ALGORITHM
from ckpttools.digest.hashing import hash_tree
from ckpttools.digest.manifest import NAMES, Manifest, check_manifest_name
from ckpttools.maxtext.model_options import check_choice
from ckpttools.maxtext.scan_axis import scan_axis_remarks
from ckpttools.quantized.view import quantized_view
from ckpttools.stores.registry import LocationLike, parse


@dataclass(frozen=True, slots=True)
class ArrayDigest:
    """An array and the hexadecimal digest of its dtype, shape and values."""

    name: str
    dtype: str
    shape: Shape
    digest: str


@dataclass(frozen=True, slots=True, repr=False)
class HashReport(Tabular):
    """Digests of a checkpoint.

    Attributes:
        path: Path of the checkpoint.
        algorithm: Digest algorithm.
        per_layer: Whether each layer of a stacked array has its own digest.
        digest: Digest of all arrays.
        parameters: Digest of the parameters only, without optimizer state, step and random states.
        remarks: Arrays that were left out, and assumptions.
        arrays: Digest of each array, ordered by name.
    """

    path: str
    algorithm: str
    per_layer: bool
    digest: str
    parameters: str
    remarks: tuple[str, ...]
    arrays: tuple[ArrayDigest, ...]

    def __repr__(self) -> str:
        return (
            f"<HashReport of {self.path}: {self.algorithm} {self.digest} of {len(self.arrays):,} arrays, "
            f"{self.parameters} of the parameters>"
        )


@validate_arguments
@declare(*HASH, *SCANNING)
def hash(
    source: Source,
    *,
    names: str = "stored",
    manifest: LocationLike | None = None,
    algorithm: str = DEFAULT_ALGORITHM,
    family: str | None = None,
    rope_layout: str | None = None,
    tied: str | None = None,
    drop: str | Sequence[str] = (),
    filter: str = "*",
    per_layer: bool = True,
    parameters: bool = False,
    **common: Unpack[Scanning],
) -> HashReport:
    """Compute digests of each array, of the parameters, and of everything, independent of layout.

    Args:
        source: A file, item, step or run directory, or a tree.

    Raises:
        CheckpointError: An array cannot be read, the memory is too small, or the manifest cannot be written.
        UsageError: No array matches, or conversion options are given without a conversion.
    """
    check_choice("kind of names", names, NAMES)
    if manifest is not None:
        check_output_file(parse(manifest), location_of(source) or "")
        check_manifest_name(parse(manifest))
    selection = Selection(filter, per_layer, parameters)
    conversion = conversion_options(family, rope_layout, tied, drop)
    with scanning(common) as scan:
        tree = opened(source, scan.read)
        scan.fetch(tree)
        remarks = scan_axis_remarks(tree) if per_layer else ()
        written_selection = selection
        selection = replace(selection, naming=partial(with_carried, layers=per_layer))
        if names == "maxtext":
            from ckpttools.compare.conversion import drop_implied_arrays, name_like_maxtext

            if not per_layer:
                hint = f"leave out {option('per_layer', False)} or {option('names')}"
                raise UsageError(f"{option('names', 'maxtext')} names single layers", hint=hint)
            named = name_like_maxtext(quantized_view(tree).plain().tree, conversion)
            named = drop_implied_arrays(named, (), tree.metadata.config, scan.memory)
            arrays = drop_step(named.arrays)
            selection = replace(selection, naming=lambda tree: arrays)
            remarks = named.remarks
        elif conversion is not None:
            hint = f"{option('names', 'maxtext')} uses the names of a conversion"
            raise UsageError("conversion options do not apply to stored names", hint=hint)
        result = hash_tree(
            tree,
            selection,
            algorithm=algorithm,
            memory=scan.memory,
            jobs=scan.jobs,
            observe=scan.observer(selection.nbytes(tree)),
        )
    if manifest is not None:
        nodes = None if names == "maxtext" else result.nodes
        replace(result, names=names, selection=written_selection, nodes=nodes).write(parse(manifest))
    return _report(tree, result, remarks)


def _report(tree: Tree, manifest: Manifest, remarks: tuple[str, ...]) -> HashReport:
    return HashReport(
        path=tree.metadata.location,
        algorithm=manifest.algorithm,
        per_layer=manifest.selection.layers,
        digest=manifest.digest,
        parameters=manifest.parameters,
        remarks=remarks,
        arrays=tuple(
            ArrayDigest(name, item.dtype, item.shape, item.digest) for name, item in manifest.arrays.items()
        ),
    )
