"""The list of formats: those of this package, then those that entry points add."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module

import ckpttools.formats as package
from ckpttools.core.plugins import load_group
from ckpttools.formats.base import Format, Writable

# Modules of this package with a `FORMAT`, in the order in which they are tried.
_BUILT_IN = (
    *("orbax.format", "safetensors.format", "zarr.read"),
    *("torch.format", "torch.dcp", "torch.ranks", "torch.zero", "torch.universal"),
    *("flax.format", "zarr.untyped_arrays"),
)


@cache
def formats() -> Mapping[str, Format]:
    """Return all formats by name, built-in ones first."""
    return {**{item.name: item for item in built_in_formats()}, **load_group("ckpttools.formats")}


def built_in_formats() -> Iterator[Format]:
    """Iterate over the formats of this package.

    Each is imported when its turn comes: 26 modules are only for PyTorch.
    """
    return map(_load_format, _BUILT_IN)


@cache
def _load_format(name: str) -> Format:
    result: Format = import_module(f"{package.__name__}.{name}").FORMAT
    return result


def formats_in_turn() -> Iterator[Format]:
    """Iterate over all formats in the order in which they are tried."""
    yield from built_in_formats()
    # Looking for plug-ins takes 30 ms, which most checkpoints do not need.
    built_in = {item.name for item in built_in_formats()}
    yield from (item for name, item in formats().items() if name not in built_in)


def format_named(name: str) -> Format | None:
    """Return the format of a name; None if there is none."""
    return next((item for item in built_in_formats() if item.name == name), None) or formats().get(name)


def writable() -> Mapping[str, Writable]:
    """Return the formats that can be written, by name."""
    return {name: item for name, item in formats().items() if isinstance(item, Writable)}
