"""Hugging Face weights into a MaxText run, called by MaxText itself: see docs/sharding.md."""

from __future__ import annotations

from typing import Any

from ckpttools.api.load import load
from ckpttools.core.errors import UsageError

_LOCATION = "maxtext.common.checkpointing"
_NAME = "load_safetensors_dynamic_state"


def use_in_maxtext() -> None:
    """Makes MaxText load `source_checkpoint_layout=safetensors_dynamic` with `ckpttools.load`.

    From then on in this process `load_parameters_path` may be what `ckpttools.load` opens: a directory, gs://,
    s3://, az://, https:// or hf://. Each weight goes from the file to the devices of the run's own mesh, in
    the run's layout and dtype, without the copies that MaxText makes of all of them on the way.

    Raises:
        UsageError: MaxText is not installed, or has no such way of loading (0.2.5 has).
    """
    from importlib import import_module

    try:
        checkpointing = import_module(_LOCATION)
        _ = getattr(checkpointing, _NAME)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            "this MaxText does not load weights in that way",
            got=error,
            expected=f"{_LOCATION}.{_NAME}, as in MaxText 0.2.5",
        ) from error
    setattr(checkpointing, _NAME, load_safetensors_dynamic_state)


def load_safetensors_dynamic_state(path: str, abstract_params: Any, maxtext_config: Any) -> tuple[None, Any]:
    """What MaxText 0.2.5's function of this name does, by `ckpttools.load`.

    Args:
        path: of a Hugging Face model, as `ckpttools.load` takes it.
        abstract_params: the weights that the run wants: an `nnx.State`, or nested dictionaries.
        maxtext_config: the run's configuration.

    Returns:
        None, and the weights below the key `params`.

    Raises:
        CheckpointError: as `ckpttools.load`.
    """
    loaded = load(
        path,
        like=abstract_params,
        to="maxtext",
        dtype="like",
        scan=maxtext_config.scan_layers,
        scan_axis=maxtext_config.param_scan_axis,
        single_replica=bool(getattr(maxtext_config, "enable_single_replica_ckpt_restoring", False)),
    )
    weights = loaded.to_pure_dict() if hasattr(loaded, "to_pure_dict") else loaded
    return None, weights if set(weights) == {"params"} else {"params": weights}
