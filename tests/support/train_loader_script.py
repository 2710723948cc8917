"""Loads training checkpoints and what transforms made of them as MaxText does; run by test_strip.py.

Reads a JSON list of [name, run directory, expected, cases]; writes name -> case -> "" or what went wrong.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from support import orbax_loader_script as loaders


def spelled(tree: Any) -> Any:
    """As the other script spells trees; typed keys by their data."""
    return loaders.spelled(jax.tree.map(_data, tree))


def _data(leaf: Any) -> Any:
    typed = isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if typed else leaf


def restore(run: Path, expected: Any) -> None:
    """Without a target, by two loaders; typed keys are those of one layer each."""
    for loader in (loaders.pytree, loaders.standard):
        tree = loader(run, None)
        assert spelled(tree) == expected
        key = tree["nnx_aux"]["model"]["decoder"]["layers_3"]["dropout"]["rngs"]["params"]["key"]
        assert jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
        assert key.shape == ()


def resume(run: Path, reference: Any) -> None:
    """The state into shards, as MaxText goes on with a run; random states are left to it."""
    expected = {key: below for key, below in reference.items() if key != "nnx_aux"}
    target = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            tuple(leaf["shape"]), jnp.dtype(leaf["dtype"]), sharding=loaders.first_axis(tuple(leaf["shape"]))
        ),
        expected,
        is_leaf=lambda node: isinstance(node, dict) and "sha256" in node,
    )
    assert spelled(loaders.manager_pytree(run, target)) == expected


CASES = loaders.cases() | {"restore": restore, "resume": resume}


def problem(case: str, run: str, expected: Any) -> str:
    try:
        CASES[case](Path(run), expected)
    except Exception:
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    jobs = json.loads(Path(sys.argv[1]).read_bytes())
    results = {
        name: {case: problem(case, run, expected) for case in cases} for name, run, expected, cases in jobs
    }
    Path(sys.argv[2]).write_text(json.dumps(results))
