"""Storing arrays as they lie on their mesh: chunks within shards, and the sharding itself beside them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttools.array.nodes import Held
from ckpttools.array.shardings import Sharding
from ckpttools.array.tree import Path, Tree
from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import option
from ckpttools.core.region import Shape
from ckpttools.formats.base import Writer
from ckpttools.formats.orbax.write import OrbaxWriter
from ckpttools.formats.zarr.given_chunks import GivenChunks
from ckpttools.sharding.grids import mesh_chunk
from ckpttools.sharding.save_shards import ShardHolder
from ckpttools.sharding.specs import spec_of

if TYPE_CHECKING:
    import jax


def keeping_shardings(writer: Writer, tree: Tree) -> Writer:
    """The same writer, for arrays as they lie on their mesh; those that lie on none stay as they were.

    Raises:
        UsageError: the format does not keep that, or the user says other chunks.
    """
    if not isinstance(writer, OrbaxWriter):
        raise UsageError("only Orbax says how arrays lie on a mesh", got=writer.name, hint='format="orbax"')
    if writer.chunks is not None:
        raise UsageError(
            f"{option('chunks')} and {option('keep_sharding')} both say how arrays are cut",
            hint="leave one of them out",
        )
    chunks: dict[Path, Shape] = {}
    shardings: dict[Path, Sharding] = {}
    for path, array in tree.arrays.items():
        holder = array.holder if isinstance(array, Held) else None
        sharding = holder.sharding if isinstance(holder, ShardHolder) and array.size else None
        kept = None if sharding is None or path in tree.metadata.key_impls else _kept(sharding)
        if sharding is not None and kept is not None:
            shard = tuple(sharding.shard_shape(array.shape))
            chunks[path] = mesh_chunk(array.shape, shard, array.dtype.itemsize, ())
            shardings[path] = kept
    return replace(writer, chunks=GivenChunks(exact=chunks), shardings=shardings)


def _kept(sharding: jax.sharding.Sharding) -> Sharding | None:
    """What is stored of a sharding; None for one that has no mesh, or leaves something open."""
    import jax

    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    try:
        spec = spec_of(sharding.spec, None)
    except UsageError:
        return None
    mesh = tuple((str(name), int(length)) for name, length in sharding.mesh.shape.items())
    ids = tuple(int(device.id) for device in sharding.mesh.devices.flat)
    usual = tuple(int(device.id) for device in jax.devices())
    return Sharding("NamedSharding", mesh, spec, devices=None if ids == usual else ids)
