"""Refuse unsuitable sources of a conversion with an error that names the right command."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from ckpttools.array.tree import Path, Tree, dotted
from ckpttools.core.errors import CheckpointError, ConfigError, FormatError
from ckpttools.core.message_terms import action
from ckpttools.core.text import array_count, first_names
from ckpttools.formats.adapters import ADAPTER, refuse_adapter, wrapped_weights
from ckpttools.formats.base import SIDECARS
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.maxtext.versions import DECODER, EMBEDDING, FACTOR
from ckpttools.maxtext.view import view_of
from ckpttools.model_families.registry import family_of
from ckpttools.stores.registry import parse

_HUGGING_FACE = "embed_tokens.weight"
# In any library, names of low-rank factors contain this; also the patterns for such names.
_FACTORS = ("*lora_a*", "*lora_b*")
# The directory in which verl saves the adapter separately.
_ADAPTER_DIRECTORY = "lora_adapter"


def refuse_maxtext(tree: Tree) -> None:
    """Raise FormatError if a tree is not a complete Hugging Face model."""
    _refuse_factors(tree)
    _refuse_part(tree)
    view = view_of(tree)
    if _has_embedding(tree, dotted(EMBEDDING)) and not _has_embedding(tree, _HUGGING_FACE):
        like = None if tree.metadata.config else "HF_DIR"
        kind = f"{view.kind}, {view.flavor.name or 'no'} flavor" if view.kind else None
        instead = action("maxtext_to_hf", tree.metadata.location, "DST", like=like)
        raise _wrong_direction_error(tree, "MaxText", kind, instead, "Hugging Face", "orbax")
    if tree.metadata.format == "orbax" and tree.metadata.config is None:
        raise _missing_config_error(tree)


def refuse_hugging_face(tree: Tree) -> None:
    """Raise FormatError if a tree is (part of) a Hugging Face model instead of a MaxText model."""
    _refuse_factors(tree)
    _refuse_part(tree)
    if _has_embedding(tree, dotted(EMBEDDING)) or view_of(tree).is_maxtext:
        return
    config = tree.metadata.config if tree.metadata.format == "safetensors" else None
    if config is not None and not _has_known_family(config):
        raise FormatError(
            "this is already a Hugging Face checkpoint, and its model cannot be converted",
            location=tree.metadata.location,
            got=f"model_type {config.get('model_type')!r}",
            hint=f"{_rewrite_command(tree, 'safetensors')} writes it with its present names",
        )
    if config is not None or _has_embedding(tree, _HUGGING_FACE):
        raise _wrong_direction_error(
            tree,
            "Hugging Face",
            None,
            action("hf_to_maxtext", tree.metadata.location, "DST"),
            "MaxText",
            "safetensors",
        )


def name_style(paths: Iterable[Path]) -> Literal["maxtext", "hf"] | None:
    """Return the naming scheme of the paths; None if it is neither MaxText's nor Hugging Face's."""
    for path in paths:
        keys = list(map(str, path))
        if {DECODER, EMBEDDING[0]} & set(keys):
            return "maxtext"
        if len(keys) == 1 and "." in keys[0] and keys[0].endswith((".weight", ".bias")):
            return "hf"
    return None


def _has_embedding(tree: Tree, embedding: str) -> bool:
    """Return whether a model, also within a composite one, has an embedding of this name."""
    return any(f".{dotted(path)}".endswith(f".{embedding}") for path in view_of(tree).parameters)


def _has_known_family(config: Mapping[str, object]) -> bool:
    try:
        family_of(config, CONFIG)
    except CheckpointError:
        return False
    return True


def refuse_adapters(tree: Tree) -> None:
    """Raise FormatError if a tree is an adapter without its model."""
    refuse_adapter(tree)
    factors, others = _factors(tree)
    if factors and not others:
        location = tree.metadata.location
        raise FormatError(
            "this is a LoRA adapter, without the parameters of its model",
            location=tree.metadata.location,
            got=f"{array_count(factors)}, such as {factors[0]}",
            expected="a complete model with merged adapters",
            hint=f"{action('merge_adapter', 'BASE', 'MODEL', adapter=location)} merges it, "
            f"{action('adapter_to_peft', location, 'DST', base='BASE')} converts it to PEFT; MaxText "
            "loads it next to its model (lora.lora_restore_path)",
        )


def _refuse_factors(tree: Tree) -> None:
    """Raise an error if a tree has adapter factors, with or without a model."""
    refuse_adapters(tree)
    factors, _ = _factors(tree)
    if factors:
        raise FormatError(
            "the checkpoint contains LoRA adapters that are not merged into the parameters",
            location=tree.metadata.location,
            got=f"{array_count(factors)}, such as {factors[0]}",
            expected="a complete model with merged adapters",
            hint=_merge_hint(tree),
        )


def _factors(tree: Tree) -> tuple[list[str], list[str]]:
    """Return the names of low-rank factors, and those of the other parameters."""
    names = [dotted(path) for path in view_of(tree).parameters]
    factors = [name for name in names if FACTOR in name.lower()]
    return factors, [name for name in names if FACTOR not in name.lower()]


def _merge_hint(tree: Tree) -> str:
    """Return the hint for adapters that are stored next to parameters."""
    adapter_directory = parse(tree.metadata.location) / _ADAPTER_DIRECTORY
    if (adapter_directory / ADAPTER).is_file():
        merging = action("merge_adapter", "BASE", "DST", adapter=str(adapter_directory))
        return f"the adapter is also stored separately: {merging}"
    if wrapped_weights(tree):
        return (
            "merge them in the training environment with PEFT's model.merge_and_unload(), and save the result"
        )
    leave = action("select", tree.metadata.location, "DST", drop=_FACTORS)
    return f"merge them in the training environment; {leave} leaves them out, and the fine-tuning with them"


def _refuse_part(tree: Tree) -> None:
    """Raise an error if a tree is a component of a diffusers pipeline."""
    config = tree.metadata.config or {}
    if "model_type" not in config and "_class_name" in config:
        raise FormatError(
            f"this is a component of a diffusers pipeline ({config['_class_name']}), not a language model",
            location=tree.metadata.location,
            expected=f"a model that {action('families')} lists",
            hint=f"{action('inspect')}, {action('diff')} and {action('hash')} accept it; "
            f"{_rewrite_command(tree, 'orbax')} writes it with its present names",
        )


def _missing_config_error(tree: Tree) -> CheckpointError:
    """Return the error for an Orbax checkpoint that is not MaxText's and has no configuration."""
    location = tree.metadata.location
    if _has_embedding(tree, _HUGGING_FACE):
        return ConfigError(
            f"this Orbax checkpoint does not contain a {CONFIG}",
            location=location,
            expected=f"the model's {CONFIG}, which gives its family and sizes",
            hint=f"copy it from the source of the weights to {parse(location) / SIDECARS}",
        )
    return FormatError(
        "this Orbax checkpoint has neither Hugging Face nor MaxText names",
        location=location,
        got=first_names([dotted(path) for path in tree.arrays], 3),
        expected=f"the names of a model that {action('families')} lists",
        hint=f"{action('inspect', tree.metadata.location)} lists all names; "
        f"{_rewrite_command(tree, 'safetensors')} writes it with its present names",
    )


