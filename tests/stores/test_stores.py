"""Stores: both pass the shipped tests; a place is found by what a user writes, and what it is not is said."""

from __future__ import annotations

import os
import tempfile
import threading
from contextlib import contextmanager
from itertools import count
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.internals import parse, staging_of

from ckpttools import StorageError, UsageError
from ckpttools.stores import FileKind
from ckpttools.stores.concurrency import map_in_threads
from ckpttools.testing.stores import StoreTests

NUMBERS = count()
SEGMENTS = st.lists(st.sampled_from(["a", "b.c", ".hidden", "x.", "..", ".", ""]), max_size=5)


class TestLocal(StoreTests):
    @contextmanager
    def filled(self, files):
        with tempfile.TemporaryDirectory() as directory:
            root = Path(directory) / "root"
            root.mkdir()
            for name, content in files.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_bytes(content)
            yield parse(root)


class TestMemory(StoreTests):
    @contextmanager
    def filled(self, files):
        root = parse(f"memory://stores/{next(NUMBERS)}")
        try:
            for name, content in files.items():
                (root / name).put(content)
            yield root
        finally:
            root.store.remove(root.key)


@given(SEGMENTS, SEGMENTS, st.booleans())
def test_local_location_matches_pathlib(first, second, is_absolute):
    text = "/" * is_absolute + "/".join(first).lstrip("/")
    path, location = PurePosixPath(text), parse(text)
    assert str(location) == str(path)
    assert (location.name, location.suffix, location.parts) == (path.name, path.suffix, path.parts)
    assert str(location.parent) == str(path.parent)
    assert [str(parent) for parent in location.parents] == [str(parent) for parent in path.parents]
    below = "/".join(second).lstrip("/")
    assert str(location / below) == str(path / below)
    assert location / (location / below).relative_to(location) == location / below


@pytest.mark.parametrize("text", ["ftp://host/x", "FTP://host", "odd+1://x"])
def test_unknown_scheme_is_refused_by_name(text):
    scheme = text.partition("://")[0]
    with pytest.raises(UsageError, match=f"no store for {scheme}://".replace("+", r"\+")) as caught:
        parse(text)
    assert "local directory" in caught.value.hint


@pytest.mark.parametrize(("scheme", "own"), [("gcs", "gs"), ("S3A", "s3"), ("abfs", "az")])
def test_aliases_of_store_schemes_are_recognized(scheme, own):
    with pytest.raises(UsageError) as caught:
        parse(f"{scheme}://b/x")
    assert caught.value.hint == f"use {own}://"


def test_writing_to_a_readonly_store_is_refused():
    with pytest.raises(UsageError) as caught:
        staging_of(parse("https://host/out"))
    assert caught.value.hint.startswith("write to a local directory")


def test_writing_to_an_unknown_store_is_refused():
    with pytest.raises(UsageError) as caught:
        parse("ftp://b/out", is_written=True)
    assert caught.value.hint == "write to a local directory, then copy it there"


def test_url_collapsed_by_pathlib_is_refused():
    with pytest.raises(UsageError, match="looks like gs://b/x"):
        parse(Path("gs://b/x"))
    with pytest.raises(UsageError, match="looks like s3://b/x") as caught:
        parse("s3:/b/x")
    assert "./s3:/b/x" in caught.value.hint


def test_paths_resembling_urls_are_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("gs:").mkdir()
    Path("gs:/x").write_bytes(b"1")
    assert parse("./gs://x").read_bytes() == parse(Path("gs:/x")).read_bytes() == b"1"


def test_file_url_equals_local_path(tmp_path):
    assert parse(f"file://{tmp_path}") == parse(str(tmp_path)) == parse(tmp_path)


def test_only_local_locations_support_fspath(tmp_path):
    assert os.fspath(parse(tmp_path)) == str(tmp_path)
    with pytest.raises(TypeError, match="not a local file"):
        os.fspath(parse("memory://x"))


def test_dangling_and_circular_links_do_not_exist(tmp_path):
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    location = parse(tmp_path)
    kinds = {entry.name: (entry.kind, entry.is_link) for entry in location.entries()}
    assert kinds == {
        "circle": (FileKind.OTHER, True),
        "dangling": (FileKind.OTHER, True),
        "link": (FileKind.DIRECTORY, True),
        "real": (FileKind.DIRECTORY, False),
    }
    assert not (location / "dangling").exists() and not (location / "circle").is_file()
    assert (location / "link").resolve() == (location / "real").resolve()


def test_map_in_threads_uses_all_threads(monkeypatch):
    began, allowed, tried = threading.Thread.start, 0, 0

    def start(thread):
        nonlocal tried
        tried += 1
        if tried > allowed:
            raise RuntimeError("can't start new thread")
        began(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    for allowed in range(4):
        tried = 0
        assert map_in_threads(4, lambda item: item + 1, range(9)) == list(range(1, 10))
        assert tried == min(allowed + 1, 3)


def test_map_in_threads_raises_first_error_and_stops():
    asked = []

    def ask(item):
        asked.append(item)
        if item in (2, 3):
            raise ValueError(item)

    for limit in (1, 4):
        asked.clear()
        with pytest.raises(ValueError, match="2"):
            map_in_threads(limit, ask, range(1000))
        assert len(asked) < 1000


def test_permission_error_is_raised(tmp_path, monkeypatch):
    def refused(path, **options):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "stat", refused)
    with pytest.raises(StorageError, match="cannot inspect"):
        parse(tmp_path).is_dir()
