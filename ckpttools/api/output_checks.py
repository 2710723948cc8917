"""Checking the parts of a model directory against each other before any of it is written."""

from __future__ import annotations

from ckpttools.array.tree import Tree
from ckpttools.checks.base import Content, ModelDirectory, ModelFinding
from ckpttools.checks.registry import findings
from ckpttools.core.errors import FormatError
from ckpttools.core.notes import Notes
from ckpttools.formats.base import Writer
from ckpttools.formats.registry import companions_at
from ckpttools.formats.sidecar import WithSidecars
from ckpttools.maxtext.model_files import has_sidecars


def check_output(tree: Tree, writer: Writer, location: str) -> Notes:
    """Check what a command is about to write: configuration, tokenizer and adapter files against the arrays.

    Args:
        tree: what is written.
        writer: how; only one with sidecars writes files whose parts can disagree.
        location: where, for messages.

    Returns:
        A remark for each finding that does not block writing.

    Raises:
        FormatError: a consumer could not load the output.
    """
    if not isinstance(writer, WithSidecars):
        return Notes()
    files: dict[str, Content] = {**writer.companions.files, **writer.made}
    arrays = None if writer.directory else tree
    return _notes(ModelDirectory(location, files, arrays, is_output=True))


def check_source(tree: Tree) -> Notes:
    """Check the model directory that a command reads.

    Args:
        tree: as it was opened.

    Returns:
        A remark for each finding; none where the tree has no files of a model next to its weights.

    Raises:
        FormatError: a finding blocks writing.
    """
    directory = companions_at(tree)
    if directory is None or not has_sidecars(tree) or not directory.is_dir():
        return Notes()
    entries = (each.name for each in directory.entries() if each.is_file)
    files: dict[str, Content] = {name: directory / name for name in entries}
    return _notes(ModelDirectory(str(directory), files, tree))


def _notes(model: ModelDirectory) -> Notes:
    """The findings that do not block writing, as remarks."""
    remarks = []
    for finding in findings(model):
        if finding.blocks_writing:
            raise _refusal(finding)
        if finding.level != "info":
            remarks.append(f"{finding.what}: {finding.why}; {finding.hint}")
    return Notes(remarks=tuple(remarks))


def _refusal(finding: ModelFinding) -> FormatError:
    return FormatError(
        finding.what, place=finding.location, wanted=finding.expected, got=finding.got, hint=finding.hint
    )
