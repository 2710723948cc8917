"""What the configuration of an adapter calls the model that it is of."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttools.adapters.bases import Base
from ckpttools.adapters.factors import Adapter
from ckpttools.array.tree import Tree
from ckpttools.core.dataclass import dataclass
from ckpttools.core.message_terms import option
from ckpttools.core.notes import Notes
from ckpttools.formats.adapters import ADAPTER, BASE_NAME
from ckpttools.stores.registry import parse
from ckpttools.stores.web.hub_name import HubName, is_model_name

# A model is named by its directory, by a file in it, or by the item in a step in it.
_BELOW_NAME = 3


@dataclass(frozen=True)
class BaseName:
    """A name, and what the user should know of it."""

    text: str
    notes: Notes


def base_name(base: Base, adapter: Adapter, given: str | None) -> BaseName:
    """What is said, else what the adapter or the base's configuration says, else where the base lies.

    Of what these say only names of the hub count: directories of whoever trained are not here.
    """
    if given:
        return BaseName(given, Notes())
    result = next((item for item in _said(base, adapter) if _is_of_hub(item)), None)
    if result is not None:
        return BaseName(result, Notes())
    location = base.tree.metadata.location
    remark = (
        f"{ADAPTER} names the base by its place here, {location}: nothing says its name on the hub; "
        "say it with "
        f"{option('base_name', 'NAME')} for others to load the adapter"
    )
    return BaseName(location, Notes(remarks=(remark,)))


def _said(base: Base, adapter: Adapter) -> Iterator[str]:
    yield str(adapter.config.get(BASE_NAME) or "")
    yield str((base.config or {}).get("_name_or_path") or "")
    location = parse(base.tree.metadata.location)
    if location.store.scheme == "hf":
        yield HubName.of(location.key).repo


def _is_of_hub(name: str) -> bool:
    """Whether a text is org/name, or a name alone, as the first models of the hub have it.

    A relative directory may be called so, too; what is written then is no worse than its path.
    """
    return is_model_name(name) or is_model_name(f"org/{name}")


def said_of_another(base: Base, adapter: Adapter, used: str) -> Iterator[str]:
    """What to know where an adapter says that it is of a model of another name than that of its base.

    Args:
        base: what is taken for the model that it is of.
        adapter: which may name another.
        used: what is done with it, a participle and a preposition: "merged into".
    """
    named, location = adapter.config.get(BASE_NAME), base.tree.metadata.location
    # A place where it was trained may be of a store that is not known here.
    last = named.rstrip("/").rpartition("/")[2] if isinstance(named, str) else ""
    if last and last not in parse(location).parts[-_BELOW_NAME:]:
        yield (
            f"the adapter says that it is of {named}, and is {used} {location}: names and shapes are "
            "compared, "
            "values cannot be"
        )


def noted_base(tree: Tree) -> str:
    """What is noted beside a MaxText adapter of its base's name; "" where nothing is."""
    noted = tree.metadata.custom.get(BASE_NAME)
    return noted if isinstance(noted, str) else ""
