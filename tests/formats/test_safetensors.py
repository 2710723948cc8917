"""The safetensors reader against the reference package, hand-made files, and everything that can be wrong."""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from support.command_line import doctor, examine, hint_of
from support.internals import LocalFile, ReadOptions, parse
from support.locations import ROOT
from support.safetensors_files import entry, file_of, framed, packed, small, write_index

import ckpttools
from ckpttools import DTYPES, CheckpointError, ConfigError, FormatError, Region, StorageError, Tree
from ckpttools.core.dtypes import from_safetensors
from ckpttools.formats.base import Format
from ckpttools.formats.safetensors.format import FORMAT, parse_header
from ckpttools.testing.models import LlamaSizes, write_llama

ALL_CODES = [dtype.safetensors for dtype in DTYPES.values() if dtype.safetensors]
WHOLE_CODES = [code for code in ALL_CODES if not from_safetensors(code).packed]
PACKED_CODES = [code for code in ALL_CODES if from_safetensors(code).packed]
few = settings(max_examples=60, deadline=None)


def opened(path: Path, **options) -> Tree:
    return FORMAT.open(parse(path), ReadOptions(**options))


def file_at(folder: Path, content: bytes, name: str = "model.safetensors") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


@pytest.fixture(scope="module")
def folder() -> Path:
    """One directory for all examples of a property; each writes the file anew."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def refusal(path: Path, kind: type[CheckpointError] = FormatError, **options) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        opened(path, **options)
    assert type(caught.value) is kind
    assert caught.value.hint
    return caught.value


def assert_says(error: CheckpointError, *words: str) -> None:
    for word in words:
        assert word in str(error), f"{word!r} is not in:\n{error}"


# --- What can be read -------------------------------------------------------------------------------------


@st.composite
def shapes(draw):
    return tuple(draw(st.lists(st.integers(0, 5), max_size=4)))


@st.composite
def regions(draw, shape):
    pairs = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Region(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))


@st.composite
def tensors(draw, codes=tuple(WHOLE_CODES)):
    names = draw(st.lists(st.text(st.characters(codec="utf-8"), max_size=6), max_size=6, unique=True))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    built = {}
    for name in names:
        if name == "__metadata__":
            continue
        code, shape = draw(st.sampled_from(codes)), draw(shapes())
        bits = math.prod(shape) * from_safetensors(code).bits
        if bits % 8:
            shape, bits = (*shape, 4), bits * 4
        # Of the 256 values of a byte two are booleans.
        raw = rng.integers(0, 2 if code == "BOOL" else 256, bits // 8, np.uint8)
        built[name] = (code, shape, raw.tobytes())
    return built


@few
@given(data=st.data(), built=tensors(), padding=st.integers(0, 17))
def test_handmade_files_read_correctly(data, built, padding, folder):
    keys = data.draw(st.permutations(list(built)))
    tree = opened(file_at(folder, packed(built, keys, padding)))
    assert set(tree) == {(name,) for name in built}
    for name, (code, shape, raw) in built.items():
        array = tree[name,]
        assert (array.shape, array.dtype) == (shape, from_safetensors(code))
        reference = np.frombuffer(raw, array.dtype.carrier).reshape(shape)
        region = data.draw(regions(shape))
        assert array.read().tobytes() == raw
        assert array.read(region).tobytes() == reference[region.slices].tobytes()


@few
@given(built=tensors(tuple(ALL_CODES)))
def test_tensors_are_in_byte_order(built, folder):
    path = file_at(folder, packed(built, sorted(built, reverse=True)))
    header = parse_header(LocalFile.at(path))
    assert [(item.begin, item.end) for item in header.entries] == sorted(
        (item.begin, item.end) for item in header.entries
    )
    assert [path[0] for path in opened(path)] == [item.name for item in header.entries]


NUMPY_DTYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"]
NUMPY_DTYPES += [ml_dtypes.bfloat16]


@few
@given(data=st.data(), dtypes=st.lists(st.sampled_from(NUMPY_DTYPES), min_size=1, max_size=5))
def test_reader_matches_the_safetensors_package(data, dtypes, folder):
    rng = np.random.default_rng(len(dtypes))
    arrays = {}
    for k, dtype in enumerate(dtypes):
        arrays[f"t{k}"] = rng.integers(0, 2, data.draw(shapes())).astype(dtype)
    path = folder / "model.safetensors"
    safetensors.numpy.save_file(arrays, path, metadata={"format": "np"})
    tree, reference = opened(path), safetensors.numpy.load_file(path)
    assert tree.metadata.custom == {"format": "np"}
    assert set(tree) == {(name,) for name in reference}
    for name in arrays:  # the package's order changes from call to call
        expected = reference[name]
        got = tree[name,].read()
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        assert got.tobytes() == expected.tobytes()
        region = data.draw(regions(expected.shape))
        assert tree[name,].read(region).tobytes() == expected[region.slices].tobytes()


def test_eight_bit_floats_are_read(tmp_path):
    """The package writes them from numpy and cannot read them back into it."""
    values = np.arange(-3, 3).reshape(2, 3)
    arrays = {name: values.astype(getattr(ml_dtypes, name)) for name in ("float8_e4m3fn", "float8_e5m2")}
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(arrays, path)
    tree = opened(path)
    for name, expected in arrays.items():
        assert tree[name,].dtype.name == name
        assert tree[name,].read().tobytes() == expected.tobytes()


def unpacked_slowly(raw: bytes, bits: int, count: int) -> list[int]:
    """Element after element, lowest bits first."""
    number = int.from_bytes(raw, "little")
    return [(number >> (bits * k)) & ((1 << bits) - 1) for k in range(count)]


@few
@given(data=st.data(), built=tensors(tuple(PACKED_CODES)))
def test_elements_smaller_than_a_byte_are_read(data, built, folder):
    tree = opened(file_at(folder, packed({"one": ("U8", [3], b"abc"), **built})))
    for name, (code, shape, raw) in built.items():
        dtype = from_safetensors(code)
        slow = np.array(unpacked_slowly(raw, dtype.bits, math.prod(shape)), np.uint8).reshape(shape)
        region = data.draw(regions(shape))
        assert tree[name,].read().dtype == dtype.numpy
        assert tree[name,].read().tobytes() == slow.tobytes()
        assert tree[name,].read(region).tobytes() == slow[region.slices].tobytes()


@pytest.mark.parametrize("code", ALL_CODES)
def test_scalars_and_empty_arrays_of_every_dtype_are_read(code, tmp_path):
    dtype = from_safetensors(code)
    raw = bytes(range(1, 9))[: max(1, dtype.bits // 8)]
    shape = [4] if dtype.packed else []
    raw = raw[:1] * (4 * dtype.bits // 8) if dtype.packed else raw
    built = {"empty": (code, [3, 0, 2], b""), "one": (code, shape, raw), "last": (code, [0], b"")}
    tree = opened(file_at(tmp_path, packed(built)))
    assert tree["empty",].read().shape == (3, 0, 2)
    assert tree["last",].read().shape == (0,)
    assert tree["one",].read().dtype == dtype.numpy
    if not dtype.packed:
        assert tree["one",].read().tobytes() == raw


def test_unaligned_data_is_read(tmp_path):
    raw = np.arange(4, dtype="<f8").tobytes()
    for padding in range(8):
        path = file_at(tmp_path, packed({"x": ("U8", [1], b"\1"), "y": ("F64", [2, 2], raw)}, None, padding))
        assert opened(path)["y",].read().tolist() == [[0, 1], [2, 3]]


def test_file_without_tensors_is_read(tmp_path):
    tree = opened(file_at(tmp_path, framed(b"{}")))
    assert len(tree) == 0
    assert tree.metadata.custom == {}


def test_header_may_have_null_metadata_and_extra_fields(tmp_path):
    built = {"__metadata__": None, "x": {**entry(), "comment": "of somebody"}}
    assert list(opened(file_at(tmp_path, file_of(built, b"1234")))) == [("x",)]


def test_valid_file_whose_length_looks_like_zip_is_read(tmp_path):
    plain = packed({"x": ("U8", [1], b"a")})
    length = int.from_bytes(plain[:8], "little")
    content = packed({"x": ("U8", [1], b"a")}, None, 0x4B50 - length)
    assert content.startswith(b"PK")
    assert opened(file_at(tmp_path, content))["x",].read().tolist() == [97]


def test_tree_metadata_is_read(tmp_path):
    path = file_at(tmp_path, packed({"x": ("U8", [0], b"")}, metadata={"a": "b"}))
    assert opened(path).metadata.config is None
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for location in (path, tmp_path):
        metadata = opened(location).metadata
        assert (metadata.format, metadata.location) == ("safetensors", str(location))
        assert metadata.custom == {"a": "b"}
        assert metadata.config == {"model_type": "llama"}


# --- What is wrong with a file ----------------------------------------------------------------------------

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"
ONE = {"x": entry()}
TWO = {"x": entry(offsets=[0, 4]), "y": entry(offsets=[4, 8])}
NOT_WHOLE = "not a list of non-negative integers"

BROKEN = {
    "empty": (b"", ["the file is empty", "0 bytes", "fetch it again"]),
    "seven bytes": (b"1234567", ["too short", "7 bytes", "at least 8 bytes"]),
    "pointer": (POINTER, ["Git LFS pointer", "4,976,698,672 bytes", "`git lfs pull`"]),
    "web page": (b"<!DOCTYPE html><html>", ["a web page", "access token"]),
    "web page, spelled otherwise": (b"\n  <!doctype HTML>", ["a web page", "access token"]),
    "web page without doctype": (b"\t<HTML lang=en>", ["a web page", "access token"]),
    "error of a store": (b"<?xml version='1.0'?><Error>AccessDenied</Error>", ["a web page"]),
    "zip": (b"PK\3\4" + bytes(60), ["zip archive", "torch.save", "save_file"]),
    "pickle": (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", ["a pickle", "torch.save", "save_file"]),
    "gguf": (b"GGUF\3\0\0\0" + bytes(40), ["a GGUF file", "cannot be read"]),
    "json": (b'{"error": "Repository not found"}', ["a JSON text", "error message"]),
    "zeros": (bytes(100), ["starts with zeros", "fetch it again"]),
    "header beyond the end": (
        (1000).to_bytes(8, "little") + b'{"x',
        ["truncated file, or not a safetensors file", "11 bytes", "1,008 bytes"],
    ),
    "noise": (b"\xff" * 50, ["truncated file, or not a safetensors file", "50 bytes"]),
    "no brace": (framed(b' {"x":1}'), ["header is not a JSON object", "byte 8", "a brace"]),
    "a list": (framed(b"[1, 2] "), ["header is not a JSON object", "[1, 2]"]),
    "not UTF-8": (framed(b'{"a\xff": 1}'), ["not UTF-8", ":1:4", "0xff"]),
    "not JSON": (framed(b'{"a": 1,\n "b" 2}'), ["not JSON", ":2:6", "2}"]),
    "cut in the middle": (framed(b'{"a": {"dtype"'), ["not JSON", ":1:15"]),
    "two objects": (framed(b'{} {"a": 1}'), ["not JSON", ":1:4"]),
    "too deep": (framed(b'{"a":' * 100_000), ["not usable JSON", "nested more than"]),
    "endless number": (framed(b'{"a": ' + b"9" * 5000 + b"}"), ["not usable JSON", "digits"]),
    "an unpaired surrogate": (framed(b'{"\\ud800": 1}'), ["surrogate", "\\ud800"]),
    "duplicate name": (framed(b'{"w": 1, "v": 2, "w": 3}'), ["duplicate key 'w'"]),
    "duplicate field": (framed(b'{"w": {"dtype": 1, "dtype": 2}}'), ["duplicate key 'dtype'"]),
    "entry that is no object": (file_of({"x": 5}), ["'x'", "not an object", "5"]),
    "no dtype": (file_of({"x": {"shape": [], "data_offsets": [0, 0]}}), ["'x'", "lacks dtype"]),
    "no shape": (file_of({"x": {"dtype": "F32", "data_offsets": [0, 0]}}), ["'x'", "lacks shape"]),
    "no offsets": (file_of({"x": {"dtype": "F32", "shape": []}}), ["'x'", "lacks data_offsets"]),
    "no fields": (file_of({"x": {}}), ["lacks dtype and shape and data_offsets"]),
    "dtype of wrong type": (file_of({"x": entry(code=3)}), ["'x'", "dtype is not a string", "3"]),
    "unknown dtype": (file_of({"x": entry(code="bf16")}), ["'x'", "'bf16'", "did you mean BF16"]),
    "unheard-of dtype": (
        file_of({"x": entry(code="qqq")}),
        ["'qqq'", "F8_E4M3FNUZ", "pip install"],
    ),
    "shape of wrong type": (file_of({"x": entry(shape="4")}), ["'x'", "shape is " + NOT_WHOLE, "'4'"]),
    "negative length": (file_of({"x": entry(shape=[2, -1])}), ["shape is " + NOT_WHOLE, "[2, -1]"]),
    "boolean length": (file_of({"x": entry(shape=[True])}), ["shape is " + NOT_WHOLE, "[True]"]),
    "float length": (file_of({"x": entry(shape=[1.0])}), ["shape is " + NOT_WHOLE, "[1.0]"]),
    "length beyond 64 bits": (file_of({"x": entry(shape=[2**63])}), ["shape is " + NOT_WHOLE]),
    "NaN as length": (file_of({"x": entry(shape=[math.nan])}), ["shape is " + NOT_WHOLE]),
    "too large": (file_of({"x": entry(shape=[2**40, 2**40, 0])}), ["'x'", "too large"]),
    "too many axes": (file_of({"x": entry(shape=[1] * 65)}), ["'x'", "too many axes", "64"]),
    "float offset": (file_of({"x": entry(offsets=[0, 4.0])}), ["data_offsets is " + NOT_WHOLE]),
    "negative offset": (file_of({"x": entry(offsets=[-4, 0])}), ["data_offsets is " + NOT_WHOLE]),
    "boolean offset": (file_of({"x": entry(offsets=[False, 4])}), ["data_offsets is " + NOT_WHOLE]),
    "three offsets": (file_of({"x": entry(offsets=[0, 4, 8])}), ["not a pair", "[0, 4, 8]"]),
    "offsets reversed": (file_of({"x": entry(offsets=[4, 0])}), ["'x'", "end before they begin", "[4, 0]"]),
    "size mismatch": (
        file_of({"x": entry(shape=[3])}, b"1234"),
        ["'x'", "contradict", "4 bytes", "12 bytes", "F32[3]"],
    ),
    "part of a byte": (
        file_of({"x": entry("F4", [3], [0, 2])}, b"12"),
        ["'x'", "elements of 4 bits do not fill whole bytes", "[3]"],
    ),
    "six bits": (
        file_of({"x": entry("F6_E2M3", [5], [0, 4])}, b"1234"),
        ["elements of 6 bits do not fill whole bytes"],
    ),
    "data cut short": (
        file_of(TWO, b"12345"),
        ["truncated file", "3 bytes are missing", "fetch it again"],
    ),
    "extra bytes": (file_of(ONE, b"1234567"), ["3 extra bytes", "truncate -s"]),
    "overlap": (
        file_of({"x": entry(shape=[2], offsets=[0, 8]), "y": entry(offsets=[4, 8])}, b"12345678"),
        ["overlap", "'x' at 0 to 8", "'y' at 4 to 8"],
    ),
    "same bytes twice": (file_of({"x": entry(), "y": entry()}, b"1234"), ["overlap", "'x'", "'y'"]),
    "nothing within": (
        file_of({"x": entry(), "y": entry(shape=[0], offsets=[2, 2])}, b"1234"),
        ["overlap", "'x' at 0 to 4", "'y' at 2 to 2"],
    ),
    "hole": (
        file_of({"x": entry(), "y": entry(offsets=[8, 12])}, bytes(12)),
        ["a gap", "bytes 4 to 8", "between 'x' and 'y'"],
    ),
    "hole at the start": (
        file_of({"x": entry(offsets=[4, 8])}, bytes(8)),
        ["a gap", "bytes 0 to 4", "before 'x'"],
    ),
    "metadata of wrong type": (
        file_of({"__metadata__": [1], **ONE}, b"1234"),
        ["__metadata__", "string to string", "[1]", "as a string"],
    ),
    "metadata with a number": (file_of({"__metadata__": {"step": 7}}), ["__metadata__", "{'step': 7}"]),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_refused(case, tmp_path):
    content, words = BROKEN[case]
    error = refusal(file_at(tmp_path, content))
    assert str(tmp_path / "model.safetensors") in error.location
    assert error.got or error.expected
    assert_says(error, *words)


def test_truncation_error_states_both_sizes(tmp_path):
    content = file_of(TWO, b"12345678")
    error = refusal(file_at(tmp_path, content[:-3]))
    assert (error.got, error.expected) == (f"{len(content) - 3} bytes", f"{len(content)} bytes")


def test_every_truncation_of_a_file_is_refused(tmp_path):
    content = packed({"x": ("U8", [2], b"ab"), "y": ("F16", [1], b"cd")}, padding=3)
    for length in range(len(content)):
        refusal(file_at(tmp_path, content[:length]))


def test_truncated_header_is_not_reported_as_pickle(tmp_path):
    assert_says(refusal(file_at(tmp_path, (0x280).to_bytes(8, "little") + b'{"x"')), "truncated")


def test_header_limit_is_an_option(tmp_path):
    path = file_at(tmp_path, packed({"x": ("U8", [1], b"a")}, padding=200))
    length = path.stat().st_size - 9
    assert len(opened(path, max_header_bytes=length)) == 1
    error = refusal(path, max_header_bytes=length - 1)
    assert_says(error, f"max_header_bytes={length}", f"{length} bytes", f"at most {length - 1} bytes")


SOUND = packed(
    {"a": ("F32", [2, 2], bytes(range(16))), "b": ("F4", [4], b"ab"), "c": ("BF16", [], b"xy")},
    key_order=["c", "a", "b"],
    padding=2,
    metadata={"format": "pt"},
)
SOUND_HEADER = json.loads(SOUND[8:-20])


def opens_or_refuses(path: Path) -> None:
    """Opens the file and reads all of it, unless it is refused."""
    try:
        tree = opened(path)
    except CheckpointError as error:
        assert error.hint
        assert str(error)
        return
    for array in tree.arrays.values():
        assert array.read().shape == array.shape


@settings(max_examples=300, deadline=None)
@given(
    changes=st.lists(st.tuples(st.integers(0, len(SOUND) - 21), st.integers(0, 255)), max_size=4),
    cut=st.none() | st.integers(0, len(SOUND)),
)
def test_damaged_bytes_open_or_are_refused(changes, cut, folder):
    content = bytearray(SOUND)
    for position, byte in changes:
        content[position] = byte
    opens_or_refuses(file_at(folder, bytes(content[:cut])))


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
scalars |= st.sampled_from([*ALL_CODES, 2**62, 2**63, 2**64, 10**400, -1, 0])
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner))


@settings(max_examples=100, deadline=None)
@given(data=st.data(), value=values)
def test_damaged_fields_open_or_are_refused(data, value, folder):
    header = json.loads(json.dumps(SOUND_HEADER))
    name = data.draw(st.sampled_from([*header, "new"]))
    field = data.draw(st.sampled_from([None, "dtype", "shape", "data_offsets"]))
    if field is None or name not in header:
        header[name] = value
    else:
        header[name][field] = value
    opens_or_refuses(file_at(folder, framed(json.dumps(header).encode(), SOUND[-20:])))


@settings(max_examples=200, deadline=None)
@given(content=st.binary(max_size=60))
def test_any_bytes_open_or_are_refused(content, folder):
    opens_or_refuses(file_at(folder, content))


# --- Directories ------------------------------------------------------------------------------------------


def shards(folder: Path, count: int = 3) -> dict[str, str]:
    """Sound shards `s0` … with tensors `t0` …; the weight map that goes with them."""
    weight_map = {}
    for k in range(count):
        name = f"model-{k + 1:05}-of-{count:05}.safetensors"
        file_at(folder, small(f"t{k}"), name)
        weight_map[f"t{k}"] = name
    return weight_map


def test_shards_with_an_index_are_read(tmp_path):
    weight_map = shards(tmp_path)
    index = write_index(tmp_path, dict(reversed(weight_map.items())))
    for location in (tmp_path, index):
        tree = opened(location)
        assert list(tree) == [("t0",), ("t1",), ("t2",)]
        assert [array.read().tobytes() for array in tree.arrays.values()] == [b"t0", b"t1", b"t2"]
        assert tree.metadata.location == str(location)


def test_index_with_another_name_is_read(tmp_path):
    write_index(tmp_path, shards(tmp_path), "diffusion.safetensors.index.json")
    file_at(tmp_path, small("other"), "other.safetensors")
    assert list(opened(tmp_path)) == [("t0",), ("t1",), ("t2",)]


def test_files_without_an_index_are_refused(tmp_path):
    file_at(tmp_path, small("b"), "two.safetensors")
    file_at(tmp_path, small("a"), "one.safetensors")
    file_at(tmp_path, b"not ours", "._one.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    assert list(opened(tmp_path)) == [("a",), ("b",)]


@pytest.mark.parametrize("first", [0, 1])
def test_numbered_files_without_an_index_are_read(first, tmp_path):
    for k in range(2):
        file_at(tmp_path, small(f"t{k}"), f"w-{k + first}-of-2.safetensors")
    assert list(opened(tmp_path)) == [("t0",), ("t1",)]
    (tmp_path / f"w-{1 + first}-of-2.safetensors").unlink()
    assert_says(refusal(tmp_path), "1 of the weight files", f"w-{first + 1 if first else 1}-of-2")


def test_shard_numbers_may_have_any_number_of_digits(tmp_path):
    """The doctor and who reads are of one opinion."""
    names = ["w-1-of-3.safetensors", "w-02-of-3.safetensors", "w-003-of-3.safetensors"]
    for k, name in enumerate(names[:2]):
        file_at(tmp_path, small(f"t{k}"), name)
    assert_says(refusal(tmp_path), "1 of the weight files", "w-03-of-3")
    assert any("w-03-of-3" in finding.what for finding in examine(tmp_path).findings)
    file_at(tmp_path, small("t2"), names[2])
    assert len(opened(tmp_path)) == 3
    assert not any("missing" in finding.what for finding in examine(tmp_path).findings)


def test_absurd_shard_counts_are_plain_names(tmp_path):
    file_at(tmp_path, small("x"), "w-1-of-99999999999999999999.safetensors")
    assert len(opened(tmp_path)) == 1


def test_single_file_takes_precedence_over_the_index(tmp_path):
    write_index(tmp_path, shards(tmp_path))
    file_at(tmp_path, small("single"))
    assert list(opened(tmp_path)) == [("single",)]


def test_custom_metadata_of_all_shards_is_merged(tmp_path):
    file_at(tmp_path, packed({}, metadata={"a": "1"}), "one.safetensors")
    file_at(tmp_path, packed({}, metadata={"b": "2"}), "two.safetensors")
    assert opened(tmp_path).metadata.custom == {"a": "1", "b": "2"}


def test_hub_cache_with_symbolic_links_is_read(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    weight_map = shards(blobs)
    write_index(blobs, weight_map)
    (blobs / "config.json").write_text('{"model_type": "qwen3"}')
    for k, path in enumerate(sorted(blobs.iterdir())):
        path.rename(blobs / f"blob{k}")
        (snapshot / path.name).symlink_to(f"../../blobs/blob{k}")
    tree = opened(snapshot)
    assert [array.read().tobytes() for array in tree.arrays.values()] == [b"t0", b"t1", b"t2"]
    assert tree.metadata.config == {"model_type": "qwen3"}
    single = opened(snapshot / weight_map["t1"])
    assert list(single) == [("t1",)]
    assert single.metadata.config == {"model_type": "qwen3"}


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_more_shards_than_open_files_are_read(tmp_path):
    before = open_files()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    weight_map = shards(tmp_path, 60)
    write_index(tmp_path, weight_map)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 20, hard))
    try:
        tree = opened(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(tree) == 60
    assert open_files() == before


def test_refused_file_is_closed(tmp_path):
    before = open_files()
    refusal(file_at(tmp_path, b"x" * 100))
    assert open_files() == before


def test_all_missing_shards_are_listed(tmp_path):
    weight_map = shards(tmp_path)
    write_index(tmp_path, {**weight_map, "u": "gone.safetensors", "v": "lost.safetensors", "w": "x" * 300})
    (tmp_path / weight_map["t2"]).unlink()
    (tmp_path / "lost.safetensors").symlink_to("nowhere")
    error = refusal(tmp_path)
    assert_says(error, "4 of the weight files", weight_map["t2"], "gone.safetensors", "lost.safetensors")
    assert weight_map["t0"] not in str(error)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/../../x.safetensors", "", "a\0b", "."]
)
def test_index_pointing_outside_is_refused(name, tmp_path):
    write_index(tmp_path, {**shards(tmp_path), "x": name})
    assert_says(refusal(tmp_path), "outside", repr(name), "do not trust")


def test_index_with_missing_tensors_is_refused(tmp_path):
    weight_map = shards(tmp_path)
    weight_map["more"] = weight_map["yet"] = weight_map["t0"]
    weight_map["t1"], weight_map["t2"] = weight_map["t2"], weight_map["t1"]
    index = write_index(tmp_path, weight_map)
    error = refusal(tmp_path)
    assert error.location == str(index)
    assert_says(error, "named by the index, not in the file", "more (", "yet (", "another save")
    assert "t1 (" not in str(error)


def test_duplicate_tensors_are_refused(tmp_path):
    for name in ("one.safetensors", "two.safetensors", "three.safetensors"):
        file_at(tmp_path, small("both"), name)
    declared = (
        "the same tensors in several files:\n    both: in one.safetensors, three.safetensors, two.safetensors"
    )
    assert_says(refusal(tmp_path), declared)


@pytest.mark.parametrize(
    "text, words",
    [
        ("", ["not JSON", ":1:1"]),
        ("{", ["not JSON", ":1:2"]),
        ("[]", ["not an object"]),
        ("{}", ["no usable weight_map", "none"]),
        ('{"weight_map": {}}', ["no usable weight_map", "empty"]),
        ('{"weight_map": ["a"]}', ["no usable weight_map", "list"]),
        ('{"weight_map": {"a": 1}}', ["no usable weight_map", "not strings"]),
        ('{"weight_map": {"a": "x", "a": "y"}}', ["duplicate key 'a'"]),
        (POINTER.decode(), ["Git LFS pointer", "4,976,698,672 bytes", "git lfs pull"]),
        ("<html>", ["a web page, not JSON"]),
    ],
)
def test_broken_index_is_refused(text, words, tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    error = refusal(tmp_path)
    assert error.location.startswith(str(path))
    assert_says(error, *words)


@pytest.mark.parametrize(
    "text, location, words",
    [
        ('{"a": 1,\n  }', ":2:3", ["not JSON"]),
        ('["llama"]', ":1:1", ["not an object", "['llama']"]),
        ("", ":1:1", ["not JSON", "the end"]),
        (POINTER.decode(), "", ["Git LFS pointer"]),
    ],
)
def test_broken_configuration_is_refused(text, location, words, tmp_path):
    path = file_at(tmp_path, small("x"))
    (tmp_path / "config.json").write_text(text)
    error = refusal(path, ConfigError)
    assert error.location == str(tmp_path / "config.json") + location
    assert error.got
    assert error.expected
    assert_says(error, *words)


def test_unreadable_configuration_is_refused(tmp_path):
    file_at(tmp_path, small("x"))
    (tmp_path / "config.json").symlink_to("nowhere")
    assert_says(refusal(tmp_path, ConfigError), "broken link", "config.json")


def test_binary_configuration_is_refused(tmp_path):
    file_at(tmp_path, small("x"))
    (tmp_path / "config.json").write_bytes(b'{"a": "\xe9"}')
    assert_says(refusal(tmp_path, ConfigError), "not UTF-8", "config.json:1:8", "0xe9")


# --- Recognition ------------------------------------------------------------------------------------------


def test_format_is_recognized(tmp_path):
    asked: Format = FORMAT
    assert asked.name == "safetensors"
    assert asked.mismatch_reason(parse(tmp_path)) == "no .safetensors file in the directory"
    assert "does not exist" in asked.mismatch_reason(parse(tmp_path / "absent.safetensors"))
    assert "name ends in neither" in asked.mismatch_reason(parse(file_at(tmp_path, b"", "model.bin")))
    index = write_index(tmp_path, shards(tmp_path))
    assert asked.mismatch_reason(parse(index)) is None
    assert asked.mismatch_reason(parse(tmp_path)) is None
    index.unlink()
    assert asked.mismatch_reason(parse(tmp_path)) is None
    assert asked.mismatch_reason(parse(tmp_path / "model-00001-of-00003.safetensors")) is None


def test_two_indexes_are_refused(tmp_path):
    write_index(tmp_path, {}, "a.safetensors.index.json")
    write_index(tmp_path, {}, "b.safetensors.index.json")
    assert "more than one index" in FORMAT.mismatch_reason(parse(tmp_path))
    assert_says(refusal(tmp_path), "a.safetensors.index.json, b.safetensors.index.json", "pass one of them")


@pytest.mark.parametrize("name", ["absent", "absent.safetensors", "x" * 300])
def test_missing_path_is_refused(name, tmp_path):
    with pytest.raises(StorageError):
        opened(tmp_path / name)


@pytest.mark.parametrize("name", ["model.bin", ""])
def test_directory_without_safetensors_is_refused(name, tmp_path):
    file_at(tmp_path, b"", "model.bin")
    assert refusal(tmp_path / name if name else tmp_path).location


# --- Cost -------------------------------------------------------------------------------------------------


def test_opening_imports_nothing_heavy(tmp_path):
    path = file_at(tmp_path, small("x"))
    code = (
        "import sys; from ckpttools.stores import parse; from ckpttools.formats.base import ReadOptions\n"
        "from ckpttools.formats.safetensors.format import FORMAT\n"
        f"FORMAT.open(parse({str(path)!r}), ReadOptions())\n"
        "print([name for name in ('numpy', 'jax', 'safetensors', 'ml_dtypes') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_opening_reads_only_headers(tmp_path, monkeypatch):
    path = file_at(tmp_path, packed({"x": ("U8", [1 << 20], bytes(1 << 20))}))
    ends = []
    plain = LocalFile.read_into
    monkeypatch.setattr(
        LocalFile,
        "read_into",
        lambda self, offset, out: ends.append(offset + len(out)) or plain(self, offset, out),
    )
    opened(path)
    assert max(ends) <= 1024


# Tensors in several shards: the index decides where transformers reads the same


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model-overlay.safetensors")


@st.composite
def overlaid(draw):
    """Files of each tensor, and the one that the index names; every file is named."""
    files = draw(st.lists(st.sets(st.sampled_from(SHARDS), min_size=1), min_size=1, max_size=5))
    named = [draw(st.sampled_from(sorted(file))) for file in files]
    return [*files, *({name} for name in SHARDS)], [*named, *SHARDS]


def write_overlaid(folder, files, named):
    """Each tensor has the number of its file."""
    for number, shard in enumerate(SHARDS):
        held = {f"t{n}": np.full(4, number, np.float32) for n, item in enumerate(files) if shard in item}
        save_file(held, folder / shard)
    write_index(folder, {f"t{n}": item for n, item in enumerate(named)})


def index_findings(folder):
    return [finding for finding in doctor(folder).findings if finding.check == "safetensors-index"]


@given(overlaid())
def test_repeated_tensors_need_index_that_agrees_with_transformers(case):
    files, named = case
    # transformers 5.23 reads the files that the index names in order of their names, and the last one wins.
    last = [max(file) for file in files]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_overlaid(folder, files, named)
        levels = [finding.level for finding in index_findings(folder)]
        if named != last:
            assert levels == ["error"]
            with pytest.raises(FormatError, match="the index does not name the last file"):
                ckpttools.open(folder)
            return
        tree = ckpttools.open(folder)
        assert {path[0]: SHARDS[int(item.read()[0])] for path, item in tree.arrays.items()} == {
            f"t{n}": item for n, item in enumerate(last)
        }
        is_repeated = any(len(file) > 1 for file in files)
        assert levels == ["warning"] * is_repeated
        assert any("in several files" in remark for remark in tree.metadata.notes.remarks) == is_repeated


def test_repeated_tensors_are_written_once(tmp_path):
    source = tmp_path / "m"
    source.mkdir()
    write_overlaid(
        source, [{SHARDS[0], SHARDS[2]}, {SHARDS[1]}, {SHARDS[0]}], [SHARDS[2], SHARDS[1], SHARDS[0]]
    )
    (result,) = index_findings(source)
    command = result.command.replace(" DST", f" {tmp_path / 'out'}").replace(
        "ckpt", f"{sys.executable} -m ckpttools", 1
    )
    subprocess.run(["bash", "-ec", command], check=True, capture_output=True)
    built = {name: int(item[0]) for name, item in load_file(tmp_path / "out" / "model.safetensors").items()}
    assert built == {"t0": 2, "t1": 1, "t2": 0}
    assert index_findings(tmp_path / "out") == []


def save_shards(folder, count, value):
    for number in range(1, count + 1):
        names = [f"t{n}" for n in range(6) if n % count == number - 1]
        name = f"model-{number:05}-of-{count:05}.safetensors"
        save_file({item: np.full(4, value, np.float32) for item in names}, folder / name)
        yield from ((item, name) for item in names)


@pytest.mark.parametrize("lacking", [0, 1])
def test_doctor_suggests_stale_index_if_other_files_have_the_tensors(tmp_path, lacking):
    named = dict(save_shards(tmp_path, 3, 1))
    for name in {*named.values()}:
        (tmp_path / name).unlink()
    write_index(tmp_path, named)
    files = [tmp_path / name for name in {*dict(save_shards(tmp_path, 2, 2)).values()}]
    for file in files[:lacking]:
        file.unlink()
    (result,) = index_findings(tmp_path)
    assert result.level == "error" and result.command is None
    assert ("earlier save" in result.consequence) == (not lacking)
    assert "hf download REPO" in result.hint
    if not lacking:
        command = (
            result.hint.split("run ")[1].split(";")[0].replace("ckpt ", f"{sys.executable} -m ckpttools ", 1)
        )
        subprocess.run(["bash", "-ec", command], check=True, capture_output=True)
        assert index_findings(tmp_path) == []
        assert all(array.read()[0] == 2 for array in ckpttools.open(tmp_path).arrays.values())


def test_doctor_reports_incomplete_download_if_tensors_are_missing(tmp_path):
    named = dict(save_shards(tmp_path, 3, 1))
    for name in {*named.values()}:
        (tmp_path / name).unlink()
    write_index(tmp_path, {**named, "t6": named["t0"]})
    dict(save_shards(tmp_path, 2, 2))
    (result,) = index_findings(tmp_path)
    assert "missing" in result.what and "earlier save" not in result.consequence


# An index that is stale, or of a download that is not complete


def run_step(text, folder):
    """Run the commands in a hint or a finding."""
    command = text.split("run ")[-1].split(";")[0]
    subprocess.run(
        ["bash", "-ec", command.replace("ckpt ", f"{sys.executable} -m ckpttools ", 1)],
        check=True,
        capture_output=True,
    )
    assert all(finding.level != "error" for finding in index_findings(folder))


def values_of(folder):
    return {path[0]: float(item.read()[0]) for path, item in ckpttools.open(folder).arrays.items()}


def test_misplaced_tensors_are_read_like_transformers(tmp_path):
    source = tmp_path / "m"
    source.mkdir()
    named = dict(save_shards(source, 2, 1))
    held = values_of(source)
    files = sorted({*named.values()})
    for stale, declared in (
        ({name: file for name, file in named.items() if name != "t1"}, "1 tensor that it does not list"),
        ({**named, "t2": files[1]}, "1 tensor in other files than it names"),
    ):
        write_index(source, stale)
        tree = ckpttools.open(source)
        assert values_of(source) == held
        (remark,) = tree.metadata.notes.remarks
        assert declared in remark and any(file in remark for file in files)
        (result,) = index_findings(source)
        assert result.level == "warning"
        out = tmp_path / f"out{len(stale)}"
        run_step(f"run {result.command.replace(' DST', f' {out}')}", out)
        assert values_of(out) == held and index_findings(out) == []


@pytest.mark.parametrize("spelling", ["./{}", ".//{}", "sub/.././{}", "././{}"])
@pytest.mark.parametrize("some", [True, False])
def test_different_spellings_of_a_file_are_one_file(tmp_path, spelling, some):
    named = dict(save_shards(tmp_path, 2, 1))
    respelled = {
        key: spelling.format(file) if not some or key == "t0" else file for key, file in named.items()
    }
    write_index(tmp_path, respelled)
    if ".." in spelling:
        with pytest.raises(FormatError, match="outside of its directory"):
            ckpttools.open(tmp_path)
        return
    tree = ckpttools.open(tmp_path)
    assert {path[0] for path in tree.arrays} == named.keys()
    assert tree.metadata.notes.remarks == ()
    assert index_findings(tmp_path) == []


def test_last_spelling_decides_the_reading_order(tmp_path):
    # transformers sorts names as the index spells them: `./z` before `a`.
    save_file({"t": np.zeros(4, np.float32), "z": np.zeros(4, np.float32)}, tmp_path / "z.safetensors")
    save_file({"t": np.ones(4, np.float32), "a": np.ones(4, np.float32)}, tmp_path / "a.safetensors")
    write_index(tmp_path, {"z": "./z.safetensors", "a": "a.safetensors", "t": "a.safetensors"})
    assert ckpttools.open(tmp_path).arrays["t",].read()[0] == 1
    assert [finding.level for finding in index_findings(tmp_path)] == ["warning"]


def test_shard_with_unknown_suffix_is_reported(tmp_path):
    named = dict(save_shards(tmp_path, 2, 1))
    first = min(named.values())
    upper = first.replace(".safetensors", ".SAFETENSORS")
    (tmp_path / first).rename(tmp_path / upper)
    write_index(tmp_path, {key: upper if file == first else file for key, file in named.items()})
    (result,) = [finding for finding in index_findings(tmp_path) if finding.level == "error"]
    assert upper in result.what and result.command is not None


def test_unlisted_file_with_repeated_tensors_is_skipped(tmp_path):
    named = dict(save_shards(tmp_path, 2, 1))
    extra = tmp_path / "model-00003-of-00002.safetensors"
    save_file({"t0": np.full(4, 9, np.float32)}, extra)
    write_index(tmp_path, named)
    (remark,) = ckpttools.open(tmp_path).metadata.notes.remarks
    assert extra.name in remark and "skipped" in remark
    assert set(values_of(tmp_path).values()) == {1.0}


def test_unlisted_file_with_further_tensors_is_refused(tmp_path):
    named = dict(save_shards(tmp_path, 2, 1))
    held = values_of(tmp_path)
    files = sorted({*named.values()})
    write_index(tmp_path, {name: file for name, file in named.items() if file == files[0]})
    error = refusal(tmp_path)
    assert_says(error, "the index is stale", files[1], "t{1,3,5}", "transformers would skip these")
    (result,) = index_findings(tmp_path)
    assert result.level == "error"
    # The step of either message gives all tensors back.
    saved = (tmp_path / "model.safetensors.index.json").read_bytes()
    for text in (hint_of(error), result.hint):
        run_step(text, tmp_path)
        assert values_of(tmp_path) == held
        (tmp_path / "model.safetensors.index.json").write_bytes(saved)
        for aside in tmp_path.glob("*.aside*"):
            aside.unlink()


def test_index_is_set_aside_only_if_it_can_be_rewritten(tmp_path):
    named = dict(save_shards(tmp_path, 3, 1))
    files = sorted({*named.values()})
    kept = {name: file for name, file in named.items() if file == files[0]}
    write_index(tmp_path, kept)
    assert "ckpttools.doctor" in str(refusal(tmp_path))
    save_file({"t0": np.zeros(4, np.float32), "u": np.zeros(4, np.float32)}, tmp_path / files[1])
    assert_says(refusal(tmp_path), "the index is stale", "fetch the index and its files again")
    write_index(tmp_path, {**kept, "u": files[1], "gone": files[1]})
    assert "ckpttools.doctor" not in str(refusal(tmp_path))


def test_missing_files_are_a_stale_index_or_an_incomplete_download(tmp_path):
    named = dict(save_shards(tmp_path, 3, 1))
    for name in {*named.values()}:
        (tmp_path / name).unlink()
    write_index(tmp_path, named)
    kept = dict(save_shards(tmp_path, 2, 2))
    error = refusal(tmp_path)
    assert_says(error, "the index is stale", *{*kept.values()})
    assert "not complete" not in str(error)
    run_step(hint_of(error), tmp_path)
    assert set(values_of(tmp_path).values()) == {2.0} and len(values_of(tmp_path)) == len(kept)
    # Without one of the other files, none of both is complete.
    write_index(tmp_path, named)
    (tmp_path / sorted({*kept.values()})[0]).unlink()
    assert_says(refusal(tmp_path), "the download is not complete")


def test_tensors_in_a_renamed_file_are_found(tmp_path):
    named = dict(save_shards(tmp_path, 2, 1))
    first, second = sorted({*named.values()})
    write_index(tmp_path, dict.fromkeys(named, first))
    (tmp_path / second).rename(tmp_path / "extra.safetensors")
    assert_says(refusal(tmp_path), "3 tensors of these in files that it does not name: extra.safetensors")
    (result,) = index_findings(tmp_path)
    assert result.level == "error" and "extra.safetensors" in result.consequence and "move" not in result.hint
    write_index(tmp_path, named)
    assert_says(refusal(tmp_path), "if their tensors are in extra.safetensors, fetch the index again")


def test_an_index_next_to_a_complete_model_is_a_warning(tmp_path):
    write_index(tmp_path, dict(save_shards(tmp_path, 2, 1)))
    save_file({"t": np.ones(4, np.float32)}, tmp_path / "model.safetensors")
    assert [finding.level for finding in index_findings(tmp_path)] == ["info"]
    for shard in tmp_path.glob("model-*"):
        shard.unlink()
    (result,) = index_findings(tmp_path)
    assert result.level == "warning" and result.command.startswith("mv -n ")
    assert len(ckpttools.open(tmp_path).arrays) == 1
    subprocess.run(["bash", "-ec", result.command], check=True)
    assert index_findings(tmp_path) == []


def test_layers_of_a_skipped_shard_are_not_reported_as_missing(tmp_path):
    write_llama(tmp_path, LlamaSizes(4, 32, 64, 2, 2, 16, 24, tied=False))
    arrays = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    named = {}
    for number, key in enumerate(sorted(arrays)):
        named[key] = f"model-{number % 2 + 1:05}-of-00002.safetensors"
    for name in {*named.values()}:
        save_file({key: arrays[key] for key in arrays if named[key] == name}, tmp_path / name)
    kept = sorted({*named.values()})[0]
    write_index(tmp_path, {key: name for key, name in named.items() if name == kept})
    result = [finding for finding in doctor(tmp_path).findings if finding.level == "error"]
    assert [item.check for item in result] == ["safetensors-index"]
    assert "--fix index" in result[0].hint and 'fix="index"' in refusal(tmp_path).hint
