"""The OCDBT index codec, with TensorStore as the independent reader and writer."""

import struct
from pathlib import Path

import google_crc32c
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttools import FormatError, UsageError
from ckpttools.formats.orbax import ocdbt, ocdbt_files
from ckpttools.formats.orbax.ocdbt import Extent
from ckpttools.formats.orbax.ocdbt_files import encode, read

NODES = "d/index"

steps = st.text("ab.~ é字", min_size=1, max_size=6)
files = st.lists(steps.filter(lambda s: s not in {".", ".."}), min_size=1, max_size=3).map("/".join)
extents = st.builds(Extent, files, st.integers(0, 2**61), st.integers(0, 2**61))
few_bytes = st.lists(st.sampled_from([0, 97, 98, 255]), max_size=8).map(bytes)
keys = few_bytes | st.binary(max_size=12) | few_bytes.map(lambda k: b"shared/prefix/" + k)
indexes = st.dictionaries(keys, st.binary(max_size=200) | extents, max_size=60)


def in_memory(index, node_file=NODES):
    files = {ocdbt.MANIFEST: index.manifest, node_file: index.nodes}

    def fetch(file, offset, length):
        return files[file][offset:] if length is None else files[file][offset : offset + length]

    return fetch


def below(root):
    def fetch(file, offset, length):
        data = (root / file).read_bytes()
        return data[offset:] if length is None else data[offset : offset + length]

    return fetch


def put(root, index, node_file=NODES):
    (root / node_file).parent.mkdir(parents=True, exist_ok=True)
    (root / ocdbt.MANIFEST).write_bytes(index.manifest)
    if index.nodes:
        (root / node_file).write_bytes(index.nodes)


def database(root, context=None, **config):
    spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{root}/"}}
    config = {"config": config} if config else {}
    return ts.KvStore.open(spec | config, context=context).result()


def value(root, entry):
    if isinstance(entry, bytes):
        return entry
    return below(root)(entry.file, entry.offset, entry.length)


def assert_same(root):
    """`read` and TensorStore agree on every key and value below `root`."""
    store, index = database(root), read(below(root))
    assert list(index) == sorted(store.list().result())
    for key, entry in index.items():
        assert value(root, entry) == store.read(key).result().value
    return index


# ---- round trips


@given(indexes, st.integers(2, 9))
def test_index_round_trips(entries, node_entries):
    index = encode(entries.items(), NODES, node_entries=node_entries)
    result = read(in_memory(index))
    assert result == entries
    assert list(result) == sorted(entries)


@given(indexes, st.integers(2, 9), st.randoms())
def test_entry_order_does_not_matter(entries, node_entries, random):
    shuffled = random.sample(list(entries.items()), len(entries))
    sizes = {"node_entries": node_entries}
    assert encode(shuffled, NODES, **sizes) == encode(entries.items(), NODES, **sizes)


