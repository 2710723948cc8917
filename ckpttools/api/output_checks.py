"""Check that the parts of a model directory agree before it is written."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from ckpttools.array.tree import Tree
from ckpttools.checks.base import Content, ModelDirectory, ModelFinding
from ckpttools.checks.registry import findings
from ckpttools.core.errors import FormatError
from ckpttools.core.notes import Notes
from ckpttools.formats.base import Writer
from ckpttools.formats.registry import sidecars_at
from ckpttools.formats.sidecar import WithSidecars
from ckpttools.maxtext.model_files import has_sidecars

# Models with more arrays are rare, and large enough to run doctor on them.
_MAX_COMPARED = 20_000


def check_output(tree: Tree, writer: Writer, location: str) -> Notes:
    """Check the configuration, tokenizer and adapter files of an output against its arrays.

    Args:
        tree: The tree to write.
        writer: The writer of the tree. Only outputs of writers with sidecars are checked.
        location: Location of the output, for messages.

    Returns:
        A remark for each finding that does not block writing.

    Raises:
        FormatError: Consumers could not load the output.
    """
    if not isinstance(writer, WithSidecars):
        return Notes()
    files: dict[str, Content] = {**writer.sidecars.files, **writer.built}
    arrays = None if writer.directory else tree
    return _notes(ModelDirectory(location, files, arrays, is_output=True))


def compare_with_config(tree: Tree, files: Mapping[str, Content]) -> Notes:
    """Compare the arrays of a model that is about to be written with the configuration next to them.

    Makes the same comparison as a conversion to MaxText, which takes 25 us per array.

    Args:
        tree: The tree to write, with the names of the output.
        files: Content of each file next to the weights, by name.

    Returns:
        A remark if transformers or a conversion would reject the model.
    """
    model = ModelDirectory(tree.metadata.location, files, is_output=True)
    # The user asked for the command's omissions and knows them.
    if model.config is None or tree.metadata.notes.dropped or len(tree.arrays) > _MAX_COMPARED:
        return Notes()
    described = replace(tree, metadata=replace(tree.metadata, config=model.config))
    # The import loads numpy, which may not fit. A command rejects a memory limit that is too small before
    # this import.
    from ckpttools.checks import coverage

    result = coverage.CHECK.run(replace(model, tree=described))
    return Notes(remarks=tuple(_remark(item) for item in result if item.level == "error"))


def check_source(tree: Tree, refused: Collection[str] = ()) -> Notes:
    """Check the model directory that a command reads.

    Args:
        tree: The opened tree.
        refused: Names of checks whose errors are raised.

    Returns:
        A remark for each finding; none if there are no model files next to the weights.

    Raises:
        FormatError: A finding blocks writing, or is an error of a check in `refused`.
    """
    model = _source_model(tree)
    return Notes() if model is None else _notes(model, refused)


def check_copied(tree: Tree) -> Iterator[str]:
    """Yield a remark for each finding in a model directory that is copied byte for byte."""
    model = _source_model(tree)
    if model is not None:
        yield from (_remark(finding) for finding in findings(model) if finding.level != "info")


def _source_model(tree: Tree) -> ModelDirectory | None:
    """Return the model directory of an opened tree; None if there are no model files next to the weights."""
    directory = sidecars_at(tree)
    if directory is None or not has_sidecars(tree) or not directory.is_dir():
        return None
    names = (entry.name for entry in directory.entries() if entry.is_file)
    files: dict[str, Content] = {name: directory / name for name in names}
    return ModelDirectory(str(directory), files, tree)


def _notes(model: ModelDirectory, refused: Collection[str] = ()) -> Notes:
    """Return findings as remarks. Raise FormatError for a finding that blocks writing."""
    remarks = []
    for finding in findings(model):
        if finding.blocks_writing or (finding.level == "error" and finding.check in refused):
            raise FormatError(
                finding.what,
                location=finding.location,
                expected=finding.expected,
                got=finding.got,
                hint=finding.hint,
            )
        if finding.level != "info":
            remarks.append(_remark(finding))
    return Notes(remarks=tuple(remarks))


def _remark(finding: ModelFinding) -> str:
    return f"{finding.what}: {finding.why}; {finding.hint}"
