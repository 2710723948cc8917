"""See `ckpttools.stores.local.links`."""

from ckpttools.stores.local.links import Trials

__all__ = ["Trials"]
