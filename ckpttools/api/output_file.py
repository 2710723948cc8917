"""Validate paths of single output files, such as manifests and reports."""

from __future__ import annotations

from ckpttools.core.errors import UsageError
from ckpttools.formats.registry import is_own_file
from ckpttools.stores.location import Location
from ckpttools.stores.publishing import PLAN_MARK, find_unfinished, staging_of
from ckpttools.stores.registry import LocationLike, parse


def check_output_file(path: Location, source: LocationLike, destination: Location | None = None) -> None:
    """Reject an invalid output path before anything is read or written.

    Args:
        path: Path of the file.
        source: A checkpoint that is read; "" for none.
        destination: A checkpoint that is written at the same time.

    Raises:
        UsageError: The file cannot be written, is inside the output, or has the name of one of the source's
            own files.
    """
    path.check_accepts_files()
    real = path.resolve()
    if destination is not None:
        _check_outside(path, real, destination)
    root = parse(source).resolve().folder()
    if source and root in real.parents and (real.name == PLAN_MARK or is_own_file(real.relative_to(root))):
        raise UsageError(
            f"{path} would be mistaken for a part of the checkpoint",
            location=source,
            got=f"a name that a checkpoint's own files have: {real.name}",
            expected="a path outside the checkpoint",
            hint="choose another name, such as one in a directory next to it",
        )


def check_manifest(path: Location, source: LocationLike, destination: Location, *, overwrite: bool) -> None:
    """Reject an invalid manifest path. The other arguments are those of `check_output_file`.

    Args:
        overwrite: Whether another manifest may be replaced. An interrupted conversion to the destination may
            already have written this manifest.

    Raises:
        UsageError: See `check_output_file`.
        CheckpointError: See `ckpttools.digest.manifest.check_manifest_name`.
    """
    from ckpttools.digest.manifest import check_manifest_name

    check_output_file(path, source, destination)
    is_begun = path.lexists() and find_unfinished(destination) is not None
    check_manifest_name(path, overwrite=overwrite or is_begun)


def _check_outside(path: Location, real: Location, destination: Location) -> None:
    taken = staging_of(destination).taken
    for output, name in zip(taken, ("DST", "the unfinished DST"), strict=True):
        location = output.resolve()
        if real == location:
            relation = "is"
        elif location in real.parents:
            relation = "is in"
        elif real in location.parents:
            relation = "is a directory above"
        else:
            continue
        raise UsageError(
            f"{path} {relation} {name}",
            location=output,
            expected="a file outside the output checkpoint",
            hint="choose another name, such as one next to DST",
        )
