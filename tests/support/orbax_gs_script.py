"""Lists and restores checkpoints on gs:// through Orbax; run by test_object_orbax.py.

A process of its own, since no other test needs JAX, and since what Orbax knows of a bucket it keeps. Reads a
JSON list of run directories, `gs://…`; writes for each what Orbax makes of it: the steps that
`CheckpointManager` lists, and by loader the leaves, or the error.

Orbax opens paths on gs:// by fsspec, for which gcsfs is only one implementation; that of obstore does the
same, and keeps no listings. Arrays are read by tensorstore's own driver.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import fsspec
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from obstore.fsspec import FsspecStore
from orbax.checkpoint import v1 as ocp_v1
from orbax.checkpoint._src.path import gcs_utils

from ckpttools.stores.objects import gs
from support.golden_data import described


class Emulated(FsspecStore):
    """The file system that epath asks for, on the server that the environment names."""

    protocol = ("gs", "gcs")

    def __init__(self, **options: object) -> None:
        config: Any = gs.STORE.access("").config
        super().__init__(config=config, client_options={"allow_http": True})


def steps(run: epath.Path) -> Any:
    with ocp.CheckpointManager(run) as manager:
        return list(manager.all_steps())


def manager(run: epath.Path) -> Any:
    with ocp.CheckpointManager(run) as result:
        return leaves(result.restore(0)["items"])


def item(run: epath.Path) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return leaves(checkpointer.restore(run / "0" / "items"))


def step_by_v1(run: epath.Path) -> Any:
    return leaves(ocp_v1.load(run / "0"))


def leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict) or not tree:
        return {prefix: "Dict" if isinstance(tree, dict) else described(np.asarray(tree))}
    result: dict[str, Any] = {}
    for name, below in tree.items():
        result |= leaves(below, f"{prefix}/{name}" if prefix else name)
    return result


def asked(question: Callable[[epath.Path], Any], run: str) -> Any:
    try:
        return question(epath.Path(run))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def emulate() -> None:
    """Has Orbax take the server that the environment names for Google's."""
    for name in Emulated.protocol:
        fsspec.register_implementation(name, Emulated, clobber=True)
    # It would ask google-cloud-storage, a package of its own, what kind of bucket this is.
    gcs_utils.is_hierarchical_namespace_enabled = lambda path: False


def main(asked_in: str, said_in: str) -> None:
    emulate()
    runs = json.loads(Path(asked_in).read_bytes())
    questions = (steps, manager, item, step_by_v1)
    result = {run: {question.__name__: asked(question, run) for question in questions} for run in runs}
    Path(said_in).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
