"""Exceptions of the package. Their messages state the location, what was found, what was expected and a hint.

All exceptions have one base class. Each leaf class names a cause and has a process exit code, one of
`EXIT_CODES`.
"""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, NamedTuple, Self

from ckpttools.core.message_terms import render
from ckpttools.core.text import fold_lines, printable, printable_text

# Process exit codes; docs/errors.md explains them.
EXIT_CODES: Mapping[int, str] = {
    0: "done",
    1: "differences found",
    2: "usage",
    3: "bad input",
    4: "does not fit into memory or disk",
    5: "input/output",
    70: "internal error",
    129: "stopped by SIGHUP",
    130: "stopped by SIGINT (Ctrl-C)",
    141: "broken pipe",
    143: "stopped by SIGTERM",
}


class ErrorText(NamedTuple):
    """The texts of an error, whose terms are rendered differently for each audience.

    Attributes:
        message, location, got, expected, hint: See `CheckpointError`.
    """

    message: str
    location: str | None = None
    got: str | None = None
    expected: str | None = None
    hint: str | None = None

    @property
    def line(self) -> str:
        """The message without line breaks, for use inside another sentence: `are missing: a; b`."""
        return "; ".join(map(str.strip, self.message.splitlines())).replace(":; ", ": ")

    def details(self) -> list[tuple[str, str]]:
        """The labeled lines below the message, in reading order."""
        pairs = (
            ("at", self.location and printable(self.location)),
            ("expected", _group_details(self.expected)),
            ("got", _group_details(self.got)),
            ("hint", self.hint),
        )
        return [(label, text) for label, text in pairs if text is not None]

    def map(self, change: Callable[[str], str]) -> ErrorText:
        """Return a copy with `change` applied to each text."""
        return ErrorText(change(self.message), *(text and change(text) for text in self[1:]))

    def __str__(self) -> str:
        lines = [self.message, *(f"  {label:<9}{text}" for label, text in self.details())]
        return "\n".join(map(printable_text, lines))


