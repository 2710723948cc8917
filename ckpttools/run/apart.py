"""Source and destination must be apart: what is read must not be replaced by what is made of it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ckpttools.array.lazy import ByteSource
from ckpttools.core.errors import UsageError
from ckpttools.core.wording import place
from ckpttools.run.staging import Staging, check_name


def check_apart(source: Path, destination: Path, name: str | None = None) -> None:
    """Refuses a destination that is the source, contains it or lies in it, through links and `..` as well.

    Args:
        source: what is read.
        destination: what is written.
        name: of what is read in messages; None for the source.

    Raises:
        UsageError: it does, or it is no name that a directory can be given.
    """
    check_name(destination)
    name = name or place("source")
    read, written = _real(source), _real(destination)
    if read == written:
        how = f"is {name} itself"
    elif written in read.parents:
        how = f"contains {name}"
    elif read in written.parents:
        how = f"lies in {name}"
    else:
        return
    raise _refused(destination, how, f"{name} {source}")


def check_unread(sources: Iterable[ByteSource], staging: Staging) -> None:
    """Refuses a destination that holds a file which is going to be read.

    Raises:
        UsageError: it does.
    """
    kept = {_real(staging.destination), _real(staging.directory)}
    directories: set[Path] = set()
    for source in sources:
        name = Path(os.path.abspath(source.path))  # noqa: PTH100  links are followed below
        for home in (name.parent, _real(name).parent):
            if home not in directories and not kept.isdisjoint((home, *home.parents)):
                raise _refused(staging.destination, "holds what is read", source.path)
            directories.add(home)


def _refused(destination: Path, how: str, source: str) -> UsageError:
    return UsageError(
        f"{place('destination')} {how}: {destination}",
        got=source,
        wanted="a destination apart from the source, which stays as it is",
        hint="choose another destination, such as a directory beside the source",
    )


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))
