"""What was learned beside a model and lies without it, such as a LoRA: told to be that."""

from __future__ import annotations

from pathlib import Path

from ckpttools.array.tree import Tree
from ckpttools.core.errors import CheckpointError, FormatError
from ckpttools.formats.json_file import read_json

ADAPTER = "adapter_config.json"
MERGING = "PeftModel.from_pretrained(BASE, ADAPTER).merge_and_unload().save_pretrained(MODEL)"
MERGE = (
    f"merge it into its base model first, in Python: {MERGING}; ckpt inspect, diff and hash take it as it is"
)


def refuse_adapter(tree: Tree) -> None:
    """Raises FormatError if a tree is what was learned beside a model, such as a LoRA, without the model."""
    place = Path(tree.metadata.place)
    folder = place if place.is_dir() else place.parent
    if (
        tree.metadata.format == "safetensors"
        and tree.metadata.config is None
        and (folder / ADAPTER).is_file()
    ):
        raise FormatError(
            f"this is {adapter_in(folder)}, not a whole model",
            place=place,
            wanted="a whole model",
            hint=MERGE,
        )


def adapter_in(folder: Path) -> str:
    """What an adapter's configuration says of it: `a LoRA adapter of Qwen/Qwen3-0.6B`."""
    try:
        said = read_json(folder / ADAPTER)
    except CheckpointError:
        said = {}
    base, kind = said.get("base_model_name_or_path"), said.get("peft_type", "")
    name = "LoRA adapter" if kind in ("", "LORA") else f"PEFT adapter ({kind})"
    return f"a {name} of {base}" if base else f"a {name}"
