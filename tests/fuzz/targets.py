"""What is fuzzed: each parser on bytes. It may give a result or raise a CheckpointError, nothing else."""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from archive import packed, packed_directory, unpacked, write

from ckpttools import DTYPES, CheckpointError, Metadata, ToMaxText, Tree
from ckpttools.array.nodes import Constant
from ckpttools.cli.tree_facts import fact_lines
from ckpttools.digest.canonical import Selection
from ckpttools.digest.hashing import hash_tree
from ckpttools.digest.manifest import read_manifest
from ckpttools.formats.base import ReadOptions
from ckpttools.formats.orbax import ocdbt, ocdbt_files
from ckpttools.formats.orbax.arrays import Arrays
from ckpttools.formats.orbax.entries import Files
from ckpttools.formats.orbax.sharding import stored_shardings
from ckpttools.formats.registry import open_tree, storage_of
from ckpttools.formats.safetensors import header as safetensors_header
from ckpttools.formats.zarr import zarr2, zarr3
from ckpttools.formats.zarr.chunks import parse_array
from ckpttools.inspection.chunks import inspect_chunks
from ckpttools.inspection.tree import inspect_tree
from ckpttools.maxtext.to_maxtext import to_maxtext
from ckpttools.model_families.file import family_from_toml
from ckpttools.model_families.registry import families
from ckpttools.model_families.toml_write import family_to_toml
from ckpttools.run import finished_tasks
from ckpttools.stores import parse
from ckpttools.stores.local.journal import JOURNAL as NAME
from ckpttools.stores.local.journal import Journal
from ckpttools.stores.memory import Bytes
from ckpttools.transforms.rename import read_rules

FIXTURES = Path(__file__).parents[2] / "fixtures"
LARGEST_READ = 1 << 20


@dataclass(frozen=True)
class Target:
    """A parser.

    Attributes:
        run: does with an input what a user could do with it.
        seeds: inputs that are as they should be, or nearly.
    """

    run: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]


