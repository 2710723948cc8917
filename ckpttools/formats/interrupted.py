"""What an interrupted conversion leaves where somebody looks for a checkpoint: told instead of opened."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from ckpttools.core.errors import FormatError, StorageError
from ckpttools.stores.local.partial import REPLACED, SUFFIX, is_staging


def partial_of(path: Path) -> Path | None:
    """The directory that an interrupted conversion to `path` left beside it, None if there is none."""
    if path.name in ("", ".."):
        return None
    partial = path.with_name(path.name + SUFFIX)
    return partial if is_staging(partial) else None


def absent(path: Path) -> StorageError:
    """The error of a path at which there is nothing."""
    partial = partial_of(path)
    hint = f"check the spelling of the path{_fetched(path)}" if partial is None else next_step(partial)
    return StorageError(f"{path} is not there", hint=hint)


def _fetched(path: Path) -> str:
    """What to do where a path looks like the name of a model on the hub, OWNER/NAME."""
    if path.is_absolute() or len(path.parts) != 2 or path.parts[0] == ".." or path.parent.exists():
        return ""
    command = f"hf download {quote(str(path))} --local-dir {quote(path.name)}"
    return f"; a model on the Hugging Face Hub is fetched first: {command}"


def refuse_interrupted(path: Path) -> None:
    """Raises FormatError if `path` is a directory in which a conversion grows, whatever lies in it."""
    if is_staging(path):
        raise FormatError("an interrupted conversion is no checkpoint yet", place=path, hint=next_step(path))


def next_step(partial: Path) -> str:
    """What to do about an interrupted conversion."""
    replaced = partial / REPLACED
    if replaced.is_dir():
        return f"{replaced} holds what it was before it was to be replaced: move it back"
    return f"{partial} is an interrupted conversion: run its command again, and it goes on"
