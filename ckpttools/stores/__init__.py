"""Where bytes live, and the only room that knows: `parse` makes a `Place` of what a user writes."""

from ckpttools.stores.base import DirEntry, File, FileKind, Status, Store
from ckpttools.stores.place import Place
from ckpttools.stores.registry import Where, parse

__all__ = ["DirEntry", "File", "FileKind", "Place", "Status", "Store", "Where", "parse"]
