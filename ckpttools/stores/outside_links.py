"""Files that symbolic links pull into a source from outside of it.

A downloaded directory may hold a link to any file of this machine. What is read through it is written like
the rest, so each writing command reports such files, and refuses to publish them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from ckpttools.core.errors import UsageError
from ckpttools.core.text import plural
from ckpttools.core.wording import option
from ckpttools.stores.place import Place

# Directories of a repository in the cache of huggingface_hub begin so; its snapshots are links to its blobs.
_CACHED = ("models--", "datasets--", "spaces--")
_MOST_NAMED = 3


def outside_links(root: Place, paths: Iterable[str]) -> Mapping[str, str]:
    """Find the files below a directory whose content lies outside of it.

    Files elsewhere are not looked at: the user named them. The blobs that a snapshot in the cache of
    huggingface_hub links to belong to the snapshot.

    Args:
        root: the directory; only those on this machine have links.
        paths: paths of files on this machine.

    Returns:
        The path of each such file below the directory, and the file that it leads to.
    """
    if root.store.scheme != "file":
        return {}
    top = os.path.abspath(root.key or ".")  # noqa: PTH100  links in it are kept
    real = os.path.realpath(top)
    inner = tuple(os.path.join(each, "") for each in (real, *_blobs(real)))  # noqa: PTH118
    real_directory = cache(os.path.realpath)
    found = {}
    for path in paths:
        named = os.path.abspath(path)  # noqa: PTH100
        if not named.startswith(os.path.join(top, "")):  # noqa: PTH118
            continue
        directory, name = os.path.split(named)
        target = os.path.join(real_directory(directory), name)  # noqa: PTH118
        if os.path.islink(target):  # noqa: PTH114  as quick as can be: there may be 100,000
            target = os.path.realpath(target)
        if not target.startswith(inner):
            found[os.path.relpath(named, top)] = target
    return found


def check_outside_links(links: Mapping[str, str], *, is_public: bool, is_allowed: bool) -> tuple[str, ...]:
    """Refuse to publish files that links pull in, and describe them elsewhere.

    Args:
        links: as of `outside_links`.
        is_public: whether everybody can read what is written.
        is_allowed: whether the user allows such files.

    Returns:
        What the user should know.

    Raises:
        UsageError: everybody could read them, and the user did not allow that.
    """
    if not links:
        return ()
    named = [f"{name} -> {target}" for name, target in list(links.items())[:_MOST_NAMED]]
    more = f" and {len(links) - _MOST_NAMED:,} more" if len(links) > _MOST_NAMED else ""
    if is_public and not is_allowed:
        raise UsageError(
            "symbolic links in the source lead to files outside of it, and the destination is public",
            got=f"{'; '.join(named)}{more}",
            wanted="files of the source itself",
            hint=f"remove the links, or publish these files with {option('allow_outside_links', True)}",
        )
    return (
        f"{plural(len(links), 'file')} read from outside the source through symbolic links: "
        f"{'; '.join(named)}{more}",
    )


def _blobs(real: str) -> list[str]:
    """Return the directory of the blobs of a snapshot in the cache of huggingface_hub."""
    above = (each.parent for each in (Path(real), *Path(real).parents) if each.name == "snapshots")
    return [str(repository / "blobs") for repository in above if repository.name.startswith(_CACHED)]
