"""Find all checks and run them on a model."""

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
    names = (module.name for module in pkgutil.iter_modules(package.__path__))
    modules = (import_module(f"{package.__name__}.{name}") for name in names if name not in _NOT_CHECKS)
    return tuple(sorted((module.CHECK for module in modules), key=lambda check: check.name))


def findings(model: ModelDirectory) -> Iterator[ModelFinding]:
    """Yield the findings of the checks that commands run on the models that they read and write."""
    for check in checks():
        if not check.is_own_check and (model.is_output or not check.is_for_outputs):
            yield from check.run(model)
