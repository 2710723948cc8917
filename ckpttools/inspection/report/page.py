"""The page around a report: one HTML file that needs no other files and no network."""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from ckpttools.core.text import printable

# Each script uses only earlier ones.
_SCRIPTS = ("format", "contents", "elements", "facts", "treemap", "heatmap", "histograms", "table", "main")


def page(contents: Mapping[str, Any], title: str) -> str:
    """Return the HTML.

    Args:
        contents: Result of `ckpttools.inspection.report.contents.contents`.
        title: Title of the window.
    """
    text = json.dumps(_printable(contents), separators=(",", ":"), allow_nan=False)
    # Compressed, because names and numbers repeat. base64 contains no characters that are special in HTML.
    packed = base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
    slots = {
        "title": html.escape(title),
        "style": _part("style.css"),
        "script": "\n".join(_part(f"{name}.js") for name in _SCRIPTS),
        "contents": packed,
    }
    built = _part("page.html")
    for name, filling in slots.items():
        built = built.replace(f"<!-- {name} -->", filling)
    return built


def _printable(value: object) -> object:
    """Escape every string of the report, so that data cannot control how the page looks."""
    match value:
        case str():
            return printable(value)
        case Mapping():
            return {printable(str(key)): _printable(item) for key, item in value.items()}
        case list() | tuple():
            return [_printable(item) for item in value]
    return value


def _part(name: str) -> str:
    return files(__package__).joinpath("assets", name).read_text("utf-8")
