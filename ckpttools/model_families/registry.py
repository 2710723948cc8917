"""Find the family of a model among the modules of this package and the entry points of plug-ins."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import ckpttools.model_families as package
from ckpttools.core.details import log_detail
from ckpttools.core.errors import ConfigError, UnknownNameError, did_you_mean
from ckpttools.core.message_terms import action, option
from ckpttools.core.plugins import entry_points_of, load_group
from ckpttools.model_families.family import Family

_GROUP = "ckpttools.families"
SUFFIXES = (".toml", ".py")
"""Suffixes of files that describe a family."""


@cache
def families() -> Mapping[str, Family]:
    """Return all families by name, sorted; a plug-in precedes a built-in family of the same name."""
    return dict(sorted({**_built_in_families(), **load_group(_GROUP, Family)}.items()))


def families_of_type(model_type: object) -> tuple[Family, ...]:
    """Return the families with a `model_type`, by name.

    Loading all built-in families takes 50 ms, so the one whose module is named after the model type is tried
    first; it refers to the other families of the same type.
    """
    family = _namesake(model_type) if isinstance(model_type, str) else None
    if family is None or entry_points_of(_GROUP):
        known = families().values()
    else:
        known = {family.name: family, **{name: family_named(name) for name in family.others}}.values()
    return tuple(
        sorted((item for item in known if model_type in item.model_types), key=lambda item: item.name)
    )


def _namesake(model_type: str) -> Family | None:
    """Return the built-in family whose module has the name of a model type, such as `gemma3_text`."""
    names = [name for name in _modules() if model_type.startswith(name)]
    for name in sorted(names, key=lambda name: -len(name)):
        family = _module_family(name)
        if family is not None and model_type in family.model_types:
            return family
    return None


@cache
def _modules() -> tuple[str, ...]:
    return tuple(module.name for module in iter_modules(package.__path__))


def _module_family(name: str) -> Family | None:
    """Return the `FAMILY` of a module in this package; None if it does not define one."""
    family = getattr(import_module(f"{package.__name__}.{name}"), "FAMILY", None)
    return family if isinstance(family, Family) else None


@cache
def _built_in_families() -> Mapping[str, Family]:
    """Return the families of this package, one for each module with a `FAMILY`."""
    return {family.name: family for family in map(_module_family, _modules()) if family is not None}


def names_a_file(text: str) -> bool:
    """Return whether the user's text refers to a file rather than to the name of a family."""
    return text.endswith(SUFFIXES) or "/" in text


def family_called(text: str) -> Family:
    """Return the family that the user names or describes in a file.

    Raises:
        CheckpointError: See `family_named` and `family_from_file`.
    """
    from ckpttools.model_families.file import family_from_file

    return family_from_file(Path(text)) if names_a_file(text) else family_named(text)


def family_named(name: str) -> Family:
    """Return the family with this name.

    Raises:
        UnknownNameError: There is no such family. The message lists the known families.
    """
    family = _module_family(name.replace("-", "_")) if name.replace("-", "_") in _modules() else None
    if family is not None and family.name == name:
        return family
    known = _built_in_families() if name in _built_in_families() else families()
    if name in known:
        return known[name]
    raise UnknownNameError(
        f"unknown family {name!r}",
        expected="one of " + ", ".join(families()),
        hint=_suffix_hint(name)
        or _families_of_model(name)
        or _unsupported_error(name)
        or did_you_mean(name, families())
        or _fallback_error(),
    )


def _suffix_hint(name: str) -> str | None:
    """Return the suffixes of family files if the name is that of a file with another suffix."""
    return f"the name of a family file ends in {' or '.join(SUFFIXES)}" if Path(name).is_file() else None


def _families_of_model(name: str) -> str | None:
    """Describe which families have a model or `model_type` with this name, such as Kimi-K2, if any."""
    word = _letters(name)
    matches = [
        family.name
        for family in families().values()
        if word in map(_letters, (*family.model_types, *family.models))
    ]
    return f"{name} belongs to the family {' or '.join(matches)}" if matches else None


def _letters(name: str) -> str:
    """Return the letters, digits and points of a name, in lower case."""
    return "".join(item for item in name.lower() if item.isalnum() or item == ".")


