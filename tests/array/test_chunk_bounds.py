"""Chunks that decode to more than their array has room for are refused before they are decoded whole."""

import bz2
import gzip
import json
import tracemalloc
import zlib
from contextlib import suppress

import google_crc32c
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from support.internals import Bytes, Zstd
from support.orbax_items import BLOSC, CRC, GZIP, LITTLE, ZSTD, write_item, zarr2, zarr3

import ckpttools
from ckpttools import DTYPES, FormatError
from ckpttools.codecs.blosc import Blosc
from ckpttools.codecs.bzip2 import Bz2
from ckpttools.codecs.coding import Coding
from ckpttools.codecs.crc32c import Crc32c
from ckpttools.codecs.gzip import Gzip, Zlib
from ckpttools.codecs.streams import ByteRange, ExactReader

BOMB = bytes(12 << 20)
ENCODERS = {Gzip(): gzip.compress, Zlib(): zlib.compress, Bz2(): bz2.compress, Zstd(): zstandard.compress}
VALUES = np.arange(32, dtype="float32").reshape(8, 4)


def checked(data):
    return data + google_crc32c.value(data).to_bytes(4, "little")


ENCODERS[Crc32c()] = checked


def decoded(codecs, data, nbytes):
    """What these codecs make of data that is to be so many bytes."""
    coding = Coding((nbytes,), DTYPES["uint8"], (0,), codecs=tuple(codecs))
    reading = ExactReader(coding.decoded(ByteRange(Bytes("", data), 0, len(data)), (nbytes,)), nbytes)
    out = bytearray(nbytes)
    reading.fill(memoryview(out))
    reading.finish()
    return bytes(out)


def refused_in_little(codecs, data, nbytes=64):
    tracemalloc.start()
    with pytest.raises(FormatError, match="decodes to more"):
        decoded(codecs, data, nbytes)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_decompression_bombs_are_refused_in_little_memory():
    for codec in (Gzip(), Zlib(), Bz2(), Zstd()):
        encode = ENCODERS[codec]
        refused_in_little([codec], encode(BOMB))
        refused_in_little([codec, Crc32c()], checked(encode(BOMB)))
        refused_in_little([Zstd(), codec], encode(zstandard.compress(BOMB)))
    refused_in_little([Blosc()], b"\2\1\1\4" + (1 << 30).to_bytes(4, "little") + bytes(8))


@given(st.binary(max_size=300), st.lists(st.sampled_from([*ENCODERS]), max_size=3), st.data())
def test_codec_chains_decode_and_refuse_truncated_data(values, codecs, data):
    encoded = values
    for codec in codecs:
        encoded = ENCODERS[codec](encoded)
    assert decoded(codecs, encoded, len(values)) == values
    cut = encoded[: data.draw(st.integers(0, max(0, len(encoded) - 1)))]
    with suppress(FormatError):
        assert decoded(codecs, cut, len(values)) == values


@pytest.mark.parametrize(
    ("created", "bomb"),
    [
        (zarr3([LITTLE, GZIP], [8, 4]), gzip.compress(BOMB)),
        (zarr3([LITTLE, ZSTD], [8, 4]), zstandard.compress(BOMB)),
        (zarr3([LITTLE, ZSTD, CRC], [8, 4]), checked(zstandard.compress(BOMB))),
        (zarr3([LITTLE, BLOSC], [8, 4]), b"\2\1\1\4" + (1 << 30).to_bytes(4, "little") + bytes(8)),
        (zarr2({"id": "zlib", "level": 1}, [8, 4]), zlib.compress(BOMB)),
        (zarr2({"id": "bz2", "level": 1}, [8, 4]), bz2.compress(BOMB)),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_checkpoint_chunk_larger_than_declared_is_refused(tmp_path, created, bomb):
    item = write_item(tmp_path / "item", {("w",): (created, VALUES)}, use_ocdbt=False)
    assert np.array_equal(ckpttools.open(item).arrays["w",].read().view("float32"), VALUES)
    (chunk,) = (entry for entry in (item / "w").rglob("*") if entry.is_file() and entry.name in ("0", "0.0"))
    chunk.write_bytes(bomb)
    with pytest.raises(FormatError, match="decodes to more") as caught:
        ckpttools.open(item).arrays["w",].read()
    assert "w, chunk" in caught.value.location
