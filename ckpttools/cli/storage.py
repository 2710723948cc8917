"""Options that say how Orbax stores what is written."""

from __future__ import annotations

from ckpttools.cli.declared import declared
from ckpttools.formats.orbax.options import STORAGE

storage_options = declared("storage", STORAGE)
"""Hands the command what the user says of it as `storage`, arguments of `ckpttools.api.arguments.Storing`."""
