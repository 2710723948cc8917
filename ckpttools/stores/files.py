"""See `ckpttools.stores.local.files`."""

from ckpttools.stores.local.files import names_in, write_error, write_file, write_whole

__all__ = ["names_in", "write_error", "write_file", "write_whole"]
