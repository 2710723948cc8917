"""What Orbax makes of items on 8 devices: told nothing, and told another sharding.

python -m support.resharded_script ITEMS RESULTS
"""

import hashlib
import json
import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def told(tree):
    """For each array its sharding and a digest of its bytes."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): [
            list(leaf.sharding.spec) if isinstance(leaf.sharding, NamedSharding) else None,
            dict(leaf.sharding.mesh.shape) if isinstance(leaf.sharding, NamedSharding) else None,
            hashlib.sha256(np.ascontiguousarray(np.asarray(leaf)).tobytes()).hexdigest(),
        ]
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def main():
    jax.config.update("jax_enable_x64", True)
    whole = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec())
    results = []
    for item in json.loads(Path(sys.argv[1]).read_text()):
        reader = ocp.PyTreeCheckpointer()
        plain = reader.restore(item)
        kinds = jax.tree.map(lambda leaf: ocp.ArrayRestoreArgs(sharding=whole), plain)
        aimed = reader.restore(item, restore_args=kinds)
        results.append([told(plain), told(aimed)])
    Path(sys.argv[2]).write_text(json.dumps(results))


main()
