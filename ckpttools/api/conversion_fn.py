"""Hooks that convert Hugging Face weights while MaxText loads them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from ckpttools.api.load import load
from ckpttools.array.tree import Tree
from ckpttools.core.argument_checks import validate_arguments
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError
from ckpttools.formats.json_file import read_json
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.maxtext.conversion_options import ToMaxText
from ckpttools.maxtext.to_maxtext import to_maxtext
from ckpttools.stores.location import Location
from ckpttools.stores.registry import LocationLike, parse
from ckpttools.transforms.base import Transformed
from ckpttools.transforms.functions import as_checkpoint_conversion_fn

_MODEL = "CKPTTOOLS_MODEL"


@dataclass(frozen=True)
class FamilySpelling:
    """A transform from a Hugging Face tree to MaxText's names, by the mapping of its family.

    Attributes:
        config: The model's `config.json`.
        options: Conversion options.
    """

    config: Mapping[str, Any]
    options: ToMaxText

    def __call__(self, tree: Tree) -> Transformed:
        """Return the parameters, nested as in MaxText's Linen trees; raises the errors of `to_maxtext`."""
        named = tree.with_metadata(config=self.config, location="the loaded weights")
        result = to_maxtext(named, self.options)
        return Transformed(Tree(result.parameters), result.notes)


@validate_arguments
def family_conversion_fn(
    config: Mapping[str, Any] | LocationLike, options: ToMaxText | None = None
) -> Callable[[Any], Any]:
    """Return a function from a dict of Hugging Face arrays to MaxText's nested parameters.

    Set MaxText's `checkpoint_conversion_fn` to this function and `source_checkpoint_layout=safetensors`.
    MaxText then trains from Hugging Face files directly.

    Args:
        config: The model's `config.json`, its path, or its directory.
        options: Conversion options; None to stack layers on axis 1.

    Raises:
        ConfigError, CoverageError: Raised when the function is called; see `to_maxtext`.
    """
    declared = config if isinstance(config, Mapping) else _read(parse(config))
    return as_checkpoint_conversion_fn(FamilySpelling(declared, options or ToMaxText()))


def conversion_fn(weights: Any) -> Any:
    """Convert Hugging Face weights of the model in CKPTTOOLS_MODEL to MaxText's parameters.

    The environment variable CKPTTOOLS_MODEL is the path of the model's `config.json` or of its directory.

    Args:
        weights: Dictionary of Hugging Face arrays.

    Returns:
        MaxText's nested parameters, with layers stacked on axis 1.

    Raises:
        UsageError: CKPTTOOLS_MODEL is not set.
        ConfigError, CoverageError: See `to_maxtext`.
    """
    model = os.environ.get(_MODEL)
    if not model:
        raise UsageError(
            f"{_MODEL} is not set in the environment",
            expected="the model's config.json, or its directory",
            hint=f"export {_MODEL}=hf/llama",
        )
    return family_conversion_fn(model)(weights)


def _read(path: Location) -> Mapping[str, Any]:
    return read_json(path / CONFIG if path.is_dir() else path)


_LOCATION = "maxtext.common.checkpointing"
_NAME = "load_safetensors_dynamic_state"


def use_in_maxtext() -> None:
    """Make MaxText load `source_checkpoint_layout=safetensors_dynamic` with `ckpttools.load`.

    Afterwards, `load_parameters_path` in this process may be anything that `ckpttools.load` opens: a
    directory, gs://, s3://, az://, https:// or hf://. Each weight goes from the file to the devices of the
    run's mesh, in the run's layout and dtype, without the intermediate copies that MaxText makes of all
    weights.

    Raises:
        UsageError: MaxText is not installed, or its version does not have this loading function (0.2.5 does).
    """
    from importlib import import_module

    try:
        checkpointing = import_module(_LOCATION)
        _ = getattr(checkpointing, _NAME)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            "this version of MaxText does not support this way of loading weights",
            got=error,
            expected=f"{_LOCATION}.{_NAME}, as in MaxText 0.2.5",
        ) from error
    setattr(checkpointing, _NAME, load_safetensors_dynamic_state)


def load_safetensors_dynamic_state(path: str, abstract_params: Any, maxtext_config: Any) -> tuple[None, Any]:
    """Load parameters with `ckpttools.load` in place of MaxText 0.2.5's function of this name.

    Args:
        path: Location of a Hugging Face model, as for `ckpttools.load`.
        abstract_params: The weights that the run needs: an `nnx.State` or nested dictionaries.
        maxtext_config: The run's configuration.

    Returns:
        None, and the weights under the key `params`.

    Raises:
        CheckpointError: See `ckpttools.load`.
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
