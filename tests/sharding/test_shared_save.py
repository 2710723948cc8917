"""Several processes of one JAX job save what each of them has, as one checkpoint."""

import socket
import subprocess
import sys

import numpy as np
import pytest
from support.internals import parse
from support.locations import HF, TESTS
from support.object_stores import google
from support.shared_save import values

import ckpttools


@pytest.fixture(scope="module")
def bucket(gcs_server):
    with google(gcs_server) as cloud:
        cloud.filled({"a": b""})
        yield f"gs://{cloud.bucket}/runs"


@pytest.fixture(scope="module")
def saved(tmp_path_factory, bucket):
    """What two processes have saved, each with four devices."""
    directory = tmp_path_factory.mktemp("shared")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "support.shared_save_script", str(port)]
    processes = [
        subprocess.Popen(
            [*words, str(number), "2", str(directory), bucket],
            cwd=TESTS,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    try:
        declared = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for number in range(2):
        told = directory / str(number)
        assert told.is_file(), declared[number]
        assert told.read_text() == ""
    return directory


def content(directory):
    """Every file but those with times of day."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name != "_CHECKPOINT_METADATA"
    }


@pytest.mark.parametrize(
    ("name", "options"), [("saved", {}), ("background", {"level": "item"}), ("again", {})]
)
def test_several_processes_write_the_same_files_as_one(saved, tmp_path, name, options):
    ckpttools.save(values(), tmp_path / "one", **options)
    assert content(saved / name) == content(tmp_path / "one")


@pytest.mark.parametrize("name", ["raw", "compressed", "zarr"])
def test_each_process_writes_its_own_objects(saved, bucket, name):
    assert ckpttools.diff(f"{bucket}/{name}", saved / "saved").equal
    assert ckpttools.doctor(f"{bucket}/{name}").healthy


def test_each_compressed_chunk_is_written_by_one_process(saved):
    assert ckpttools.diff(saved / "compressed", saved / "saved").equal
    assert ckpttools.doctor(saved / "compressed").healthy


@pytest.mark.parametrize("name", ["replicated", "rows", "columns"])
def test_each_process_converts_its_own_shards(saved, tmp_path, name):
    ckpttools.hf_to_maxtext(HF, tmp_path / "one")
    arrays = [location / "0" / "items" / "d" for location in (saved / f"{name}-maxtext", tmp_path / "one")]
    assert content(arrays[0]) == content(arrays[1])


@pytest.mark.parametrize("name", ["rows", "columns"])
def test_shared_save_converts_back_to_hugging_face(saved, tmp_path, name):
    ckpttools.maxtext_to_hf(saved / "rows-maxtext", tmp_path / "one", like=HF)
    assert content(saved / f"{name}-hf") == content(tmp_path / "one")


def test_arrays_are_cast_by_their_own_processes(saved):
    result = ckpttools.open(saved / "cast")
    for path, array in ckpttools.open(HF).arrays.items():
        assert np.array_equal(result[path].read(), array.read().astype(np.float64))


def test_saves_leave_no_extra_files(saved, bucket):
    built = {f"{name}-maxtext" for name in ("replicated", "rows", "columns")}
    saves = {"rows-hf", "columns-hf", "cast", "saved", "background", "compressed", "again", "one"}
    assert {path.name for path in saved.iterdir()} == {*built, *saves, "0", "1"}
    assert {entry.name for entry in parse(bucket).entries()} == {"raw", "compressed", "zarr"}