@given(st.integers(0, 300), st.integers(2, 9))
def test_tree_height_and_node_count_are_as_expected(count, node_entries):
    index = encode([(b"%d" % i, b"") for i in range(count)], NODES, node_entries=node_entries)
    levels = [-(-count // node_entries)]
    while levels[-1] > 1:
        levels.append(-(-levels[-1] // node_entries))
    assert (index.num_nodes, index.height) == (sum(levels), len(levels) - 1)


def test_large_offsets_round_trip():
    entries = {b"a": Extent("big", 2**40 + 3, 2**33 + 1), b"b": Extent("big", 0, 2**63 - 1)}
    assert read(in_memory(encode(entries.items(), NODES))) == entries


def test_longest_key_and_largest_inline_value_round_trip():
    entries = {b"k" * 65535: b"v" * 2**20}
    assert read(in_memory(encode(entries.items(), NODES))) == entries


# ---- TensorStore reads what encode writes


def layers(count, file="d/data"):
    """Entries as of a checkpoint: some inline metadata, many chunks in one file."""
    for i in range(count):
        array = b"params.decoder.layers_%d.kernel/" % (i // 50)
        whole, chunk = (array + b"zarr", b"{}"), (array + b"c/%d/0" % i, Extent(file, 4 * i, 4))
        yield chunk if i % 50 else whole


@settings(max_examples=25, deadline=None)
@given(entries=indexes, node_entries=st.integers(2, 9))
def test_tensorstore_lists_keys(tmp_path_factory, entries, node_entries):
    root = tmp_path_factory.mktemp("db")
    put(root, encode(entries.items(), NODES, node_entries=node_entries))
    store = database(root)
    assert sorted(store.list().result()) == sorted(entries)
    for key, entry in entries.items():
        if isinstance(entry, bytes):
            assert store.read(key).result().value == entry


@pytest.mark.parametrize("node_entries", [2, 7, 1000])
def test_tensorstore_reads_values(tmp_path, node_entries):
    put(tmp_path, encode(layers(200), NODES, node_entries=node_entries))
    (tmp_path / "d/data").write_bytes(b"".join(struct.pack("<I", i) for i in range(200)))
    assert len(assert_same(tmp_path)) == 200


def test_values_in_several_data_files_are_read(tmp_path):
    data = {"model.safetensors": b"first", "d/äö": b"second", "d/deep/er": b"third", "d!": b"4"}
    entries = [(f.encode(), Extent(f, 1, len(data[f]) - 1)) for f in data]
    put(tmp_path, encode(entries, "index", node_entries=3), "index")
    for file, content in data.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(content)
    index = assert_same(tmp_path)
    assert {value(tmp_path, entry) for entry in index.values()} == {c[1:] for c in data.values()}


@pytest.mark.parametrize(("node_entries", "height"), [(5000, 1), (40, 3)])
def test_tensorstore_reads_100_000_entries(tmp_path, node_entries, height):
    entries = dict(layers(100_000))
    index = encode(entries.items(), NODES, node_entries=node_entries)
    assert index.height == height
    put(tmp_path, index)
    assert sorted(database(tmp_path).list().result()) == sorted(entries)
    assert read(in_memory(index)) == entries


def test_manifest_statistics_match_the_tree(tmp_path):
    index = encode(layers(200), NODES, node_entries=7, commit_time_ns=12, uuid=b"u" * 16)
    put(tmp_path, index)
    dump = ts.ocdbt.dump(ts.KvStore.open(f"file://{tmp_path}/").result()).result()
    (version,) = dump["versions"]
    assert version["commit_time"] == 12
    assert version["root"]["statistics"] == {
        "num_keys": 200,
        "num_tree_bytes": len(index.nodes),
        "num_indirect_value_bytes": 4 * 196,
    }
    assert dump["config"]["uuid"] == (b"u" * 16).hex()
    assert dump["config"]["max_decoded_node_bytes"] == 100_000_000


def test_empty_index_round_trips(tmp_path):
    index = encode([], NODES)
    assert (index.nodes, index.num_nodes, index.height) == (b"", 0, 0)
    put(tmp_path, index)
    assert assert_same(tmp_path) == {}


def test_tensorstore_can_continue_writing(tmp_path):
    even = [(b"key/%03d" % i, b"%d" % i) for i in range(0, 100, 2)]
    put(tmp_path, encode(even, NODES, node_entries=3))
    with ts.Transaction() as txn:
        store = database(tmp_path).with_transaction(txn)
        for key in [b"", b"key/", b"key/051", b"key/0511", b"zzz"]:
            store[key] = b"new"
        del store[b"key/050"]
    index = assert_same(tmp_path)
    assert len(index) == 54
    assert b"key/050" not in index


# ---- read understands what TensorStore writes


@pytest.mark.parametrize("compression", [None, {"id": "zstd", "level": 3}])
@pytest.mark.parametrize("node_bytes", [1000, 100_000_000])
def test_tensorstore_databases_are_read(tmp_path, compression, node_bytes):
    sizes = {"max_decoded_node_bytes": node_bytes, "max_inline_value_bytes": 50}
    store = database(tmp_path, compression=compression, **sizes)
    for commit in range(3):
        with ts.Transaction() as txn:
            for i in range(commit, 150, commit + 1):
                store.with_transaction(txn)[b"some/key/%03d" % i] = b"%d" % commit * (i + 1)
    index = assert_same(tmp_path)
    assert len(index) == 150
    assert {type(entry) for entry in index.values()} == {bytes, Extent}


def test_database_is_empty_after_deletion(tmp_path):
    store = database(tmp_path)
    store[b"key"] = b"value"
    store.delete_range(ts.KvStore.KeyRange()).result()
    assert assert_same(tmp_path) == {}


def test_version_tree_nodes_are_read(tmp_path):
    store = database(tmp_path, version_tree_arity_log2=1)
    for i in range(6):
        store.write(b"key%d" % i, b"%d" % i).result()
    assert len(assert_same(tmp_path)) == 6


@pytest.mark.parametrize("node_bytes", [400, 100_000_000])
def test_paths_are_relative_to_the_database_of_the_node(tmp_path, node_bytes):
    sizes = {"max_decoded_node_bytes": node_bytes, "max_inline_value_bytes": 8}
    context = ts.Context()
    merged = database(tmp_path, context, **sizes)
    for process in range(3):
        part = database(tmp_path / f"ocdbt.process_{process}", context, **sizes)
        for i in range(20):
            part.write(b"process%d/%02d" % (process, i), b"%d" % i * 20).result()
        with ts.Transaction(atomic=True) as txn:
            part.experimental_copy_range_to(merged.with_transaction(txn)).result()
    index = assert_same(tmp_path)
    assert len(index) == 60
    assert all(entry.file.startswith("ocdbt.process_") for entry in index.values())


@pytest.mark.parametrize(("node_entries", "height"), [(100, 0), (30, 1), (4, 3)])
def test_nodes_in_another_directory_are_read(tmp_path, node_entries, height):
    """A manifest that names the nodes of `part/` with the base path `part/`."""
    inner = encode(layers(100), NODES, node_entries=node_entries)
    put(tmp_path / "part", inner)
    (tmp_path / "part/d/data").write_bytes(bytes(range(200)) * 2)
    old, new = b"\1\7\0d/index", b"\1\x0c\5part/d/index"
    body = body_of(inner.manifest)
    assert (body.count(old), inner.height) == (1, height)
    (tmp_path / ocdbt.MANIFEST).write_bytes(framed(body.replace(old, new)))
    index = assert_same(tmp_path)
    assert {entry.file for entry in index.values() if isinstance(entry, Extent)} == {"part/d/data"}


# ---- errors of encode


def test_encoding_refuses_duplicate_keys():
    with pytest.raises(FormatError, match=r"b'twice' occurs twice"):
        encode([(b"twice", b"1"), (b"other", b""), (b"twice", b"2")], NODES)


@pytest.mark.parametrize(
    "entry",
    [Extent("f", -1, 2), Extent("f", 0, -1), Extent("f", 1, 2**63 - 1), b"v" * (2**20 + 1)],
)
def test_invalid_entry_is_refused(entry):
    with pytest.raises(FormatError, match="an index cannot contain this entry") as caught:
        encode([(b"key", entry)], NODES)
    assert "key" in caught.value.location


def test_overlong_key_is_refused():
    with pytest.raises(FormatError, match="65,535"):
        encode([(b"k" * 65536, b"")], NODES)


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../up", "d//f", "d/./f", "d/", "f" * 65536])
def test_invalid_path_is_refused(path):
    with pytest.raises(FormatError, match="not the path of a data file"):
        encode([(b"key", Extent(path, 0, 1))], NODES)
    with pytest.raises(FormatError, match="not the path of a data file"):
        encode([], path)


@pytest.mark.parametrize("wrong", [{"node_entries": 1}, {"uuid": b"short"}])
def test_invalid_arguments_are_refused(wrong):
    with pytest.raises(UsageError, match="do not give a valid index"):
        encode([], NODES, **wrong)


# ---- errors of read


def framed(body, magic="0cdb3a2a", head=b"\0\0"):
    data = bytes.fromhex(magic) + struct.pack("<Q", len(body) + 18) + head + body
    return data + struct.pack("<I", google_crc32c.value(data))


def body_of(framed_bytes):
    return framed_bytes[14:-4]


def sample(**options):
    return encode([(b"a", b"inline"), (b"b", Extent("d/data", 5, 6))], NODES, **options)


def with_manifest(manifest):
    return in_memory(ocdbt_files.EncodedIndex(manifest, sample().nodes, 1, 0))


def with_node(node):
    """A database whose manifest, itself right, refers to `node`."""
    index = sample()
    tail = body_of(index.manifest)
    old, new = bytes([0, 0, len(index.nodes)]), bytes([0, 0, len(node)])
    assert len(node) < 128
    assert tail.count(old) == 1
    return in_memory(ocdbt_files.EncodedIndex(framed(tail.replace(old, new)), node, 1, 0))


def error(fetch):
    with pytest.raises(FormatError) as caught:
        read(fetch)
    assert caught.value.hint
    return caught.value


def node_location(node):
    return f"{NODES}:0:{len(node)}"


def node_with(body):
    return framed(body, "0cdb20de")


def test_wrong_magic_is_refused():
    wrong = error(with_manifest(b"PK\3\4" + sample().manifest[4:]))
    assert "not an OCDBT manifest" in wrong.message
    assert (wrong.location, wrong.got) == ("manifest.ocdbt", "magic 504b0304")
    assert wrong.expected == "magic 0cdb3a2a"


def test_manifest_in_place_of_a_node_is_refused():
    node = framed(b"")
    wrong = error(with_node(node))
    assert "not an OCDBT B+tree node" in wrong.message
    assert wrong.location == node_location(node)


def test_truncated_manifests_are_refused():
    whole = sample().manifest
    for length in range(len(whole)):
        wrong = error(with_manifest(whole[:length]))
        assert "truncated" in wrong.message
        assert wrong.got == f"{length} bytes"
    assert wrong.expected == f"{len(whole)} bytes"


def test_truncated_node_is_refused():
    index = sample()
    size = len(index.nodes)
    wrong = error(in_memory(ocdbt_files.EncodedIndex(index.manifest, index.nodes[:-1], 1, 0)))
    assert "truncated" in wrong.message
    assert (wrong.got, wrong.expected) == (f"{size - 1} bytes", f"{size} bytes")
    assert wrong.location == f"{NODES}:0:{size}"


def test_manifest_longer_than_declared_is_refused():
    assert "longer" in error(with_manifest(sample().manifest + b"\0")).message


@given(st.data())
def test_every_flipped_bit_is_found(data):
    index = encode([(b"k%d" % i, Extent("d/data", i, 1)) for i in range(20)], NODES, node_entries=4)
    blobs = {"manifest": bytearray(index.manifest), "nodes": bytearray(index.nodes)}
    blob = blobs[data.draw(st.sampled_from(sorted(blobs)))]
    blob[data.draw(st.integers(0, len(blob) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    error(in_memory(ocdbt_files.EncodedIndex(bytes(blobs["manifest"]), bytes(blobs["nodes"]), 0, 0)))


def test_checksum_mismatch_names_location_and_both_values():
    node = bytearray(sample().nodes)
    node[20] ^= 1
    wrong = error(with_node(bytes(node)))
    assert "CRC-32C" in wrong.message
    assert wrong.location == node_location(node)
    assert wrong.got == f"{google_crc32c.value(bytes(node[:-4])):#010x}"
    assert wrong.expected == f"0x{node[-4:][::-1].hex()}"


def test_unknown_version_and_compression_are_refused():
    body = body_of(sample().manifest)
    version = error(with_manifest(framed(body, head=b"\1\0")))
    assert "unknown format version" in version.message
    assert version.got == "1"
    compression = error(with_manifest(framed(body, head=b"\0\2")))
    assert "unknown compression" in compression.message
    assert (compression.got, compression.expected) == ("2", "0 (none) or 1 (zstd)")


def test_unknown_compression_in_the_config_is_refused():
    body = bytearray(body_of(sample().manifest))
    body[16 + 1 + 2 + 4 + 1] = 7
    assert "unknown configured compression" in error(with_manifest(framed(bytes(body)))).message


def test_invalid_zstd_is_refused():
    wrong = error(with_manifest(framed(b"not zstd", head=b"\0\1")))
    assert "zstd" in wrong.message


def test_numbered_manifests_are_refused(tmp_path):
    database(tmp_path, manifest_kind="numbered").write(b"key", b"value").result()
    wrong = error(below(tmp_path))
    assert "checkpoints do not use" in wrong.message
    assert "kind 1" in wrong.got
    assert wrong.location == "manifest.ocdbt"


def test_manifest_without_a_version_is_refused():
    config = body_of(sample().manifest)[:25]
    assert "no version" in error(with_manifest(framed(config + bytes(12)))).message


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"\0\0" + b"\xff", "varint extends beyond the end"),
        (b"\0\0" + b"\xff" * 20, "varint extends beyond the end"),
        (b"\0\0\5", "varint extends beyond the end"),
        (b"\1\0\0", "height differs"),
        (b"\0\0\1\7abc", "ends inside a field"),
        (b"\0\0\2" + b"\2\1\1ab", "longer than the previous string"),
        (b"\0\1\1\2" + b"a", "prefix is longer than its string"),
        (b"\0\1\4\0../f", "not the path of a data file"),
        (b"\0\0\1\1a\0\2", "unknown kind of value"),
        (b"\0\0\1\1a\0\0x", "after the last column"),
        (b"\0\1\1\0f\1\1a\1\1\0" + b"\xff" * 9 + b"\1", "byte range overflows"),
    ],
)
def test_invalid_node_is_refused(body, words):
    node = node_with(body)
    wrong = error_without_hint(with_node(node)) if "path" in words else error(with_node(node))
    assert words in wrong.message
    assert wrong.location == node_location(node)


def error_without_hint(fetch):
    with pytest.raises(FormatError) as caught:
        read(fetch)
    return caught.value


def test_out_of_range_data_file_id_is_refused():
    wrong = error(with_node(node_with(b"\0\1\1\0f\1\1a\1\1\3\0")))
    assert "not in the table" in wrong.message
    assert (wrong.got, wrong.expected) == ("3", "below 1, the size of the table")


def test_module_needs_neither_numpy_nor_tensorstore():
    for module in (ocdbt, ocdbt_files, ocdbt_files):
        text = Path(module.__file__).read_text()
        assert "import numpy" not in text
        assert "import tensorstore" not in text
