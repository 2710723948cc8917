"""The files that a checkpoint shares with another: each gets one more name, below the new one's root."""

from __future__ import annotations

from ckpttools.formats.base import Layout
from ckpttools.stores.abilities import Links
from ckpttools.stores.base import File
from ckpttools.stores.location import Location


def link_files(layout: Layout, content: Location) -> int:
    """Links every file of a layout below a place; does nothing where an earlier run did.

    Where the store refuses although a trial went well, or none was made, the parts that are needed are copied
    to the same places of a file with holes: the index that was planned is right for both.

    Returns:
        Bytes that were copied instead.

    Raises:
        FormatError: a file is not what it was when the plan was made.
        StorageError, NoSpaceError: the store reports an error.
    """
    copied = 0
    store = content.store
    for name, source in layout.links.items():
        if not (isinstance(source, File) and isinstance(store, Links)):
            raise TypeError(f"{source!r} is not a file that can be linked into {content}")
        target, parts = (content / name).key, layout.used[name]
        if not store.link(source, target):
            store.copy_parts(source, target, parts)
            copied += sum(stop - start for start, stop in parts)
    return copied