def refused_or_done(target: Target, data: bytes) -> str | None:
    """Runs a target: the message of its refusal, None if there was none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            target.run(data)
        except CheckpointError as error:
            return str(error)
    return None


def _on_disk(
    use: Callable[[Path], object], files: Callable[[bytes], Iterable[tuple[str, bytes]]] = unpacked
) -> Callable[[bytes], object]:
    """A target whose input is files below a directory."""

    def run(data: bytes) -> object:
        root = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        try:
            write(files(data), root)
            return use(root)
        finally:
            shutil.rmtree(root, ignore_errors=True)

    return run


def _examine(path: Path) -> Tree:
    """All that is looked at without reading much."""
    tree = open_tree(path, ReadOptions())
    list(fact_lines(inspect_tree(tree), 100))
    for array in tree.arrays.values():
        if array.nbytes <= LARGEST_READ and array.scratch_bytes <= 64 * LARGEST_READ:
            try:
                array.read()
            except CheckpointError:
                continue  # others may be readable
    return tree


# ---- safetensors


def _safetensors_header(data: bytes) -> object:
    source = Bytes("model.safetensors", len(data).to_bytes(8, "little") + data + bytes(64))
    return safetensors_header.parse_header(source)


def _header_seeds() -> list[bytes]:
    entries = {
        "a.weight": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]},
        "b": {"dtype": "BF16", "shape": [16], "data_offsets": [32, 64]},
    }
    return [json.dumps(entries).encode(), json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()]


def _safetensors_seeds() -> list[bytes]:
    first, second = (
        _header_file({name: {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}, bytes(4)) for name in "ab"
    )
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = json.dumps({"metadata": {}, "weight_map": dict(zip("ab", names, strict=True))}).encode()
    config = (FIXTURES / "golden/llama3.1/hf/config.json").read_bytes()
    files = {names[0]: first, names[1]: second, "model.safetensors.index.json": index, "config.json": config}
    flat = {"version": 1, "separator": ".", "step": 3, "custom_metadata": {}, "leaves": [[["a"], "array"]]}
    described = {"__metadata__": {"ckpttools.tree": json.dumps(flat)}}
    entry = {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}
    return [packed(files), packed({"model.safetensors": _header_file({**described, **entry}, bytes(4))})]


def _header_file(header: dict[str, object], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


# ---- OCDBT: bodies are framed with lengths and checksums that hold, or nothing but these would be tested.


def _framed(magic: bytes, body: bytes) -> bytes:
    data = ocdbt.HEADER.pack(magic, ocdbt.MIN_FRAME_BYTES + len(body)) + b"\0\0" + body
    return data + ocdbt.crc32c(data).to_bytes(4, "little")


def _body(frame: bytes) -> bytes:
    return frame[ocdbt.HEADER.size + 2 : -4]


def _ocdbt(data: bytes) -> object:
    files = dict(unpacked(data))
    manifest = _framed(ocdbt.MANIFEST_MAGIC, files.pop("manifest", b""))
    node = _framed(ocdbt.NODE_MAGIC, files.pop("node", b""))

    def fetch(file: str, offset: int, length: int | None) -> bytes:
        # Wherever a node is said to be, there is this one.
        return manifest if file == ocdbt.MANIFEST else node

    return ocdbt_files.read(fetch)


def _ocdbt_seeds() -> list[bytes]:
    small = {
        b"a/zarr.json": b"{}",
        b"a/c/0": ocdbt.Extent("d/x", 0, 64),
        b"a/c/1": ocdbt.Extent("d/x", 64, 64),
    }
    many = {b"layers_%d/c/0" % number: b"x" for number in range(9)}
    result = []
    for entries, limit in ((small, 100), (many, 3)):
        index = ocdbt_files.encode(entries.items(), "d/n", node_entries=limit)
        root = index.nodes[index.nodes.rindex(ocdbt.NODE_MAGIC) :]
        result.append(packed({"manifest": _body(index.manifest), "node": _body(root)}))
    return result


def _database_files(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Files of an item in one database: its manifest and what lies in directories `d` are bodies."""
    for name, content in unpacked(data):
        *above, own = name.split("/")
        if own == ocdbt.MANIFEST:
            yield name, _framed(ocdbt.MANIFEST_MAGIC, content)
        elif above[-1:] == ["d"]:
            yield name, _framed(ocdbt.NODE_MAGIC, content)
        else:
            yield name, content


def _database_seeds() -> list[bytes]:
    files = dict(unpacked(packed_directory(FIXTURES / "orbax/pytree_ocdbt0_zarr31")))
    entries = {name.encode(): content for name, content in files.items() if not name.startswith("_")}
    index = ocdbt_files.encode(entries.items(), "d/n")
    metadata = json.loads(files["_METADATA"]) | {"use_ocdbt": True}
    built = {"_METADATA": json.dumps(metadata).encode(), "manifest.ocdbt": _body(index.manifest)}
    return [packed({**built, "d/n": _body(index.nodes)})]


# ---- zarr


def _zarr3(data: bytes) -> object:
    return parse_array("zarr.json", data, "a/zarr.json")


def _zarr2(data: bytes) -> object:
    return parse_array(".zarray", data, "a/.zarray")


def _documents(name: str) -> list[bytes]:
    result = {path.read_bytes() for path in (FIXTURES / "orbax").rglob(name)}
    return sorted(result, key=len)[:12] + [
        _CODECS[codec][1] for codec in _CODECS if _CODECS[codec][0] == name
    ]


