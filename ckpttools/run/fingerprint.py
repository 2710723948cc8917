"""Fingerprints of runs, and the description of a run's source."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from ckpttools.array.fingerprint import Identify, identity
from ckpttools.array.lazy import ByteSource
from ckpttools.formats.base import Writer
from ckpttools.plan.plan import Plan
from ckpttools.stores.base import File
from ckpttools.stores.checksums import sample_files
from ckpttools.stores.registry import parse


def is_local(source: ByteSource) -> bool:
    """Return whether the version of a source is a modification time, which can be set back."""
    return isinstance(source, File) and parse(source.path).store.scheme == "file"


def fingerprint(
    plan: Plan,
    writer: Writer,
    identify: Identify = identity,
    declared: Callable[[str], str] = lambda text: text,
    is_timed: Callable[[ByteSource], bool] = is_local,
) -> str:
    """Return a text that identifies what a run writes, from which sources and with which tasks.

    Args:
        plan, writer: The run.
        identify: Returns the identity of a source.
        declared: Normalizes texts that may contain locations.
        is_timed: Returns whether the version of a source is a time; if so, sampled bytes are included.

    Raises:
        FormatError, StorageError: A source cannot be read.
    """
    metadata = plan.tree.metadata
    leaves = [(path, leaf) for path, leaf in plan.tree.items() if path not in plan.tree.arrays]
    marks = sorted(map(repr, metadata.scalars)), metadata.key_impls
    rest = writer, leaves, metadata.step, metadata.item, marks
    samples = _samples(plan, identify, is_timed)
    return hashlib.sha256(
        f"{plan.fingerprint(identify)} {samples} {declared(repr(rest))}".encode()
    ).hexdigest()


def _samples(plan: Plan, identify: Identify, is_timed: Callable[[ByteSource], bool]) -> str:
    files = {
        identify(source)[0]: source
        for source in plan.sources
        if isinstance(source, File) and is_timed(source)
    }
    return sample_files([files[name] for name in sorted(files)])


def source_of(plan: Plan) -> str:
    """Return the location of the source for messages: the opened path, or the directory of its files."""
    if plan.tree.metadata.location:
        return str(parse(plan.tree.metadata.location).absolute())
    directories = {parse(source.path).absolute().parent for source in plan.sources}
    common = min(directories, default=None)
    while common is not None and not all(
        common in (directory, *directory.parents) for directory in directories
    ):
        common = None if common == common.parent else common.parent
    return "" if common is None else str(common)
