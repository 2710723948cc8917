"""Safetensors files that are not what their name says: pointers, pages, cut or damaged files."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttools.core.errors import CheckpointError
from ckpttools.doctor.base import Check, Finding, told
from ckpttools.doctor.scene import Scene
from ckpttools.doctor.shards import header_of


def _look(scene: Scene) -> Iterator[Finding]:
    for weights in scene.weights:
        for name in weights.files:
            found = header_of(weights.folder / name)
            if isinstance(found, CheckpointError):
                yield told(found, weights.folder / name, why="no tensor of this file can be trusted")


CHECK = Check("safetensors", "Git LFS pointers, truncated or damaged safetensors, header and size", _look)
