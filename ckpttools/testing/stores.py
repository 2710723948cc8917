"""Conformance tests for stores. To test a plug-in, subclass `StoreTests` and run pytest.

class TestMyStore(StoreTests):
    @contextmanager
    def filled(self, files):
        yield ...
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, closing, suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpttools.core.errors import (
    CheckpointError,
    DestinationExistsError,
    FormatError,
    StorageError,
    UsageError,
)
from ckpttools.stores import Location, parse
from ckpttools.stores.abilities import SupportsLinks, SupportsPut, SupportsWrite
from ckpttools.stores.publishing import (
    JobInfo,
    LockedError,
    Staging,
    SupportsKeepFiles,
    SupportsPublishing,
    Work,
)

_SETTINGS = settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
_NAMES = st.text(st.characters(codec="ascii", categories=("L", "N"), include_characters="._- "), min_size=1)
_PATHS = st.lists(_NAMES.filter(lambda name: name.strip(".") == name), min_size=1, max_size=3).map("/".join)
_FILES = st.dictionaries(_PATHS, st.binary(max_size=99), min_size=1, max_size=6)


class _StoppedError(Exception):
    """Raised to interrupt a simulated run."""


def _is_tree(files: Mapping[str, bytes]) -> bool:
    """Return whether files can coexist: no file is another's directory, and no names differ only in case."""
    names = {name.lower() for name in files}
    return len(names) == len(files) and not any(b.startswith(f"{a}/") for a in names for b in names)


