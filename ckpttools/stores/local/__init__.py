"""Local files: reading by position, durable writes, links, and where a checkpoint grows."""

from ckpttools.stores.local.file import LocalFile, occurrences, read_whole, storage_error

__all__ = ["LocalFile", "occurrences", "read_whole", "storage_error"]
