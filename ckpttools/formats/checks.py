"""Checks that writers run before writing the first byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set

from ckpttools.array.tree import Path, Tree, keystr
from ckpttools.core.dtypes import DType
from ckpttools.core.errors import FormatError, listing
from ckpttools.core.message_terms import action, option
from ckpttools.core.text import array_count
from ckpttools.formats.json_file import DEEPEST

# Limit of Linux file systems for a file name.
LONGEST_NAME = 255
# Readers refuse longer array names, which occur in damaged or malicious files.
LONGEST_PATH = 4096


def is_file_name(name: str) -> bool:
    """Return whether a file can have this name. Orbax and zarr-python treat a backslash as "/"."""
    if name in ("", ".", "..") or not {"/", "\\", "\0"}.isdisjoint(name):
        return False
    try:
        return len(name.encode()) <= LONGEST_NAME
    except UnicodeEncodeError:
        return False


def check_paths(tree: Tree, name_of: Callable[[Path], str], subject: str) -> None:
    """Refuse paths that the format's own reader would refuse.

    Args:
        tree: The tree to write.
        name_of: Returns a leaf's name on disk.
        subject: The format's name, for the message.

    Raises:
        FormatError: Names are not valid Unicode, too long, or have too many keys. The message lists them.
    """
    invalid = [keystr(path) for path in tree if not _is_readable(path, name_of(path))]
    if invalid:
        remap = action("remap", "SRC", "DST", map="RULES")
        raise FormatError(
            f"{subject} cannot hold these names:" + listing([ascii(_shorten(name)) for name in invalid]),
            location=tree.metadata.location or None,
            expected=f"Unicode text of at most {LONGEST_PATH:,} characters and {DEEPEST} keys",
            hint=f"rename them with {remap}",
        )


def _is_readable(path: Path, name: str) -> bool:
    is_text = name.isascii() or not any("\ud800" <= char <= "\udfff" for char in name)
    return is_text and len(name) <= LONGEST_PATH and len(path) <= DEEPEST


def _shorten(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}…"


def check_plain(tree: Tree, subject: str) -> None:
    """Reject leaves other than arrays, for formats that store only arrays.

    Args:
        tree: The tree to write.
        subject: The format's name, for the message.

    Raises:
        FormatError: The tree has such leaves. The message lists them.
    """
    if len(tree.arrays) < len(tree):
        raise FormatError(
            f"{subject} can hold only arrays:"
            + listing([keystr(path) for path in tree if path not in tree.arrays]),
            location=tree.metadata.location or None,
            hint=f"leave them out with {option('drop', 'PATTERN')}, or choose another format",
        )


def check_dtypes(
    tree: Tree, spelling: Callable[[DType], str | None], subject: str, cast: str = "bfloat16"
) -> None:
    """Reject arrays whose dtype the format does not support.

    Args:
        tree: The tree to write.
        spelling: Returns the format's name for a dtype, or None if it is not supported.
        subject: The format's name, for the message.
        cast: A supported dtype to which floating-point arrays can be cast.

    Raises:
        FormatError: The tree has such arrays. The message lists them and suggests a cast.
    """
    invalid = {path: array for path, array in tree.arrays.items() if spelling(array.dtype) is None}
    if not invalid:
        return
    dtypes = sorted({array.dtype.name for array in invalid.values()})
    raise FormatError(
        f"{subject} does not support {' or '.join(dtypes)}:"
        + listing([f"{keystr(path)}: {array.dtype}" for path, array in invalid.items()]),
        location=tree.metadata.location or None,
        got=array_count(invalid),
        hint="; ".join(_remedies({array.dtype for array in invalid.values()}, cast)),
    )


def _remedies(dtypes: Set[DType], cast: str) -> Iterator[str]:
    if any(dtype.is_float for dtype in dtypes):
        yield (f"{option('dtype', cast)} casts floating-point arrays, without loss from 8 bits or fewer")
    others = sorted(dtype.name for dtype in dtypes if not dtype.is_float)
    if others:
        left = f"{option('dtype')} leaves {', '.join(others)} unchanged"
        yield f"{left}: choose a format that supports it, such as Orbax"
