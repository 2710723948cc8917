"""The registry of stores, which maps a path or URL to a location. Other stores are entry points."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import PurePosixPath
from typing import TypeAlias

from ckpttools.core.errors import UsageError
from ckpttools.core.plugins import load_group
from ckpttools.stores.base import Store
from ckpttools.stores.costs import Traffic
from ckpttools.stores.local.store import STORE as LOCAL
from ckpttools.stores.location import Location

LocationLike: TypeAlias = str | os.PathLike[str] | Location
"""A path, a URL such as `scheme://…`, or a location."""

# Modules of this package that define a `STORE`, by URL scheme.
_BUILT_IN = {
    "file": "local.store",
    "memory": "memory",
    "gs": "objects.gs",
    "s3": "objects.s3",
    "az": "objects.az",
    "http": "web.http",
    "https": "web.https",
    "hf": "web.hub",
}
# Schemes that other tools use for the same stores.
_SCHEME_ALIASES = {
    "gcs": "gs",
    "s3a": "s3",
    "s3n": "s3",
    "abfs": "az",
    "abfss": "az",
    "azure": "az",
    "huggingface": "hf",
}
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
# `pathlib` turns `gs://bucket` into `gs:/bucket`.
_JOINED = re.compile(r"([a-z][a-z0-9+.-]+):/(?!/)(.+)", re.DOTALL)


def parse(where: LocationLike, *, is_written: bool = False) -> Location:
    """Return the location for a path or URL.

    Args:
        where: A local path or `scheme://key`; a location is returned unchanged.
        is_written: Whether the location will be written, which affects the hint of the error.

    Raises:
        UsageError: No store with that scheme is installed.
    """
    if isinstance(where, Location):
        return where
    text = os.fsdecode(where)
    scheme, separator, rest = text.partition("://")
    if not separator or not _SCHEME.fullmatch(scheme):
        _refuse_joined(text)
        return Location(LOCAL, _key(text))
    store = _store(scheme.lower())
    if store is None:
        raise _no_store(scheme, text, is_written)
    _REMOTE_STORES[store.scheme] = store
    return Location(store, _key(rest))


# Remote stores that were used in this process, by scheme.
_REMOTE_STORES: dict[str, Store] = {}


def used_stores() -> list[Store]:
    """Return all stores used in this process except the local file system."""
    return list(_REMOTE_STORES.values())


def _key(text: str) -> str:
    key = str(PurePosixPath(text))
    return "" if key == "." else key


@cache
def _store(scheme: str) -> Store | None:
    """Return the store for a scheme; None if there is none."""
    # Searching for plug-ins takes 30 ms.
    if scheme in _BUILT_IN:
        result: Store = import_module(f"{__package__}.{_BUILT_IN[scheme]}").STORE
        return result
    return load_group("ckpttools.stores").get(scheme)


def _refuse_joined(text: str) -> None:
    """Raise UsageError if a path is a URL from which `pathlib` removed a slash."""
    match = _JOINED.fullmatch(text)
    if match and match[1] in _BUILT_IN and not os.path.lexists(f"{match[1]}:"):
        raise UsageError(
            f"{text} is a path, and looks like {match[1]}://{match[2]}, which pathlib turns into such a path",
            expected="a string with two slashes",
            hint=f"write {match[1]}://{match[2]}; or ./{text}, if you mean a directory with that name",
        )


def _no_store(scheme: str, text: str, is_written: bool) -> UsageError:
    write_hint, read = "write to a local directory, then copy it there", "copy it to a local directory"
    hint = write_hint if is_written else read
    own = _SCHEME_ALIASES.get(scheme.lower())
    return UsageError(
        f"no store for {scheme}:// is installed",
        location=text,
        expected="a local path, or a package with such a store (entry point `ckpttools.stores`)",
        hint=f"use {own}://" if own else hint,
    )


@contextmanager
def count_traffic() -> Iterator[Callable[[], Mapping[str, Traffic]]]:
    """Count the requests of all threads in a `with` block.

    Yields:
        A function that returns the traffic so far by address, such as "gs://", sorted. Local files and memory
        are not included.
    """
    before = {id(store): store.traffic or Traffic() for store in used_stores()}

    def since() -> Mapping[str, Traffic]:
        result = {
            f"{store.scheme}://": store.traffic - before.get(id(store), Traffic())
            for store in used_stores()
            if store.traffic is not None
        }
        return {address: result[address] for address in sorted(result) if result[address].requests}

    yield since