def _codec_documents() -> dict[str, tuple[str, bytes]]:
    """Metadata of an array of 2 chunks of 4 by 4 float32, for each chain of codecs."""
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    zstd = {"name": "zstd", "configuration": {"level": 3}}
    index = [little, {"name": "crc32c"}]
    blosc = {"cname": "lz4", "clevel": 5, "shuffle": "shuffle", "typesize": 4, "blocksize": 0}
    shard = {"chunk_shape": [2, 4], "codecs": [little, zstd], "index_codecs": index}
    chains = {
        "plain": [little],
        "transposed": [{"name": "transpose", "configuration": {"order": [1, 0]}}, little],
        "zstd": [little, zstd],
        "zstd-crc": [little, zstd, {"name": "crc32c"}],
        "gzip": [little, {"name": "gzip", "configuration": {"level": 5}}],
        "blosc": [little, {"name": "blosc", "configuration": blosc}],
        "crc": [little, {"name": "crc32c"}],
        "big": [{"name": "bytes", "configuration": {"endian": "big"}}],
        "shards": [{"name": "sharding_indexed", "configuration": {**shard, "index_location": "end"}}],
        "shards-first": [{"name": "sharding_indexed", "configuration": {**shard, "index_location": "start"}}],
    }
    built = {}
    for name, codecs in chains.items():
        document = zarr3.encode((8, 4), DTYPES["float32"], (4, 4), codecs)
        built[name] = (zarr3.DOCUMENT, document)
    for name in (None, "zlib", "gzip", "bz2", "blosc", "zstd"):
        settings = {"id": name, **({"level": 1} if name != "blosc" else blosc)} if name else None
        built[f"zarr2-{name}"] = (zarr2.DOCUMENT, zarr2.encode((8, 4), DTYPES["float32"], (4, 4), settings))
    return built


_CODECS = _codec_documents()


def _chunk(root: Path) -> object:
    """The input is named after a chain of codecs, and is its chunk."""
    for name, (document, text) in _CODECS.items():
        path = root / name
        if path.is_file():
            data = path.read_bytes()
            path.unlink()
            (path / "c/0").mkdir(parents=True)
            (path / document).write_bytes(text)
            (path / ("c/0/0" if document == zarr3.DOCUMENT else "0.0")).write_bytes(data)
            location = parse(path)
            array = Arrays(location, Files(location), document == zarr3.DOCUMENT, True).array(())
            array.read()
    return None


def _chunk_seeds() -> list[bytes]:
    import tensorstore as ts

    values, built = np.arange(32, dtype="float32").reshape(8, 4), []
    for name, (document, text) in _CODECS.items():
        with tempfile.TemporaryDirectory() as location:
            driver = "zarr3" if document == zarr3.DOCUMENT else "zarr"
            Path(location, document).write_bytes(text)
            spec = {"driver": driver, "kvstore": {"driver": "file", "path": f"{location}/"}}
            try:
                ts.open(spec, open=True).result().write(values).result()
            except (ValueError, NotImplementedError):
                continue  # a codec that this tensorstore has not
            key = "c/0/0" if driver == "zarr3" else "0.0"
            built.append(packed({name: Path(location, key).read_bytes()}))
    return built


# ---- Orbax


def _item(root: Path) -> object:
    tree = _examine(root)
    try:
        stored_shardings(tree)
    finally:
        inspect_chunks(tree, storage_of(tree))
    return tree


def _run(root: Path) -> object:
    from ckpttools.diagnosis.examine import examine

    stopped = [finding.what for finding in examine(root).findings if finding.what.startswith("the check ")]
    assert not stopped, stopped
    return _examine(root)


def _item_seeds() -> list[bytes]:
    names = ("pytree_ocdbt0_zarr31", "pytree_ocdbt0_zarr30", "v1_training", "tree_rich_types", "emergency")
    seeds = [packed_directory(FIXTURES / "orbax" / name, largest=1500) for name in names]
    small = [seed for seed in seeds if len(seed) < 40_000]
    return [*small, *_database_seeds()]


