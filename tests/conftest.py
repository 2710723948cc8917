"""Every test has this package's hypothesis settings, and waits for the disk only where that is tested."""

import os
from pathlib import Path

import pytest

from ckpttools.testing.profile import use_profile

use_profile()

HERE = Path(__file__).parent
# What is synced, when, and what a crash leaves is the subject of these, and of those in sub-directories.
WAITING = ("test_durability.py", "test_run.py")


@pytest.fixture(scope="module", autouse=True)
def no_waiting_for_the_disk(request):
    """Nothing that other tests write must outlive a crash: a third of their time was spent in syncs."""
    if request.path.parent != HERE or request.path.name in WAITING:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync", "sync"):
            patch.setattr(os, name, lambda *descriptor: None)
        yield
