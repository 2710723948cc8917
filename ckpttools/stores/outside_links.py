"""Find files that symbolic links pull into a source from outside of it.

A downloaded directory may contain a link to any file of this machine. Commands would write its target like
any other file. So each writing command reports such files, and refuses to publish them.
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

# Name prefixes of repositories in the cache of huggingface_hub, where snapshots are links to blobs.
_REPOSITORY_PREFIXES = ("models--", "datasets--", "spaces--")
_MAX_LISTED = 3


def find_outside_links(root: Location, paths: Iterable[str]) -> Mapping[str, str]:
    """Find the files below a directory whose content is outside of it.

    Paths that are not below the directory are skipped: the user named them. In the cache of huggingface_hub,
    the blobs that a snapshot links to belong to the snapshot.

    Args:
        root: the directory; only directories on this machine have links.
        paths: paths of files on this machine.

    Returns:
        For each such file, its path below the directory and the link's target.
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
    """Refuse to publish files that links pull in, and describe them for other destinations.

    Args:
        links: the result of `find_outside_links`.
        is_public: whether everyone can read the destination.
        is_allowed: whether the user allows such files.

    Returns:
        Remarks for the user.

    Raises:
        UsageError: everyone could read the files, and the user did not allow that.
    """
    if not links:
        return ()
    listed = "; ".join(f"{name} -> {target}" for name, target in list(links.items())[:_MAX_LISTED])
    if len(links) > _MAX_LISTED:
        listed += f" and {len(links) - _MAX_LISTED:,} more"
    if is_public and not is_allowed:
        raise UsageError(
            "symbolic links in the source lead to files outside of it, and the destination is public",
            got=listed,
            expected="only files inside the source",
            hint=f"remove the links, or publish these files with {option('allow_outside_links', True)}",
        )
    return (f"{plural(len(links), 'file')} read from outside the source through symbolic links: {listed}",)


def _blob_directories(snapshot: str) -> list[str]:
    """Return the blob directory of a snapshot in the cache of huggingface_hub; empty for other paths."""
    directories = (Path(snapshot), *Path(snapshot).parents)
    repositories = (directory.parent for directory in directories if directory.name == "snapshots")
    return [
        str(repository / "blobs")
        for repository in repositories
        if repository.name.startswith(_REPOSITORY_PREFIXES)
    ]
