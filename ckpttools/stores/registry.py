"""From what a user writes to a place: built-in stores are listed here, others come by entry points."""

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
"""What says where something is: a path, `scheme://…`, or a place."""

# Modules of this package with a `STORE`, by the scheme that stands before `://`.
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
# What other tools call these stores.
_ELSEWHERE = {
    "gcs": "gs",
    "s3a": "s3",
    "s3n": "s3",
    "abfs": "az",
    "abfss": "az",
    "azure": "az",
    "huggingface": "hf",
}
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
# `pathlib` makes `gs:/bucket` of `gs://bucket`.
_JOINED = re.compile(r"([a-z][a-z0-9+.-]+):/(?!/)(.+)", re.DOTALL)


def parse(where: LocationLike, *, is_written: bool = False) -> Location:
    """The place that a user names.

    Args:
        where: a local path, or `scheme://key`; a place is returned as it is.
        is_written: whether something is to be written there, for the next step in the error.

    Raises:
        UsageError: no store of that scheme is installed.
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
    _IN_USE[store.scheme] = store
    return Location(store, _key(rest))


# Stores other than the local one in which something was named, by scheme.
_IN_USE: dict[str, Store] = {}


def in_use() -> list[Store]:
    """The stores in which places were named since the process began, but for local files."""
    return list(_IN_USE.values())


def _key(text: str) -> str:
    key = str(PurePosixPath(text))
    return "" if key == "." else key


@cache
def _store(scheme: str) -> Store | None:
    """The store of a scheme; None if there is none."""
    # Looking for plug-ins takes 30 ms.
    if scheme in _BUILT_IN:
        result: Store = import_module(f"{__package__}.{_BUILT_IN[scheme]}").STORE
        return result
    return load_group("ckpttools.stores").get(scheme)


def _refuse_joined(text: str) -> None:
    """Raises UsageError if a path is an address with a slash too few, as `pathlib` makes it of one."""
    match = _JOINED.fullmatch(text)
    if match and match[1] in _BUILT_IN and not os.path.lexists(f"{match[1]}:"):
        raise UsageError(
            f"{text} is a path, and looks like {match[1]}://{match[2]}, which pathlib makes such a path of",
            expected="two slashes, in text",
            hint=f"write {match[1]}://{match[2]}; or ./{text}, if a directory of that name is meant",
        )


def _no_store(scheme: str, text: str, is_written: bool) -> UsageError:
    written, read = "write to a local directory, then copy that there", "copy it to a local directory"
    hint = written if is_written else read
    own = _ELSEWHERE.get(scheme.lower())
    return UsageError(
        f"no store for {scheme}:// is installed",
        location=text,
        expected="a local path, or a package that brings such a store (entry point `ckpttools.stores`)",
        hint=f"here that is {own}://" if own else hint,
    )


@contextmanager
def counted() -> Iterator[Callable[[], Mapping[str, Traffic]]]:
    """Gives what tells how much stores were asked since the `with` began, by any thread of the process.

    By address, such as "gs://", in the order of the alphabet; local files and memory are not among them.
    """
    before = {id(store): store.traffic or Traffic() for store in in_use()}

    def since() -> Mapping[str, Traffic]:
        result = {
            f"{store.scheme}://": store.traffic - before.get(id(store), Traffic())
            for store in in_use()
            if store.traffic is not None
        }
        return {address: result[address] for address in sorted(result) if result[address].requests}

    yield since
