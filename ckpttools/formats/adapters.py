"""Adapters, such as LoRA, that are saved without their base model: recognized, and refused as models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpttools.array.tree import Tree, dotted
from ckpttools.core.errors import CheckpointError, FormatError
from ckpttools.core.message_terms import action, call
from ckpttools.formats.json_file import read_json
from ckpttools.stores.location import Location
from ckpttools.stores.registry import parse

ADAPTER = "adapter_config.json"
BASE_NAME = "base_model_name_or_path"
"""Metadata key that names the base model of an adapter."""
WEIGHTS_STEM = "adapter_model"
"""PEFT's name for the weights file, without the suffix."""
# Prefixes that PEFT adds to all names, and to the names of low-rank factors.
PREFIX, _PART = "base_model.model.", ".lora_"
# Name components that PEFT uses for a wrapped module's weight and for the factors of a linear module.
_WRAPPED, _FACTOR = ".base_layer.", ".lora_A."
# Modules whose base weights PEFT saves with an adapter.
_EXTRA_SAVED_MODULES = ("embed_tokens", "lm_head")
_FORMATS = ("safetensors", "torch")
LORA = "LORA"
MERGE_WITH_PEFT = "in Python: PeftModel.from_pretrained(BASE, ADAPTER).merge_and_unload()"
_READ_COMMANDS_TEXT = f"{action('inspect')}, {action('diff')} and {action('hash')} read it as is"


def refuse_adapter(tree: Tree) -> None:
    """Raise FormatError if a tree is an adapter, such as a LoRA, without its base model."""
    location = parse(tree.metadata.location)
    folder = location.folder()
    is_separate = tree.metadata.config is None and (folder / ADAPTER).is_file()
    if tree.metadata.format in _FORMATS and (is_separate or is_adapter(tree)):
        raise FormatError(
            f"this is {adapter_in(folder)}, not a complete model",
            location=location,
            expected="a complete model",
            hint=merge_hint(location),
        )


def is_adapter(tree: Tree) -> bool:
    """Return whether all array names are names that PEFT adds, regardless of other files.

    While PEFT trains a complete model, some of its names are such names, too: see `wrapped_weights`.
    """
    names = list(map(dotted, tree.arrays))
    are_peft = bool(names) and all(name.startswith(PREFIX) or _PART in name for name in names)
    return are_peft and not wrapped_weights(tree)


def is_peft_name(name: str, modules: tuple[str, ...] | None) -> bool:
    """Return whether PEFT loads an array of an adapter under this name.

    Args:
        name: The dotted name.
        modules: The names of modules, or ends of their names, that have factors; None if any module may.
    """
    module, is_factor, _ = name.partition(_PART)
    ends = None if modules is None or not is_factor else tuple(f".{item}" for item in modules)
    return name.startswith(PREFIX) and (ends is None or module.endswith(ends))


def has_adapter(tree: Tree) -> bool:
    """Return whether a tree is an adapter, or a model with an unmerged PEFT adapter."""
    return is_adapter(tree) or bool(wrapped_weights(tree))


def wrapped_weights(tree: Tree) -> list[str]:
    """Return the names of weights that PEFT wraps, in a model that also has an adapter's factors.

    PEFT saves embedding tables and the head with an adapter if they have factors, which does not make the
    adapter a model. If two parameters of a module have factors, the wrapper of the second contains those of
    the first.
    """
    names = list(map(dotted, tree.arrays))
    modules = {name.partition(_FACTOR)[0] for name in names if _FACTOR in name}
    wrapped = {name: name.partition(_WRAPPED)[0] for name in names if _WRAPPED in name and _PART not in name}
    result = {name: module for name, module in wrapped.items() if module in modules}
    return (
        [*result]
        if any(module.rpartition(".")[2] not in _EXTRA_SAVED_MODULES for module in result.values())
        else []
    )


def is_adapter_alone(folder: Location) -> bool:
    """Return whether a directory has an adapter configuration and no weights besides the adapter's."""
    if not (folder / ADAPTER).is_file():
        return False
    weights = (entry.name for entry in folder.entries() if entry.name.endswith((".safetensors", ".bin")))
    return all(name.startswith(WEIGHTS_STEM) for name in weights)


def adapter_in(folder: Location) -> str:
    """Describe an adapter from its configuration, such as `a LoRA adapter of Qwen/Qwen3-0.6B`."""
    declared = _read_config(folder)
    base, kind = declared.get(BASE_NAME), _kind(declared)
    name = "LoRA adapter" if kind == LORA else f"PEFT adapter ({kind})"
    return f"a {name} of {base}" if base else f"a {name}"


def _kind(declared: Mapping[str, Any]) -> str:
    """Return the kind of PEFT adapter that a configuration declares; LoRA by default."""
    return str(declared.get("peft_type") or LORA)


def is_lora(adapter: Location) -> bool:
    """Return whether the adapter's configuration declares a kind that can be read."""
    return _kind(_read_config(adapter.folder())) == LORA


def merge_command(adapter: Location) -> str | None:
    """Return the command that merges an adapter into its base model; None if only PEFT can."""
    return call("merge_adapter", "BASE", "MODEL", adapter=str(adapter)) if is_lora(adapter) else None


def merge_hint(adapter: Location) -> str:
    """Return a hint for an adapter that was passed where a complete model is expected."""
    command = merge_command(adapter)
    if command is None:
        return f"merge it into its base model first, {MERGE_WITH_PEFT}; {_READ_COMMANDS_TEXT}"
    is_separate = f"{action('adapter_to_maxtext')} converts it alone; {_READ_COMMANDS_TEXT}"
    return f"merge it into its base model first: {command}; {is_separate}"


def _read_config(folder: Location) -> Mapping[str, Any]:
    try:
        return read_json(folder / ADAPTER)
    except CheckpointError:
        return {}
