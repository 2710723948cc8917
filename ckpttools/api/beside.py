"""A single file that is written beside checkpoints, such as a manifest or a page: never as a part of one."""

from __future__ import annotations

import os
from pathlib import Path

from ckpttools.core.errors import UsageError
from ckpttools.formats.registry import is_own_file
from ckpttools.run.destination import staging_of
from ckpttools.stores.publishing import PLAN_MARK
from ckpttools.stores.registry import parse


def check_beside(path: Path, source: str | Path, destination: Path | None = None) -> None:
    """Refuses a name for a file that is no checkpoint, before anything is read or written.

    Args:
        path: of the file.
        source: a checkpoint that is read; "" for none.
        destination: a checkpoint that is written meanwhile.

    Raises:
        UsageError: the file would lie in what is written or have its name, or have a name in what is read
            that the checkpoint's own files have.
    """
    real = Path(os.path.realpath(path))
    if destination is not None:
        _check_outside(path, real, destination)
    root = Path(os.path.realpath(source))
    root = root if root.is_dir() else root.parent
    if source and root in real.parents and (real.name == PLAN_MARK or is_own_file(real.relative_to(root))):
        raise UsageError(
            f"{path} would be taken for a part of the checkpoint",
            place=source,
            got=f"a name that a checkpoint's own files have: {real.name}",
            wanted="a name outside of it",
            hint="choose another name, such as one in a directory beside it",
        )


def _check_outside(path: Path, real: Path, destination: Path) -> None:
    taken = staging_of(parse(destination)).taken
    for written, name in zip(taken, ("DST", "where DST grows"), strict=True):
        place = Path(os.path.realpath(written))
        if real == place:
            how = "is"
        elif place in real.parents:
            how = "lies in"
        elif real in place.parents:
            how = "is a directory above"
        else:
            continue
        raise UsageError(
            f"{path} {how} {name}",
            place=written,
            wanted="a file outside of the checkpoint that is written",
            hint=f"choose another name, such as {destination.name}.manifest.json beside DST",
        )
