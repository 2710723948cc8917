"""Options that say how Orbax stores what is written."""

from __future__ import annotations

from ckpttools.cli.declared import declared
from ckpttools.formats.orbax.options import STORAGE

storage_options = declared(STORAGE)
"""Adds what may be said of it: arguments of `ckpttools.api.arguments.Storing`."""
new_storage_options = declared([item for item in STORAGE if item.name != "reference"])
"""The same where there is nothing that bytes could be shared with."""
