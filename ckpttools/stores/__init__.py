"""Where bytes live, and the only room that knows: `parse` makes a `Location` of what a user writes."""

from ckpttools.stores.base import DirEntry, File, FileKind, Status, Store
from ckpttools.stores.location import Location
from ckpttools.stores.registry import LocationLike, parse

__all__ = ["DirEntry", "File", "FileKind", "Location", "LocationLike", "Status", "Store", "parse"]