def _run_seeds() -> list[bytes]:
    document = {
        "tree_metadata": {
            "('w',)": {
                "key_metadata": [{"key": "w", "key_type": 2}],
                "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
            }
        },
        "use_ocdbt": False,
        "use_zarr3": True,
    }
    step = {"item_handlers": {"items": "PyTreeCheckpointHandler"}, "commit_timestamp_nsecs": 1}
    files: dict[str, bytes] = {}
    for number, item in (("1", "items"), ("2", "items"), ("3.orbax-checkpoint-tmp", "default")):
        files[f"{number}/_CHECKPOINT_METADATA"] = json.dumps(step).encode()
        files[f"{number}/{item}/_METADATA"] = json.dumps(document).encode()
        files[f"{number}/{item}/w/zarr.json"] = _CODECS["plain"][1]
        files[f"{number}/{item}/w/c/0/0"] = bytes(64)
    hierarchy = {"zarr.json": b'{"zarr_format":3,"node_type":"group"}', "a/b/zarr.json": _CODECS["zstd"][1]}
    return [
        packed(files),
        packed(hierarchy),
        packed_directory(FIXTURES / "orbax/handmade_bare", largest=1500),
    ]


# ---- models, manifests, rules


def _config(data: bytes) -> object:
    text = safetensors_header.json_object(data, "config.json", CheckpointError, "")
    tree = open_tree(FIXTURES / "golden/llama3.1/hf").with_metadata(config=text)
    inspect_tree(tree, with_families=True)
    return to_maxtext(tree, ToMaxText())


def _config_seeds() -> list[bytes]:
    return [path.read_bytes() for path in sorted((FIXTURES / "golden").glob("*/hf/config.json"))]


def _manifest(root: Path) -> object:
    return [read_manifest(path) for path in root.glob("*") if path.is_file()]


def _manifest_seeds() -> list[bytes]:
    tree = Tree({("a",): Constant((2, 3), DTYPES["float32"], bytes(4))}, Metadata("orbax", location="x"))
    text = hash_tree(tree, Selection(), memory=256 << 20, jobs=1)._text()
    return [packed({"manifest.json": text.encode()})]


def _family(data: bytes) -> object:
    result = family_from_toml(data.decode(errors="replace"), "family.toml")
    return family_from_toml(family_to_toml(result), "again")


def _family_seeds() -> list[bytes]:
    return [family_to_toml(family).encode() for family in families().values()]


_RULES = b"""
[[rules]]
from = "model.layers.{layer}.mlp.{part:up,down}.weight"
axes = "mlp embed"
to = "decoder/layers/mlp/{part:wi_0,wi_1}/kernel"
to-axes = "embed layer mlp"

[[rules]]
from = "x.{...}"
to = "rest/{...}"

[[rules]]
from = "lm_head.weight"
drop = true
optional = true

[sizes]
layer = 2
"""


def _rules(root: Path) -> object:
    layers = (f"model.layers.{number}.mlp.{part}.weight" for number in range(2) for part in ("up", "down"))
    names = (*layers, "x.bias")
    leaves = {(name,): Constant((2, 3), DTYPES["float32"], bytes(4)) for name in names}
    tree = Tree(leaves, Metadata("safetensors", location="x"))
    return [read_rules(path)(tree) for path in sorted(root.glob("*")) if path.is_file()]


def _journal(root: Path) -> object:
    """Each line of the input gets a checksum that holds; an empty line gets none."""
    result = []
    for path in [item for item in root.glob("*") if item.is_file()][:1]:
        lines = (line and b"%08x %s" % (zlib.crc32(line), line) for line in path.read_bytes().split(b"\n"))
        (root / "of").mkdir(exist_ok=True)
        (root / "of" / NAME).write_bytes(b"\n".join(lines) + b"\n")
        journal = Journal(root / "of")
        result.append((journal.purpose, list(finished_tasks.entries(journal.records)), journal.inventory))
        journal.close()
    return result


def _journal_seeds() -> list[bytes]:
    entries = [
        ["plan", ["abc", "/src", "ckpt cast a b", "/"]],
        ["task", [0, [[[0, 1], "d/x", 0, 64]], {}]],
        ["task", [1, [], {"overflowed": 3}]],
        ["inventory", None],
        ["file", "64 1700000000000000000 d/x"],
        ["publishing", 1],
    ]
    return [packed({"journal": b"\n".join(json.dumps(entry).encode() for entry in entries)})]


