"""Any number of files with few of them open: read and written under limits that cannot be raised."""

from __future__ import annotations

import json
import os
import resource
import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from support.internals import LocalFile

from ckpttools import FormatError
from ckpttools.stores.local.file import ReopenableFile, iso_time

SHARDS = 80


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def shards(directory, count=SHARDS):
    """A sharded checkpoint of one small tensor in every file, and an index."""
    directory.mkdir()
    weight_map = {}
    for number in range(count):
        name = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        weight_map[f"t{number}"] = name
        header = json.dumps(
            {f"t{number}": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, "__metadata__": {}}
        ).encode()
        data = np.full(4, number, np.float32).tobytes()
        (directory / name).write_bytes(struct.pack("<Q", len(header)) + header + data)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def limited(*arguments, limit=64):
    """Runs a command that may have so many files open and no more."""
    code = (
        "import resource, sys; from ckpttools.cli.main import main; "
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit})); main()"
    )
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_commands_work_with_fewer_open_files_than_shards(tmp_path):
    source = shards(tmp_path / "model")
    commands = [
        ("hash", source, "--json"),
        ("inspect", "stats", source),
        ("convert", "to-safetensors", source, tmp_path / "again", "--max-shard-size", "20B"),
        ("diff", source, tmp_path / "again"),
    ]
    for command in commands:
        done = limited(*command, "--jobs", "8")
        assert done.returncode == 0, (command, done.stderr)
    assert len(list((tmp_path / "again").glob("*.safetensors"))) == SHARDS


def test_many_shards_work_at_a_hard_limit_of_1024(tmp_path):
    done = limited("hash", shards(tmp_path / "model", 2000), "--json", limit=1024)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["arrays"]) == 2000


@pytest.fixture
def few_files():
    """Room for eight open files here, whatever else the process has open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (8 + open_files(), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def numbered(directory, count):
    files = []
    for number in range(count):
        (directory / str(number)).write_bytes(number.to_bytes(4, "little") * 1000)
        files.append(LocalFile.at(directory / str(number)))
    return files


def test_threads_share_few_descriptors(tmp_path, few_files):
    files = numbered(tmp_path, 60)
    wrong = []

    def reading(start):
        for turn in range(300):
            number = (start + 7 * turn) % len(files)
            result = files[number].read(4 * (turn % 1000), 4)
            if int.from_bytes(result, "little") != number:
                wrong.append((number, result))

    threads = [threading.Thread(target=reading, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_limit_is_raised_before_files_are_closed(tmp_path):
    code = """
import os, resource, sys
from ckpttools.stores.local.file import LocalFile
from ckpttools.stores.local.file import iso_time
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
files = [LocalFile.at(path) for path in sys.argv[1:]]
for file in files:
    file.read(0, 4)
print(len(os.listdir("/proc/self/fd")))
"""
    numbered(tmp_path, 100)
    command = [sys.executable, "-c", code, *map(str, tmp_path.iterdir())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) > 100


@pytest.mark.parametrize("how", ["replaced", "rewritten", "shortened"])
def test_changed_file_is_not_reopened(tmp_path, how):
    path = tmp_path / "x"
    path.write_bytes(b"0123456789")
    file = LocalFile.at(path)
    assert file.read(0, 4) == b"0123"
    file.close()
    assert file.read(0, 4) == b"0123"
    file.close()
    if how == "replaced":
        (tmp_path / "y").write_bytes(b"abcdefghij")
        os.utime(tmp_path / "y", ns=(0, int(file.version)))
        (tmp_path / "y").replace(path)
    elif how == "rewritten":
        path.write_bytes(b"abcdefghij")
        os.utime(path, ns=(0, int(file.version) + 1))
    else:
        os.truncate(path, 5)
    with pytest.raises(FormatError, match="ends too early" if how == "shortened" else "was changed while it"):
        file.read(0, 4)


def test_unreferenced_file_is_closed(tmp_path):
    before = open_files()
    files = numbered(tmp_path, 5)
    for file in files:
        file.read(0, 1)
    assert open_files() == before + 5
    del file, files
    assert open_files() == before


def test_borrowed_descriptor_is_not_closed(tmp_path, few_files):
    (tmp_path / "kept").write_bytes(b"kept")
    kept = ReopenableFile(lambda: os.open(tmp_path / "kept", os.O_RDONLY))
    with kept.use() as descriptor:
        for file in (files := numbered(tmp_path, 30)):
            file.read(0, 4)
        assert os.pread(descriptor, 4, 0) == b"kept"
    assert len(files) == 30


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (0, "1970-01-01T00:00:00Z"),
        (1_700_000_000_000_000_001, "2023-11-14T22:13:20.000000001Z"),
        (-1, "1969-12-31T23:59:59.999999999Z"),
        (10**21, f"{10**21} ns since 1970"),
    ],
)
def test_iso_time_formats_nanoseconds(nanoseconds, text):
    assert iso_time(nanoseconds) == text
