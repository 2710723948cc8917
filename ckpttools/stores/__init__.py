"""Storage of checkpoint bytes. `parse` maps a path or URL to a `Location`."""

from ckpttools.stores.base import DirEntry, File, FileKind, Status, Store
from ckpttools.stores.location import Location
from ckpttools.stores.registry import LocationLike, parse

__all__ = ["DirEntry", "File", "FileKind", "Location", "LocationLike", "Status", "Store", "parse"]
