"""Models named as their pages on the hub are, org/name, where a path is taken."""

from __future__ import annotations

from ckpttools.stores.location import Location
from ckpttools.stores.registry import LocationLike, parse
from ckpttools.stores.web.hub_name import is_model_name


def model_at(where: LocationLike) -> Location:
    """The place that a user names, or the model of the hub where no such directory is.

    Args:
        where: as `ckpttools.stores.parse` takes it; only text can be the name of a model, and only where the
            directory above is not there either.

    Raises:
        UsageError: as `ckpttools.stores.parse`.
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
