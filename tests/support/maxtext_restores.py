"""MaxText's own restore with what ckpttools gives it, on four simulated devices; needs MaxText 0.2.5.

python -m support.maxtext_restores HUGGING_FACE_DIRECTORY RESULTS.json
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

SETTINGS = {
    "run_name": "restores",
    "base_output_directory": tempfile.gettempdir(),
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "override_model_config": True,
    "scan_layers": True,
    "attention": "dot_product",
    "dtype": "float32",
    "weight_dtype": "float32",
    "log_config": False,
    "dataset_type": "synthetic",
    "model_name": "llama3.1-8b",
    "ici_fsdp_parallelism": 2,
    "ici_tensor_parallelism": 2,
}
SIZES = {
    "base_emb_dim": "hidden_size",
    "base_num_query_heads": "num_attention_heads",
    "base_num_kv_heads": "num_key_value_heads",
    "base_mlp_dim": "intermediate_size",
    "base_num_decoder_layers": "num_hidden_layers",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
}


def main(source: str, declared: str) -> None:
    os.environ.update(
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
        JAX_PLATFORMS="cpu",
        DECOUPLE_GCLOUD="TRUE",
        CKPTTOOLS_MODEL=source,
    )
    import jax
    import maxtext
    from flax import nnx
    from maxtext.common import checkpointing
    from maxtext.configs import pyconfig
    from maxtext.utils import maxtext_utils, model_creation_utils

    import ckpttools

    model = json.loads((Path(source) / "config.json").read_text())
    settings = {**SETTINGS, **{name: model[field] for name, field in SIZES.items()}}
    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    lines = [
        f"{name}={json.dumps(item) if isinstance(item, bool) else item}" for name, item in settings.items()
    ]
    config = pyconfig.initialize(["restores", str(base), *lines])
    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    with mesh:
        _, abstract = model_creation_utils.create_nnx_abstract_model(config, mesh)

    def restored(state: nnx.State, parameters: str, everything: str, **how: Any) -> Any:
        with mesh:
            return checkpointing.load_state_if_possible(
                None, None, parameters, everything, 8, state, maxtext_config=config, **how
            )

    ckpttools.use_in_maxtext()
    expected = nnx.state(abstract)
    _, weights = restored(expected, source, "", source_checkpoint_layout="safetensors_dynamic")
    state = nnx.State({"model": nnx.state(abstract)})
    how = {"source_checkpoint_layout": "safetensors", "checkpoint_conversion_fn": "ckpttools.conversion_fn"}
    full, _ = restored(state, "", source, **how)
    rules = ckpttools.load(source, to="maxtext", dtype="float32", rules="maxtext", mesh=mesh)
    Path(declared).write_text(
        json.dumps(
            {
                "dynamic": described(weights, nnx),
                "function": described(full["items"]["model"], nnx),
                "rules": {"/".join(path): item for path, item in walked(rules["params"]["params"])},
                "asked": {
                    "/".join(map(str, path)): str(leaf.get_value().sharding.spec)
                    for path, leaf in nnx.to_flat_state(nnx.state(abstract, nnx.Param))
                },
            }
        )
    )


def described(state: Any, nnx: Any) -> dict[str, Any]:
    return {
        "/".join(map(str, path)): described_array(leaf.get_value())
        for path, leaf in nnx.to_flat_state(state)
        if isinstance(leaf, nnx.Param)
    }


def walked(node: Any, path: tuple[str, ...] = ()) -> Any:
    if not isinstance(node, dict):
        yield path, described_array(node)
        return
    for key, item in node.items():
        yield from walked(item, (*path, key))


def described_array(array: Any) -> dict[str, Any]:
    import hashlib

    import numpy as np

    values = np.ascontiguousarray(np.asarray(array).astype(np.float32))
    return {
        "values": hashlib.sha256(values.tobytes()).hexdigest(),
        "dtype": str(array.dtype),
        "spec": str(array.sharding.spec),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