class StoreTests(ABC):
    """Tests for a store; tests of abilities that the store lacks are skipped."""

    @abstractmethod
    def filled(self, files: Mapping[str, bytes]) -> AbstractContextManager[Location]:
        """Yield a new location with exactly these files; keys are names with `/` separators."""

    @_SETTINGS
    @given(files=_FILES.filter(_is_tree), data=st.data())
    def test_any_range_equals_the_slice_of_the_file(
        self, files: Mapping[str, bytes], data: st.DataObject
    ) -> None:
        with self.filled(files) as location:
            for name, content in files.items():
                with closing((location / name).open()) as file:
                    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(content))] * 2)))
                    assert file.size == len(content)
                    assert file.read(start, stop - start) == content[start:stop]
                    with pytest.raises(FormatError):
                        file.read(start, len(content) - start + 1)
                assert (location / name).read_bytes() == content

    @_SETTINGS
    @given(files=_FILES.filter(_is_tree))
    def test_all_files_are_listed(self, files: Mapping[str, bytes]) -> None:
        with self.filled(files) as location:
            assert {name: result.size for name, result in location.walk()} == {
                k: len(v) for k, v in files.items()
            }
            above = {name.rpartition("/")[0] for name in files}
            for directory in (location / parent if parent else location for parent in above):
                assert directory.is_dir() and not directory.is_file()
                start = f"{parent}/" if (parent := directory.relative_to(location)) else ""
                inside = {name[len(start) :] for name in files if name.startswith(start)}
                kinds = {entry.name: entry.kind for entry in directory.entries()}
                assert set(kinds) >= {parent for parent in inside if "/" not in parent}
                for name, kind in kinds.items():
                    assert (directory / name).stat().kind is kind

    def test_locations_round_trip_through_their_names(self) -> None:
        with self.filled({"a b/c.d": b"x"}) as location:
            file = location / "a b" / "c.d"
            assert parse(str(file)) == file == parse(file)
            assert (file.name, file.suffix, file.parent.name) == ("c.d", ".d", "a b")
            assert file.relative_to(location) == "a b/c.d" and location in file.parents
            assert [item.name for item in location.glob("*/c.*")] == ["c.d"]
            with closing(file.open()) as opened:
                assert parse(opened.path).read_bytes() == b"x"

    def test_missing_files_raise_errors_of_the_package(self) -> None:
        with self.filled({"d/file": b"1234"}) as location:
            missing, directory, file = location / "no", location / "d", location / "d" / "file"
            assert not missing.exists() and not (missing / "x").exists()
            for nothing in (missing.read_bytes, missing.entries, missing.stat, file.entries):
                with pytest.raises(StorageError):
                    nothing()
            with pytest.raises(FormatError):
                missing.open().read(0, 1)
            with pytest.raises(CheckpointError):
                directory.read_bytes()
            with pytest.raises(FormatError, match="too large"):
                file.read_bytes(limit=3)

    def test_changed_file_has_another_version(self) -> None:
        with self.filled({"file": b"before"}) as location:
            file = location / "file"
            self._needs(location, SupportsPut)
            before, opened = file.stat(), file.open()
            opened.check_unchanged()
            file.put(b"behind")
            assert file.stat().version != before.version
            with pytest.raises(CheckpointError):
                opened.check_unchanged()

    def test_put_is_atomic(self) -> None:
        with self.filled({"file": bytes(1 << 16)}) as location:
            self._needs(location, SupportsPut)
            file, contents = location / "file", [bytes([number]) * (1 << 16) for number in range(2)]

            def put() -> None:
                for number in range(20):
                    file.put(contents[number % 2])

            writer = threading.Thread(target=put)
            writer.start()
            while writer.is_alive():
                with suppress(CheckpointError):  # Another file has the name while it is read.
                    assert file.read_bytes() in contents
            writer.join()
            (location / "new" / "one").put(b"x")
            assert (location / "new" / "one").read_bytes() == b"x"
            with pytest.raises(CheckpointError):
                (file / "below").put(b"x")
            with pytest.raises(CheckpointError):
                location.put(b"x")
            assert [entry.name for entry in location.entries()] == ["file", "new"]

    def test_links_and_copies_have_the_expected_bytes(self) -> None:
        with self.filled({"file": bytes(range(100))}) as location:
            self._needs(location, SupportsLinks)
            store: Any = location.store
            source, linked, copied = (
                (location / "file").open(),
                location / "x" / "linked",
                location / "copied",
            )
            assert store.link_trials(linked.key).refusal(source) is None
            assert store.link(source, linked.key) and store.link(source, linked.key)
            store.copy_parts(source, copied.key, [(10, 20), (30, 40)])
            assert linked.read_bytes() == bytes(range(100))
            result = copied.read_bytes()
            assert len(result) == 100
            assert result[10:20] + result[30:40] == bytes((*range(10, 20), *range(30, 40)))
            with suppress(CheckpointError):
                (location / "file").put(b"")
            assert linked.read_bytes() == bytes(range(100)), "the link changed with its source"

    def test_publication_is_atomic(self) -> None:
        with self.filled({"other": b"x"}) as location:
            target = location / "out"
            for stopped_in in ("data", "small", "end"):
                with pytest.raises(_StoppedError), self._staging(target).opened(JobInfo("plan")) as work:
                    self._write(work, stopped_in)
                assert not (target / "meta.json").exists()
                assert target.store.streams or not target.exists()
            with self._staging(target).opened(JobInfo("plan")) as work:
                assert [list(record) for record in work.records] == [[0, [], {}]]
                if isinstance(work, SupportsKeepFiles):
                    work.keep_files((), {"d/more"})
                self._write(work, "")
                work.publish()
                assert (target / "d" / "data").read_bytes() == bytes(range(200))
                work.finalize()
            more = f"d/more-{2 if target.store.streams else 0:05d}"
            assert {name for name, _ in target.walk()} == {"d/data", more, "chunk/0", "meta.json"}
            assert (target / more).read_bytes() == b"onetwo"
            assert [entry.name for entry in location.entries()] == ["other", "out"]

    def test_existing_checkpoint_is_replaced_only_if_allowed(self) -> None:
        with self.filled({"out/old": b"x"}) as location:
            target = location / "out"
            with pytest.raises(DestinationExistsError):
                self._staging(target).check("plan", 0)
            with self._staging(target, overwrite=True).opened(JobInfo("plan")) as work:
                self._write(work, "")
                assert (target / "old").read_bytes() == b"x"
                work.publish()
                work.finalize()
            assert not (target / "old").exists() and (target / "meta.json").is_file()

    def test_destination_is_locked_by_one_process(self) -> None:
        with self.filled({"other": b"x"}) as location:
            target = location / "out"
            with self._staging(target).opened(JobInfo("plan")) as work:
                with pytest.raises(LockedError), self._staging(target).opened(JobInfo("plan")):
                    raise AssertionError("two writers have the lock")
                with suppress(_StoppedError):
                    self._write(work, "end")
            assert isinstance(location.store, SupportsPublishing) and location.store.find_unfinished(
                target.key
            )
            another = self._staging(target).opened(JobInfo("another"))
            with pytest.raises(UsageError, match="beginning of another"), another:
                raise AssertionError("it resumed another conversion")
            with self._staging(target, overwrite=True).opened(JobInfo("another")) as work:
                assert list(work.records) == []
                self._write(work, "")
                work.discard()
                assert list(work.records) == []

    def _staging(self, target: Location, overwrite: bool = False) -> Staging:
        self._needs(target, SupportsPublishing)
        self._needs(target, SupportsWrite)
        assert isinstance(target.store, SupportsPublishing)
        return target.store.staging(target.key, overwrite, lambda: None)

    def _write(self, work: Work, stopped_in: str) -> None:
        """Write a checkpoint with a few files, or only a part of it."""
        data = memoryview(bytes(range(200)))
        with closing(work.data_files({"d/data": 200}, {"d/data": bytes(data[:20])})) as files:
            # If the store cannot write at offsets, write in the order of a single thread.
            for sink in files.write_passes(0):
                for start in range(20, 200, 60):
                    sink.write("d/data", start, data[start : start + 60], 0)
                    if stopped_in == "data":
                        raise _StoppedError
            for sink in files.write_passes(1):
                sink.write_whole("chunk/0", b"chunk")
            if not work.records:
                for sink in files.write_passes(2):
                    name, start = sink.append("d/more", 6, b"one")
                    assert sink.append("d/more", 6, b"two") == (name, start + 3)
            files.write_heads()
            files.sync()
            if not work.records:
                work.record([[0, [], {}]])
        if stopped_in == "small":
            raise _StoppedError
        (work.content / "meta.json").write_bytes(b"{}")
        (work.content / "meta.json").write_at(0, b"[")
        if stopped_in == "end":
            raise _StoppedError

    def _needs(self, location: Location, protocol: type) -> None:
        if not isinstance(location.store, protocol):
            pytest.skip(f"{location.store.scheme}:// has no {protocol.__name__}")
