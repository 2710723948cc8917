"""Conformance tests for formats. To test a plug-in, subclass `FormatTests` and run pytest.

class TestMyFormat(FormatTests):
    format = my_module.FORMAT
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from math import prod
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ckpttools.array.tree import Empty, Leaf, Metadata, Text, Tree, keystr
from ckpttools.core.dtypes import DTYPES, DType
from ckpttools.core.errors import CheckpointError
from ckpttools.core.options import parse_options
from ckpttools.core.region import Region, grid_indices
from ckpttools.formats.base import (
    Format,
    ReadOptions,
    SupportsFaults,
    SupportsFiles,
    SupportsStorage,
    Target,
    Writable,
    Writer,
)
from ckpttools.formats.registry import faults_in
from ckpttools.formats.survey import plain_storage
from ckpttools.plan import plan as planning
from ckpttools.plan.plan import build
from ckpttools.run.executor import execute
from ckpttools.stores import Location, LocationLike, parse
from ckpttools.stores.memory import MemoryStore
from ckpttools.testing.strategies import assert_same, many_leaves, noise, regions, stored, trees, unambiguous

MEMORY = 512 << 20
SCHEMES = ("file", "memory")
_SETTINGS = settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))


@contextmanager
def new_location(scheme: str) -> Iterator[Location]:
    """Yield an empty directory in a built-in store, and delete its contents afterward."""
    with tempfile.TemporaryDirectory() as name:
        location = parse(name if scheme == "file" else f"{scheme}://{name}")
        yield location
        if isinstance(location.store, MemoryStore):
            location.store.remove(location.key)


def write(tree: Tree, writer: Writer, destination: LocationLike) -> None:
    """Plan and write a tree like a conversion does."""
    execute(build(tree, writer, memory=MEMORY, jobs=2), writer, destination)


class FormatTests:
    """Tests for a format that can be read and written.

    Attributes:
        format: The format to test.
        dtypes: The dtypes that the format supports.
        structure: Whether the format supports lists, empty leaves, strings and scalars.
        most_leaves: Number of leaves in the tree of many small arrays.
    """

    format: ClassVar[Format]
    dtypes: ClassVar[tuple[DType, ...]] = tuple(DTYPES.values())
    structure: ClassVar[bool] = True
    most_leaves: ClassVar[int] = 1000

    def writer(self, tree: Tree) -> Writer:
        """Return a writer for this tree; by default, the format's own writer with default options."""
        assert isinstance(self.format, Writable)
        return self.format.writer(
            Target(tree), **parse_options(self.format.options, {}, tuple, self.format.name)
        )

    @contextmanager
    def written(self, tree: Tree, scheme: str = "file") -> Iterator[tuple[Tree, Location]]:
        """Write a tree; yield the opened result and its location."""
        with new_location(scheme) as above:
            location = above / "checkpoint"
            write(tree, self.writer(tree), location)
            yield self.format.open(location, ReadOptions()), location

    @_SETTINGS
    @given(data=st.data())
    def test_tree_round_trips(self, data: st.DataObject) -> None:
        tree = data.draw(trees(self.dtypes, structure=self.structure))
        assume(unambiguous(tree))
        with self.written(tree, data.draw(st.sampled_from(SCHEMES))) as (reopened, _):
            assert_same(reopened, tree)

    @_SETTINGS
    @given(data=st.data())
    def test_any_region_equals_the_slice_of_the_array(self, data: st.DataObject) -> None:
        tree = data.draw(trees(self.dtypes, structure=False, most_leaves=3))
        assume(unambiguous(tree))
        with self.written(tree) as (reopened, _):
            for array in reopened.arrays.values():
                region = data.draw(regions(array.shape))
                values = array.read().view(array.dtype.carrier)
                assert array.read(region).tobytes() == values[region.slices].tobytes()

    def test_each_dtype_round_trips(self) -> None:
        for dtype in self.dtypes:
            tree = Tree({("w",): stored(noise((5, 3), dtype), dtype)}, Metadata(step=0))
            with self.written(tree) as (reopened, _):
                assert_same(reopened, tree)

    def test_many_leaves_round_trip(self) -> None:
        tree = many_leaves(self.most_leaves)
        with self.written(tree) as (reopened, _):
            assert_same(reopened, tree)

    def test_large_array_is_written_in_many_tasks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(planning, "LARGEST_TASK", 64 << 10)
        monkeypatch.setattr(planning, "_SMALLEST_TASK", 16 << 10)
        shape = (301, 7, 130)
        tree = Tree({("w",): stored(noise(shape, DTYPES["uint16"]), DTYPES["uint16"])}, Metadata(step=0))
        with self.written(tree) as (reopened, _):
            assert_same(reopened, tree)

    def test_two_runs_write_the_same_files(self) -> None:
        tree = many_leaves(20)
        with self.written(tree) as (_, one), self.written(tree) as (_, other):
            assert _data(one) == _data(other)

    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_only_own_checkpoints_are_recognized(self, scheme: str) -> None:
        with new_location(scheme) as location:
            assert self.format.mismatch_reason(location)
            (location / "notes.txt").put(b"no checkpoint")
            assert self.format.mismatch_reason(location)
            assert self.format.mismatch_reason(location / "notes.txt")
        with self.written(many_leaves(2), scheme) as (_, location):
            assert self.format.mismatch_reason(location) is None

    def test_truncated_file_raises_an_error(self) -> None:
        tree = many_leaves(3)
        with self.written(tree) as (_, location):
            for file in sorted(location / name for name, _ in location.walk()):
                content = file.read_bytes()
                file.write_bytes(content[: len(content) // 2])
                self._check_same_or_error(location, tree)
                file.write_bytes(content)

    @_SETTINGS
    @given(data=st.data())
    def test_plan_writes_every_element_once(self, data: st.DataObject) -> None:
        """Every element is written exactly once, and no two chunks overlap."""
        tree = data.draw(trees(self.dtypes, structure=False, most_leaves=4))
        assume(unambiguous(tree))
        plan = build(tree, self.writer(tree), memory=MEMORY, jobs=2)
        assert plan.layout.placements.keys() == tree.arrays.keys()
        built = {path: np.zeros(array.shape, np.uint8) for path, array in tree.arrays.items()}
        for task in plan.tasks:
            built[task.path][task.region.slices] += 1
        assert all((counts == 1).all() for counts in built.values())
        spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for placement in plan.layout.placements.values():
            if placement.codec is None:
                for index in grid_indices(placement.shape, placement.chunk):
                    location = placement.chunk_range(index)
                    spans[location.file].append((location.offset, location.offset + location.nbytes))
        for file, result in spans.items():
            result.sort()
            assert all(stop <= start for (_, stop), (start, _) in pairwise(result)), file
            assert result[-1][1] <= plan.layout.files.get(file, result[-1][1]), file

    def test_unsupported_leaves_are_refused(self) -> None:
        """The error is raised before anything is written, and names the leaf."""
        array = stored(noise((5, 3), self.dtypes[0]), self.dtypes[0])
        others = [dtype for dtype in DTYPES.values() if dtype not in self.dtypes]
        unsupported: list[Leaf] = [stored(noise((5, 3), dtype), dtype) for dtype in others]
        if not self.structure:
            unsupported += [Empty("None"), Empty("Dict"), Empty("List"), Text("x")]
        for leaf in unsupported:
            tree = Tree({("fine",): array, ("wrong",): leaf}, Metadata(step=0))
            with pytest.raises(CheckpointError, match="wrong"):
                self.writer(tree).layout(tree, MEMORY)

    def test_options_are_declared(self) -> None:
        assert isinstance(self.format, Writable)
        names = [option.name for option in self.format.options]
        assert len(set(names)) == len(names)
        assert all(name.isidentifier() for name in names)
        assert all(option.help for option in self.format.options)
        assert self.format.help

    def test_unowned_files_are_found(self) -> None:
        if isinstance(self.format, SupportsFiles):
            with self.written(many_leaves(2)) as (reopened, location):
                assert set(self.format.unowned_files(location, reopened)) == set()
                (location / "notes.txt").write_bytes(b"mine")
                assert set(self.format.unowned_files(location, reopened)) == {"notes.txt"}

    def test_faults_are_found_only_in_damaged_checkpoints(self) -> None:
        if isinstance(self.format, SupportsFaults):
            with self.written(many_leaves(3)) as (_, location):
                assert list(faults_in(self.format, location, ReadOptions())) == []
                largest = max((location / name for name, _ in location.walk()), key=_size)
                largest.write_bytes(largest.read_bytes()[:-1])
                assert list(faults_in(self.format, location, ReadOptions())) != []

    def test_storage_of_arrays_is_described(self) -> None:
        tree = many_leaves(3)
        with self.written(tree) as (reopened, _):
            storage = plain_storage(reopened)
            if isinstance(self.format, SupportsStorage):
                storage = self.format.storage(reopened, ReadOptions())
            result = {item.path: (item.shape, item.dtype, item.missing) for item in storage.arrays}
            arrays = tree.arrays.items()
            assert result == {keystr(path): (array.shape, array.dtype, 0) for path, array in arrays}
            assert all(file.kind != "missing" and file.unreferenced_nbytes >= 0 for file in storage.files)

    def _check_same_or_error(self, location: Location, tree: Tree) -> None:
        try:
            reopened = self.format.open(location, ReadOptions())
            for path, array in reopened.arrays.items():
                if prod(array.shape):
                    region = Region.whole(array.shape)
                    assert array.read(region).tobytes() == tree.arrays[path].read(region).tobytes()
        except CheckpointError:
            return


def _size(file: Location) -> int:
    return file.stat().size


def _data(location: Location) -> dict[str, bytes]:
    """Return the contents of all files except those with timestamps."""
    files = {name: (location / name).read_bytes() for name, _ in location.walk()}
    return {name: content for name, content in files.items() if b"timestamp" not in content}
