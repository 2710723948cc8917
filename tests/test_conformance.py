"""Every pair of formats carries trees over: written in one, opened, written in the other, opened, the same.

Each format alone passes the shipped conformance tests: tests/test_orbax_write.py, test_zarr3.py,
test_safetensors_write.py; the plainest of them here.
"""

from __future__ import annotations

import tempfile
from itertools import product
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, assume, given, settings

from ckpttools.dtypes import DTYPES
from ckpttools.formats import orbax
from ckpttools.formats.chunk_codecs import Zstd
from ckpttools.formats.orbax_write import OrbaxWriter
from ckpttools.formats.registry import open_tree
from ckpttools.formats.safetensors_write import SafetensorsWriter
from ckpttools.formats.zarr3_write import ZarrWriter
from ckpttools.testing.conformance import FormatTests, write
from ckpttools.testing.trees import assert_same, trees, unambiguous

ZARR3 = tuple(dtype for dtype in DTYPES.values() if dtype.zarr3)
HELD_BY_ALL = tuple(dtype for dtype in ZARR3 if dtype.safetensors and not dtype.packed)

WRITERS = {
    "orbax": OrbaxWriter(step=None),
    "orbax zstd": OrbaxWriter(step=None, compression=Zstd(3)),
    "orbax zarr2": OrbaxWriter(step=None, zarr3=False),
    "orbax files": OrbaxWriter(step=None, ocdbt=False),
    "safetensors": SafetensorsWriter(),
    "safetensors shards": SafetensorsWriter(max_shard_bytes=1000, separator="/"),
    "zarr3": ZarrWriter(),
    "zarr3 zstd": ZarrWriter(compression=Zstd(1)),
}


class TestOrbax(FormatTests):
    format = orbax.FORMAT
    dtypes = ZARR3

    def writer(self, tree):
        return OrbaxWriter(step=tree.metadata.step)


@pytest.mark.parametrize(("first", "second"), list(product(WRITERS, WRITERS)))
@settings(deadline=None, max_examples=4, suppress_health_check=list(HealthCheck))
@given(tree=trees(HELD_BY_ALL))
def test_a_tree_goes_through_two_formats(first, second, tree):
    assume(unambiguous(tree))
    with tempfile.TemporaryDirectory() as name:
        one, other = Path(name) / "one", Path(name) / "other"
        write(tree, WRITERS[first], one)
        write(open_tree(one), WRITERS[second], other)
        assert_same(open_tree(other), tree)


@settings(deadline=None, max_examples=10, suppress_health_check=list(HealthCheck))
@given(tree=trees(HELD_BY_ALL), path=st.permutations(sorted(WRITERS)))
def test_a_tree_goes_round_all_formats(tree, path):
    assume(unambiguous(tree))
    with tempfile.TemporaryDirectory() as name:
        current = tree
        for number, each in enumerate(path):
            write(current, WRITERS[each], Path(name) / str(number))
            current = open_tree(Path(name) / str(number))
        assert_same(current, tree)
