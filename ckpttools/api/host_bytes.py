"""What one host of a training writes, by the shardings with which its state was saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ckpttools.array.shardings import Sharding
from ckpttools.array.tree import Path, Tree, keystr
from ckpttools.core.errors import UsageError
from ckpttools.core.wording import option
from ckpttools.formats.registry import stored_shardings
from ckpttools.sharding.mesh import MeshShape
from ckpttools.sharding.predict import process_loading


class TrainingState(NamedTuple):
    """What a checkpoint, or a configuration, says of a training state.

    Attributes:
        tree: its arrays.
        parameters: how many numbers the model has.
        nbytes: of the whole state, moments among them.
        is_exact: whether the arrays are a checkpoint's own; else sizes are reckoned from a configuration.
    """

    tree: Tree
    parameters: int
    nbytes: int
    is_exact: bool


class HostBytes(NamedTuple):
    """What one host writes.

    Attributes:
        nbytes: that it writes.
        replicated: bytes of these beyond an even share, which others write as well.
        remarks: what to say of that.
        is_known: whether shardings say so; else it is an even share.
    """

    nbytes: int
    replicated: int
    remarks: tuple[str, ...]
    is_known: bool


def host_bytes(state: TrainingState, hosts: int, slices: int, mesh: MeshShape | None) -> HostBytes:
    """What each host holds, by the shardings with which the state was saved."""
    stored = stored_shardings(state.tree) if state.is_exact else {}
    named = {path: each for path, each in stored.items() if each.mesh}
    even = -(-state.nbytes // hosts)
    if not named:
        unused = f", so that {option('mesh')} counts for nothing" if mesh is not None else ""
        why = f"no sharding is known{unused}: each host is taken to hold an even share"
        return HostBytes(even, 0, (why,), False)
    saved = MeshShape(dict(next(iter(named.values())).mesh))
    used = _with_axes(saved, mesh)
    if used.size % (hosts * slices):
        why = (
            f"the checkpoint was saved on a mesh of {used.size} devices ({used}), which {hosts * slices} "
            "hosts cannot share evenly: each host is taken to hold an even share of a slice"
        )
        return HostBytes(even, 0, (why,), False)
    nbytes = _held(state.tree, named, used, hosts * slices)
    return HostBytes(nbytes, max(0, nbytes - even), (), True)


def _with_axes(saved: MeshShape, mesh: MeshShape | None) -> MeshShape:
    """The mesh that is planned for, with the axes of the saved one, of length 1 where it lacks them."""
    if mesh is None:
        return saved
    unknown = [name for name in mesh.axes if name not in saved.axes]
    if unknown:
        raise UsageError(
            "the checkpoint was saved on a mesh without such axes",
            got=", ".join(unknown),
            wanted=f"axes of {saved}",
        )
    return MeshShape({name: mesh.axes.get(name, 1) for name in saved.axes})


def _held(tree: Tree, stored: Mapping[Path, Sharding], mesh: MeshShape, processes: int) -> int:
    arrays = {keystr(path): array for path, array in tree.arrays.items()}
    specs = {keystr(path): each.spec for path, each in stored.items()}
    return process_loading(arrays, specs, mesh, processes).needed
