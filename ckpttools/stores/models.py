"""Names of Hub models (org/name) in place of paths."""

from __future__ import annotations

from ckpttools.stores.location import Location
from ckpttools.stores.registry import LocationLike, parse
from ckpttools.stores.web.hub_name import is_model_name


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
