"""Classes and functions that may occur in pickles of training programs; none of them is ever resolved."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import lru_cache

from ckpttools.formats.torch.pickled import Global

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
