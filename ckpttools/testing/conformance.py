"""The tests that every format passes. The author of a plug-in subclasses `FormatTests` and runs pytest.

class TestMyFormat(FormatTests):
    format = my_module.FORMAT

    def writer(self, tree):
        return my_module.MyWriter()
"""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path as FilePath
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ckpttools.array.tree import Metadata, Tree
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.errors import CheckpointError
from ckpttools.core.region import Region
from ckpttools.formats.base import Format, ReadOptions, Writer
from ckpttools.plan import plan as planning
from ckpttools.plan.plan import build
from ckpttools.run.executor import execute
from ckpttools.testing.strategies import noise, regions, stored
from ckpttools.testing.trees import assert_same, many_leaves, trees, unambiguous

MEMORY = 512 << 20
_SETTINGS = settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))


def write(tree: Tree, writer: Writer, destination: FilePath) -> None:
    """Plans and runs, as a conversion does."""
    execute(build(tree, writer, memory=MEMORY, jobs=2), writer, destination)


class FormatTests(ABC):
    """What holds for every format that can be read and written.

    Attributes:
        format: the reader.
        dtypes: those that the format can hold.
        structure: whether it can hold lists, empty leaves, strings and scalars.
        most_leaves: of the tree of many small arrays.
    """

    format: ClassVar[Format]
    dtypes: ClassVar[tuple[DType, ...]] = tuple(DTYPES.values())
    structure: ClassVar[bool] = True
    most_leaves: ClassVar[int] = 1000

    @abstractmethod
    def writer(self, tree: Tree) -> Writer:
        """A writer for this tree."""

    @contextmanager
    def written(self, tree: Tree) -> Iterator[tuple[Tree, FilePath]]:
        """The tree as it comes back, and where it lies meanwhile."""
        with tempfile.TemporaryDirectory() as name:
            place = FilePath(name) / "checkpoint"
            write(tree, self.writer(tree), place)
            yield self.format.open(place, ReadOptions()), place

    @_SETTINGS
    @given(data=st.data())
    def test_a_tree_comes_back_as_it_was(self, data: st.DataObject) -> None:
        tree = data.draw(trees(self.dtypes, structure=self.structure))
        assume(unambiguous(tree))
        with self.written(tree) as (back, _):
            assert_same(back, tree)

    @_SETTINGS
    @given(data=st.data())
    def test_any_region_equals_the_slice_of_the_whole(self, data: st.DataObject) -> None:
        tree = data.draw(trees(self.dtypes, structure=False, most_leaves=3))
        assume(unambiguous(tree))
        with self.written(tree) as (back, _):
            for array in back.arrays.values():
                region = data.draw(regions(array.shape))
                whole = array.read().view(array.dtype.carrier)
                assert array.read(region).tobytes() == whole[region.slices].tobytes()

    def test_every_dtype_alone(self) -> None:
        for dtype in self.dtypes:
            tree = Tree({("w",): stored(noise((5, 3), dtype), dtype)}, Metadata(step=0))
            with self.written(tree) as (back, _):
                assert_same(back, tree)

    def test_many_leaves(self) -> None:
        tree = many_leaves(self.most_leaves)
        with self.written(tree) as (back, _):
            assert_same(back, tree)

    def test_a_large_array_in_many_tasks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(planning, "LARGEST_TASK", 64 << 10)
        monkeypatch.setattr(planning, "_SMALLEST_TASK", 16 << 10)
        shape = (301, 7, 130)
        tree = Tree({("w",): stored(noise(shape, DTYPES["uint16"]), DTYPES["uint16"])}, Metadata(step=0))
        with self.written(tree) as (back, _):
            assert_same(back, tree)

    def test_two_runs_give_the_same_files(self) -> None:
        tree = many_leaves(20)
        with self.written(tree) as (_, one), self.written(tree) as (_, other):
            assert _data(one) == _data(other)

    def test_it_recognises_its_own_and_nothing_else(self, tmp_path: FilePath) -> None:
        assert self.format.why_not(tmp_path)
        (tmp_path / "notes.txt").write_text("no checkpoint")
        assert self.format.why_not(tmp_path)
        assert self.format.why_not(tmp_path / "notes.txt")
        with self.written(many_leaves(2)) as (_, place):
            assert self.format.why_not(place) is None

    def test_a_file_cut_short_is_an_error_never_wrong_values(self) -> None:
        tree = many_leaves(3)
        with self.written(tree) as (_, place):
            for file in sorted(each for each in place.rglob("*") if each.is_file()):
                whole = file.read_bytes()
                file.write_bytes(whole[: len(whole) // 2])
                self._opens_the_same_or_refuses(place, tree)
                file.write_bytes(whole)

    def _opens_the_same_or_refuses(self, place: FilePath, tree: Tree) -> None:
        try:
            back = self.format.open(place, ReadOptions())
            for path, array in back.arrays.items():
                if prod(array.shape):
                    region = Region.whole(array.shape)
                    assert array.read(region).tobytes() == tree.arrays[path].read(region).tobytes()
        except CheckpointError:
            return


def _data(place: FilePath) -> dict[str, bytes]:
    """All files but those that say when they were written."""
    files = (file for file in place.rglob("*") if file.is_file())
    return {str(f.relative_to(place)): f.read_bytes() for f in files if b"timestamp" not in f.read_bytes()}
