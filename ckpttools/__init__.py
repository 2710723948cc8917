"""Convert, inspect and prove LLM checkpoints in the JAX world.

    import ckpttools

    tree = ckpttools.open("checkpoints/llama")              # nothing is read but headers
    conversion = ckpttools.plan_to_maxtext("hf/llama")      # everything is decided, nothing is written
    receipt = conversion.run("maxtext/llama")

Names are loaded when they are first used: importing the package costs next to nothing.
"""

from __future__ import annotations

# Not that of typing, whose import takes as long as all else before the command line can be stopped in order.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ckpttools.conversion_fn import family_conversion_fn as family_conversion_fn
    from ckpttools.convert import Conversion as Conversion
    from ckpttools.convert import Resources as Resources
    from ckpttools.convert import open_checkpoint as open
    from ckpttools.convert_any import plan_save as plan_save
    from ckpttools.convert_any import save as save
    from ckpttools.errors import CheckpointError as CheckpointError
    from ckpttools.hf_to_maxtext import ToMaxText as ToMaxText
    from ckpttools.hf_to_maxtext import plan_to_maxtext as plan_to_maxtext
    from ckpttools.ir.array import LazyArray as LazyArray
    from ckpttools.ir.tree import Tree as Tree
    from ckpttools.maxtext_to_hf import ToHuggingFace as ToHuggingFace
    from ckpttools.maxtext_to_hf import plan_to_huggingface as plan_to_huggingface
    from ckpttools.model import ModelOptions as ModelOptions
    from ckpttools.region import Region as Region
    from ckpttools.run.events import Receipt as Receipt
    from ckpttools.transforms.cast import CastMap as CastMap
    from ckpttools.transforms.cast import CastTo as CastTo
    from ckpttools.transforms.functions import as_checkpoint_conversion_fn as as_checkpoint_conversion_fn
    from ckpttools.transforms.functions import remap as remap
    from ckpttools.transforms.scan import ForceUnroll as ForceUnroll
    from ckpttools.transforms.scan import StackLayers as StackLayers
    from ckpttools.transforms.scan import UnstackLayers as UnstackLayers
    from ckpttools.transforms.select import Select as Select
    from ckpttools.transforms.strip import StripOptimizer as StripOptimizer

__version__ = "0.1.0"

_HOMES = {
    "CastMap": ("ckpttools.transforms.cast", "CastMap"),
    "CastTo": ("ckpttools.transforms.cast", "CastTo"),
    "CheckpointError": ("ckpttools.errors", "CheckpointError"),
    "Conversion": ("ckpttools.convert", "Conversion"),
    "ForceUnroll": ("ckpttools.transforms.scan", "ForceUnroll"),
    "LazyArray": ("ckpttools.ir.array", "LazyArray"),
    "ModelOptions": ("ckpttools.model", "ModelOptions"),
    "Receipt": ("ckpttools.run.events", "Receipt"),
    "Region": ("ckpttools.region", "Region"),
    "Resources": ("ckpttools.convert", "Resources"),
    "Select": ("ckpttools.transforms.select", "Select"),
    "StackLayers": ("ckpttools.transforms.scan", "StackLayers"),
    "StripOptimizer": ("ckpttools.transforms.strip", "StripOptimizer"),
    "ToHuggingFace": ("ckpttools.maxtext_to_hf", "ToHuggingFace"),
    "ToMaxText": ("ckpttools.hf_to_maxtext", "ToMaxText"),
    "Tree": ("ckpttools.ir.tree", "Tree"),
    "UnstackLayers": ("ckpttools.transforms.scan", "UnstackLayers"),
    "as_checkpoint_conversion_fn": ("ckpttools.transforms.functions", "as_checkpoint_conversion_fn"),
    "family_conversion_fn": ("ckpttools.conversion_fn", "family_conversion_fn"),
    "open": ("ckpttools.convert", "open_checkpoint"),
    "plan_save": ("ckpttools.convert_any", "plan_save"),
    "plan_to_huggingface": ("ckpttools.maxtext_to_hf", "plan_to_huggingface"),
    "plan_to_maxtext": ("ckpttools.hf_to_maxtext", "plan_to_maxtext"),
    "remap": ("ckpttools.transforms.functions", "remap"),
    "save": ("ckpttools.convert_any", "save"),
}
__all__ = [
    "CastMap",
    "CastTo",
    "CheckpointError",
    "Conversion",
    "ForceUnroll",
    "LazyArray",
    "ModelOptions",
    "Receipt",
    "Region",
    "Resources",
    "Select",
    "StackLayers",
    "StripOptimizer",
    "ToHuggingFace",
    "ToMaxText",
    "Tree",
    "UnstackLayers",
    "as_checkpoint_conversion_fn",
    "family_conversion_fn",
    "open",
    "plan_save",
    "plan_to_huggingface",
    "plan_to_maxtext",
    "remap",
    "save",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ckpttools' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return __all__
