"""OCDBT databases that are small on disk and huge in memory, or endless: refused in little of both."""

import subprocess
import sys
from pathlib import Path

import pytest
import zstandard
from support.command_line import ckpt

from ckpttools import FormatError
from ckpttools.formats.orbax import ocdbt, ocdbt_files
from ckpttools.formats.orbax.ocdbt_files import encode, read

MANIFEST_MAGIC, NODE_MAGIC = bytes.fromhex("0cdb3a2a"), bytes.fromhex("0cdb20de")
MEGABYTE = 1 << 20


def frame(magic, body, zstd=False):
    if zstd:
        return _framed(magic, zstandard.ZstdCompressor().compress(body), b"\0\1")
    return _framed(magic, body, b"\0\0")


def _framed(magic, body, kind):
    data = ocdbt.HEADER.pack(magic, ocdbt.MIN_FRAME_BYTES + len(body)) + kind + body
    return data + ocdbt.crc32c(data).to_bytes(4, "little")


def manifest_body(height, offset, length):
    head = bytes(16) + b"\0" + ocdbt_files._varints(ocdbt.CONFIG) + ocdbt_files._table(["d/n"])
    return head + ocdbt_files._varints([1, 1, height, 0, offset, length, 0, 0, 0]) + bytes(8) + b"\0"


def database(manifest, nodes=b""):
    files = {ocdbt.MANIFEST: manifest, "d/n": nodes}

    def fetch(file, offset, length):
        return files[file][offset:] if length is None else files[file][offset : offset + length]

    return fetch


def interior(height, children):
    """A node whose children are byte ranges of the file that it lies in."""
    count, (offsets, lengths) = len(children), zip(*children, strict=True)
    keys = ocdbt_files._strings([bytes([number]) for number in range(count)], [0] * count)
    columns = [offsets, lengths, *[[1] * count] * 3]
    body = bytes([height]) + ocdbt_files._table(["d/n"]) + ocdbt_files._varint(count) + keys + bytes(count)
    return frame(NODE_MAGIC, body + b"".join(map(ocdbt_files._varints, columns)))


def leaf():
    return encode([(b"k", b"v")], "d/n").nodes


def shared_children():
    """Each node has the one below twice: 2 ** 100 leaves in 5 kB."""
    nodes = leaf()
    offset, length = 0, len(nodes)
    for height in range(1, 101):
        node = interior(height, [(offset, length)] * 2)
        offset, length = len(nodes), len(node)
        nodes += node
    return database(frame(MANIFEST_MAGIC, manifest_body(100, offset, length)), nodes)


def nested_nodes():
    """A node inside of a value of the node above it: not the same range, but the same bytes."""
    inner = leaf()
    outer = encode([(b"k", inner)], "d/n").nodes
    nodes = outer + interior(1, [(0, len(outer)), (outer.index(inner), len(inner))])
    return database(frame(MANIFEST_MAGIC, manifest_body(1, len(outer), len(nodes) - len(outer))), nodes)


def zstd_of_zeros():
    return database(frame(MANIFEST_MAGIC, manifest_body(0, 0, 9) + bytes(260 * MEGABYTE), zstd=True))


def many_versions():
    count = 2 * MEGABYTE
    head = bytes(16) + b"\0" + ocdbt_files._varints(ocdbt.CONFIG) + ocdbt_files._table(["d/n"])
    return database(frame(MANIFEST_MAGIC, head + ocdbt_files._varint(count) + bytes(count), zstd=True))


def many_files():
    count = 2 * MEGABYTE
    head = bytes(16) + b"\0" + ocdbt_files._varints(ocdbt.CONFIG) + ocdbt_files._varint(count)
    return database(frame(MANIFEST_MAGIC, head + bytes(count), zstd=True))


def long_keys():
    """Keys of 60,000 bytes in 5 bytes each, as they share all but their last."""
    count, length = 80_000, 60_000
    columns = [[length] * (count - 1), [length + 1], [1] * (count - 1)]
    keys = b"".join(map(ocdbt_files._varints, columns)) + bytes(length + count)
    node = frame(NODE_MAGIC, b"\0\0" + ocdbt_files._varint(count) + keys + bytes(2 * count))
    return database(frame(MANIFEST_MAGIC, manifest_body(0, 0, len(node))), node)


