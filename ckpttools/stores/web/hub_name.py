"""Names of models on the Hub: hf://org/name[@revision][/path], and org/name in place of a path."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote

from ckpttools.core.errors import UsageError
from ckpttools.stores.location import Location
from ckpttools.stores.registry import LocationLike, parse

# Valid names of organizations and models on the Hub.
_HUB_NAME = re.compile(r"(?!.*(?:--|\.\.|\.git$))\w(?:[\w.-]{0,94}\w)?", re.ASCII)
# Prefixes of other tools' hf:// addresses that do not name models.
_OTHERS = frozenset(("datasets", "spaces", "buckets", "kernels", "models"))

COMMIT = re.compile("[0-9a-f]{40}")
"""A revision that never changes."""


def is_model_name(text: str) -> bool:
    """Return whether a text may be the name of a model: org/name or org/name@revision."""
    org, slash, name = text.partition("/")
    name, at, revision = name.partition("@")
    is_whole = bool(slash) and bool(revision) == bool(at) and org not in _OTHERS
    return is_whole and bool(_HUB_NAME.fullmatch(org) and _HUB_NAME.fullmatch(name))


class HubName(NamedTuple):
    """The parts of a key in the Hub store.

    Attributes:
        repo: org/name.
        revision: The revision; "" if there is none.
        path: Path in the repository; "" is the root.
    """

    repo: str
    revision: str
    path: str

    @classmethod
    def of(cls, key: str) -> HubName:
        """Parse a key.

        Raises:
            UsageError: The key does not name a repository.
        """
        org, _, rest = key.partition("/")
        named, _, path = rest.partition("/")
        name, at, revision = named.partition("@")
        is_named = _HUB_NAME.fullmatch(org) and _HUB_NAME.fullmatch(name) and org not in _OTHERS
        if not is_named or (at and not revision):
            raise UsageError(
                f"hf://{key} does not name a model",
                got=f"another kind of repository: {org}" if org in _OTHERS else None,
                expected="hf://org/name, hf://org/name@revision or hf://org/name/path",
                hint="look up the model's name on its page",
            )
        if revision == "refs" and path.count("/") >= 1:
            kind, number, *below = path.split("/", 2)
            revision, path = f"refs/{kind}/{number}", "".join(below)
        return cls(f"{org}/{name}", unquote(revision), path)


def model_at(where: LocationLike) -> Location:
    """Return the location for a path, or for a Hub model if the path does not exist.

    Args:
        where: As for `ckpttools.stores.parse`. Only text can be a model name, and only if the path's parent
            does not exist either.

    Raises:
        UsageError: As for `ckpttools.stores.parse`.
    """
    location = parse(where)
    if (
        not isinstance(where, str)
        or not is_model_name(where)
        or location.exists()
        or location.parent.exists()
    ):
        return location
    return parse(f"hf://{where}")
