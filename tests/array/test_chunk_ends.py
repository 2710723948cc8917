"""Chunks that are cut are told from whole ones by their headers, whoever wrote them."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import google_crc32c
import numcodecs
import numpy as np
import pytest
import zarr
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from support.command_line import examine
from support.internals import Bytes
from support.orbax_items import BLOSC, CRC, GZIP, LITTLE, ZSTD, sharded, values_of, write_item, zarr2, zarr3

import ckpttools
from ckpttools import DTYPES, CheckpointError, FormatError
from ckpttools.codecs.coding import Coding
from ckpttools.codecs.registry import codec_steps
from ckpttools.codecs.sharding import ShardIndex
from ckpttools.codecs.streams import ByteRange, ExactReader

F32 = np.dtype("float32")
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4" * 64 + b"\nsize 99\n"
# Chunks of 160 kB, some of them beyond the array: several blocks of zstd.
SHAPE, CHUNK = (500, 250), [200, 200]
TENSORSTORE = {
    "zarr2-zstd": zarr2({"id": "zstd", "level": 1}, CHUNK),
    "zarr2-gzip": zarr2({"id": "gzip", "level": 5}, CHUNK),
    "zarr2-blosc": zarr2(
        {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 0}, CHUNK, order="F"
    ),
    "zstd": zarr3([LITTLE, ZSTD], CHUNK),
    "zstd-crc": zarr3([LITTLE, ZSTD, CRC], CHUNK),
    "gzip": zarr3([{"name": "transpose", "configuration": {"order": [1, 0]}}, LITTLE, GZIP], CHUNK),
    "blosc": zarr3([LITTLE, BLOSC], CHUNK),
    "crc": zarr3([LITTLE, CRC], CHUNK),
    "shards": zarr3([sharded([100, 200], [LITTLE, ZSTD])], CHUNK),
    "plain-shards": zarr3([sharded([100, 50], [LITTLE, CRC])], CHUNK),
    "one-piece": zarr3([sharded(CHUNK, [LITTLE, ZSTD])], CHUNK),
    "shards-at-start": zarr3([sharded([100, 200], [LITTLE, GZIP], "start")], CHUNK),
}
# zlib and bz2 do not say where they end.
SILENT = {
    "zarr2-zlib": zarr2({"id": "zlib", "level": 5}, CHUNK),
    "zarr2-bz2": zarr2({"id": "bz2", "level": 5}, CHUNK),
}
KINDS = {"random": values_of(F32, SHAPE), "constant": np.full(SHAPE, 3, F32)}
TWICE = np.repeat(values_of(F32, (500, 125)), 2, axis=1)


def item(tmp_path: Path, created, values=TWICE) -> tuple[Path, Path]:
    """An item, and its first chunk."""
    location = write_item(tmp_path / "item", {("w",): (created, values)}, use_ocdbt=False)
    return location, next(path for path in sorted((location / "w").rglob("*0")) if path.is_file())


def faults(location: Path) -> list[str]:
    return [finding.what for finding in examine(location).findings if finding.level == "error"]


@pytest.mark.parametrize("values", [*KINDS.values(), TWICE], ids=[*KINDS, "repetitive"])
@pytest.mark.parametrize("created", [*TENSORSTORE.values(), *SILENT.values()], ids=[*TENSORSTORE, *SILENT])
def test_complete_tensorstore_chunks_have_no_faults(tmp_path, created, values):
    assert faults(item(tmp_path, created, values)[0]) == []


@pytest.mark.parametrize("created", TENSORSTORE.values(), ids=TENSORSTORE)
def test_truncated_chunks_are_faults(tmp_path, created):
    location, chunk = item(tmp_path, created)
    data = chunk.read_bytes()
    for changed in (data[:-1], data[: len(data) // 2], data[:40], data[:-60] + b"<html>"):
        chunk.write_bytes(changed)
        (what,) = faults(location)
        assert "1 of 6 chunks, such as w/" in what
    chunk.write_bytes(data)
    assert faults(location) == []


@pytest.mark.parametrize("created", [*TENSORSTORE.values(), *SILENT.values(), zarr3([LITTLE], CHUNK)])
def test_git_lfs_pointers_are_faults(tmp_path, created):
    location, chunk = item(tmp_path, created)
    chunk.write_bytes(POINTER)
    (result,) = (finding for finding in examine(location).findings if finding.level == "error")
    assert "Git LFS pointers" in result.what and "git lfs pull" in result.hint


@pytest.mark.parametrize("name", sorted(TENSORSTORE.keys() - {"crc"}))
def test_zero_filled_chunks_are_faults(tmp_path, name):
    """A file of the right size that was never filled; of bare elements only `ckpt verify` can tell."""
    location, chunk = item(tmp_path, TENSORSTORE[name])
    chunk.write_bytes(bytes(chunk.stat().st_size))
    assert len(faults(location)) == 1


def test_shard_index_beyond_file_end_is_a_fault(tmp_path):
    location, chunk = item(tmp_path, TENSORSTORE["shards"])
    data = chunk.read_bytes()
    chunk.write_bytes(data[-36:])  # the index alone, which is sound
    assert "names more than exists" in faults(location)[0]


ZARR2 = {name: entry for name, entry in (TENSORSTORE | SILENT).items() if name.startswith("zarr2")}
ZARR2["zarr2-plain"] = zarr2(None, CHUNK)


@pytest.mark.parametrize("created", ZARR2.values(), ids=ZARR2)
def test_trailing_bytes_are_refused_like_tensorstore(tmp_path, created):
    location, chunk = item(tmp_path, created)
    good = chunk.read_bytes()
    for behind in (b"\0", bytes(8), b"junk", good):
        chunk.write_bytes(good + behind)
        with pytest.raises(ValueError, match="Error reading"):
            read_by_tensorstore(location / "w")
        with pytest.raises(FormatError) as error:
            ckpttools.open(location).arrays["w",].read()
        assert "chunk 0.0" in (error.value.location or "")
    chunk.write_bytes(good)
    assert read_by_tensorstore(location / "w") == ckpttools.open(location).arrays["w",].read().tobytes()


def read_by_tensorstore(location: Path) -> bytes:
    import tensorstore as ts

    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{location}/"}}
    return np.asarray(ts.open(spec, open=True).result().read().result()).tobytes()


@pytest.mark.parametrize(
    "codec",
    [
        None,
        zarr.codecs.ZstdCodec(level=3),
        zarr.codecs.ZstdCodec(level=3, checksum=True),
        zarr.codecs.BloscCodec(),
        zarr.codecs.GzipCodec(),
    ],
)
@pytest.mark.parametrize("shards", [None, (200, 200)])
def test_complete_zarr_chunks_have_no_faults(tmp_path, codec, shards):
    group = zarr.open_group(str(tmp_path / "z"), mode="w")
    compressors = None if codec is None else [codec]
    array = group.create_array(
        "a", shape=SHAPE, chunks=(100, 200), shards=shards, dtype="f4", compressors=compressors
    )
    array[:] = TWICE
    assert faults(tmp_path / "z") == []


@pytest.mark.parametrize(
    ("name", "encoded"),
    [
        ("zstd", numcodecs.Zstd(level=1)),
        ("zstd", numcodecs.Zstd(level=22, checksum=True)),
        ("gzip", numcodecs.GZip()),
        ("blosc", numcodecs.Blosc(cname="zstd", shuffle=numcodecs.Blosc.BITSHUFFLE)),
        ("blosc", numcodecs.Blosc(cname="lz4", clevel=0)),
    ],
)
@pytest.mark.parametrize("values", KINDS.values(), ids=KINDS)
def test_truncated_numcodecs_chunks_are_incomplete(name, encoded, values):
    data = bytes(encoded.encode(values))
    assert whole(data, [name], values.nbytes)
    assert not any(whole(data[:length], [name], values.nbytes) for length in (0, 1, 9, 17, len(data) - 1))


@given(
    st.lists(st.binary(max_size=300).map(lambda part: part * 1000), min_size=1, max_size=3),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_zstd_frames_must_be_complete(parts, checksum, sized, data):
    """Any number of frames, also such as are skipped; no beginning is whole that does not end with one."""
    compressor = zstandard.ZstdCompressor(write_checksum=checksum, write_content_size=sized)
    frames = [compressor.compress(part) for part in parts]
    frames.append(bytes.fromhex("5f2a4d18") + (7).to_bytes(4, "little") + b"skipped")
    encoded = b"".join(frames)
    lengths = [*map(len, parts), 0]
    ends = {sum(map(len, frames[:n])): sum(lengths[:n]) for n in range(1, len(frames) + 1)}
    for length in (*ends, data.draw(st.integers(0, len(encoded) - 1))):
        assert whole(encoded[:length], ["zstd"], ends.get(length, 0)) is (length in ends)
        wrong = ends.get(length, 0) + data.draw(st.integers(1, 9))
        assert not (sized and whole(encoded[:length], ["zstd"], wrong))


def test_truncated_zstd_stream_is_incomplete():
    out = io.BytesIO()
    with zstandard.ZstdCompressor().stream_writer(out, closefd=False) as writer:
        for _ in range(40):
            writer.write(values_of(F32, (5000,)).tobytes())
    assert whole(out.getvalue(), ["zstd"], 800_000)
    assert not whole(out.getvalue()[:-2], ["zstd"], 800_000)


RAW = bytes(range(256)) * 64
ZSTD_CHUNKS = {
    "good": [RAW],
    "two frames": [RAW[:8192], RAW[8192:]],
    "skipped": [RAW, None],
    "too short": [RAW[:-4]],
    "too long": [RAW + b"x" * 8],
    "twice": [RAW, RAW],
    "zeros": [bytes(1 << 26)],
    "little": [RAW[:3]],
    "none": [b""],
}
GZIP_CHUNKS = {
    "good": gzip.compress(RAW),
    "two members": gzip.compress(RAW[:8000]) + gzip.compress(RAW[8000:]),
    "zeros behind": gzip.compress(RAW) + bytes(8),
    "other bytes behind": gzip.compress(RAW) + b"junk",
    "too short": gzip.compress(RAW[:-4]),
    "too long": gzip.compress(RAW[:8000]) + gzip.compress(RAW + b"x"),
    "cut": gzip.compress(RAW)[:-4],
    "cut member": gzip.compress(RAW[:8000]) + gzip.compress(RAW[8000:])[:-4],
    "zeros": gzip.compress(bytes(1 << 22)),
}
READABLE = {"good", "two frames", "skipped"}


def test_doctor_and_readers_agree_on_chunks():
    """Also as a piece of a shard; the doctor and whoever reads are of one opinion."""
    frame = zstandard.ZstdCompressor().compress
    skipped = bytes.fromhex("502a4d1804000000") + b"abcd"
    chunks = {
        name: ("zstd", b"".join(skipped if part is None else frame(part) for part in parts))
        for name, parts in ZSTD_CHUNKS.items()
    }
    for name, (codec, data) in [*chunks.items(), *((name, ("gzip", it)) for name, it in GZIP_CHUNKS.items())]:
        steps = codec_steps([{"name": codec}])
        coding = Coding((len(RAW),), DTYPES["uint8"], (0,), codecs=steps)
        stored = ByteRange(Bytes("", data), 0, len(data))
        assert (coding.is_whole(stored), reads(coding, stored)) == (name in READABLE,) * 2, (codec, name)
        index = (0).to_bytes(8, "little") + len(data).to_bytes(8, "little")
        shard = data + index + google_crc32c.value(index).to_bytes(4, "little")
        in_shard = ByteRange(Bytes("", shard), 0, len(shard))
        assert ShardIndex((1,), (0,), False).is_whole(in_shard, coding) == (name in READABLE), (codec, name)


def reads(coding: Coding, stored: ByteRange) -> bool:
    reading = ExactReader(coding.decoded(stored, coding.shape), coding.nbytes)
    out = bytearray(coding.nbytes)
    try:
        reading.fill(memoryview(out))
        reading.finish()
    except CheckpointError:
        return False
    return out == RAW


def test_unknown_codecs_are_not_checked():
    assert whole(b"anything", ["numcodecs.lzma"], 3)
    assert whole(gzip.compress(b"abc"), ["numcodecs.delta", "gzip"], 99)


def whole(data: bytes, codecs: list[str], decoded: int) -> bool:
    steps = codec_steps({"name": name} for name in codecs)
    coding = Coding((decoded,), DTYPES["uint8"], (0,), codecs=steps)
    return coding.is_whole(ByteRange(Bytes("", data), 0, len(data)))