def long_paths():
    """The same of the table of data files."""
    count, length = 80_000, 60_000
    columns = [[length] * (count - 1), [length + 1], [1] * (count - 1), [0] * count]
    table = b"".join(map(ocdbt_files._varints, columns)) + b"a" * (length + count)
    node = frame(NODE_MAGIC, b"\0" + ocdbt_files._varint(count) + table + b"\0")
    return database(frame(MANIFEST_MAGIC, manifest_body(0, 0, len(node))), node)


BOMBS = {
    shared_children: "same bytes",
    nested_nodes: "same bytes",
    zstd_of_zeros: "too much memory",
    many_versions: "too much memory",
    many_files: "too much memory",
    long_keys: "too much memory",
    long_paths: "too much memory",
}


def test_decompression_bomb_is_refused_quickly():
    """All in one process of 1 GiB, which is ended after 20 seconds."""
    program = (
        "import resource, signal, sys; signal.alarm(20)\n"
        f"sys.path[:0] = {[str(path) for path in Path(__file__).parents[:2]]!r}\n"
        "import test_ocdbt_limits as bombs\n"
        "made = [(bomb, words, bomb()) for bomb, words in bombs.BOMBS.items()]\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "for bomb, words, fetch in made:\n"
        "    try: bombs.read(fetch)\n"
        "    except bombs.FormatError as error:\n"
        "        print(bomb.__name__, words in error.message, bool(error.location))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.stderr == ""
    assert ended.stdout.splitlines() == [f"{bomb.__name__} True True" for bomb in BOMBS]


def long_keys(count, length=60_000):
    """Manifest and node of keys that are alike but for their last byte."""
    columns = [[length] * (count - 1), [length + 1], [1] * (count - 1)]
    suffixes = bytes(length) + b"".join(bytes([number]) for number in range(count))
    keys = b"".join(map(ocdbt_files._varints, columns)) + suffixes
    node = frame(NODE_MAGIC, b"\0\0" + ocdbt_files._varint(count) + keys + bytes(2 * count), zstd=True)
    return frame(MANIFEST_MAGIC, manifest_body(0, 0, len(node))), node


def test_doctor_accepts_a_memory_limit(tmp_path):
    location, (manifest, node) = tmp_path / "ocdbt.process_0", long_keys(100)
    (location / "d").mkdir(parents=True)
    (location / "manifest.ocdbt").write_bytes(manifest)
    (location / "d/n").write_bytes(node)
    (tmp_path / "_METADATA").write_text('{"tree_metadata": {}, "use_ocdbt": true}')
    assert "--max-index-bytes" not in ckpt("doctor", tmp_path).stdout
    limited = ("doctor", tmp_path, "--max-index-bytes", "6000000")
    assert "--max-index-bytes" in ckpt(*limited).stdout
    refused = ckpt(*limited, "--fix", "merge")
    assert refused.exit_code == 3 and "--max-index-bytes" in refused.output
    assert not (tmp_path / "manifest.ocdbt").exists()


def test_index_limit_can_be_raised_and_excludes_stored_size():
    count, (manifest, node) = 100, long_keys(100)
    fetch = database(manifest, node)
    assert len(node) < 1000
    assert len(read(fetch, 7_000_000)) == count
    with pytest.raises(FormatError, match="`max_index_bytes`"):
        read(fetch, 6_000_000)
    entries = {b"layers/%06d" % number: b"" for number in range(20_000)}
    index = encode(entries.items(), "d/n")
    assert read(database(index.manifest, index.nodes), 1) == entries


def test_duplicate_key_is_refused():
    nodes = leaf()
    again = interior(1, [(0, len(nodes)), (len(nodes), len(nodes))])
    file = nodes + nodes + again
    fetch = database(frame(MANIFEST_MAGIC, manifest_body(1, 2 * len(nodes), len(again))), file)
    with pytest.raises(FormatError, match="twice"):
        read(fetch)
