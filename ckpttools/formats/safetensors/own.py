"""Which files are those of safetensors, and of what goes along with a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase

from ckpttools.array.tree import Tree
from ckpttools.formats.base import COMPANIONS, RECORD
from ckpttools.formats.sidecar import CARRIED, PATTERNS
from ckpttools.stores.place import Place

_SHARD = re.compile(r"(.*?)(-\d{5}-of-\d{5})?\.safetensors", re.DOTALL)
_INDEX = ".safetensors.index.json"
_OF_AN_ADAPTER = "adapter_config.json"
# Weights that torch wrote lie beside them, too.
_PATTERNS = (*PATTERNS, "*.safetensors", "*.index.json", "*.bin", RECORD)


def owns(name: str) -> bool:
    """Whether a file has a name that weights have, or what goes along with a model."""
    return any(fnmatchcase(name.rpartition("/")[2], pattern) for pattern in _PATTERNS)


def strangers(directory: Place, tree: Tree) -> Iterator[str]:
    """All but the weights, which have one stem, their index, and what goes along with a model."""
    names = [entry.name for entry in directory.entries()]
    stems = {match[1] for name in names if (match := _SHARD.fullmatch(name))}
    own = "model" if "model" in stems else min(stems, default="")

    def is_weights(name: str) -> bool:
        match = _SHARD.fullmatch(name)
        return name == own + _INDEX or (match is not None and match[1] == own)

    return _strangers(directory, is_weights)


def strangers_beside(directory: Place) -> Iterator[str]:
    """All but what goes along with a model, in the directory that `sidecar.Beside` writes."""
    return _strangers(directory, f"{CARRIED}.safetensors".__eq__)


def _strangers(directory: Place, is_weights: Callable[[str], bool]) -> Iterator[str]:
    for entry in directory.entries():
        if entry.name == COMPANIONS and entry.is_own_dir:
            yield from (f"{COMPANIONS}/{each}" for each in strangers_beside(directory / COMPANIONS))
        elif entry.is_own_dir or not (is_weights(entry.name) or _goes_along(entry.name)):
            yield entry.name


def _goes_along(name: str) -> bool:
    """Whether a file is one that is written beside weights, or would be carried along."""
    known = any(fnmatchcase(name, pattern) for pattern in PATTERNS)
    return name == RECORD or (known and name != _OF_AN_ADAPTER)
