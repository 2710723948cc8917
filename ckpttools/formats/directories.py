"""What formats have in common whose checkpoints are directories with files of many processes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

from ckpttools.array.tree import Tree
from ckpttools.core.errors import CheckpointError
from ckpttools.formats.base import COMPANIONS, ReadOptions
from ckpttools.stores.place import Place
from ckpttools.stores.registry import parse


class DirectoryFormat:
    """A format of which whatever keeps a directory from being opened is its fault."""

    @abstractmethod
    def open(self, path: Place, options: ReadOptions) -> Tree:
        """As `ckpttools.formats.base.Format.open`."""

    def companions(self, tree: Tree) -> Place:
        """Beside the weights of a model; of other trees in a directory of their own."""
        folder = parse(tree.metadata.place)
        return folder / COMPANIONS if tree.metadata.config is None else folder

    def faults(self, path: Place, options: ReadOptions) -> Iterable[CheckpointError]:
        """As `ckpttools.formats.base.TellsFaults.faults`."""
        try:
            self.open(path, options)
        except CheckpointError as error:
            yield error
