"""Check that the parts of a model directory agree before any of it is written."""

from __future__ import annotations

from ckpttools.array.tree import Tree
from ckpttools.checks.base import Content, ModelDirectory
from ckpttools.checks.registry import findings
from ckpttools.core.errors import FormatError
from ckpttools.core.notes import Notes
from ckpttools.formats.base import Writer
from ckpttools.formats.registry import companions_at
from ckpttools.formats.sidecar import WithSidecars
from ckpttools.maxtext.model_files import has_sidecars


def check_output(tree: Tree, writer: Writer, location: str) -> Notes:
    """Check the configuration, tokenizer and adapter files of an output against its arrays.

    Args:
        tree: the tree to write.
        writer: its writer. Only outputs of writers with sidecars are checked.
        location: the output's location, for messages.

    Returns:
        A remark for each finding that does not block writing.

    Raises:
        FormatError: consumers could not load the output.
    """
    if not isinstance(writer, WithSidecars):
        return Notes()
    files: dict[str, Content] = {**writer.companions.files, **writer.made}
    arrays = None if writer.directory else tree
    return _notes(ModelDirectory(location, files, arrays, is_output=True))


def check_source(tree: Tree) -> Notes:
    """Check the model directory that a command reads.

    Args:
        tree: the opened tree.

    Returns:
        A remark for each finding; no remarks if there are no model files next to the weights.

    Raises:
        FormatError: a finding blocks writing.
    """
    directory = companions_at(tree)
    if directory is None or not has_sidecars(tree) or not directory.is_dir():
        return Notes()
    names = (entry.name for entry in directory.entries() if entry.is_file)
    files: dict[str, Content] = {name: directory / name for name in names}
    return _notes(ModelDirectory(str(directory), files, tree))


def _notes(model: ModelDirectory) -> Notes:
    """Return findings as remarks. Raises FormatError for a finding that blocks writing."""
    remarks = []
    for finding in findings(model):
        if finding.blocks_writing:
            raise FormatError(
                finding.what,
                place=finding.location,
                wanted=finding.expected,
                got=finding.got,
                hint=finding.hint,
            )
        if finding.level != "info":
            remarks.append(f"{finding.what}: {finding.why}; {finding.hint}")
    return Notes(remarks=tuple(remarks))
