"""What the steps of a run and the trees in them are called: a manager finds only what is called alike.

Orbax's `CheckpointManager` (0.12.8) lists the steps of one prefix and one padding, and restores by the names
of items: where one step has its tree as `default` and the next as `items`, the same call fails for one of
them. A step without named items it does not restore at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import option
from ckpttools.formats.orbax.steps import OrbaxRun, Step
from ckpttools.stores.location import Location

ITEM = "items"
"""What an item is called where nothing says otherwise, as MaxText calls it."""


@dataclass(frozen=True)
class Neighbors:
    """The steps of a run beside the one that is written.

    Attributes:
        destination: where that will be.
    """

    destination: Location

    @cached_property
    def _steps(self) -> Sequence[Step]:
        """Those that were finished, the latest last."""
        # What is called by a word and a number may be anything.
        steps = OrbaxRun(self.destination.parent).steps.values()
        own = Step(self.destination).prefix
        return [
            step
            for step in steps
            if step.path != self.destination and step.prefix in ("", own) and is_finished(step)
        ]

    def item(self, declared: str | None, as_read: str | None) -> str:
        """Return the name of the one item of a step.

        Args:
            declared: by the user.
            as_read: that which the tree had.

        Raises:
            UsageError: the steps have several items, or none with a name of its own; or no manager that
                lists them would list a step of this name.
        """
        if not self._steps:
            return declared or as_read or ITEM
        self._check_name()
        names = tree_names(self._steps[-1])
        if not names:
            raise self._refused(
                "the steps of this run are items themselves, as StandardCheckpointer writes them",
                f"save it as one, too: {option('level', 'item')}",
            )
        if declared or as_read in names:
            return declared or as_read or ITEM
        if len(names) > 1:
            raise self._refused(
                f"the steps of this run have several items: {', '.join(names)}",
                f"say which of them is written: {option('item', names[0])}",
            )
        return names[0]

    def check_bare(self) -> None:
        """Refuse an item of its own among steps with named ones.

        Raises:
            UsageError: a manager that restores those would fail on it.
        """
        own = Step(self.destination)
        if own.number is None or not self._steps or not tree_names(self._steps[-1]):
            return
        raise self._refused(
            f"this is a step of a run whose steps have items with names: {', '.join(self._latest)}",
            f"save it as a step: {option('level', 'step')}",
        )

    def why_unlisted(self, item: str) -> str | None:
        """Why a manager will not find the step, or the item in it, as it was named; None where it will."""
        if not self._steps:
            if Step(self.destination).number is not None:
                return None
            return f"{self.destination.name!r} has no number: no CheckpointManager lists it as a step"
        if item in self._latest:
            return None
        return (
            f"the item is called {item}, that of step {self._steps[-1].number} {', '.join(self._latest)}: "
            f"a CheckpointManager that restores the one does not restore the other"
        )

    @property
    def _latest(self) -> tuple[str, ...]:
        return tree_names(self._steps[-1])

    def _check_name(self) -> None:
        if is_alike(self.destination.name, self._steps):
            return
        latest = self._steps[-1].path.name
        raise self._refused(
            f"no CheckpointManager that lists {latest} would list a step called {self.destination.name}",
            "name it with a number as the other steps are, or write it to a place outside of the run",
        )

    def _refused(self, what: str, hint: str) -> UsageError:
        return UsageError(what, location=self.destination, hint=hint)


def is_finished(step: Step) -> bool:
    """Return whether a step has a tree, and was saved to the end."""
    return bool(step.items) and step.why_unfinished is None


def tree_names(step: Step) -> tuple[str, ...]:
    """Return the names of the trees of a step; none where the step is the tree itself."""
    return tuple(item.name for item in step.items if item.name is not None)


def is_alike(name: str, steps: Sequence[Step]) -> bool:
    """Return whether a manager that lists these steps would list one of this name."""
    own = Step(steps[0].path.with_name(name))
    if own.number is None or own.prefix != steps[0].prefix:
        return False
    digits = name.removeprefix(own.prefix)
    others = [step.path.name.removeprefix(step.prefix) for step in steps]
    if any(_is_padded(other) for other in (digits, *others)):
        return all(len(other) == len(digits) for other in others)
    return True


def _is_padded(digits: str) -> bool:
    return len(digits) > 1 and digits.startswith("0")


def named_apart(steps: Sequence[Step]) -> Mapping[tuple[str, ...], Sequence[Step]]:
    """Return steps by the names of their trees, where no name is common to all of them; else empty."""
    result: dict[tuple[str, ...], list[Step]] = {}
    for step in steps:
        result.setdefault(tree_names(step), []).append(step)
    common = set.intersection(*map(set, result)) if result else set()
    return {} if len(result) < 2 or common else result
