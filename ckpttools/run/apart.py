"""Source and destination must be apart: what is read must not be replaced by what is made of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckpttools.array.lazy import ByteSource
from ckpttools.core.errors import UsageError
from ckpttools.core.wording import place as called
from ckpttools.stores.place import Place
from ckpttools.stores.publishing import check_name
from ckpttools.stores.registry import Where, parse


def check_apart(source: Where, destination: Where, name: str | None = None) -> None:
    """Refuses a destination that is the source, contains it or lies in it, through links and `..` as well.

    Args:
        source: what is read.
        destination: what is written.
        name: of what is read in messages; None for the source.

    Raises:
        UsageError: it does, or it is not a name that a directory can be given.
    """
    written = parse(destination)
    check_name(written)
    name = name or called("source")
    read, to = parse(source).resolve(), written.resolve()
    if read == to:
        how = f"is {name} itself"
    elif to in read.parents:
        how = f"contains {name}"
    elif read in to.parents:
        how = f"lies in {name}"
    else:
        return
    raise _refused(written, how, f"{name} {source}")


def check_unread(sources: Iterable[ByteSource], taken: Sequence[Place]) -> None:
    """Refuses a destination that holds a file which is going to be read.

    Args:
        sources: what is read.
        taken: what is written, replaced or deleted, the destination first.

    Raises:
        UsageError: it does.
    """
    kept = {each.resolve() for each in taken}
    directories: set[Place] = set()
    for source in sources:
        place = parse(source.path)
        for home in (place.parent, place.resolve().parent):
            if home not in directories:
                real = home.resolve()
                if not kept.isdisjoint((real, *real.parents)):
                    raise _refused(taken[0], "holds what is read", source.path)
            directories.add(home)


def _refused(destination: Place, how: str, source: str) -> UsageError:
    return UsageError(
        f"{called('destination')} {how}: {destination}",
        got=source,
        wanted="a destination apart from the source, which stays as it is",
        hint="choose another destination, such as a directory beside the source",
    )
