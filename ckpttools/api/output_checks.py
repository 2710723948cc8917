"""Check a destination before writing: what exists there, and whether the parts of a model agree.

Only a checkpoint of the kind that is being written may be replaced, and only if every file there belongs
to it. Runs of several steps, other items, files and directories next to the weights, and optimizer state
that the new checkpoint lacks are never replaced.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttools.array.lazy import LazyArray
from ckpttools.array.tree import Tree, dotted, keystr
from ckpttools.checks.base import Content, ModelDirectory, ModelFinding
from ckpttools.checks.registry import findings
from ckpttools.core.errors import (
    CheckpointError,
    DestinationExistsError,
    FormatError,
    StorageError,
    listing,
    suppress_step_warnings,
)
from ckpttools.core.message_terms import option
from ckpttools.core.notes import Notes
from ckpttools.core.text import array_count, first_names, format_type, sample_names, sort_naturally
from ckpttools.formats.adapters import ADAPTER, is_adapter, is_peft_name
from ckpttools.formats.base import Writer, WritesSteps
from ckpttools.formats.detect import Detected, detect
from ckpttools.formats.interrupted import find_interrupted_copy, next_step
from ckpttools.formats.orbax.steps import OrbaxRun
from ckpttools.formats.registry import find_unowned_files, open_detected, open_tree, sidecars_at
from ckpttools.formats.sidecar import WithSidecars, sidecar_contents
from ckpttools.formats.sidecar_files import CONFIG
from ckpttools.maxtext.model_files import has_sidecars
from ckpttools.maxtext.recognition import family_fits, guess_families
from ckpttools.maxtext.view import view_of
from ckpttools.model_families.family import Family
from ckpttools.model_families.registry import families_of_type
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import PLAN_MARK
from ckpttools.stores.sharing import is_of_repository

if TYPE_CHECKING:
    from ckpttools.api.prepared import Prepared

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


def compare_with_config(tree: Tree, files: Mapping[str, Content], *, is_renamed: bool = False) -> Notes:
    """Compare the arrays of a model that is about to be written with the configuration next to them.

    Makes the same comparison as a conversion to MaxText, which takes 25 us per array.

    Args:
        tree: The tree to write, with the names of the output.
        files: Content of each file next to the weights, by name.
        is_renamed: Whether arrays have new names.

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
    errors = (item for item in result if item.level == "error")
    return Notes(remarks=tuple(_format_remark(item, is_of_names=is_renamed) for item in errors))


def compare_names(source: Tree, tree: Tree, files: Mapping[str, Content]) -> Notes:
    """Compare new names of arrays with the configurations that are copied along.

    Args:
        source: The tree before its arrays were renamed.
        tree: The tree to write.
        files: Content of each of the model's files in the output, by name.

    Returns:
        A remark for each configuration that the new names do not fit, if the old ones did.
    """
    remarks = []
    config = tree.metadata.config or {}
    new = [path for path in tree.arrays if path not in source.leaves]
    is_known = CONFIG in files and not config.get("auto_map")
    families = families_of_type(config.get("model_type")) if is_known else ()
    lost = _unowned(tree, families) - _unowned(source, families) if families else set()
    # Names of the family are those below a prefix such as `params/params`.
    if names := [keystr(path) for path in new if any(dotted(path[k:]) in lost for k in range(len(path)))]:
        others = [guess.name for guess in guess_families(tree) if not (guess.missing or guess.unmatched)]
        instead = f"; these are names of {' or '.join(others)}" if others else ""
        remarks.append(
            f"{CONFIG} describes {config['model_type']}, which does not have the new names of "
            f"{array_count(names)}: {sample_names(names)}{instead}; programs that load the model with this "
            f"configuration do not find them, so adapt or remove {CONFIG}"
        )
    adapter = ModelDirectory(tree.metadata.location, files).json(ADAPTER)
    if adapter is not None and is_adapter(source):
        targets = adapter.get("target_modules")
        # A text is a regular expression.
        modules = tuple(map(str, targets)) if isinstance(targets, list) else None
        if not all(is_peft_name(dotted(path), modules) for path in source.arrays):
            modules = None  # Factors of single parameters, for example, are in `target_parameters`.
        if strange := [keystr(path) for path in new if not is_peft_name(dotted(path), modules)]:
            remarks.append(
                f"{ADAPTER} describes an adapter of PEFT, which does not load the new names of "
                f"{array_count(strange)}: {sample_names(strange)}"
            )
    return Notes(remarks=tuple(remarks))


def _unowned(tree: Tree, families: Iterable[Family]) -> set[str]:
    """Return the dotted names of parameters that the best matching family does not have."""
    best = min(family_fits(tree, families), key=lambda fit: fit.penalty)
    return {name for names in best.others.values() for name in names}


