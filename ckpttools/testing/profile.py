"""The hypothesis settings that this package's own tests use."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings


def use_profile() -> None:
    """No deadline, since machines differ, and no complaint about large inputs; 100 examples a test.

    Under continuous integration (`CI` in the environment) the examples are the same in every run.
    """
    settings.register_profile(
        "ckpttools",
        deadline=None,
        max_examples=100,
        derandomize=bool(os.environ.get("CI")),
        print_blob=True,
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.filter_too_much,
            HealthCheck.function_scoped_fixture,
        ],
    )
    settings.load_profile("ckpttools")
