"""What configurations say of quantised weights that no scheme reads: formats, sparsity, rotations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckpttools.quantized.schemes.registry import read_formats

_COMPRESSED = "compressed-tensors"
_DENSE = "dense"
# Which each group says of itself, or which says that nothing is quantised.
_GENERAL = frozenset((_DENSE, "mixed-precision"))


def unread(said: Mapping[str, Any]) -> tuple[str, ...]:
    """A line for each thing that a `quantization_config` says and that is not read.

    Such weights may have the names and dtypes of others that are read, and mean something else.
    """
    return tuple(dict.fromkeys((*_formats(said), *_sparsity(said), *_rotations(said))))


def _formats(said: Mapping[str, Any]) -> Iterator[str]:
    if said.get("quant_method") != _COMPRESSED:
        return
    for place in (said, *_mappings(said.get("config_groups"))):
        name = place.get("format")
        if isinstance(name, str) and name not in _GENERAL | read_formats():
            yield f"format: {name}, which is not read"


def _sparsity(said: Mapping[str, Any]) -> Iterator[str]:
    sparsity = said.get("sparsity_config")
    name = sparsity.get("format") if isinstance(sparsity, Mapping) else None
    if name not in (None, _DENSE):
        yield f"sparsity_config: weights are stored as {name}, which is not read"


def _rotations(said: Mapping[str, Any]) -> Iterator[str]:
    """Activations that are rotated at run time, against what weights were.

    Rotations of queries and cached keys undo each other, and those of weights alone are in them for good.
    """
    transforms = said.get("transform_config")
    groups = transforms.get("config_groups") if isinstance(transforms, Mapping) else None
    found = [place for each in _mappings(groups) for place in _places(each) if place in ("input", "output")]
    if found:
        yield (
            f"transform_config: activations are rotated at run time ({', '.join(dict.fromkeys(found))}), "
            "without which the weights mean something else"
        )


def _places(transform: Mapping[str, Any]) -> Iterator[Any]:
    applied = transform.get("apply")
    for each in applied if isinstance(applied, list) else ():
        yield each.get("location") if isinstance(each, Mapping) else None


def _mappings(groups: object) -> Iterator[Mapping[str, Any]]:
    for each in groups.values() if isinstance(groups, Mapping) else ():
        if isinstance(each, Mapping):
            yield each
