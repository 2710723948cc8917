"""Families by `model_type`, found without importing all families."""

from support.internals import families, family_named

from ckpttools.model_families.registry import families_of_type


def test_model_types_map_to_declaring_families():
    known = families().values()
    for model_type in sorted({name for family in known for name in family.model_types}):
        expected = [family.name for family in known if model_type in family.model_types]
        assert [family.name for family in families_of_type(model_type)] == expected


def test_unknown_types_have_no_family():
    assert [*map(families_of_type, ("", "unheard-of", None, 3, "registry", "family"))] == [()] * 6


def test_names_resolve_to_families():
    assert all(family_named(name) is family for name, family in families().items())
