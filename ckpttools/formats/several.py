"""A directory with weights of several kinds: which were found, and which of them are read."""

from __future__ import annotations

from ckpttools.core.notes import Notes
from ckpttools.core.text import matches_any
from ckpttools.formats.foreign import foreign_kinds
from ckpttools.stores.location import Location

# Names that files of a format have, of those that trainers and the hub put beside one another.
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
# Adapters and optimizers lie beside what they belong to, as do parts of distributed checkpoints.
_NOT_WEIGHTS = ("adapter_model.safetensors", "*.distcp", "*.npy", "*.npz", "*.pkl", "*.pickle", "*.joblib")


def other_kinds(path: Location, format: str) -> Notes:
    """What is said of a directory in which a format was opened, and other kinds of weights lie, too."""
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
    return Notes(remarks=(f"several kinds of weights lie here: those of {format} are read, not {result}",))


def has_weights(path: Location) -> bool:
    """Return whether weights of any kind that is read lie in a directory."""
    return any(matches_any(entry.name, patterns) for patterns in _NAMES.values() for entry in path.entries())
