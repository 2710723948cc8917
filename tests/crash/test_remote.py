"""A sample of `make crash-remote`: conversions to gs:// that are killed at random moments."""

from __future__ import annotations

import random

import pytest
from support.object_stores import environment

from crash.remote import Campaign, one, prepared, serving


@pytest.mark.parametrize(("name", "is_replacing"), [("hf", False), ("orbax", True)])
def test_remote_conversions_survive_kills(name, is_replacing):
    with serving() as url, environment(STORAGE_EMULATOR_HOST=url):
        campaign = Campaign(url, random.Random(3))
        expected = prepared(campaign, [name])
        assert one(campaign, 0, name, is_replacing, expected[name]) == ""
