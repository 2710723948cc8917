"""Parse directory listings of web servers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from html.parser import HTMLParser
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit

from ckpttools.stores.base import FileKind, is_inside

# Titles of listing pages; nginx, Apache, lighttpd and Python's http.server use the first two.
_TITLE = re.compile(r"(?i)\s*(index of|directory listing|files within|listing of)\b")

_HALF = re.compile("[\ud800-\udfff]")


def names_in(page: str, url: str) -> Mapping[str, FileKind] | None:
    """Return the entries of a listing page; None if the page is not a listing.

    Args:
        page: JSON, as from nginx (`autoindex_format json`) and Caddy, or HTML.
        url: URL of the page.
    """
    if page.lstrip().startswith("["):
        return _from_json(page)
    parser = _HtmlPage()
    parser.feed(page)
    if not any(_TITLE.match(title) for title in parser.titles):
        return None
    return dict(filter(None, (_parse_link(url, link) for link in parser.links)))


def plain_name(text: str) -> str:
    """Decode a name for a key, except for characters with a meaning in URLs."""
    try:
        name = unquote(text, errors="strict")
    except UnicodeDecodeError:
        return text
    return re.sub(r"[%?#]", lambda letter: quote(letter[0]), name)


def _from_json(page: str) -> Mapping[str, FileKind] | None:
    try:
        result = json.loads(page)
    except (ValueError, RecursionError):
        return None
    entries = [item for item in result if isinstance(item, dict) and isinstance(item.get("name"), str)]
    if len(entries) != len(result):
        return None
    named = ((entry, entry["name"].rstrip("/")) for entry in entries)
    return {plain_name(quote(name)): _kind(item) for item, name in named if is_name(name)}


def is_name(text: str) -> bool:
    """Return whether a text can be the name of an entry that can be displayed and requested."""
    return is_inside(text) and "/" not in text and is_text(text)


def is_plain(path: str) -> bool:
    """Return whether a path has no empty component and no `.`, which would be another spelling of a path."""
    return not any(part in ("", ".") for part in path.split("/"))


def is_text(text: str) -> bool:
    """Return whether a text can be encoded; an unpaired surrogate, which JSON may contain, cannot."""
    return not _HALF.search(text)


def _kind(entry: Mapping[str, Any]) -> FileKind:
    is_directory = entry.get("type") == "directory" or entry.get("is_dir") or entry["name"].endswith("/")
    return FileKind.DIRECTORY if is_directory else FileKind.FILE


def _parse_link(base: str, link: str) -> tuple[str, FileKind] | None:
    """Return the name and kind of a linked entry; skip the parent and other sort orders of the same page."""
    try:
        target, base_parts = urlsplit(urljoin(base, link)), urlsplit(base)
    except ValueError:
        return None
    if target.netloc != base_parts.netloc or target.query or not target.path.startswith(base_parts.path):
        return None
    name, slash, rest = target.path[len(base_parts.path) :].partition("/")
    if not name or rest:
        return None
    plain = plain_name(name)
    return (plain, FileKind.DIRECTORY if slash else FileKind.FILE) if is_name(plain) else None


class _HtmlPage(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.titles: list[str] = []
        self._is_title = False

    def handle_starttag(self, tag: str, attrs: Iterable[tuple[str, str | None]]) -> None:
        self._is_title = tag in ("title", "h1")
        if tag == "a":
            self.links += [value for name, value in attrs if name == "href" and value]

    def handle_data(self, data: str) -> None:
        if self._is_title:
            self.titles.append(data)
            self._is_title = False
