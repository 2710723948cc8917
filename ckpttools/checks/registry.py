"""All checks, and running them over a model."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from functools import cache
from importlib import import_module

from ckpttools import checks as package
from ckpttools.checks.base import ModelCheck, ModelDirectory, ModelFinding

_NOT_CHECKS = ("base", "registry")


@cache
def checks() -> tuple[ModelCheck, ...]:
    """Return all checks, by name."""
    names = (each.name for each in pkgutil.iter_modules(package.__path__) if each.name not in _NOT_CHECKS)
    found = (import_module(f"{package.__name__}.{name}").CHECK for name in names)
    return tuple(sorted(found, key=lambda check: check.name))


def findings(model: ModelDirectory) -> Iterator[ModelFinding]:
    """Run the checks that a command makes of what it reads and writes.

    Args:
        model: the directory.

    Yields:
        The findings of each check in turn.
    """
    for check in checks():
        if not check.is_own_check:
            yield from check.run(model)
