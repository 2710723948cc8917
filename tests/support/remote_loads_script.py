"""Loads checkpoints of stores behind a network onto eight devices; run by test_remote_loads.py.

python -m support.remote_loads_script JOBS RESULTS, of a JSON list of [place, local place, options of load].
Says for each the bytes needed, planned and fetched, and which arrays are not those of the local place.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

import ckpttools
from ckpttools.stores import block_cache, parse
from ckpttools.stores.registry import count_traffic


def bits(array: Any) -> Any:
    """Of each shard; numbers are what they are."""
    if not isinstance(array, jax.Array):
        return array
    return [np.ascontiguousarray(np.asarray(shard.data)).tobytes() for shard in array.addressable_shards]


def main(asked: str, declared: str) -> None:
    # Else what is read of a header brings small files along, whole.
    block_cache.SIZE = 1
    results = []
    for location, local, options in json.loads(Path(asked).read_text()):
        prepared = ckpttools.load.plan(location, **options)
        with count_traffic() as since:
            loaded = prepared.run()
            fetched = {address: item.nbytes for address, item in since().items()}
        expected = ckpttools.load(local, **options)
        both = jax.tree.map(lambda one, other: bits(one) == bits(other), loaded, expected)
        plan = prepared.plan
        results.append(
            {
                "needed": plan.bytes_needed,
                "planned": plan.bytes_read,
                "fetched": fetched,
                "differing": [jax.tree_util.keystr(k) for k, v in jax.tree.leaves_with_path(both) if not v],
                "scheme": parse(location).store.scheme,
            }
        )
    Path(declared).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