def check_source(tree: Tree, refused: Collection[str] = (), *, renamed_from: Tree | None = None) -> Notes:
    """Check the model directory that a command reads.

    Args:
        tree: The opened tree.
        refused: Names of checks whose errors are raised.
        renamed_from: The tree before its arrays got new names; None if they have not.

    Returns:
        A remark for each finding; none if there are no model files next to the weights.

    Raises:
        FormatError: A finding blocks writing, or is an error of a check in `refused`.
    """
    model = _source_model(tree)
    if model is None:
        return Notes()
    if renamed_from is None:
        return _notes(model, refused)
    return _notes(model, refused, {item.what for item in findings(replace(model, tree=renamed_from))})


def check_copied(tree: Tree) -> Iterator[str]:
    """Yield a remark for each finding in a model directory that is copied byte for byte."""
    model = _source_model(tree)
    if model is not None:
        yield from (_format_remark(finding) for finding in findings(model) if finding.level != "info")


def _source_model(tree: Tree) -> ModelDirectory | None:
    """Return the model directory of an opened tree; None if there are no model files next to the weights."""
    directory = sidecars_at(tree)
    if directory is None or not has_sidecars(tree) or not directory.is_dir():
        return None
    names = (entry.name for entry in directory.entries() if entry.is_file)
    files: dict[str, Content] = {name: directory / name for name in names}
    return ModelDirectory(str(directory), files, tree)


def _notes(
    model: ModelDirectory, refused: Collection[str] = (), earlier: Collection[str] | None = None
) -> Notes:
    """Return findings as remarks, given what was found with the old names, if arrays are renamed.

    Raises:
        FormatError: A finding blocks writing, or is an error of a check in `refused`.
    """
    remarks = []
    for finding in findings(model):
        is_of_names = earlier is not None and finding.what not in earlier
        # In a source, these are names that a trainer added.
        if is_of_names and finding.check == "name-prefixes":
            continue
        if finding.blocks_writing or (finding.level == "error" and finding.check in refused):
            raise FormatError(
                finding.what,
                location=finding.location,
                expected=finding.expected,
                got=finding.got,
                hint=finding.hint,
            )
        if finding.level != "info":
            remarks.append(_format_remark(finding, is_of_names=is_of_names))
    return Notes(remarks=tuple(remarks))


def _format_remark(finding: ModelFinding, *, is_of_names: bool = False) -> str:
    if is_of_names:
        # Files need not be fetched again if only the new names do not fit.
        return f"with the new names, {finding.what}"
    return f"{finding.what}: {finding.why}; {finding.hint}"


_SHOWN = 5


def check_replaceable(destination: Location, tree: Tree, writer: Writer) -> None:
    """Refuse to replace a destination with data that would be lost.

    Args:
        destination: A directory that is not empty.
        tree: The tree to write.
        writer: The writer of the tree.

    Raises:
        DestinationExistsError: The destination may not be replaced. The message describes its contents.
        StorageError: The system reports an error.
    """
    detected = detect(destination)
    old = _opened(detected)
    if old.metadata.format != writer.name:
        raise _destination_error(
            destination,
            f"holds a checkpoint of format {old.metadata.format}",
            f"a checkpoint of format {writer.name}",
        )
    _check_steps(detected, writer)
    result = find_unowned_files(destination, old, writer) - {PLAN_MARK, *_written_names(writer)}
    unowned_files = sorted(name for name in result if not is_of_repository(destination, name))
    if unowned_files:
        raise _destination_error(
            destination,
            f"holds files that are not part of the checkpoint: {first_names(unowned_files, _SHOWN)}",
            "one checkpoint, laid out as this command writes it, and nothing else",
        )
    optimizer = view_of(old).optimizer
    if optimizer and not view_of(tree).optimizer:
        step = "" if old.metadata.step is None else f" of step {old.metadata.step}"
        raise _destination_error(
            destination,
            f"holds a training checkpoint{step}, with the state of its optimizer ({optimizer.name})",
            "no optimizer state, because the replacement has none",
        )


def _written_names(writer: Writer) -> tuple[str, ...]:
    """Return patterns of the files that the writer creates with weights or next to them."""
    if not isinstance(writer, WithSidecars) or writer.directory:
        return ()
    return (*writer.built, *writer.sidecars.files)


def _check_steps(detected: Detected, writer: Writer) -> None:
    """Refuse to replace a run whose step differs from the requested one."""
    new = writer.requested_step if isinstance(writer, WritesSteps) else None
    run = detected.orbax
    if new is None or not isinstance(run, OrbaxRun):
        return
    other = next((step.path.name for number, step in run.steps.items() if number != new), None)
    if other is not None:
        new_step = run.path / str(new)
        raise _destination_error(
            detected.location,
            f"is a run with step {other}, which would be lost: the new step is {new}",
            f"a run whose only step is {new}",
            f"to add the step to the run, write it to {new_step} with {option('level', 'step')}",
        )