def _rewrite_command(tree: Tree, format: str) -> str:
    return action("convert", tree.metadata.location, "DST", format=format)


def _wrong_direction_error(
    tree: Tree, this: str, kind: str | None, instead: str, other: str, rewrite: str
) -> FormatError:
    return FormatError(
        f"this is already a {this} checkpoint",
        location=tree.metadata.location,
        got=kind,
        hint=f"{instead} converts it to a {other} checkpoint; "
        f"{_rewrite_command(tree, rewrite)} writes it with its present names",
    )


def conversion_of(tree: Tree) -> Literal["hf_to_maxtext", "maxtext_to_hf"] | None:
    """Return the name of the function that converts a model; None if this cannot be determined.

    Raises:
        FormatError: The tree is an adapter, contains unmerged adapters, or is a component of a pipeline.
    """
    _refuse_factors(tree)
    _refuse_part(tree)
    is_maxtext = _has_embedding(tree, dotted(EMBEDDING)) or view_of(tree).is_maxtext
    config = tree.metadata.config
    is_hub = _has_embedding(tree, _HUGGING_FACE) or (
        not is_maxtext and config is not None and _has_known_family(config)
    )
    if is_maxtext == is_hub:
        return None
    return "maxtext_to_hf" if is_maxtext else "hf_to_maxtext"
