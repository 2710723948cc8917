"""Chunks that decode to more than their array has room for are refused before they are decoded whole."""

import bz2
import gzip
import json
import tracemalloc
import zlib

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from support.orbax_items import BLOSC, CRC, GZIP, LITTLE, ZSTD, write_item, zarr2, zarr3

from ckpttools.core.errors import FormatError
from ckpttools.formats.registry import open_tree
from ckpttools.formats.zarr.chunk_bounds import refuse_more

BOMB = bytes(12 << 20)
ENCODERS = {"gzip": gzip.compress, "zlib": zlib.compress, "bz2": bz2.compress, "zstd": zstandard.compress}
VALUES = np.arange(32, dtype="float32").reshape(8, 4)


def refused_in_little(codecs, data, nbytes=64):
    tracemalloc.start()
    with pytest.raises(FormatError, match="decodes to more"):
        refuse_more(codecs, data, nbytes)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_bombs():
    for name, encode in ENCODERS.items():
        refused_in_little([name], encode(BOMB))
        refused_in_little([name, "crc32c"], encode(BOMB) + bytes(4))
        refused_in_little(["zstd", name], encode(zstandard.compress(BOMB)))
    # Of several members, the first ones empty.
    refused_in_little(["gzip"], gzip.compress(b"") * 3 + gzip.compress(BOMB))
    refused_in_little(["blosc"], b"\2\1\1\4" + (1 << 30).to_bytes(4, "little") + bytes(8))


@given(st.binary(max_size=300), st.lists(st.sampled_from(sorted(ENCODERS)), min_size=1, max_size=3))
def test_what_fits_passes_and_what_is_damaged_is_left_to_who_decodes_it(data, codecs):
    encoded = data
    for name in codecs:
        encoded = ENCODERS[name](encoded)
    refuse_more(codecs, encoded, len(data))
    refuse_more(codecs, encoded[:-1], len(data))
    refuse_more(codecs, data, 1 << 20)


@pytest.mark.parametrize(
    ("created", "bomb"),
    [
        (zarr3([LITTLE, GZIP], [8, 4]), gzip.compress(BOMB)),
        (zarr3([LITTLE, ZSTD], [8, 4]), zstandard.compress(BOMB)),
        (zarr3([LITTLE, ZSTD, CRC], [8, 4]), zstandard.compress(BOMB) + bytes(4)),
        (zarr3([LITTLE, BLOSC], [8, 4]), b"\2\1\1\4" + (1 << 30).to_bytes(4, "little") + bytes(8)),
        (zarr2({"id": "zlib", "level": 1}, [8, 4]), zlib.compress(BOMB)),
        (zarr2({"id": "bz2", "level": 1}, [8, 4]), bz2.compress(BOMB)),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_in_a_checkpoint(tmp_path, created, bomb):
    item = write_item(tmp_path / "item", {("w",): (created, VALUES)}, use_ocdbt=False)
    assert np.array_equal(open_tree(item).arrays["w",].read().view("float32"), VALUES)
    (chunk,) = (each for each in (item / "w").rglob("*") if each.is_file() and each.name in ("0", "0.0"))
    chunk.write_bytes(bomb)
    with pytest.raises(FormatError, match="decodes to more") as caught:
        open_tree(item).arrays["w",].read()
    assert "w, chunk" in caught.value.place
