"""JSON documents in files of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ckpttools.errors import FormatError
from ckpttools.stores.local import read_whole


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        StorageError: the file cannot be read.
        FormatError: it holds no JSON object.
    """
    text = read_whole(path)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError("not a JSON file", place=path, got=error) from error
    if not isinstance(document, dict):
        raise FormatError("not a JSON object", place=path, got=type(document).__name__)
    return document
