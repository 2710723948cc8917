"""Ways to make Orbax skip a step that it considers finished but cannot load."""

from __future__ import annotations

from ckpttools.core.dataclass import dataclass
from ckpttools.core.message_terms import call
from ckpttools.formats.orbax.metadata import COMMIT_FILE
from ckpttools.formats.orbax.steps import commits_by_file, is_committed
from ckpttools.stores.abilities import SupportsRename
from ckpttools.stores.location import Location


@dataclass(frozen=True, slots=True)
class Remedy:
    """An action that makes Orbax skip a step.

    Attributes:
        words: Description of the action, in the imperative.
        command: The command for the action; None if the user must move the step away.
        fix: Name of the `ckpt doctor` fix for the action, or None.
    """

    words: str
    command: str | None = None
    fix: str | None = None


def remedy(step: Location, asked: Location, *, is_uncommitted: bool) -> Remedy:
    """Return an action that makes Orbax skip a step.

    Args:
        step: The step to skip.
        asked: Path to pass to `ckpt doctor`: the step, or a parent directory.
        is_uncommitted: Whether the save was never committed; `ckpt doctor` renames only uncommitted steps.
    """
    if commits_by_file(step):
        words = f"delete its {COMMIT_FILE}, so that Orbax skips it"
        return Remedy(words, step.store.removal((step / COMMIT_FILE).key))
    if is_uncommitted and isinstance(step.store, SupportsRename):
        command = call("doctor", asked, fix="set-aside")
        return Remedy("rename it, so that Orbax skips it", command, "set-aside")
    return Remedy(f"move {step} away, so that Orbax skips it")


def is_passed_over(step: Location) -> bool:
    """Return whether loaders skip an uncommitted step, as Orbax does where it judges by names."""
    return not is_committed(step) or not (commits_by_file(step) or isinstance(step.store, SupportsRename))
