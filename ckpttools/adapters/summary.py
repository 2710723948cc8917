"""An adapter in words and numbers, and what may be one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from ckpttools.array.tree import Tree
from ckpttools.core.dataclass import dataclass
from ckpttools.formats.adapters import ADAPTER, LORA, wrapped_weights
from ckpttools.stores.registry import parse


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """An adapter without its numbers.

    Attributes:
        base_model: what it says of the model that it is of; "" where it says nothing.
        ranks: rank -> number of weights whose factors have it.
        alpha: what its configuration says of its scale, before patterns; None where it says nothing.
        targets: last name of a module -> number of weights of such modules that it changes.
        features: what is special about it: "rslora", "dora", "experts", "embedding".
        replaced: number of arrays that it replaces as a whole.
        problem: why it is not read; None where it is.
        kind: what PEFT calls its kind; "LORA" where nothing says another.
        skipped: config field -> number of stored arrays that the field makes PEFT ignore.
        names: "MaxText" or "Tunix", whose names the factors of a trainer in JAX have; "" for PEFT.
    """

    base_model: str
    ranks: Mapping[int, int]
    alpha: float | None
    targets: Mapping[str, int]
    features: tuple[str, ...] = ()
    replaced: int = 0
    problem: str | None = None
    kind: str = LORA
    skipped: Mapping[str, int] = field(default_factory=dict)
    names: str = ""


def unmerged_weights(tree: Tree) -> list[str]:
    """Names of a model's weights beside which PEFT keeps factors while it trains them."""
    return wrapped_weights(tree)


def may_be_adapter(tree: Tree) -> bool:
    """Whether names speak of LoRA, as those of PEFT and of trainers in JAX do, or PEFT was here."""
    if any("lora" in str(key) for path in tree.arrays for key in path):
        return True
    location = parse(tree.metadata.location) if tree.metadata.location else None
    return location is not None and (location.folder() / ADAPTER).is_file()
