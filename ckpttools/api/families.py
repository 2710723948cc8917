"""List the supported model families, and check a family."""

from __future__ import annotations

from ckpttools.api.options.inspect import CHECK_FAMILY
from ckpttools.core.argument_checks import validate_arguments
from ckpttools.core.options import declare
from ckpttools.family_check.definition import FamilyCheck
from ckpttools.model_families.family import Family
from ckpttools.model_families.registry import families as known_families
from ckpttools.model_families.registry import family_called
from ckpttools.model_families.summary import FamilySummary, summary
from ckpttools.stores.registry import LocationLike, parse


def families() -> tuple[FamilySummary, ...]:
    """Return all families in the order of their names, with their models, layers and inexact values."""
    return tuple(summary(family) for family in known_families().values())


@validate_arguments
@declare(*CHECK_FAMILY)
def check_family(
    family: LocationLike | Family, *, against: LocationLike | None = None, config: LocationLike | None = None
) -> FamilyCheck:
    """Check that a family is consistent, converts in both directions, and matches a model. Reads no arrays.

    Args:
        family: Name of a family, a file that describes one, or the family itself.

    Raises:
        CheckpointError: The family does not exist, or `against` or `config` cannot be read.
    """
    from ckpttools.family_check.check import check_family as check

    checked = family if isinstance(family, Family) else family_called(str(family))
    return check(
        checked,
        None if against is None else parse(against),
        None if config is None else parse(config),
    )
