"""Options that identify the model of a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from shlex import quote

from ckpttools.core.argument_checks import validate_fields
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import ConfigError, UsageError
from ckpttools.core.message_terms import action, option
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.mapping.flags import Flag
from ckpttools.maxtext.tied_embeddings import TIED_MODES
from ckpttools.model_families.family import Family
from ckpttools.model_families.registry import family_called, family_of
from ckpttools.stores.location import Location
from ckpttools.stores.registry import parse

ROPE_LAYOUTS = ("halves", "interleaved")
_MODEL_CONFIG_PLACEHOLDER = f"HF_DIR/{CONFIG}"


@validate_fields
@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The model options that the user set.

    Attributes:
        family: The name of the family whose rows are used, or a file that describes one; None follows
            `model_type`.
        rope_layout: "halves" or "interleaved"; None follows the configuration.
        tied: How to handle the output head: "keep" follows the existing arrays, "drop" leaves it out,
            "materialize" creates it from the embedding; None follows the configuration.
    """

    family: str | None = None
    rope_layout: str | None = None
    tied: str | None = None

    def __post_init__(self) -> None:
        check_choice("RoPE layout", self.rope_layout, ROPE_LAYOUTS)
        check_choice("handling of tied embeddings", self.tied, TIED_MODES)


def check_choice(subject: str, value: str | None, choices: Collection[str]) -> None:
    """Raise UsageError if a value is not among the choices; None is always allowed."""
    if value is not None and value not in choices:
        raise UsageError(f"unknown {subject} {value!r}", expected="one of " + ", ".join(choices))


def family_for(config: Mapping[str, object] | None, options: ModelOptions, location: str) -> Family:
    """Return the family that the user names, or that of the configuration's `model_type`.

    Raises:
        ConfigError: The configuration is missing or does not state a type, or no family has its type.
        UnknownNameError: There is no family with this name.
        CheckpointError: The user's file does not describe a family.
    """
    if options.family is not None:
        return family_called(options.family)
    return family_of(require_config(config, location), CONFIG)


def require_config(
    config: Mapping[str, object] | None, location: str, hint: str | None = None
) -> Mapping[str, object]:
    """Return `config`, or raise an error if it is None.

    Args:
        config: The configuration of the model, if known.
        location: The location of the weights.
        hint: The hint of the error; None for a hint on how to add the configuration.

    Raises:
        ConfigError: The configuration is None.
    """
    if config is None:
        raise ConfigError(
            "config.json does not exist next to the weights",
            location=location,
            expected="the model's config.json, which gives its family and sizes",
            hint=hint or config_hint(location),
        )
    return config


def config_hint(location: str) -> str:
    """Return a hint on how to put a model's configuration next to its weights."""
    if not location:
        return "copy it there from the source of the weights"
    converted = action("convert", location, "MODEL", format="safetensors")
    copy_hint = f"{converted} and `cp {_MODEL_CONFIG_PLACEHOLDER} MODEL`, and continue with MODEL"
    copy = config_copy_command(parse(location))
    if copy is None:
        return copy_hint
    return f"`{copy}`, from the trained model; if that location is read-only, {copy_hint}"


def config_copy_command(location: Location) -> str | None:
    """Return the command that copies a configuration next to weights; None for remote stores."""
    if location.store.scheme != "file":
        return None
    return f"cp {_MODEL_CONFIG_PLACEHOLDER} {quote(str(location.folder()))}"


def rope_flags(family: Family, options: ModelOptions) -> dict[str, Flag]:
    """Return the flags that the user sets.

    Raises:
        UsageError: The family does not support this choice.
    """
    if options.rope_layout is None:
        return {}
    expected = options.rope_layout == "interleaved"
    if "interleaved" in family.flags:
        return {"interleaved": Flag(expected, option("rope_layout", options.rope_layout))}
    if expected:
        raise UsageError(f"family {family.name} has no interleaved RoPE layout in MaxText")
    return {}
