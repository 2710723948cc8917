"""Find files outside a source that symbolic links include in it.

A downloaded directory may contain a link to any file on this machine, and commands would write its target
like any other file. Each writing command therefore reports such files and refuses to publish them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import option
from ckpttools.core.text import plural
from ckpttools.stores.location import Location

# Name prefixes of repositories in the huggingface_hub cache, where snapshots are links to blobs.
_REPOSITORY_PREFIXES = ("models--", "datasets--", "spaces--")
_MAX_LISTED = 3


def find_outside_links(root: Location, paths: Iterable[str]) -> Mapping[str, str]:
    """Find files below a directory whose content is outside the directory.

    Paths that are not below the directory are skipped, because the user named them. In the huggingface_hub
    cache, the blobs that a snapshot links to belong to the snapshot.

    Args:
        root: The directory; only directories on this machine have links.
        paths: Paths of files on this machine.

    Returns:
        The path below the directory of each such file, mapped to the link's target.
    """
    if root.store.scheme != "file":
        return {}
    top = os.path.abspath(root.key or ".")  # `abspath` keeps links.
    real_top = os.path.realpath(top)
    inner = tuple(os.path.join(directory, "") for directory in (real_top, *_blob_directories(real_top)))
    real_directory = cache(os.path.realpath)
    links = {}
    for path in paths:
        named = os.path.abspath(path)
        if not named.startswith(os.path.join(top, "")):
            continue
        directory, name = os.path.split(named)
        target = os.path.join(real_directory(directory), name)
        if os.path.islink(target):
            target = os.path.realpath(target)
        if not target.startswith(inner):
            links[os.path.relpath(named, top)] = target
    return links


def check_outside_links(links: Mapping[str, str], *, is_public: bool, is_allowed: bool) -> tuple[str, ...]:
    """Refuse to publish files that links include, and describe them for other destinations.

    Args:
        links: The result of `find_outside_links`.
        is_public: Whether everyone can read the destination.
        is_allowed: Whether the user allows such files.

    Returns:
        Remarks for the user.

    Raises:
        UsageError: Everyone could read the files, and the user has not allowed that.
    """
    if not links:
        return ()
    links_text = "; ".join(f"{name} -> {target}" for name, target in list(links.items())[:_MAX_LISTED])
    if len(links) > _MAX_LISTED:
        links_text += f" and {len(links) - _MAX_LISTED:,} more"
    if is_public and not is_allowed:
        raise UsageError(
            "symbolic links in the source lead to files outside of it, and the destination is public",
            got=links_text,
            expected="only files inside the source",
            hint=f"remove the links, or publish these files with {option('allow_outside_links', True)}",
        )
    return (
        f"{plural(len(links), 'file')} read from outside the source through symbolic links: {links_text}",
    )


def _blob_directories(snapshot: str) -> list[str]:
    """Return the blob directory of a snapshot in the huggingface_hub cache; empty for other paths."""
    directories = (Path(snapshot), *Path(snapshot).parents)
    repositories = (directory.parent for directory in directories if directory.name == "snapshots")
    return [
        str(repository / "blobs")
        for repository in repositories
        if repository.name.startswith(_REPOSITORY_PREFIXES)
    ]
