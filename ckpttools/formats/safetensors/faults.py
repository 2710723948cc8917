"""Find safetensors files whose content does not match their name: pointers, web pages, damaged files."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttools.core.errors import CheckpointError, FormatError
from ckpttools.formats.safetensors.header import SafetensorsHeader, parse_header
from ckpttools.formats.sidecar_files import is_file
from ckpttools.stores.location import Location, require_file_error


def faults(path: Location) -> Iterator[CheckpointError]:
    """Yield the faults of a file or of the files in a directory."""
    for file in sorted(path.glob("[!.]*.safetensors")) if path.is_dir() else [path]:
        result = header_of(file)
        if isinstance(result, CheckpointError):
            yield result


def header_of(path: Location) -> SafetensorsHeader | CheckpointError:
    """Return the header of a file, checked against the file's size, or the error that describes its fault.

    Raises:
        StorageError: A network store did not respond.
    """
    if path.lexists() and not is_file(path):
        return FormatError("not a file", location=path, hint="it is a dangling link or a special file")
    try:
        source = path.open()
        try:
            return parse_header(source)
        finally:
            source.close()
    except CheckpointError as error:
        return require_file_error(error, path)
