"""Adapters, such as a LoRA, without their base model: recognised, and refused where a model is wanted."""

from __future__ import annotations

from ckpttools.array.tree import Tree, dotted
from ckpttools.core.errors import CheckpointError, FormatError
from ckpttools.formats.json_file import read_json
from ckpttools.stores.place import Place
from ckpttools.stores.registry import parse

ADAPTER = "adapter_config.json"
BASE_NAME = "base_model_name_or_path"
"""Where it names the model that an adapter is of."""
WEIGHTS_STEM = "adapter_model"
"""What PEFT calls the file of weights, before its ending."""
# What PEFT puts before all names, and in those of low-rank factors.
PREFIX, _PART = "base_model.model.", ".lora_"
_FORMATS = ("safetensors", "torch")
MERGING = "ckpt adapter merge BASE ADAPTER MODEL"
MERGE = f"merge it into its base model first: {MERGING}; ckpt inspect, diff and hash take it as it is"


def refuse_adapter(tree: Tree) -> None:
    """Raises FormatError if a tree is an adapter, such as a LoRA, without its base model."""
    place = parse(tree.metadata.place)
    folder = place if place.is_dir() else place.parent
    alone = tree.metadata.config is None and (folder / ADAPTER).is_file()
    if tree.metadata.format in _FORMATS and (alone or is_adapter(tree)):
        raise FormatError(
            f"this is {adapter_in(folder)}, not a whole model",
            place=place,
            wanted="a whole model",
            hint=MERGE,
        )


def is_adapter(tree: Tree) -> bool:
    """Whether all names are those that PEFT gives to what it adds, whatever lies beside the file."""
    names = map(dotted, tree.arrays)
    return bool(tree.arrays) and all(name.startswith(PREFIX) or _PART in name for name in names)


def adapter_in(folder: Place) -> str:
    """What an adapter's configuration says of it: `a LoRA adapter of Qwen/Qwen3-0.6B`."""
    try:
        said = read_json(folder / ADAPTER)
    except CheckpointError:
        said = {}
    base, kind = said.get(BASE_NAME), said.get("peft_type", "")
    name = "LoRA adapter" if kind in ("", "LORA") else f"PEFT adapter ({kind})"
    return f"a {name} of {base}" if base else f"a {name}"
