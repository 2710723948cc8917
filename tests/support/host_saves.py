"""A job of four processes that saves with Orbax's own emergency, replicator or peer-to-peer manager.

    python -m support.host_saves OUT                  all kinds, several meshes
    python -m support.host_saves OUT KIND MESH        one, such as replicator data=2,fsdp=4
    python -m support.host_saves OUT KIND MESH RUN    the same, with the states of another run's checkpoints

Each process keeps OUT/KIND-MESH/host<n>; what the manager itself restores of the full set goes to
OUT/KIND-MESH/restored.npz.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

PROCESSES, DEVICES = 4, 2
KINDS = ("emergency", "replicator", "p2p")
MESHES = ("data=2,fsdp=4", "data=4,fsdp=2", "data=2,fsdp=2,tensor=2")
STEPS = (2, 3)
COMMIT, EMPTY_KEYS = "commit_success.txt", "/checkpoints/hosts"


def save_all(out: Path) -> None:
    for kind in KINDS:
        for mesh in MESHES:
            save_one(out, kind, mesh)


def save_one(out: Path, kind: str, mesh: str, run: str = "") -> Path:
    """Starts the four processes, and returns where they have saved."""
    location = out.absolute() / f"{kind}-{mesh}"
    location.mkdir(parents=True)
    with socket.socket() as result:
        result.bind(("localhost", 0))
        port = result.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "support.host_saves",
        "process",
        str(location),
        kind,
        mesh,
        run,
        str(port),
    ]
    environment = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}"}
    started = [
        subprocess.Popen([*command, str(number)], env=environment, stderr=subprocess.PIPE, text=True)
        for number in range(PROCESSES)
    ]
    ended = [(process.communicate()[1], process.returncode) for process in started]
    assert all(code == 0 for _, code in ended), [text[-3000:] for text, code in ended if code]
    _forget(location)
    return location


def _forget(location: Path) -> None:
    """Takes the directories of this machine out of what Orbax notes of commits: samples are of none."""
    for file in location.rglob(COMMIT):
        file.write_text(file.read_text().replace(str(location.parent.absolute()), EMPTY_KEYS))
    for file in filter(Path.is_file, location.rglob("*")):
        assert str(location.parent.absolute()).encode() not in file.read_bytes(), file


def one_process(location: Path, kind: str, mesh_text: str, run: str, port: int, number: int) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", PROCESSES, number)
    import numpy as np
    import orbax.checkpoint as ocp
    from absl import flags
    from jax.experimental import multihost_utils
    from jax.sharding import Mesh

    flags.FLAGS(["host_saves"])
    flags.FLAGS.experimental_orbax_use_distributed_process_id = True
    ocp.multihost.initialize_runtime_to_distributed_ids()
    ocp.multihost.initialize_distributed_to_device_ids()
    axes = {name: int(size) for name, _, size in (item.partition("=") for item in mesh_text.split(","))}
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    mesh = Mesh(np.array(devices).reshape(list(axes.values())), tuple(axes))
    local = location / f"host{number}"
    local.mkdir()
    if number == 0 and kind != "replicator":
        (location / "persistent").mkdir()
    multihost_utils.sync_global_devices("directories")
    states = {step: _stored(mesh, Path(run) / str(step)) if run else _state(mesh, step) for step in STEPS}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), states[3])
    manager, wrap, read = _manager(kind, location, local, mesh, shapes)
    for step, state in states.items():
        manager.save(step, args=wrap(state))
        manager.wait_until_finished()
    multihost_utils.sync_global_devices("saved")
    restored = read(manager)
    leaves = {
        ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(restored)[0]
    }
    whole = {
        name: np.asarray(multihost_utils.process_allgather(leaf, tiled=True)) for name, leaf in leaves.items()
    }
    if number == 0:
        # numpy's files do not know bfloat16.
        np.savez(location / "restored.npz", **{name: item.astype(np.float32) for name, item in whole.items()})
    multihost_utils.sync_global_devices("done")
    manager.close()


def _state(mesh: Any, step: int) -> Any:
    """Arrays cut along one axis and along two, whole ones, and numbers; those of each step are others."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    def put(values: Any, *spec: Any) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    import numpy as np

    rng = np.random.default_rng(step)

    def noise(*shape: int) -> Any:
        return rng.standard_normal(shape, np.float32)

    last = "tensor" if "tensor" in mesh.axis_names else None
    decoder = {
        "rep": put(noise(33)),
        "w_fsdp": put(noise(16, 32).astype(jnp.bfloat16), "fsdp", last),
        "w_col": put(noise(16, 32).astype(jnp.bfloat16), None, "fsdp"),
        # Chunks of more than a kilobyte are not in the index but in data files.
        "w_large": put(noise(64, 32), "fsdp", last),
        "w_both": put(noise(8, 6), ("fsdp", last) if last else "fsdp", None),
    }
    moments = {"params": {"w_fsdp": put(noise(16, 32), "fsdp", last)}}
    count = put(np.array(step, np.int32))
    return {
        "step": count,
        "params": {"params": {"decoder": decoder}},
        "opt_state": [{"count": count, "mu": moments}, None],
    }


