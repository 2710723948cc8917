"""Weights without the configuration of their model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ckpttools.doctor.base import WARNING, Check, Finding, pasted, told
from ckpttools.doctor.scene import Scene, json_or_error
from ckpttools.errors import CheckpointError

_CONFIG = "config.json"


def _look(scene: Scene) -> Iterator[Finding]:
    listed = {directory.path: directory.files for directory in scene.directories}
    for weights in scene.weights:
        if not weights.is_whole or weights.folder not in listed:
            continue
        place = weights.folder / _CONFIG
        if _CONFIG not in listed[weights.folder]:
            yield _without(weights.folder)
            continue
        found = json_or_error(place)
        if isinstance(found, CheckpointError):
            yield told(found, place, why="sizes and family of the model are in it")


def _without(folder: Path) -> Finding:
    why = "conversions to and from MaxText, and transformers, take the family and sizes of the model from it"
    do = f"fetch it: hf download REPO {_CONFIG} --local-dir {pasted(folder)}; other commands do without"
    return Finding(WARNING, str(folder), f"no {_CONFIG} beside the weights", why, do)


CHECK = Check("config", f"no {_CONFIG} beside safetensors, or an unreadable one", _look)
