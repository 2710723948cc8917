"""Stored shardings: read from Orbax's own files, and shown as information."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.internals import Constant, Sharding, inspect_tree, keystr
from support.locations import ORBAX

import ckpttools
from ckpttools import DTYPES, FormatError, Metadata, Tree
from ckpttools.cli.inspect_tree import format_array_type
from ckpttools.formats.orbax.metadata import sharding_document
from ckpttools.formats.orbax.sharding import stored_shardings

MESH_AXES = st.lists(
    st.tuples(st.sampled_from(("data", "fsdp", "tensor")), st.integers(1, 8)),
    min_size=1,
    max_size=3,
    unique_by=lambda axis: axis[0],
)


def test_orbax_shardings_are_read():
    tree = ckpttools.open(ORBAX / "multihost_plain")
    result = {keystr(path): item for path, item in stored_shardings(tree).items()}
    mesh = (("fsdp", 4),)
    assert result["params/params/decoder/w_col"] == Sharding(
        "NamedSharding", mesh, ((), ("fsdp",)), write_shape=(16, 8)
    )
    assert result["step"] == Sharding("NamedSharding", mesh, write_shape=())
    assert set(result) == {keystr(path) for path in tree.arrays}


def test_single_device_sharding_is_read():
    (sharding,) = stored_shardings(ckpttools.open(ORBAX / "bare_leaf")).values()
    assert (sharding.kind, sharding.device, sharding.mesh) == ("SingleDeviceSharding", "cpu:0", ())


def test_missing_sharding_is_none():
    assert stored_shardings(ckpttools.open(ORBAX / "maxtext_converted")) == {}
    assert stored_shardings(Tree({}, Metadata("safetensors", location="/"))) == {}


@pytest.mark.parametrize(
    "text", ["[]", '{"AA==": 3}', '{"AA==": "{}"}', '{"not base64!": "{}"}', '{"AA==": "no json"}']
)
def test_damaged_file_is_reported(tmp_path: Path, text: str):
    (tmp_path / "_sharding").write_text(text)
    with pytest.raises(FormatError) as caught:
        stored_shardings(Tree({}, Metadata("orbax", location=str(tmp_path))))
    assert str(tmp_path / "_sharding") in str(caught.value)


@given(data=st.data(), mesh=MESH_AXES)
def test_named_shardings_are_parsed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, mesh: Any):
    """A document as JAX would write it, against the spec it was made from."""
    names = [name for name, _ in mesh]
    entry = st.none() | st.sampled_from(names) | st.lists(st.sampled_from(names), max_size=3)
    spec = data.draw(st.lists(entry, max_size=3))
    directory = tmp_path_factory.mktemp("item")
    document = {
        "sharding_type": "NamedSharding",
        "shape": [length for _, length in mesh],
        "axis_names": names,
        "axis_types": ["AxisType.Auto"] * len(mesh),
        "partition_spec": spec,
        "device_mesh": {"mesh": []},
    }
    key = base64.urlsafe_b64encode(b"a.b").decode()
    (directory / "_sharding").write_text(json.dumps({key: json.dumps(document)}))
    leaf = Constant((8, 8, 8), DTYPES["int8"], b"\0")
    tree = Tree({("a", "b"): leaf, ("c",): leaf}, Metadata("orbax", location=str(directory)))
    (result,) = stored_shardings(tree).items()
    expected = tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec)
    assert result == (("a", "b"), Sharding("NamedSharding", tuple(map(tuple, mesh)), expected))


def test_devices_are_nested_by_the_axes_of_their_mesh():
    """As Orbax nests them: whoever restores elsewhere, or in another order, goes by these numbers."""
    tree = Tree({("a",): Constant((8, 4, 2), DTYPES["bfloat16"], b"\0\0")})
    devices = (5, 4, 3, 2, 1, 0)
    cut = Sharding("NamedSharding", (("x", 2), ("y", 3)), (("x",),), devices=devices)
    (text,) = sharding_document(tree, {("a",): cut}, ()).values()
    nested = json.loads(text)["device_mesh"]["mesh"]
    assert [[item["id"] for item in row] for row in nested] == [[5, 4, 3], [2, 1, 0]]


def test_saved_bytes_match_jax():
    tree = Tree({("a",): Constant((8, 4, 2), DTYPES["bfloat16"], b"\0\0")})
    cut = Sharding("NamedSharding", (("x", 2), ("y", 2)), (("x", "y"), (), ("x",)))
    for sharding, text in (
        (cut, "bfloat16[8@(x,y),4,2@x]"),
        (Sharding("NamedSharding", (("x", 2),), (("x",),)), "bfloat16[8@x,4,2]"),
        (Sharding("NamedSharding"), "bfloat16[8,4,2]"),
        (None, "bfloat16[8,4,2]"),
    ):
        shardings = {("a",): sharding} if sharding else {}
        (array,) = inspect_tree(tree, shardings=shardings).arrays
        assert format_array_type(array) == text
