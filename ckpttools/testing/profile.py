"""The hypothesis settings that this package's own tests use."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings


def use_profile() -> None:
    """Use no deadline, since machines differ, accept large inputs, and try 100 examples for each test.

    Under continuous integration (`CI` in the environment) the examples are the same 30 in every run.
    """
    is_ci = bool(os.environ.get("CI"))
    settings.register_profile(
        "ckpttools",
        deadline=None,
        max_examples=30 if is_ci else 100,
        derandomize=is_ci,
        print_blob=True,
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.filter_too_much,
            HealthCheck.function_scoped_fixture,
        ],
    )
    settings.load_profile("ckpttools")
