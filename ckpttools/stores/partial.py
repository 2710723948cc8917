"""See `ckpttools.stores.local.partial`."""

from ckpttools.stores.local.partial import JOURNAL, REPLACED, SUFFIX, is_staging

__all__ = ["JOURNAL", "REPLACED", "SUFFIX", "is_staging"]
