"""One function for each thing a user does; `ckpttools` has all of them, too."""

from __future__ import annotations

import sys
from typing import Any

import ckpttools


def __getattr__(name: str) -> Any:
    if name not in ckpttools.__all__:
        raise AttributeError(f"module 'ckpttools.api' has no attribute {name!r}")
    return ckpttools.__getattr__(name)


def __dir__() -> list[str]:
    return ckpttools.__all__


# Its modules, too, may have the names of functions.
sys.modules[__name__].__class__ = ckpttools.Package
