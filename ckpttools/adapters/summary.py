"""A summary of an adapter, and checks for trees that may be adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from ckpttools.array.tree import Tree
from ckpttools.core.dataclass import dataclass
from ckpttools.formats.adapters import ADAPTER, LORA, wrapped_weights
from ckpttools.stores.registry import parse


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """A summary of an adapter without its values.

    Attributes:
        base_model: The recorded base model; "" if it is not recorded.
        ranks: Number of weights by rank of their factors.
        alpha: The recorded alpha, before patterns; None if it is not recorded.
        targets: Number of changed weights by the last component of the module's name.
        features: Special features: "rslora", "dora", "experts", "embedding".
        num_replaced: Number of arrays that the adapter replaces.
        problem: Reason why the adapter cannot be read; None if it can.
        kind: PEFT's name for the kind of adapter; "LORA" by default.
        skipped: Number of stored arrays that PEFT ignores, by the responsible config field.
        names: The naming scheme of a JAX trainer's factors, "MaxText" or "Tunix"; "" for PEFT.
    """

    base_model: str
    ranks: Mapping[int, int]
    alpha: float | None
    targets: Mapping[str, int]
    features: tuple[str, ...] = ()
    num_replaced: int = 0
    problem: str | None = None
    kind: str = LORA
    skipped: Mapping[str, int] = field(default_factory=dict)
    names: str = ""


def unmerged_weights(tree: Tree) -> list[str]:
    """Return the names of weights that PEFT has wrapped with factors."""
    return wrapped_weights(tree)


def may_be_adapter(tree: Tree) -> bool:
    """Return whether array names contain "lora", or a PEFT configuration exists."""
    if any("lora" in str(key) for path in tree.arrays for key in path):
        return True
    location = parse(tree.metadata.location) if tree.metadata.location else None
    return location is not None and (location.folder() / ADAPTER).is_file()
