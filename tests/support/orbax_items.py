"""Items written by tensorstore itself, and the fixtures with what Orbax and tensorstore read in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from ckpttools import LazyArray, Region
from ckpttools.array.scratch import Scratch
from ckpttools.array.tree import Path as TreePath
from ckpttools.formats.orbax import ocdbt, ocdbt_files
from support.locations import ORBAX

EXPECTED: dict[str, list[dict[str, Any]]] = json.loads((ORBAX / "expected.json").read_bytes())

LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
BIG = {"name": "bytes", "configuration": {"endian": "big"}}
ZSTD = {"name": "zstd", "configuration": {"level": 3}}
GZIP = {"name": "gzip", "configuration": {"level": 5}}
CRC = {"name": "crc32c"}
BLOSC = {
    "name": "blosc",
    "configuration": {"cname": "lz4", "clevel": 5, "shuffle": "shuffle", "typesize": 4, "blocksize": 0},
}


def sharded(inner: list[int], codecs: list[Any], location: str = "end") -> dict[str, Any]:
    """The codec of chunks that are shards."""
    settings = {"chunk_shape": inner, "codecs": codecs, "index_codecs": [LITTLE, CRC]}
    return {"name": "sharding_indexed", "configuration": settings | {"index_location": location}}


def zarr3(codecs: list[Any], chunk: list[int], **more: Any) -> dict[str, Any]:
    """What tensorstore must know to create a zarr v3 array."""
    grid = {"name": "regular", "configuration": {"chunk_shape": chunk}}
    return {"driver": "zarr3", "metadata": {"codecs": codecs, "chunk_grid": grid, **more}}


def zarr2(compressor: Any, chunk: list[int], **more: Any) -> dict[str, Any]:
    """What tensorstore must know to create a zarr v2 array."""
    return {"driver": "zarr", "metadata": {"compressor": compressor, "chunks": chunk, **more}}


def write_item(
    item: Path,
    arrays: Mapping[TreePath, tuple[dict[str, Any], np.ndarray]],
    *,
    use_ocdbt: bool = True,
    all_chunks: bool = True,
    config: Mapping[str, Any] | None = None,
    **metadata: Any,
) -> Path:
    """An item with arrays as tensorstore writes them.

    Args:
        item: its directory.
        arrays: path -> how to create the array, and its values.
        use_ocdbt: whether there is an index, or a file for each chunk.
        all_chunks: whether chunks that hold only the fill value are written, too.
        config: more settings of the OCDBT driver.
        metadata: entries of `_METADATA` to change; those that are None are left out.
    """
    item.mkdir(parents=True, exist_ok=True)
    for path, (created, values) in arrays.items():
        name = ".".join(map(str, path))
        _write_array(kvstore(item, use_ocdbt, name) | dict(config or {}), created, values, all_chunks)
    drivers = {created["driver"] for created, _ in arrays.values()}
    document = {
        "tree_metadata": {str(path): _entry(path) for path in arrays},
        "use_ocdbt": use_ocdbt,
        "use_zarr3": drivers == {"zarr3"},
        "store_array_data_equal_to_fill_value": all_chunks,
        **metadata,
    }
    kept = {key: value for key, value in document.items() if value is not None}
    (item / "_METADATA").write_text(json.dumps(kept))
    return item


def kvstore(item: Path, use_ocdbt: bool, name: str) -> dict[str, Any]:
    if use_ocdbt:
        return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{item}/"}, "path": f"{name}/"}
    return {"driver": "file", "path": f"{item}/{name}/"}


def _write_array(store: Any, created: Mapping[str, Any], values: np.ndarray, all_chunks: bool) -> None:
    spec = dict(created) | {"kvstore": store, "store_data_equal_to_fill_value": all_chunks}
    array = ts.open(spec, create=True, dtype=values.dtype, shape=values.shape).result()
    array.write(values).result()


def _entry(path: TreePath) -> dict[str, Any]:
    keys = [{"key": str(key), "key_type": 1 if isinstance(key, int) else 2} for key in path]
    return {"key_metadata": keys, "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False}}


def values_of(dtype: np.dtype[Any], shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random bits, as far as every one of them is a value of the dtype."""
    generator = np.random.default_rng(seed)
    if dtype.name in ("bool", "float4_e2m1fn"):
        return generator.integers(0, 2, shape).astype(dtype)
    if dtype.name in ("int2", "int4"):
        return generator.integers(-2, 2, shape).astype(dtype)
    nbytes = dtype.itemsize * int(np.prod(shape))
    return np.frombuffer(generator.bytes(nbytes), dtype).reshape(shape)


def regions(shape: tuple[int, ...], count: int, seed: int = 0) -> Iterator[tuple[list[int], list[int]]]:
    """Random boxes within a shape, as starts and stops."""
    generator = np.random.default_rng(seed)
    for _ in range(count):
        pairs = [sorted(generator.choice(n + 1, 2, replace=False).tolist()) for n in shape]
        yield [a for a, _ in pairs], [b for _, b in pairs]


def check_regions(array: LazyArray, whole: np.ndarray, count: int) -> None:
    """Regions of the array, read by one worker, are those of the whole."""
    scratch = Scratch(array.scratch_bytes)
    whole = whole.view(array.dtype.carrier)
    for start, stop in regions(array.shape, count, seed=array.size):
        region = Region(tuple(start), tuple(stop))
        out = np.empty(region.shape, array.dtype.carrier)
        array.read_into(region, out, scratch)
        assert np.array_equal(out, whole[region.slices])


def change_json(path: Path, **changes: object) -> None:
    """Changes entries of a JSON file; those that are None go."""
    document = json.loads(path.read_bytes()) | changes
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not None}))


def change_index(item: Path, change: Callable[[dict[bytes, ocdbt.Entry]], object]) -> None:
    """Writes the item's index again with some entries changed."""

    def fetch(file: str, offset: int, length: int | None) -> bytes:
        data = (item / file).read_bytes()
        return data[offset:] if length is None else data[offset : offset + length]

    entries = ocdbt_files.read(fetch)
    change(entries)
    index = ocdbt_files.encode(entries.items(), "d/index")
    (item / "d" / "index").write_bytes(index.nodes)
    (item / "manifest.ocdbt").write_bytes(index.manifest)


def damage_node(file: Path) -> bool:
    """Changes a byte of the first B+tree node in a file, if there is one."""
    data = bytearray(file.read_bytes())
    start = data.find(bytes.fromhex("0cdb20de"))
    if start >= 0:
        data[start + 20] ^= 1
        file.write_bytes(data)
    return start >= 0
