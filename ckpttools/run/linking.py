"""The files that a checkpoint shares with another: each gets one more name, below the new one's root."""

from __future__ import annotations

from pathlib import Path

from ckpttools.formats.base import Layout
from ckpttools.stores.files import write_error
from ckpttools.stores.links import copy_parts, link
from ckpttools.stores.local import LocalFile


def link_files(layout: Layout, directory: Path) -> int:
    """Links every file of a layout below a directory; does nothing where an earlier run did.

    Where the file system refuses although a trial went well, or none was made, the parts that are needed are
    copied to the same places of a file with holes: the index that was planned is right for both.

    Returns:
        Bytes that were copied instead.

    Raises:
        FormatError: a file is not what it was when the plan was made.
        StorageError, NoSpaceError: the system reports an error.
    """
    copied = 0
    for name, source in layout.links.items():
        if not isinstance(source, LocalFile):
            raise TypeError(f"{source!r} is no file that can be linked")
        target, parts = directory / name, layout.used[name]
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            if not link(source, target):
                copy_parts(source, target, parts)
                copied += sum(stop - start for start, stop in parts)
        except OSError as error:
            raise write_error(target, error) from error
    return copied