def _rules_seeds() -> list[bytes]:
    import tomllib

    as_json = json.dumps(tomllib.loads(_RULES.decode())).encode()
    return [packed({"rules.toml": _RULES}), packed({"rules.json": as_json})]


# ---- torch


def _torch(root: Path) -> object:
    """The input is the pickle of a file of torch.save, in an archive whose checksums hold."""
    for path in [item for item in root.glob("*") if item.is_file()][:1]:
        with zipfile.ZipFile(root / "pytorch_model.bin", "w") as archive:
            archive.writestr("archive/data.pkl", path.read_bytes())
            for number in range(20):
                archive.writestr(f"archive/data/{number}", bytes(1600))
        _examine(root / "pytorch_model.bin")
    return None


def _torch_seeds() -> list[bytes]:
    result = []
    for path in (FIXTURES / "torch/pytorch_model.bin", FIXTURES / "torch/full.pt"):
        with zipfile.ZipFile(path) as archive:
            result.append(packed({"pickle": archive.read(f"{path.stem}/data.pkl")}))
    return result


# ---- flax


def _flax(root: Path) -> object:
    """The input is a state that Flax wrote with msgpack."""
    for path in [item for item in root.glob("*") if item.is_file()][:1]:
        _examine(path.rename(root / "flax_model.msgpack"))
    return None


def _flax_seeds() -> list[bytes]:
    array = np.arange(6, dtype="f4").reshape(2, 3)
    pieces = {"0": array.reshape(-1)[:4], "1": array.reshape(-1)[4:]}
    chunked = {"__msgpack_chunked_array__": True, "shape": {"0": 2, "1": 3}, "chunks": pieces}
    state = {"params": {"kernel": array, "whole": chunked}, "step": 7, "name": "x", "none": None}
    # EasyLM writes pairs of a path and a state, one after the other.
    pairs = [_msgpack([["params", name], _msgpack(array)]) for name in ("kernel", "bias")]
    return [packed({"state": item}) for item in (_msgpack(state), b"".join(pairs))]


def _msgpack(value: object) -> bytes:
    """Small values as `flax.serialization` writes them."""
    match value:
        case None | bool():
            return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
        case int():
            return b"\xcd" + value.to_bytes(2, "big")
        case str():
            return bytes([0xA0 | len(value)]) + value.encode()
        case bytes():
            return bytes([0xC4, len(value)]) + value
        case dict():
            pairs = b"".join(_msgpack(key) + _msgpack(item) for key, item in value.items())
            return bytes([0x80 | len(value)]) + pairs
        case np.ndarray():
            declared = _msgpack([list(value.shape), value.dtype.name, value.tobytes()])
            return bytes([0xC7, len(declared), 1]) + declared
        case list():
            return bytes([0x90 | len(value)]) + b"".join(map(_msgpack, value))
    raise TypeError(value)


TARGETS = {
    "chunk": Target(_on_disk(_chunk), _chunk_seeds),
    "config": Target(_config, _config_seeds),
    "database": Target(_on_disk(_item, _database_files), _database_seeds),
    "family": Target(_family, _family_seeds),
    "flax": Target(_on_disk(_flax), _flax_seeds),
    "item": Target(_on_disk(_item), _item_seeds),
    "journal": Target(_on_disk(_journal), _journal_seeds),
    "manifest": Target(_on_disk(_manifest), _manifest_seeds),
    "ocdbt": Target(_ocdbt, _ocdbt_seeds),
    "rules": Target(_on_disk(_rules), _rules_seeds),
    "run": Target(_on_disk(_run), _run_seeds),
    "safetensors": Target(_on_disk(_examine), _safetensors_seeds),
    "safetensors_header": Target(_safetensors_header, _header_seeds),
    "torch": Target(_on_disk(_torch), _torch_seeds),
    "zarr2": Target(_zarr2, lambda: _documents(zarr2.DOCUMENT)),
    "zarr3": Target(_zarr3, lambda: _documents(zarr3.DOCUMENT)),
}
