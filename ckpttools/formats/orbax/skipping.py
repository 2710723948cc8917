"""How Orbax is kept from a step that it takes for finished and cannot load."""

from __future__ import annotations

from shlex import quote

from ckpttools.core.dataclass import dataclass
from ckpttools.formats.orbax.metadata import COMMIT_FILE
from ckpttools.formats.orbax.steps import commits_by_file, is_committed
from ckpttools.stores.abilities import SupportsRename
from ckpttools.stores.location import Location


@dataclass(frozen=True, slots=True)
class Remedy:
    """What makes Orbax skip a step.

    Attributes:
        words: what that is, as an order.
        command: that does it; None where moving it away is left to the user.
        fix: name of the fix of `ckpt doctor` that does it, or None.
    """

    words: str
    command: str | None = None
    fix: str | None = None


def remedy(step: Location, asked: Location, *, is_uncommitted: bool) -> Remedy:
    """What makes Orbax skip a step.

    Args:
        step: that should be skipped.
        asked: of what `ckpt doctor` would be asked: the step, or something above.
        is_uncommitted: whether it is a save that was never committed, which alone `ckpt doctor` renames.
    """
    if commits_by_file(step):
        words = f"delete its {COMMIT_FILE}, so that Orbax skips it"
        return Remedy(words, step.store.removal((step / COMMIT_FILE).key))
    if is_uncommitted and isinstance(step.store, SupportsRename):
        path = f"./{asked}" if str(asked).startswith("-") else str(asked)
        command = f"ckpt doctor {quote(path)} --fix set-aside"
        return Remedy("rename it, so that Orbax skips it", command, "set-aside")
    return Remedy(f"move {step} away, so that Orbax skips it")


def is_passed_over(step: Location) -> bool:
    """Return whether loaders skip an uncommitted step: Orbax does if it goes by names."""
    return not is_committed(step) or not (commits_by_file(step) or isinstance(step.store, SupportsRename))
