"""Convert, inspect and prove LLM checkpoints in the JAX world.

    import ckpttools

    tree = ckpttools.open("checkpoints/llama")              # nothing is read but headers
    conversion = ckpttools.plan_to_maxtext("hf/llama")      # everything is decided, nothing is written
    receipt = conversion.run("maxtext/llama")

Names are loaded when they are first used: importing the package costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpttools.convert import Conversion as Conversion
    from ckpttools.convert import Resources as Resources
    from ckpttools.convert import ToMaxText as ToMaxText
    from ckpttools.convert import open_checkpoint as open
    from ckpttools.convert import plan_to_maxtext as plan_to_maxtext
    from ckpttools.errors import CheckpointError as CheckpointError
    from ckpttools.ir.array import LazyArray as LazyArray
    from ckpttools.ir.tree import Tree as Tree
    from ckpttools.region import Region as Region
    from ckpttools.run.events import Receipt as Receipt

__version__ = "0.1.0"

_HOMES = {
    "CheckpointError": ("ckpttools.errors", "CheckpointError"),
    "Conversion": ("ckpttools.convert", "Conversion"),
    "LazyArray": ("ckpttools.ir.array", "LazyArray"),
    "Receipt": ("ckpttools.run.events", "Receipt"),
    "Region": ("ckpttools.region", "Region"),
    "Resources": ("ckpttools.convert", "Resources"),
    "ToMaxText": ("ckpttools.convert", "ToMaxText"),
    "Tree": ("ckpttools.ir.tree", "Tree"),
    "open": ("ckpttools.convert", "open_checkpoint"),
    "plan_to_maxtext": ("ckpttools.convert", "plan_to_maxtext"),
}
__all__ = [
    "CheckpointError",
    "Conversion",
    "LazyArray",
    "Receipt",
    "Region",
    "Resources",
    "ToMaxText",
    "Tree",
    "open",
    "plan_to_maxtext",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ckpttools' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return __all__
