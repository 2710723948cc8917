"""Find all checks and run them on a model."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from functools import cache
from importlib import import_module

from ckpttools import checks as package
from ckpttools.checks.base import ModelCheck, ModelDirectory, ModelFinding

_HELPER_MODULES = ("base", "registry")
OWN_CHECKS = ("coverage", "deviations", "tied_head", "vocabulary")
"""Modules of checks that conversions run themselves, so that commands do not repeat them."""
_OUTPUT_CHECKS = ("dtype", "layers", "quantization")
"""Modules of checks that commands run only on Hugging Face models that they write, not on their sources."""


def checks() -> tuple[ModelCheck, ...]:
    """Return all checks in the order of their names."""
    return _checks_except(())


@cache
def _checks_except(left: tuple[str, ...]) -> tuple[ModelCheck, ...]:
    """Return the checks by name, except those of some modules, which are not imported."""
    names = (module.name for module in pkgutil.iter_modules(package.__path__))
    remaining = (name for name in names if name not in (*_HELPER_MODULES, *left))
    modules = (import_module(f"{package.__name__}.{name}") for name in remaining)
    return tuple(sorted((module.CHECK for module in modules), key=lambda check: check.name))


def findings(model: ModelDirectory) -> Iterator[ModelFinding]:
    """Yield the findings of the checks that commands run on the models that they read and write."""
    is_written = model.is_output and model.tree is not None
    for check in _checks_except(OWN_CHECKS if is_written else OWN_CHECKS + _OUTPUT_CHECKS):
        yield from check.run(model)
