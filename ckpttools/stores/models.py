"""Models named as their pages on the hub are, org/name, where a path is taken."""

from __future__ import annotations

from ckpttools.stores.place import Place
from ckpttools.stores.registry import Where, parse
from ckpttools.stores.web.hub_name import is_model_name


def model_at(where: Where) -> Place:
    """The place that a user names, or the model of the hub where no such directory is.

    Args:
        where: as `ckpttools.stores.parse` takes it; only text can be the name of a model, and only where the
            directory above is not there either.

    Raises:
        UsageError: as `ckpttools.stores.parse`.
    """
    place = parse(where)
    if not isinstance(where, str) or not is_model_name(where) or place.exists() or place.parent.exists():
        return place
    return parse(f"hf://{where}")
