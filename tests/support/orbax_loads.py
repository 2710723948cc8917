"""The cases of orbax_loader_script.py: Orbax's loaders, with every kind of target, and what MaxText calls."""

from __future__ import annotations

from itertools import product

SHARDED = ("one_device", "first_axis", "last_axis", "replicated")
V0_LOADERS = ("standard", "pytree", "manager_bare", "manager_named", "manager_pytree")
V1_LOADERS = ("v1_load", "v1_load_item", "v1_load_checkpointables")
LOADERS = (*V0_LOADERS, *V1_LOADERS)
# Orbax v1 wants a sharding in every `jax.ShapeDtypeStruct`; its targets without one are arrays of numpy.
TARGETS = dict.fromkeys(V0_LOADERS, ("unsharded", *SHARDED)) | dict.fromkeys(V1_LOADERS, ("numpy", *SHARDED))
PARAMETERS = ("first_axis", "last_axis", "replicated", "float32")
METADATA = ("maxtext_metadata", "item_metadata", "manager_metadata", "v1_metadata")
EVERY_CASE = (
    *(f"{loader}-{target}" for loader in LOADERS for target in ("none", *TARGETS[loader])),
    *map("-".join, product(["maxtext_parameters"], PARAMETERS)),
    *METADATA,
)


def some_cases(number: int) -> tuple[str, ...]:
    """A share of the cases for the checkpoint of this number: every loader, every target, not all pairs.

    Where chunks lie and which leaves there are is nothing to a loader, which asks for regions as its target
    says: every checkpoint meets every loader and every target, and one in all, elsewhere, meets every pair.
    """
    targeted = (
        f"{loader}-{TARGETS[loader][(number + k) % len(TARGETS[loader])]}" for k, loader in enumerate(LOADERS)
    )
    untargeted = (f"{loader}-none" for loader in LOADERS)
    return (*untargeted, *targeted, f"maxtext_parameters-{PARAMETERS[number % 4]}", *METADATA)
