"""The contents of a pickle as inert values: classes and calls become records, and nothing is imported."""

from __future__ import annotations

from dataclasses import field
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from ckpttools.core.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Global:
    """The name of a class or function, such as `torch.FloatStorage`."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, slots=True)
class Record:
    """An object that a class or function would have created.

    Attributes:
        made_by: The class or function.
        args: Arguments of the call.
        state: State that would have been set afterward, or None.
        items: Items that would have been added.
    """

    made_by: Global
    args: tuple[Any, ...]
    state: Any = None
    items: list[Any] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Last component of the name; classes move between modules from release to release."""
        return self.made_by.name

    def attribute(self, name: str) -> Any:
        """Return an attribute from the state; None if it does not exist."""
        states = self.state if isinstance(self.state, tuple) else (self.state,)
        result = (state[name] for state in states if isinstance(state, dict) and name in state)
        return next(result, None)


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """A reference by id to an object outside the pickle."""

    key: Any


class DamagedPickleError(Exception):
    """The bytes are not a pickle, are truncated, or have instructions that data pickles do not use."""


class NamelessCallError(DamagedPickleError):
    """The callee is itself the result of a call, such as a method from `getattr`."""


def describe_briefly(value: Any) -> str:
    """Describe a value briefly, regardless of its size."""
    if isinstance(value, Record):
        return str(value.made_by)
    if isinstance(value, Persistent):
        return "a storage without a tensor"
    return str(value) if isinstance(value, Global) else type(value).__name__


_BUILTINS = (
    *("dict", "list", "set", "frozenset", "tuple", "slice", "range", "object", "bytearray"),
    *("int", "float", "bool", "str", "bytes", "complex"),
)
# Names in files of torch 2.13, its distributed checkpoints, DeepSpeed and trainers based on them. A star
# stands for modules that move between releases; their content is plain data.
_ALLOWED = (
    "collections.*",
    *(f"{module}.{name}" for module in ("builtins", "__builtin__") for name in _BUILTINS),
    "_codecs.encode",
    "copyreg._reconstructor",
    "argparse.Namespace",
    "types.SimpleNamespace",
    "pathlib.*Path*",
    # State that modules store next to tensors, as in Transformer Engine before 1.14.
    "_io.BytesIO",
    "datetime.*",
    "torch.*Storage",
    "torch.storage.*Storage",
    "torch.Size",
    "torch.device",
    "torch.layout",
    "torch.per_*_affine*",
    "torch.serialization._get_layout",
    "torch._utils._rebuild_*",
    "torch._tensor._rebuild_*",
    "torch.nn.parameter.*",
    "torch.Tensor",
    "torch._tensor.Tensor",
    "torch.distributed.*",
    "numpy.dtype",
    "numpy.ndarray",
    "numpy*.multiarray._reconstruct",
    "numpy*.multiarray.scalar",
    "numpy.random.*",
    "deepspeed.*",
    "accelerate.utils.*",
)
_DTYPE_WORDS = (
    *("float", "bfloat", "int", "uint", "bool", "complex", "half", "double", "long", "short"),
    *("quint", "qint"),
)


@lru_cache(maxsize=4096)
def is_of_training(name: Global) -> bool:
    """Return whether this name occurs in files of weights and trainer states."""
    spelled = str(name)
    if name.module == "torch" and name.name.startswith(_DTYPE_WORDS):
        return True
    return any(fnmatchcase(spelled, pattern) for pattern in _ALLOWED)
