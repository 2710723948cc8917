"""Every writer keeps the kinds of values that Orbax restores: Python numbers, numpy arrays, JAX arrays."""

from __future__ import annotations

import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command_line import run

import ckpttools

WIDE = {
    "step": 3_000_000_017,
    "largest": 2**62 + 1,
    "negative": -(2**40),
    "tiny": 1e-300,
    "precise": 1 + 2**-40,
    "flag": True,
    "np_int": np.int64(3_000_000_017),
    "np_uint": np.uint64(2**63 + 1),
    "np_float": np.float64(1e-300),
    "np_narrow": np.float32(1.5),
    "array_0d": np.array(3_000_000_017),
    "integers": np.array([3_000_000_017, 2]),
    "floats": np.array([[1e-300, 1.0], [2.0, 1e300]]),
    "complex": np.array([1 + 1e-300j]),
    "half": np.array([1.5, 2.5], ml_dtypes.bfloat16),
}
WEIGHT = np.arange(32, dtype=np.float32).reshape(4, 8)


def restored(path):
    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(path)


def assert_same(got, expected):
    """Check that both trees have the same values and dtypes, and that numbers are still Python numbers."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        is_array = isinstance(value, np.ndarray | jax.Array)
        assert isinstance(got[name], np.ndarray | jax.Array) if is_array else type(got[name]) is type(value)
        assert np.asarray(got[name]).dtype == np.asarray(value).dtype, name
        assert np.array_equal(np.asarray(got[name]), np.asarray(value)), name


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("kinds") / "source"
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, {**WIDE, "w": jnp.asarray(WEIGHT)})
    return path


RULES = '[arrays]\n"w" = "P(\'x\')"\n'


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--zarr2",),
        ("--no-ocdbt",),
        ("--zarr2", "--no-ocdbt"),
        ("--compression", "zstd"),
    ],
)
def test_reshard_keeps_value_kinds(words, source, tmp_path):
    (tmp_path / "rules.toml").write_text(RULES)
    how = ("--mesh", "x=1", "--rules", tmp_path / "rules.toml", "--level", "item", *words)
    run("reshard", source, tmp_path / "out", *how)
    assert_same(restored(tmp_path / "out"), restored(source))


@pytest.mark.parametrize(
    "command",
    [
        ("convert", "to-orbax"),
        ("select", "--drop", "array_0d"),
        ("cast", "--dtype-map", "half=float32"),
    ],
)
def test_other_writers_keep_the_kind_of_numbers(command, source, tmp_path):
    name, *rest = command
    words = (name, rest.pop(0)) if name == "convert" else (name,)
    run(*words, source, tmp_path / "out", *rest)
    (item,) = (tmp_path / "out").glob("0/*/_METADATA")
    got, expected = restored(item.parent), restored(source)
    for key, value in expected.items():
        if key in got and key not in ("w", "half"):
            assert type(got[key]) is type(value), key
            assert np.array_equal(np.asarray(got[key]), np.asarray(value)), key


@pytest.mark.parametrize("format", ["zarr3", "safetensors"])
def test_numbers_survive_another_format(format, source, tmp_path):
    tree = {key: value for key, value in WIDE.items() if key != "complex"}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "source", tree)
    run("convert", f"to-{format}", tmp_path / "source", tmp_path / "between")
    run("convert", "to-orbax", tmp_path / "between", tmp_path / "out", "--level", "item")
    assert_same(restored(tmp_path / "out"), restored(tmp_path / "source"))


def test_save_with_shardings_keeps_numbers(tmp_path):
    mesh = jax.make_mesh((1,), ("x",))
    weight = jax.device_put(WEIGHT, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))
    tree = {**WIDE, "w": weight}
    ckpttools.save(tree, tmp_path / "out", keep_sharding=True, level="item")
    got = restored(tmp_path / "out")
    assert isinstance(got["w"], jax.Array) and got["step"] == WIDE["step"] and got["tiny"] == WIDE["tiny"]
    for key in ("integers", "floats", "np_uint"):
        assert np.array_equal(np.asarray(got[key]), np.asarray(WIDE[key])), key


def test_64_bit_jax_array_keeps_sharding(tmp_path):
    with jax.enable_x64(True):
        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "source", {"w": jnp.arange(8, dtype=jnp.int64) + 2**40})
        (tmp_path / "rules.toml").write_text(RULES)
        how = ("--mesh", "x=1", "--rules", tmp_path / "rules.toml", "--level", "item")
        run("reshard", tmp_path / "source", tmp_path / "out", *how)
        assert_same(restored(tmp_path / "out"), restored(tmp_path / "source"))


NUMBERS = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.floats(allow_nan=False, width=32).map(np.float32),
    st.integers(0, 2**64 - 1).map(np.uint64),
    st.integers(-128, 127).map(np.int8),
)


@settings(max_examples=15)
@given(numbers=st.lists(NUMBERS, min_size=1, max_size=6))
def test_any_number_survives_reshard(numbers, tmp_path_factory):
    location = tmp_path_factory.mktemp("numbers")
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(location / "source", {"w": WEIGHT, "numbers": numbers})
    (location / "rules.toml").write_text(RULES)
    how = ("--mesh", "x=1", "--rules", location / "rules.toml", "--level", "item")
    run("reshard", location / "source", location / "out", *how)
    got, expected = restored(location / "out"), restored(location / "source")
    assert got["numbers"] == expected["numbers"]
    assert list(map(type, got["numbers"])) == list(map(type, expected["numbers"]))
    shutil.rmtree(location)
