"""The list of formats: the built-in ones, followed by those that entry points add."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module

import ckpttools.formats as package
from ckpttools.core.plugins import load_group
from ckpttools.formats.base import Format, Writable

# Name of each built-in format -> module with its `FORMAT`, in the order in which formats are tried.
_BUILT_IN = {
    "orbax": "orbax.format",
    "safetensors": "safetensors.format",
    "zarr3": "zarr.read",
    "torch": "torch.format",
    "torch-distributed": "torch.dcp",
    "torch-ranks": "torch.ranks",
    "deepspeed-zero": "torch.zero",
    "deepspeed-universal": "torch.universal",
    "flax-msgpack": "flax.format",
    "zarr-tree": "zarr.untyped_arrays",
}


@cache
def formats() -> Mapping[str, Format]:
    """Return all formats by name, built-in ones first."""
    return {**{name: _load_format(name) for name in _BUILT_IN}, **load_group("ckpttools.formats")}


def built_in_formats(left_out: str = "") -> Iterator[Format]:
    """Iterate over the built-in formats, except `left_out`.

    Each is imported only when it is reached: half of the modules of this room are for Orbax or PyTorch alone.
    """
    return (_load_format(name) for name in _BUILT_IN if name != left_out)


@cache
def _load_format(name: str) -> Format:
    result: Format = import_module(f"{package.__name__}.{_BUILT_IN[name]}").FORMAT
    return result


def formats_in_turn(left_out: str = "") -> Iterator[Format]:
    """Iterate over all formats except `left_out`, in the order in which they are tried."""
    yield from built_in_formats(left_out)
    # Searching for plug-ins takes 30 ms, and most checkpoints do not need them.
    yield from (item for name, item in formats().items() if name not in _BUILT_IN)


def format_named(name: str) -> Format | None:
    """Return the format with a name; None if it does not exist."""
    return _load_format(name) if name in _BUILT_IN else formats().get(name)


def writable() -> Mapping[str, Writable]:
    """Return the writable formats by name."""
    return {name: item for name, item in formats().items() if isinstance(item, Writable)}