def _stored(mesh: Any, step: Path) -> Any:
    """What a step holds, each array cut along the first axis that all of a replica's devices can share."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp
    from jax.sharding import NamedSharding, PartitionSpec

    checkpointer = ocp.PyTreeCheckpointer()
    tree = checkpointer.metadata(step / "items").item_metadata.tree
    args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    parts = mesh.shape["fsdp"]

    def put(values: Any) -> Any:
        values = np.asarray(values)
        spec: list[Any] = [None] * values.ndim
        axis = next((axis for axis, size in enumerate(values.shape) if size % parts == 0), None)
        if axis is not None:
            spec[axis] = "fsdp"
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    return jax.tree.map(put, checkpointer.restore(step / "items", restore_args=args))


def _manager(kind: str, location: Path, local: Path, mesh: Any, shapes: Any) -> tuple[Any, Any, Any]:
    """The manager, what makes arguments of a state, and what restores the newest step with it."""
    import orbax.checkpoint as ocp

    last = max(STEPS)
    if kind == "replicator":
        from orbax.checkpoint.experimental.emergency.multi_tier_checkpointing import (
            replicator_checkpoint_manager as replicator,
        )

        options = replicator.ReplicatorCheckpointManagerOptions(save_interval_steps=1)
        manager = replicator.ReplicatorCheckpointManager(local, options=options, global_mesh=mesh)
        args = ocp.args.Composite(state=ocp.args.PyTreeRestore(item=shapes, restore_args=_restoring(shapes)))
        return (
            manager,
            lambda state: ocp.args.Composite(state=ocp.args.PyTreeSave(state)),
            lambda manager: manager.restore(last, args=args).state,
        )
    if kind == "emergency":
        from orbax.checkpoint.experimental.emergency import checkpoint_manager as emergency

        options = emergency.CheckpointManagerOptions(
            local=emergency.LocalCheckpointOptions(save_interval_steps=1, max_to_keep=2),
            persistent=emergency.PersistentCheckpointOptions(save_interval_steps=2, max_to_keep=2),
            replica_axis_index=0,
        )
        manager = emergency.CheckpointManager(
            local, location / "persistent", global_mesh=mesh, abstract_state=shapes, options=options
        )
        args = ocp.args.Composite(state=ocp.args.PyTreeRestore(item=shapes))
        return (
            manager,
            lambda state: ocp.args.Composite(state=ocp.args.PyTreeSave(state)),
            lambda manager: manager.restore(last, args=args).state,
        )
    from orbax.checkpoint.experimental.emergency import p2p
    from orbax.checkpoint.experimental.emergency.p2p import args as p2p_args
    from orbax.checkpoint.experimental.emergency.p2p import checkpoint_manager as peers
    from orbax.checkpoint.experimental.emergency.p2p import options as p2p_options

    assert p2p
    options = p2p_options.CheckpointManagerOptions(
        local=p2p_options.LocalCheckpointOptions(save_interval_steps=1, max_to_keep=2),
        persistent=p2p_options.PersistentCheckpointOptions(save_interval_steps=2),
    )
    manager = peers.CheckpointManager(mesh, shapes, local, location / "persistent", options=options)
    args = p2p_args.Composite(state=ocp.args.PyTreeRestore(item=shapes))
    return (
        manager,
        lambda state: p2p_args.Composite(state=ocp.args.PyTreeSave(state)),
        lambda manager: manager.restore(last, args=args).state,
    )


def _restoring(shapes: Any) -> Any:
    import jax
    import orbax.checkpoint as ocp

    return jax.tree.map(lambda x: ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape), shapes)


if __name__ == "__main__":
    if sys.argv[1] == "process":
        where, kind, mesh, run, port, number = sys.argv[2:]
        one_process(Path(where), kind, mesh, run, int(port), int(number))
    elif len(sys.argv) > 2:
        save_one(Path(sys.argv[1]), *sys.argv[2:])
    else:
        save_all(Path(sys.argv[1]))
