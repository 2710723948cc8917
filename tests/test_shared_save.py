"""Several processes of one JAX job save what each of them has, as one checkpoint."""

import socket
import subprocess
import sys

import pytest
from support.places import TESTS
from support.shared_save import values

import ckpttools


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What two processes have saved, each with four devices."""
    directory = tmp_path_factory.mktemp("shared")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "support.shared_save_script", str(port)]
    processes = [
        subprocess.Popen(
            [*words, str(number), "2", str(directory)],
            cwd=TESTS,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    try:
        said = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for number in range(2):
        told = directory / str(number)
        assert told.is_file(), said[number]
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
def test_several_processes_write_what_one_would(saved, tmp_path, name, options):
    ckpttools.save(values(), tmp_path / "one", **options)
    assert content(saved / name) == content(tmp_path / "one")


def test_nothing_is_left(saved):
    assert {path.name for path in saved.iterdir()} == {"saved", "background", "again", "0", "1"}
