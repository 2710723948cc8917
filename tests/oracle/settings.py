"""What MaxText is told: the sizes of a model, and how the oracle wants it computed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oracle.sizes import sizes

# Everything in float32 on one CPU, with nothing that is random or for speed.
COMPUTED = {
    "run_name": "run",
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "override_model_config": True,
    "enable_checkpointing": True,
    "async_checkpointing": False,
    "attention": "dot_product",
    "per_device_batch_size": 1,
    "max_target_length": 32,
    "max_prefill_predict_length": 16,
    "dtype": "float32",
    "weight_dtype": "float32",
    "matmul_precision": "highest",
    "float32_qk_product": True,
    "float32_logits": True,
    "enable_dropout": False,
    "remat_policy": "full",
    "log_config": False,
    "dataset_type": "synthetic",
    # Every expert takes all of its tokens.
    "sparse_matmul": False,
    "megablox": False,
    "capacity_factor": -1.0,
}
TRAINED = {
    "learning_rate": 1e-3,
    "enable_goodput_recording": False,
    "save_config_to_gcs": False,
    "gcs_metrics": False,
    "enable_tensorboard": False,
}


def of(model: Path, scanned: bool, directory: Path, **more: Any) -> list[str]:
    """`key=value` for a model, by its config.json."""
    those = sizes(json.loads((model / "config.json").read_bytes()))
    places = {"base_output_directory": directory, "jax_cache_dir": model.parents[1] / "compiled"}
    chosen = {"scan_layers": scanned, **places}
    return [f"{key}={_text(value)}" for key, value in {**COMPUTED, **chosen, **those, **more}.items()]


def _text(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, bool | list | tuple | Mapping) else value