def optimizer_in(location: Location) -> str | None:
    """Return the name of a checkpoint's optimizer state; None if there is none or it cannot be read."""
    try:
        with suppress_step_warnings():
            optimizer = view_of(open_tree(location)).optimizer
    except StorageError:
        raise
    except CheckpointError:
        return None
    return optimizer.name if optimizer else None


def _opened(detected: Detected) -> Tree:
    destination = detected.location
    try:
        with suppress_step_warnings():
            return open_detected(detected)
    except StorageError:
        raise
    except CheckpointError as error:
        names = sort_naturally(entry.name for entry in destination.entries())
        left = find_interrupted_copy(destination)
        raise _destination_error(
            destination,
            "is not a readable checkpoint" + listing(names, _SHOWN),
            "a complete checkpoint of the same kind",
            f"{next_step(left)}; or choose another destination" if left else None,
        ) from error


def _destination_error(
    destination: Location, got: str, expected: str, hint: str | None = None
) -> DestinationExistsError:
    return DestinationExistsError(
        f"{destination} is not replaced: it {got}",
        expected=expected,
        hint=hint or "choose another destination, or move the existing content away",
    )


# Arrays that are sampled in large models, because each sample in a bucket takes up to four requests.
_MAX_SAMPLED = 256


def require_same_output(prepared: Prepared) -> str:
    """Check that an existing destination is the output of a plan.

    Arrays, their values, and the model's configuration and tokenizer are compared; in buckets, samples of the
    values.

    Returns:
        The compared properties, for a message.

    Raises:
        DestinationExistsError: It comes from another source or from other options.
        CheckpointError: It cannot be read.
    """
    output = open_tree(prepared.destination)
    found = {keystr(path): array for path, array in output.arrays.items()}
    planned = {keystr(path): array for path, array in prepared.plan.tree.arrays.items()}
    is_local = not any(
        "://" in str(item) for item in (prepared.destination, prepared.plan.tree.metadata.location)
    )
    memory, jobs = prepared.options.memory, prepared.options.jobs
    got = (
        _first_difference(planned, found)
        or (_first_unequal(planned, found, memory, jobs) if is_local else _first_sampled(planned, found))
        or _changed_file(prepared.writer, output)
    )
    if got is not None:
        raise DestinationExistsError(
            f"{prepared.destination} comes from another source, or from other options",
            got=got,
            hint=f"convert this source to another directory, or replace the output with "
            f"{option('overwrite', True)}",
        )
    return f"names, dtypes, files and {'all' if is_local else 'samples of the'} values"


def _first_difference(planned: Mapping[str, LazyArray], found: Mapping[str, LazyArray]) -> str | None:
    """Describe a difference between the names and types of a plan and a checkpoint; None if there is none."""
    for name in planned.keys() ^ found.keys():
        return f"only {'the source' if name in planned else 'the output'} has {name}"
    for name, array in planned.items():
        other = found[name]
        if (array.shape, array.dtype) != (other.shape, other.dtype):
            own, its = (format_type(item.dtype.name, item.shape) for item in (array, other))
            return f"{name} is {its} there, and would be {own}"
    return None


def _first_unequal(
    planned: Mapping[str, LazyArray], found: Mapping[str, LazyArray], memory: int, jobs: int | None
) -> str | None:
    from ckpttools.compare.verify import compare
    from ckpttools.digest.pairing import Pairing

    differences = compare(Pairing(planned, found), memory=memory, jobs=jobs)
    return f"{differences[0].name} has other values" if differences else None


def _first_sampled(planned: Mapping[str, LazyArray], found: Mapping[str, LazyArray]) -> str | None:
    import numpy as np

    from ckpttools.compare.samples import read_samples

    for name in list(planned)[:: -(-len(planned) // _MAX_SAMPLED)]:
        samples = zip(read_samples(planned[name]), read_samples(found[name]), strict=True)
        if not all(np.array_equal(a, b) for a, b in samples):
            return f"{name} has other values"
    return None


def _changed_file(writer: Writer, output: Tree) -> str | None:
    """Describe a difference between a plan's sidecars and those of a checkpoint; None if there is none."""
    planned = sidecar_contents(writer)
    directory = sidecars_at(output)
    if directory is None:
        return None
    for name, content in planned.items():
        path = directory / name
        if not path.is_file():
            return f"the output does not have {name}"
        if path.read_bytes() != content:
            return f"{name} has other content"
    return None