def family_of(config: Mapping[str, Any], location: str) -> Family:
    """Return the family with the `model_type` of a configuration.

    Raises:
        ConfigError: The configuration does not state a `model_type`, or states an unknown one. The message
            lists the known types.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError(
            "the configuration does not state a model type",
            location=location,
            got=f"model_type {model_type!r}",
            expected="a string such as " + ", ".join(sorted(_families_by_model_type())),
            hint=f"name the family with {option('family')}",
        )
    # Loading all built-in families takes 50 ms, and searching for plug-ins takes 30 ms; most models need
    # neither.
    family = _namesake(model_type) or _index_by_type(_built_in_families()).get(model_type)
    family = family or _families_by_model_type().get(model_type)
    if family is not None:
        other = (name for name, rule in family.others.items() if rule.read(config, location).value)
        family = next(map(family_named, other), family)
        log_detail("model_type %s in %s: family %s", model_type, location, family.name)
        return family
    if (reason := _unsupported_error(model_type)) is not None:
        raise ConfigError(
            f"no family has model_type {model_type!r}",
            location=location,
            got=reason,
            expected=f"a model of one of the families: {action('families')}",
            hint=f"your own family goes into a file: {_file()}"
            if model_type in MAXTEXT_ONLY_MODELS
            else "no other family fits, and MaxText cannot run it",
        )
    raise ConfigError(
        f"no family has model_type {model_type!r}",
        location=location,
        expected="one of " + ", ".join(sorted(_families_by_model_type())),
        # Similar names are not suggested, because the next version of a model usually has different arrays.
        hint=f"{action('inspect')} shows which family's names the arrays have, if any; "
        f"{option('family', 'NAME')} uses its rows. {_fallback_error()}",
    )


def _unsupported_error(model_type: str) -> str | None:
    """Return why no family supports a model type; None if the type is unknown."""
    if model_type in MAXTEXT_ONLY_MODELS:
        return f"MaxText 0.2.5 supports it, but ckpttools does not: {MAXTEXT_ONLY_MODELS[model_type]}"
    return UNFIT.get(model_type)


def _file() -> str:
    return option("family", "FILE.toml")


def _fallback_error() -> str:
    return f"{action('families')} lists all families; describe your own in a file: {_file()}"


def _families_by_model_type() -> dict[str, Family]:
    return _index_by_type(families())


def _index_by_type(known: Mapping[str, Family]) -> dict[str, Family]:
    # If a family passes such models on to another family, the other family comes after it.
    handed_on = {name for family in known.values() for name in family.others}
    ordered = sorted(known.values(), key=lambda family: family.name not in handed_on)
    return {name: family for family in ordered for name in family.model_types}


# Model types that no family supports, with the reasons.
#
# Compared with the decoders of MaxText 0.2.5 and the models of transformers 5.
#
# MaxText's own models, which have no weights on the Hub and no class in transformers.
MAXTEXT_ONLY_MODELS: Mapping[str, str] = {
    "envy": "its weights are trained with MaxText, and their names on the Hub are unknown",
    "gpt3": "MaxText has it as a benchmark, and no weights are published",
    "weaver": "its weights have special names, and none are published",
}
_DENSE_3_5 = "MaxText 0.2.5's qwen3_5 decoder has experts in every layer, and this model has none"
_QWEN2_TEXT_REASON = "its text model is Qwen 2, but MaxText 0.2.5 does not have its towers"
_FACTORS = (
    "it scales embeddings, residuals and scores by additional factors, which MaxText 0.2.5 does not support"
)
_PIXTRAL = "its text model is Mistral, but MaxText 0.2.5 does not have Pixtral's tower"
# Models that resemble a family by name or shape.
UNFIT: Mapping[str, str] = {
    "cohere": "its layers run attention and MLP in parallel, which no decoder of MaxText 0.2.5 does",
    "cohere2": "its layers run attention and MLP in parallel, which no decoder of MaxText 0.2.5 does",
    "gemma3n": "MaxText 0.2.5 has no alternating updates (AltUp) and no low-rank branches (LAuReL)",
    "granite": _FACTORS,
    "granitemoe": _FACTORS,
    "kimi_linear": "MaxText 0.2.5 has no linear attention with a gate for each channel (KDA)",
    "mistral3": _PIXTRAL,
    "pixtral": _PIXTRAL,
    "mllama": "MaxText 0.2.5 has no cross-attention to images (Llama 3.2 Vision)",
    "olmo": "its norms have no weights; MaxText 0.2.5 only has OLMo 2 and 3",
    "olmoe": "MaxText 0.2.5's OLMo decoder has no experts",
    "qwen2_5_omni": _QWEN2_TEXT_REASON,
    "qwen2_5_vl": _QWEN2_TEXT_REASON,
    "qwen2_audio": _QWEN2_TEXT_REASON,
    "qwen2_vl": _QWEN2_TEXT_REASON,
    "qwen2_moe": "MaxText 0.2.5 has no decoder with both Qwen 2's attention and experts",
    "qwen3_5": _DENSE_3_5,
    "qwen3_5_text": _DENSE_3_5,
    "smollm3": "some of its layers have no rotary embedding, which MaxText 0.2.5 only supports in Llama 4",
}
