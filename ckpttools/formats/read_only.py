"""Shared parts of formats that can be read but not written, and notes on what a tree cannot hold."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ckpttools.array.tree import Path, Tree, dotted
from ckpttools.core.errors import CheckpointError
from ckpttools.core.notes import Notes
from ckpttools.core.text import first_names
from ckpttools.formats.base import ReadOptions
from ckpttools.formats.sidecar_files import sidecar_directory
from ckpttools.stores.location import Location


class ReadOnlyFormat:
    """A read-only format; its only possible fault is that a checkpoint cannot be opened."""

    @abstractmethod
    def open(self, path: Location, options: ReadOptions) -> Tree:
        """See `ckpttools.formats.base.Format.open`."""

    def sidecars(self, tree: Tree) -> Location:
        """See `ckpttools.formats.base.SupportsSidecarLookup.sidecars`."""
        return sidecar_directory(tree)

    def faults(self, path: Location, options: ReadOptions) -> Iterable[CheckpointError]:
        """See `ckpttools.formats.base.SupportsFaults.faults`."""
        try:
            self.open(path, replace(options, with_optimizer=True))
        except CheckpointError as error:
            yield error


_MAX_NAMED = 5


def left_out(others: Mapping[Path, str]) -> Notes:
    """Return a remark on objects that are not arrays, numbers or texts, from their kinds by path."""
    if not others:
        return Notes()
    named = first_names([f"{dotted(path)} ({kind})" for path, kind in others.items()], _MAX_NAMED)
    return Notes(remarks=(f"left out, as they are neither tensors nor numbers: {named}",))
