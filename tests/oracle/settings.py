"""What MaxText is told: what `ckpt maxtext-config` says of a model, and how the oracle wants it computed."""

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
    """What the command says, as it is: nothing of the model is told to MaxText but this."""
    return tuple(ckpt("maxtext-config", model, "--scan" if scanned else "--no-scan").splitlines())


@cache
def said_of_text(checkpoint: Path, scanned: bool) -> tuple[str, ...]:
    """The same of a checkpoint, which has nothing of its model's towers, and of its layers in either form."""
    lines = ckpt("maxtext-config", checkpoint).splitlines()
    own = ("load_parameters_path=", "scan_layers=")
    return f"scan_layers={_text(scanned)}", *(each for each in lines if not each.startswith(own))


def of(model: Path, scanned: bool, directory: Path, text: Path | None = None, **more: Any) -> list[str]:
    """`key=value` for a model, by its config.json, or by a checkpoint that is its text alone."""
    told = said(model, scanned) if text is None else said_of_text(text, scanned)
    places = {"base_output_directory": directory, "jax_cache_dir": model.parents[1] / "compiled"}
    own = [f"{key}={_text(value)}" for key, value in {**COMPUTED, **places, **more}.items()]
    return [*told, *own]


def _text(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, bool | list | tuple | Mapping) else value
