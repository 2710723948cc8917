"""Shared parts of formats that can be read but not written."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace

from ckpttools.array.tree import Tree
from ckpttools.core.errors import CheckpointError
from ckpttools.formats.base import ReadOptions
from ckpttools.formats.sidecar_files import sidecar_directory
from ckpttools.stores.location import Location


class ReadOnlyFormat:
    """A format whose only fault is the error that prevents opening a checkpoint."""

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
