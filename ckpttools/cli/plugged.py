"""Commands of other packages: those that they bring, and one for each transform that they announce."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ckpttools.cli.lazy import Deferred
from ckpttools.core.errors import UsageError
from ckpttools.core.plugins import announced, package_of

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def plugged_in() -> Mapping[str, Deferred]:
    """All of them, by name; none is loaded."""
    found: dict[str, Deferred] = {}
    for group, load in (("ckpttools.transforms", _transform), ("ckpttools.commands", _command)):
        for point in announced(group):
            found[point.name] = Deferred(partial(load, point), f"Of the package {package_of(point)}.")
    return found


def _command(point: EntryPoint) -> click.Command:
    try:
        found = point.load()
    except Exception as error:
        what = f"the command {point.name} of {package_of(point)} cannot be loaded"
        raise UsageError(what, got=repr(error), hint="repair that package, or remove it") from error
    if not isinstance(found, click.Command):
        what = f"{point.name} of {package_of(point)} is no command"
        raise UsageError(what, got=type(found).__name__, wanted="a click.Command")
    return found


def _transform(point: EntryPoint) -> click.Command:
    from ckpttools.api.changes import transform
    from ckpttools.cli.declared import declared, made
    from ckpttools.cli.transforming import common_options, places, target_options
    from ckpttools.cli.write import write
    from ckpttools.transforms.registry import help_of, options_of

    def command(**options: Any) -> None:
        write(transform.plan, transforms=point.name, **options)

    options = (places, declared(options_of(point.name)), target_options, common_options)
    return made(point.name, help_of(point.name), command, *options)
