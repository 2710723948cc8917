"""Diagnose a checkpoint and suggest fixes."""

from __future__ import annotations

from collections.abc import Sequence

from ckpttools.api.options.inspect import DOCTOR
from ckpttools.api.sources import DEFAULT_MEMORY, Observe, Source, location_of, read_options
from ckpttools.core.argument_checks import validate_arguments
from ckpttools.core.errors import UsageError
from ckpttools.core.options import declare, parse_size_option
from ckpttools.diagnosis.examine import Diagnosis, apply_fixes, examine
from ckpttools.diagnosis.inventory import ValueReading
from ckpttools.formats.orbax.ocdbt import MAX_INDEX_BYTES
from ckpttools.stores.concurrency import use_concurrency


@validate_arguments
@declare(*DOCTOR)
def doctor(
    source: Source,
    *,
    fix: str | Sequence[str] = (),
    checksums: bool = False,
    values: bool = False,
    max_index_bytes: int | str = MAX_INDEX_BYTES,
    memory: int | str = DEFAULT_MEMORY,
    jobs: int | None = None,
    requests: int | None = None,
    observe: Observe | None = None,
) -> Diagnosis:
    """Examine everything at or below a path, complete or damaged. Reads indexes and metadata.

    Without `values` and `checksums`, it reads no arrays except scales of quantized weights, a tied output
    head, and the embedding of that head.

    Args:
        source: A run, step, item, file or directory. For a tree, the location from which it was opened is
            examined.

    Raises:
        UsageError: A tree has no location.
        StorageError: The path does not exist or cannot be listed.
        FormatError: The path does not contain a checkpoint, not even an incomplete one.
        CheckpointError: No fix could be applied; nothing was changed.
    """
    names = (fix,) if isinstance(fix, str) else tuple(fix)
    location, read = location_of(source), read_options({"max_index_bytes": max_index_bytes})
    if location is None:
        raise UsageError("the tree was not read from files", expected="a path, or an opened tree")
    observe = observe or (lambda done, total: None)
    data = observe if checksums else None
    limit = parse_size_option("memory", memory)
    elements = ValueReading(limit, jobs, observe) if values else None
    with use_concurrency(requests):
        if names:
            return apply_fixes(location, *names, read=read, reading=data, values=elements)
        return examine(location, read, data, elements)