class CheckpointError(Exception):
    """Base class of all errors that this package raises deliberately.

    Args:
        message: One sentence that states the failure.
        location: File, array or row where the failure happened.
        got: What was found.
        expected: What was expected.
        hint: The next step for the user.

    Attributes:
        raw: The same texts, with unrendered terms. The other attributes have the terms of Python.
    """

    exit_code: ClassVar[int] = 3

    def __init__(
        self,
        message: str,
        *,
        location: object = None,
        got: object = None,
        expected: object = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(render(message))
        where, found, due = (None if item is None else str(item) for item in (location, got, expected))
        self.raw = ErrorText(message, where, found, due, hint)

    def at(self, location: object = None, *, got: str | None = None, hint: str | None = None) -> Self:
        """Return a copy of the error with another location, finding or hint, if given."""
        # Copying would call the constructor, and some constructors take more than the message.
        result = type(self).__new__(type(self), *self.args)
        result.__dict__.update(self.__dict__)
        changes = {"location": None if location is None else str(location), "got": got, "hint": hint}
        result.raw = self.raw._replace(**{name: text for name, text in changes.items() if text is not None})
        return result

    @property
    def message(self) -> str:
        """The sentence that states the failure."""
        return render(self.raw.message)

    @property
    def location(self) -> str | None:
        """File, array or row where the failure happened."""
        return self.raw.location and render(self.raw.location)

    @property
    def got(self) -> str | None:
        """The observed value or state."""
        return self.raw.got and render(self.raw.got)

    @property
    def expected(self) -> str | None:
        """The expected value or state."""
        return self.raw.expected and render(self.raw.expected)

    @property
    def hint(self) -> str | None:
        """The next step for the user."""
        return self.raw.hint and render(self.raw.hint)

    @property
    def line(self) -> str:
        """The message without line breaks."""
        return render(self.raw.line)

    def details(self) -> list[tuple[str, str]]:
        """Return the labeled lines below the message, in reading order."""
        return self.raw.map(render).details()

    def __str__(self) -> str:
        return str(self.raw.map(render))


def _group_details(text: str | None) -> str | None:
    """Group the digits of numbers of bytes: `12,345 bytes`."""
    return text and re.sub(r"(?<![\w.,-])\d{4,}(?= bytes)", lambda number: f"{int(number[0]):,}", text)


class UsageError(CheckpointError):
    """The call itself is invalid: an option, a name or a path."""

    exit_code = 2


class DestinationExistsError(UsageError):
    """The destination already exists, and the caller did not ask to overwrite it."""


class MissingPackageError(UsageError, ImportError):
    """A Python package that a function needs is not installed."""


class FormatError(CheckpointError):
    """The content of a file does not match its name or the files next to it."""


class SeveralCheckpointsError(FormatError):
    """A directory of several checkpoints or runs was given, but a single one is expected.

    Attributes:
        suggested: Path of the checkpoint that a hint may suggest.
        detected: Result of `ckpttools.formats.detect`.
    """

    suggested: str = ""
    detected: object = None


class SourceChangedError(FormatError):
    """A source changed after it was planned, so the data read from it may mix two states."""


class DamagedScalesError(FormatError):
    """Scales of quantized weights produce non-finite values.

    Attributes:
        list_all: Extends the error to all damaged scales of a run's arrays; None if the error already lists
            all.
    """

    list_all: Callable[[DamagedScalesError, Iterable[Any]], BaseException] | None = None


def with_all_damage(error: BaseException, arrays: Iterable[Any]) -> BaseException:
    """Extend an error about damaged scales to all arrays of a run; return other errors unchanged."""
    return (
        error.list_all(error, arrays) if isinstance(error, DamagedScalesError) and error.list_all else error
    )


class ConfigError(CheckpointError):
    """A model configuration is missing, unreadable or contradicts the weights."""


class UnknownNameError(UsageError):
    """An unknown family, dtype or algorithm."""


class NoSuchPathError(UnknownNameError, KeyError):
    """A path that does not exist in a tree; also a KeyError, since trees are mappings."""


class MappingError(CheckpointError):
    """A mapping row or table that is invalid for any checkpoint."""


class ShapeError(CheckpointError):
    """Shapes that contradict each other or the configuration."""


class CoverageError(CheckpointError):
    """Arrays are missing, unexpected or of the wrong shape. The message lists all of them."""


class MemoryBudgetError(CheckpointError):
    """The work cannot be divided finely enough for the memory limit."""

    exit_code = 4


class OtherProcessError(CheckpointError):
    """Another process of the job failed."""

    exit_code = 5


class NoSpaceError(CheckpointError):
    """The destination has too little free space."""

    exit_code = 4


class StorageError(CheckpointError):
    """Reading or writing failed in the file system or store."""

    exit_code = 5


class MissingPathError(StorageError):
    """A path that the caller named does not exist."""

    exit_code = 2


def system_error(activity: str, path: object, error: OSError, hint: str | None = None) -> StorageError:
    """Convert an OSError, keeping its message.

    Args:
        activity: What failed, such as "cannot read".
        path: Path of the file.
        error: The original error; if the path does not exist, the result is a MissingPathError.
        hint: What to do.
    """
    is_missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
    return (MissingPathError if is_missing else StorageError)(
        f"{activity} {path}", got=f"{error.strerror} (errno {error.errno})", hint=hint
    )


class CheckpointWarning(Warning):
    """Base class of the package's warnings, which render terms for Python."""

    def __str__(self) -> str:
        return render(super().__str__())


class LostValuesWarning(CheckpointWarning):
    """Values changed because the dtype cannot represent them."""


class UncutArraysWarning(CheckpointWarning):
    """Arrays match no sharding rule and are replicated."""


class PaddedVocabularyWarning(CheckpointWarning):
    """A vocabulary is padded with zeros to the requested size."""


class StepWarning(CheckpointWarning):
    """A different step was opened than expected."""


class LaterStepWarning(StepWarning):
    """An earlier step was opened, because the latest is not finished."""


class ChosenItemWarning(StepWarning):
    """One of several items of a step was opened, because only its name indicates parameters."""


class UnlistedStepWarning(StepWarning):
    """A step that Orbax does not list under this name, or restores differently from its neighbors."""


def similar_names(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Return known names that resemble `name`, best first."""
    return difflib.get_close_matches(name, list(known), n=count, cutoff=0.6)


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """Return a question that suggests the most similar known name; None if no name is similar."""
    near = similar_names(name, known, 1)
    return f"did you mean {near[0]}?" if near else None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message with its terms, or its type if the message is empty."""
    text = str(error.raw if isinstance(error, CheckpointError) else error)
    return text.partition("\n")[0] or type(error).__name__


def listing(items: Sequence[str], limit: int = 20, *, folds: bool = True) -> str:
    """List `items` on indented lines, joining those that differ only in numbers if `folds`."""
    declared = fold_lines(map(printable, items)) if folds else [*map(printable, items)]
    lines = [f"\n    {item}" for item in declared[:limit]]
    if len(declared) > limit:
        lines.append(f"\n    … and {len(declared) - limit} more lines")
    return "".join(lines)


def list_with_count(title: str, items: Sequence[str]) -> str:
    """List items below a line with their description and count; "" for none."""
    return f"\n  {title} ({len(items)}):{listing(items)}" if items else ""


_SUPPRESSED: ContextVar[tuple[type[StepWarning], ...]] = ContextVar("unwanted", default=())


@contextmanager
def suppress_step_warnings(kind: type[StepWarning] = StepWarning) -> Iterator[None]:
    """Suppress warnings of a kind inside the `with`, in this thread only.

    `warnings.catch_warnings` affects all threads. If two threads leave it in a different order than they
    entered it, the warnings they ignored stay ignored.
    """
    token = _SUPPRESSED.set((*_SUPPRESSED.get(), kind))
    try:
        yield
    finally:
        _SUPPRESSED.reset(token)


def warn_step(text: str, kind: type[StepWarning]) -> None:
    """Warn about the opened step, attributing the warning to the caller's caller."""
    if not issubclass(kind, _SUPPRESSED.get()):
        warnings.warn(text, kind, stacklevel=3)
