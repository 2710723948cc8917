"""What formats have in common that are read and not written."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace

from ckpttools.array.tree import Tree
from ckpttools.core.errors import CheckpointError
from ckpttools.formats.base import ReadOptions
from ckpttools.formats.sidecar_files import sidecar_directory
from ckpttools.stores.place import Place


class ReadOnlyFormat:
    """A format of which whatever keeps a checkpoint from being opened is its fault."""

    @abstractmethod
    def open(self, path: Place, options: ReadOptions) -> Tree:
        """As `ckpttools.formats.base.Format.open`."""

    def companions(self, tree: Tree) -> Place:
        """As `ckpttools.formats.base.TellsCompanions.companions`."""
        return sidecar_directory(tree)

    def faults(self, path: Place, options: ReadOptions) -> Iterable[CheckpointError]:
        """As `ckpttools.formats.base.TellsFaults.faults`."""
        try:
            self.open(path, replace(options, with_optimizer=True))
        except CheckpointError as error:
            yield error
