"""Errors for a destination that contains a different unfinished conversion."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ckpttools.core.budget import DEFAULT_MEMORY, format_size, parse_size
from ckpttools.core.errors import UsageError
from ckpttools.core.message_terms import option
from ckpttools.stores.publishing import JobInfo

_RESOURCES = frozenset(("--jobs", "--memory", "--requests", "--progress", "--no-progress", "--resume"))
"""Options that do not affect the result, so that a command can resume with different values."""


def conflict_error(directory: Path, begun: JobInfo | None, purpose: JobInfo) -> UsageError:
    """Return the error for a directory that contains a different conversion.

    Args:
        directory: The staging directory of the other conversion.
        begun: The other conversion; None if its journal is damaged.
        purpose: The requested conversion.
    """
    discard = f"delete {directory}, or discard it with {option('overwrite', True)}"
    if begun is None:
        return UsageError(
            f"the journal in {directory} is damaged, so the finished work is unknown",
            expected="an unmodified file of an interrupted conversion",
            hint=discard,
        )
    if begun.is_same_command(purpose):
        what = "another conversion: the same command, started before its source changed"
        go_on = "it cannot be resumed"
    else:
        what = "another conversion"
        go_on = f"to resume it, {_resume_hint(begun)}"
    hint = f"{go_on}; otherwise {discard}"
    if _is_same_conversion(begun, purpose):
        changes = _describe_changes(begun, purpose) or _describe_smaller_memory(begun, purpose)
        what = f"another conversion: the same command, started with other options{changes}"
        hint = f"to start over with the new options, {discard}; {go_on}"
        if not changes:
            what = "another conversion: the same command, with other options or before its source changed"
            hint = f"to start over, {discard}"
    return UsageError(
        f"{directory} contains the beginning of {what}",
        got=describe_conversion(begun),
        expected=describe_conversion(purpose),
        hint=hint,
    )


def _is_same_conversion(begun: JobInfo, purpose: JobInfo) -> bool:
    """Return whether two conversions have the same command and source but different options."""
    names = [item.command.split()[:2] for item in (begun, purpose)]
    return begun.command != purpose.command and begun.source == purpose.source and names[0] == names[1]


def _describe_changes(begun: JobInfo, purpose: JobInfo) -> str:
    """Describe the options that differ between two commands; "" if none differ."""
    before, now = (dict.fromkeys(_options(item.command)) for item in (begun, purpose))
    old = [item for item in before if item not in now]
    new = [item for item in now if item not in before]
    changes = [f"{word} {' '.join(options)}" for word, options in (("with", old), ("now", new)) if options]
    return f" ({', '.join(changes)})" if changes else ""


def _describe_smaller_memory(begun: JobInfo, purpose: JobInfo) -> str:
    """Describe the memory limits of two commands if the started tasks may not fit in the other limit."""
    before, now = _parse_memory_limit(begun.command), _parse_memory_limit(purpose.command)
    if not begun.division or before is None or now is None or before <= now:
        return ""
    old, new = (option("memory", format_size(memory)) for memory in (before, now))
    return f" (with {old}, now {new}, into which its tasks do not fit)"


def _parse_memory_limit(command: str) -> int | None:
    """Return the memory limit of a command in bytes; None if it cannot be parsed."""
    words = command.replace("--memory=", "--memory ").split()
    if "--memory" not in words:
        return DEFAULT_MEMORY
    try:
        return parse_size(words[words.index("--memory") + 1])
    except (IndexError, UsageError):
        return None


def _options(command: str) -> Iterator[str]:
    """Iterate over the options of a command that affect its result, with their values."""
    words = command.split()
    for word, following in zip(words, [*words[1:], "-"], strict=True):
        if word.startswith("--") and word.partition("=")[0] not in _RESOURCES:
            yield word if following.startswith("-") else f"{word} {following}"


def describe_conversion(purpose: JobInfo) -> str:
    """Describe a conversion for a message."""
    of = f"the conversion of {purpose.source}, " if purpose.source else ""
    by = f"by `{purpose.command}` in {purpose.directory}, " if purpose.command else ""
    return f"{of}{by}plan {purpose.plan[:12]}"


def _resume_hint(purpose: JobInfo) -> str:
    """Return a hint on how to resume a conversion."""
    if not purpose.command:
        return "run the command that started it"
    return f"run in {purpose.directory}: {purpose.command}"
