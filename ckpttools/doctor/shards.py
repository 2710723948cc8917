"""The headers of safetensors files, or what is wrong with them."""

from __future__ import annotations

import os
from pathlib import Path

from ckpttools.core.errors import CheckpointError, FormatError
from ckpttools.doctor.looking import is_file
from ckpttools.formats.safetensors.header import Header, parse_header
from ckpttools.stores.local.file import LocalFile


def header_of(path: Path) -> Header | CheckpointError:
    """The header of a file, checked against its size, or the error that it is."""
    if os.path.lexists(path) and not is_file(path):
        return FormatError("not a file", place=path, hint="a symbolic link to nothing, or no regular file")
    try:
        source = LocalFile.at(path)
        try:
            return parse_header(source)
        finally:
            source.close()
    except CheckpointError as error:
        return error
