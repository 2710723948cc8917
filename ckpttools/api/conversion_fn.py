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
    """A transform of a Hugging Face tree to MaxText's names, by its family's mapping.

    Attributes:
        config: the model's `config.json`.
        options: how to convert.
    """

    config: Mapping[str, Any]
    options: ToMaxText

    def __call__(self, tree: Tree) -> Transformed:
        """The parameters alone, as MaxText's Linen trees nest them; errors as `to_maxtext`."""
        named = tree.with_metadata(config=self.config, location="the loaded weights")
        built = to_maxtext(named, self.options)
        return Transformed(Tree(built.parameters), built.notes)


@validate_arguments
def family_conversion_fn(
    config: Mapping[str, Any] | LocationLike, options: ToMaxText | None = None
) -> Callable[[Any], Any]:
    """Return a function from a dict of Hugging Face arrays to MaxText's nested parameters.

    Name it in MaxText's configuration as `checkpoint_conversion_fn`, with
    `source_checkpoint_layout=safetensors`: MaxText then trains from Hugging Face files directly.

    Args:
        config: the model's `config.json`, its path, or the directory that holds it.
        options: how to convert; None for layers stacked on axis 1.

    Raises:
        ConfigError, CoverageError: when it is called, as `to_maxtext`.
    """
    declared = config if isinstance(config, Mapping) else _read(parse(config))
    return as_checkpoint_conversion_fn(FamilySpelling(declared, options or ToMaxText()))


def conversion_fn(weights: Any) -> Any:
    """Convert Hugging Face weights of the model in CKPTTOOLS_MODEL to MaxText's parameters.

    Which model it is, says the environment: CKPTTOOLS_MODEL is its `config.json`, or the directory with it.

    Args:
        weights: a dictionary of Hugging Face arrays.

    Returns:
        MaxText's nested parameters, layers stacked on axis 1.

    Raises:
        UsageError: the environment does not say which model it is.
        ConfigError, CoverageError: as `to_maxtext`.
    """
    model = os.environ.get(_MODEL)
    if not model:
        raise UsageError(
            f"{_MODEL} is not set in the environment",
            expected="the model's config.json, or the directory that has it",
            hint=f"export {_MODEL}=hf/llama",
        )
    return family_conversion_fn(model)(weights)


def _read(path: Location) -> Mapping[str, Any]:
    return read_json(path / CONFIG if path.is_dir() else path)


_LOCATION = "maxtext.common.checkpointing"
_NAME = "load_safetensors_dynamic_state"


def use_in_maxtext() -> None:
    """Make MaxText load `source_checkpoint_layout=safetensors_dynamic` with `ckpttools.load`.

    From then on in this process `load_parameters_path` may be what `ckpttools.load` opens: a directory,
    gs://,
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
    """Replace MaxText 0.2.5's function of this name by `ckpttools.load`.

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
