"""Directories with several kinds of weights: which kinds they contain, and which one is read."""

from __future__ import annotations

from ckpttools.core.notes import Notes
from ckpttools.core.text import matches_any
from ckpttools.formats.foreign import foreign_kinds
from ckpttools.stores.location import Location

# File names of each format that trainers and the Hub put next to each other.
_NAMES = {
    "orbax": ("_METADATA",),
    "safetensors": ("*.safetensors",),
    "torch": ("pytorch_model*.bin", "consolidated*.pth"),
    "torch-distributed": (".metadata",),
    "torch-ranks": ("model_world_size_*_rank_*.pt",),
    "deepspeed-zero": ("*zero_pp_rank_*_optim_states.pt",),
    "deepspeed-universal": ("latest_universal",),
    "flax-msgpack": ("flax_model*.msgpack",),
}
# Adapters, optimizers and parts of distributed checkpoints are next to the model they belong to.
_NOT_WEIGHTS = ("adapter_model.safetensors", "*.distcp", "*.npy", "*.npz", "*.pkl", "*.pickle", "*.joblib")


def other_kinds(path: Location, format: str) -> Notes:
    """Return remarks on other kinds of weights in a directory that a format opened."""
    if not path.is_dir():
        return Notes()
    entries = [entry for entry in path.entries() if not matches_any(entry.name, _NOT_WEIGHTS)]
    names = [entry.name for entry in entries]
    # Directories can have any of these names, because zarr uses array keys as directory names.
    files = [entry.name for entry in entries if not entry.is_dir]
    others = [
        kind
        for kind, patterns in _NAMES.items()
        if kind != format and any(matches_any(name, patterns) for name in files)
    ]
    others += [f"{name} ({what})" for what, name in foreign_kinds(names)]
    if not others:
        return Notes()
    result = ", ".join(others)
    return Notes(remarks=(f"several kinds of weights are here: {format} is read, not {result}",))


def has_weights(path: Location) -> bool:
    """Return whether a directory contains weights of any supported kind."""
    return any(matches_any(entry.name, patterns) for patterns in _NAMES.values() for entry in path.entries())
