"""Names of a run's steps and their trees, which must be consistent for a manager to find them.

Orbax's `CheckpointManager` (0.12.8) lists steps with one prefix and one padding, and restores by item name.
If one step stores its tree as `default` and the next as `items`, the same call fails for one of them. Steps
without named items are not restored at all.
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
"""Default item name, as in MaxText."""


@dataclass(frozen=True)
class Neighbors:
    """The other steps of a run in which a step is written.

    Attributes:
        destination: Location of the step to write.
    """

    destination: Location

    @cached_property
    def _steps(self) -> Sequence[Step]:
        """The finished steps, from oldest to latest."""
        # A directory named by a word and a number may be anything.
        steps = OrbaxRun(self.destination.parent).steps.values()
        own = Step(self.destination).prefix
        return [
            step
            for step in steps
            if step.path != self.destination and step.prefix in ("", own) and is_finished(step)
        ]

    def item(self, declared: str | None, as_read: str | None) -> str:
        """Return the name of the step's only item.

        Args:
            declared: The name set by the user.
            as_read: The name in the source.

        Raises:
            UsageError: The other steps have several items or an unnamed item, or a manager that lists them
                would not list a step of this name.
        """
        if not self._steps:
            return declared or as_read or ITEM
        self._check_name()
        names = tree_names(self._steps[-1])
        if not names:
            raise self._usage_error(
                "the steps of this run are items themselves, as StandardCheckpointer writes them",
                f"save this one as an item, too: {option('level', 'item')}",
            )
        if declared or as_read in names:
            return declared or as_read or ITEM
        if len(names) > 1:
            raise self._usage_error(
                f"the steps of this run have several items: {', '.join(names)}",
                f"choose the item to write: {option('item', names[0])}",
            )
        return names[0]

    def check_bare(self) -> None:
        """Reject an unnamed item among steps with named items.

        Raises:
            UsageError: A manager that restores the other steps would fail on it.
        """
        own = Step(self.destination)
        if own.number is None or not self._steps or not tree_names(self._steps[-1]):
            return
        raise self._usage_error(
            f"the other steps of this run have named items: {', '.join(self._latest)}",
            f"save it as a step: {option('level', 'step')}",
        )

    def unlisted_reason(self, item: str) -> str | None:
        """Return why a manager will not find the step or its item by name; None if it will."""
        if not self._steps:
            if Step(self.destination).number is not None:
                return None
            return f"{self.destination.name!r} has no number: no CheckpointManager lists it as a step"
        if item in self._latest:
            return None
        return (
            f"the item is named {item}, but in step {self._steps[-1].number} {', '.join(self._latest)}: "
            f"a CheckpointManager restores only one of them"
        )

    @property
    def _latest(self) -> tuple[str, ...]:
        return tree_names(self._steps[-1])

    def _check_name(self) -> None:
        if is_listed_with(self.destination.name, self._steps):
            return
        latest = self._steps[-1].path.name
        raise self._usage_error(
            f"a CheckpointManager that lists {latest} does not list a step named {self.destination.name}",
            "name it like the other steps, with a number, or write it outside of the run",
        )

    def _usage_error(self, message: str, hint: str) -> UsageError:
        return UsageError(message, location=self.destination, hint=hint)


def is_finished(step: Step) -> bool:
    """Return whether a step has a tree and its save finished."""
    return bool(step.items) and step.unfinished_reason is None


def tree_names(step: Step) -> tuple[str, ...]:
    """Return the names of the trees of a step; empty if the step itself is the tree."""
    return tuple(item.name for item in step.items if item.name is not None)


def is_listed_with(name: str, steps: Sequence[Step]) -> bool:
    """Return whether a manager that lists these steps would also list this name."""
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


def group_by_tree_name(steps: Sequence[Step]) -> Mapping[tuple[str, ...], Sequence[Step]]:
    """Group steps by the names of their trees; return an empty mapping if all steps share a name."""
    result: dict[tuple[str, ...], list[Step]] = {}
    for step in steps:
        result.setdefault(tree_names(step), []).append(step)
    common = set.intersection(*map(set, result)) if result else set()
    return {} if len(result) < 2 or common else result
