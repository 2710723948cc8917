"""MaxText's settings: the output of `ckpt maxtext-config`, and those of the oracle's runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from oracle.commands import ckpt

# Everything in float32 on one CPU, with nothing that is random or for speed.
COMPUTED = {
    "run_name": "run",
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
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
    "use_multimodal": False,
    # Every expert takes all of its tokens.
    "sparse_matmul": False,
    "megablox": False,
    "capacity_factor": -1.0,
}
TRAINED = {
    "learning_rate": 1e-3,
    # Of all steps, those after the checkpoint among them: so the step is compiled once.
    "learning_rate_schedule_steps": 6,
    "enable_goodput_recording": False,
    "save_config_to_gcs": False,
    "gcs_metrics": False,
    "enable_tensorboard": False,
}


@cache
def said(model: Path, scanned: bool) -> tuple[str, ...]:
    """Return the output of the command, unchanged: MaxText gets no other settings of the model."""
    return tuple(ckpt("maxtext-config", model, "--scan" if scanned else "--no-scan").splitlines())


@cache
def said_of_text(checkpoint: Path, scanned: bool) -> tuple[str, ...]:
    """Return the settings of a checkpoint without towers, for either form of its layers."""
    lines = ckpt("maxtext-config", checkpoint).splitlines()
    own = ("load_parameters_path=", "scan_layers=")
    return f"scan_layers={_text(scanned)}", *(each for each in lines if not each.startswith(own))


def of(model: Path, scanned: bool, directory: Path, text: Path | None = None, **more: Any) -> list[str]:
    """Return `key=value` for a model, from its config.json or from a checkpoint of its text part."""
    told = said(model, scanned) if text is None else said_of_text(text, scanned)
    locations = {"base_output_directory": directory, "jax_cache_dir": model.parents[1] / "compiled"}
    own = [f"{key}={_text(value)}" for key, value in {**COMPUTED, **locations, **more}.items()]
    return [*told, *own]


def _text(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, bool | list | tuple | Mapping) else value
