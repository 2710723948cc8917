"""One of several processes of a `jax.distributed` job that load together: `test_sharding_processes.py`.

python -m support.sharded_processes NUMBER COUNT PORT DIRECTORY
"""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpttools
from ckpttools import DTYPES, CheckpointError, StorageError, ToMaxText, Tree
from ckpttools.maxtext.to_maxtext import to_maxtext
from ckpttools.stores.local.file import LocalFile
from ckpttools.testing.strategies import stored
from support.eight_devices import by_path, counted, fitting, mesh_of, nest, same
from support.locations import HF
from support.stored_trees import values

DEVICES = 8
# Rows so long that a part of each is read with the rest of it.
ROWS, COLUMNS = 256, 2048


def checkpoint() -> Tree:
    """Arrays of which columns are cut, of some dtypes, with every pattern of bits."""
    arrays: dict[Any, Any] = {}
    for name in ("bfloat16", "float32", "float8_e4m3fn", "bool"):
        dtype = DTYPES[name]
        arrays[name, "columns"] = stored(values((ROWS, COLUMNS), dtype, 1), dtype, f"{name}c")
        arrays[name, "odd"] = stored(values((3, 8, 5), dtype, 2), dtype, f"{name}o")
    nans = np.array([0x7FC1, 0xFFFF, 0x8000, 0x7F81, 0x0001, 0x8001, 0xFF81, 0x7F80], np.uint16)
    arrays["nans", "columns"] = stored(np.tile(nans, (64, 32)), DTYPES["bfloat16"], "nans")
    arrays["nothing", "columns"] = stored(values((0, 16), DTYPES["float32"]), DTYPES["float32"], "nothing")
    arrays["scalar", "odd"] = stored(values((), DTYPES["float32"]), DTYPES["float32"], "scalar")
    return Tree(arrays)


def run(directory: Path, processes: int) -> dict[str, Any]:
    source = directory / "columns"
    tree = ckpttools.open(source)
    onto_one(source, tree)
    result: dict[str, Any] = {}
    over_columns = {"*columns": "P(None, 'tensor')", "*": "P()"}
    rows = {"*columns": "P('fsdp')", "*": "P()"}
    two = f"data={processes},fsdp={DEVICES // processes}"
    for name, rules, mesh, how in (
        ("direct", over_columns, "tensor=8", {"max_over_read": math.inf}),
        ("exchange", over_columns, "tensor=8", {}),
        ("replicated", {"*": "P()"}, "data=8", {}),
        ("broadcast", rows, two, {"single_replica": True}),
    ):
        prepared = ckpttools.load.plan(source, rules=rules, mesh=mesh, **how)
        declared: list[Any] = []
        prepared = replace(prepared, observe_job=declared.append)
        with counted() as count:
            loaded = by_path(prepared.run())
        same(loaded, tree)
        plan = prepared.plan
        result[name] = {
            "read": count[0],
            "planned": plan.bytes_read,
            "alone": plan.bytes_read_alone,
            "needed": plan.bytes_needed,
            "exchanged": plan.bytes_exchanged,
            "said": [[repr(item), len(item.processes), item.count] for item in declared],
            "ways": {item.path: item.way for item in plan.array_list},
        }
    result["refused"] = [failing(source, over_columns), differing(source, over_columns)]
    result["total"] = tree.nbytes
    if processes == 2:
        into_maxtext()
    return result


def onto_one(source: Path, tree: Tree) -> None:
    """Onto devices of the last process alone: nobody waits, and all stay in step."""
    import jax

    last = [device for device in jax.devices() if device.process_index == jax.process_count() - 1]
    mesh = jax.sharding.Mesh(np.array(last), ("fsdp",))
    loaded = by_path(ckpttools.load(source, rules={"*columns": "P(None, 'fsdp')", "*": "P()"}, mesh=mesh))
    same(loaded, tree)
    is_last = jax.process_index() == jax.process_count() - 1
    assert all(len(item.addressable_shards) == is_last * len(last) for item in loaded.values())


def failing(source: Path, rules: dict[str, str]) -> str:
    """What is said where one process cannot read what all are to exchange; they go on with other loads."""
    import jax

    prepared = ckpttools.load.plan(source, rules=rules, mesh="tensor=8")

    def broken(file: Any, offset: int, out: Any) -> None:
        raise StorageError("the disk is gone")

    with pytest.MonkeyPatch.context() as patch:
        if jax.process_index() == 1:
            patch.setattr(LocalFile, "read_into", broken)
        return said_by(prepared.run)


def differing(source: Path, rules: dict[str, str]) -> str:
    """What is said where processes have planned different things."""
    import jax

    limit = 1.5 if jax.process_index() else math.inf
    return said_by(lambda: ckpttools.load(source, rules=rules, mesh="tensor=8", max_over_read=limit))


def said_by(call: Callable[[], object]) -> str:
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return "nothing"


def into_maxtext() -> None:
    """A Hugging Face model into MaxText's layout, exchanged wherever that can be."""
    state = to_maxtext(ckpttools.open(HF), ToMaxText()).state
    expected = Tree({path: leaf for path, leaf in state.items() if path[0] == "params"})
    mesh = mesh_of("fsdp=2,tensor=4")
    shardings = nest({path: fitting(array.shape, mesh, 1) for path, array in expected.arrays.items()})
    same(by_path(ckpttools.load(HF, to="maxtext", shardings=shardings, max_over_read=0)), expected)


def main(number: str, count: str, port: str, directory: str) -> None:
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES // int(count)}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.distributed.initialize(f"localhost:{port}", int(count), int(number))
    try:
        result = run(Path(directory), int(count))
    except BaseException:
        result = {"error": traceback.format_exc()}
    (Path(directory) / f"{number}.json").write_text(json.dumps(result))
    # Those that are still at work would wait for one that has given up.
    os._exit(0) if "error" in result else jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
