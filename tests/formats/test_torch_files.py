"""Files of torch.save: read to the bit without torch, and nothing in them executed."""

import builtins
import io
import json
import os
import pickle
import pickletools
import random
import shutil
import tarfile
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command_line import ckpt, run
from support.gcs_server import Fault
from support.internals import ReadOptions, dotted, parse
from support.torch_files import View, archived, pickled, save, whole

import ckpttools
from ckpttools import Empty, FormatError, Region, StorageError, Text
from ckpttools.formats.known_formats import formats
from ckpttools.formats.torch.pickled import Global, Record, is_of_training
from ckpttools.formats.torch.tensors import NotReadableError, _unwrap
from ckpttools.formats.torch.unpickling import unpickle

FIXTURES = Path(__file__).parents[2] / "fixtures/torch"


def anything(name):
    return True


# ---- what torch 2.13 itself wrote (fixtures/README.md)


def test_torch_files_are_read_bit_for_bit():
    """Views, transposes, edges of larger tensors, parameters, shared storages, float8, uint16, nothing."""
    theirs = ckpttools.open(FIXTURES / "pytorch_model.bin").arrays
    same = ckpttools.open(FIXTURES / "pytorch_model.safetensors").arrays
    assert theirs.keys() == same.keys()
    for path, array in same.items():
        assert theirs[path].dtype == array.dtype and theirs[path].shape == array.shape, path
        assert theirs[path].read().tobytes() == array.read().tobytes(), path


def test_values_other_than_arrays_are_kept():
    tree = ckpttools.open(FIXTURES / "full.pt")
    assert tree["name",] == Text("x") and tree["none",] == Empty("None")
    assert tree["step"].read() == 7 and tree["lr"].read() == 1e-3 and tree["l", 0].read() == 1
    assert {("step",), ("lr",), ("l", 0)} == tree.metadata.scalars
    (remark,) = tree.metadata.notes.remarks
    assert "args (argparse.Namespace)" in remark and "dtype (torch.bfloat16)" in remark


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("expand.pt", "e: one of its axes repeats the same elements"),
        ("module.pt", "torch.nn.modules.linear.Linear"),
        ("old.pt", "torch before version 1.6"),
    ],
)
def test_unreadable_torch_files_are_refused_by_name(name, says):
    told = ckpt("inspect", "tree", FIXTURES / name)
    assert told.exit_code == 3 and says in told.output
    assert ckpt("doctor", FIXTURES / name).exit_code == 1


def test_strided_views_match_torch():
    x, y, z = (np.arange(n, dtype="f4") for n in (60, 49, 105))
    x, y, z = x.reshape(12, 5), y.reshape(7, 7), z.reshape(7, 5, 3)
    expected = {
        "step": np.arange(10.0)[::3],
        "offset": np.arange(10.0)[1::3],
        "rows": x[::5],
        "cols": x[:, ::2],
        "both": x[1::4, 1::3],
        "diag": np.arange(25.0).reshape(5, 5).diagonal(),
        "t": x.T[::2],
        "cols1": x[2:, ::3],
        "band": y[:, ::3],
        "c3": z[::2, 1::2, ::2],
    }
    tree = ckpttools.open(FIXTURES / "strided.pt")
    assert {name for (name,) in tree.arrays} == expected.keys()
    for (name,), array in tree.arrays.items():
        assert np.array_equal(array.read().astype("f4"), expected[name].astype("f4")), name


def test_tar_from_before_2018_is_identified(tmp_path):
    with tarfile.open(tmp_path / "a.pt", "w", format=tarfile.USTAR_FORMAT) as tar:
        for name in ("sys_info", "pickle"):
            tar.addfile(tarfile.TarInfo(name))
    assert "before version 0.1.10" in run("hash", tmp_path / "a.pt", code=3)
    with tarfile.open(tmp_path / "b.pt", "w") as tar:
        tar.addfile(tarfile.TarInfo("notes"))
    assert "torch: it does not start like a torch.save file" in run("hash", tmp_path / "b.pt", code=3)


def test_commands_accept_torch_files(tmp_path):
    """A model of the hub with pytorch_model.bin: looked at, converted, proved, its configuration along."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/pytorch_model.bin").write_bytes((FIXTURES / "pytorch_model.bin").read_bytes())
    (tmp_path / "in/config.json").write_text('{"model_type": "tiny"}')
    assert "format      torch" in ckpt("inspect", "tree", tmp_path / "in").output
    run("convert", "to-safetensors", tmp_path / "in", tmp_path / "out")
    run("verify", tmp_path / "out", "--against", tmp_path / "in")
    run("diff", tmp_path / "out", FIXTURES / "pytorch_model.safetensors")
    assert json.loads((tmp_path / "out/config.json").read_text()) == {"model_type": "tiny"}
    assert "no errors" in ckpt("doctor", tmp_path / "in").output


def test_torch_adapter_is_not_a_model(tmp_path):
    save(tmp_path / "adapter_model.bin", {"base_model.model.x.lora_A.weight": whole(np.ones((2, 4), "f4"))})
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "me/base"}')
    told = run("convert", "hf-to-maxtext", tmp_path, tmp_path.parent / "out", code=3)
    assert "this is a LoRA adapter of me/base, not a complete model" in told


# ---- shards


def sharded(folder: Path, files: dict[str, list[str]], named: dict[str, str]) -> Path:
    folder.mkdir()
    for file, names in files.items():
        save(folder / file, {name: whole(np.full(3, len(name), "f4")) for name in names})
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": named}))
    return folder


NAMES = ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin")


def test_indexed_shards_are_read(tmp_path):
    first, second = NAMES
    whole_one = sharded(tmp_path / "m", {first: ["a"], second: ["bb"]}, {"a": first, "bb": second})
    assert {path: array.read().tolist() for path, array in ckpttools.open(whole_one).arrays.items()} == {
        ("a",): [1, 1, 1],
        ("bb",): [2, 2, 2],
    }
    (whole_one / second).unlink()
    with pytest.raises(FormatError, match="1 of the weight files is missing"):
        ckpttools.open(whole_one)
    (whole_one / "pytorch_model.bin.index.json").unlink()
    with pytest.raises(FormatError, match="00002-of-00002"):
        ckpttools.open(whole_one)


def test_contradicting_index_is_refused(tmp_path):
    first, second = NAMES
    wrong = sharded(
        tmp_path / "w", {first: ["a"], second: ["b", "c"]}, {"a": first, "b": second, "d": second}
    )
    with pytest.raises(FormatError, match="do not hold the same tensors"):
        ckpttools.open(wrong)
    twice = sharded(tmp_path / "t", {first: ["a"], second: ["a"]}, {"a": first, "b": second})
    with pytest.raises(FormatError, match="several files have the same tensors") as caught:
        ckpttools.open(twice)
    assert caught.value.message.endswith(f":\n    a: in {first}, {second}")
    assert str(caught.value.location) == str(twice / "pytorch_model.bin.index.json")


FIRST, SECOND = NAMES
THIRD = "pytorch_model-00003-of-00002.bin"


@pytest.mark.parametrize(
    ("files", "index", "expected"),
    [
        ({FIRST: "a", SECOND: "b"}, {"a": FIRST, "b": SECOND}, ""),
        ({FIRST: "a", SECOND: "b"}, {"a": FIRST, "b": f"./{SECOND}"}, ""),
        ({FIRST: "ac", SECOND: "b"}, {"a": FIRST, "b": SECOND}, "1 tensor that it does not list"),
        ({FIRST: "ac", SECOND: "bd"}, {"a": FIRST, "b": SECOND}, "2 tensors that it does not list"),
        ({FIRST: "ac", SECOND: "b"}, {"a": FIRST, "b": SECOND, "c": SECOND}, "1 tensor in other files"),
        ({FIRST: "a", SECOND: "b"}, {"a": SECOND, "b": FIRST}, "2 tensors in other files"),
        ({FIRST: "ab", SECOND: "b"}, {"a": FIRST, "b": SECOND}, "1 tensor in several files"),
        ({FIRST: "ab", SECOND: "ab"}, {"a": SECOND, "b": SECOND, "c": FIRST}, None),
        ({FIRST: "ab", SECOND: "b"}, {"a": FIRST, "b": FIRST, "c": SECOND}, None),
        ({FIRST: "a", SECOND: "b", THIRD: "a"}, {"a": FIRST, "b": SECOND}, "skipped as by transformers"),
        ({FIRST: "a", SECOND: "b", THIRD: "c"}, {"a": FIRST, "b": SECOND}, None),
        ({FIRST: "a", SECOND: "b"}, {"a": FIRST, "b": SECOND, "c": SECOND}, None),
    ],
)
def test_shards_contradicting_their_index_are_read_like_transformers(tmp_path, files, index, expected):
    """transformers updates one state dict with every file that the index names, in the order of the names."""
    values, loaded = {}, {}
    for number, (file, tensors) in enumerate(files.items()):
        values[file] = {name: np.full(3, number, "f4") for name in tensors}
        save(tmp_path / file, {name: whole(array) for name, array in values[file].items()})
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    for file in sorted({name.removeprefix("./") for name in index.values()}):
        loaded.update(values[file])
    if expected is None:
        with pytest.raises(FormatError) as caught:
            ckpttools.open(tmp_path)
        assert "--fix index" not in str(caught.value)
        return
    tree = ckpttools.open(tmp_path)
    assert {path[0]: array.read().tolist() for path, array in tree.arrays.items()} == {
        name: array.tolist() for name, array in loaded.items()
    }
    assert expected in "".join(tree.metadata.notes.remarks) and bool(expected) == bool(
        tree.metadata.notes.remarks
    )


def test_later_shard_replaces_tensor_under_another_spelling_of_its_name(tmp_path):
    save(tmp_path / SECOND, {"a.b": whole(np.ones(3, "f4"))})
    save(tmp_path / "pytorch_model-00000-of-00002.bin", {"c": whole(np.zeros(3, "f4"))})
    index = tmp_path / "pytorch_model.bin.index.json"
    first = "pytorch_model-00000-of-00002.bin"
    index.write_text(json.dumps({"weight_map": {"a.b": SECOND, "c": first, "x": FIRST}}))
    save(tmp_path / FIRST, {"a": {"b": whole(np.zeros(3, "f4"))}, "x": whole(np.zeros(3, "f4"))})
    values = {dotted(path): array.read().tolist() for path, array in ckpttools.open(tmp_path).arrays.items()}
    assert values == {"a.b": [1, 1, 1], "c": [0, 0, 0], "x": [0, 0, 0]}


# ---- views of storages


@st.composite
def views(draw):
    """A view of a storage that slicing with steps, transposing, taking coordinates and diagonals make."""
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    storage = np.arange(int(np.prod(shape)) + 3, dtype=draw(st.sampled_from(("float32", "int64", "uint8"))))
    array = storage[draw(st.integers(0, 3)) :][: int(np.prod(shape))].reshape(shape)
    for axis, length in enumerate(shape):
        start = draw(st.integers(0, length - 1))
        stop = draw(st.integers(start + 1, length))
        array = array[(slice(None),) * axis + (slice(start, stop, draw(st.integers(1, 3))),)]
    if array.ndim > 1 and draw(st.booleans()):
        array = array.diagonal()
    array = array.transpose(draw(st.permutations(range(array.ndim))))
    offset = (address(array) - address(storage)) // storage.itemsize
    return View(storage, offset, array.shape, tuple(n // storage.itemsize for n in array.strides)), array


def address(array):
    return array.__array_interface__["data"][0]


@given(views(), st.data())
def test_any_region_of_any_view_is_read(tmp_path_factory, drawn, data):
    view, array = drawn
    path = save(tmp_path_factory.mktemp("torch") / "x.pt", {"x": view}, data.draw(st.integers(2, 5)))
    lazy = ckpttools.open(path).arrays["x",]
    assert lazy.read().tobytes() == np.ascontiguousarray(array).tobytes()
    start = [data.draw(st.integers(0, length)) for length in array.shape]
    stop = [data.draw(st.integers(a, length)) for a, length in zip(start, array.shape, strict=True)]
    region = Region(tuple(start), tuple(stop))
    assert np.array_equal(lazy.read(region), array[region.slices])


@pytest.mark.parametrize(
    ("view", "why"),
    [
        (View(np.arange(6.0, dtype="f4"), 0, (2, 3), (2, 1)), "overlap"),
        (View(np.arange(6.0, dtype="f4"), 3, (4,), (1,)), "element has index 6 in a storage of 6"),
        (View(np.arange(6.0, dtype="f4"), -1, (4,), (1,)), "damaged"),
        (View(np.arange(6.0, dtype="f4"), 0, (4,), (-1,)), "damaged"),
        (View(np.arange(6.0, dtype="f4"), 0, (1 << 62, 1 << 62), (1, 1)), "last element"),
        (View(np.arange(6.0, dtype="f4"), 0, (4, 2), (1,)), "damaged"),
    ],
)
def test_invalid_views_are_refused(tmp_path, view, why):
    with pytest.raises(FormatError, match=why):
        ckpttools.open(save(tmp_path / "x.pt", {"x": view}))


# ---- the pickle machine

TEXTS = st.text() | st.binary()
KEYS = st.integers(-(2**60), 2**60)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**200), 2**200) | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | KEYS, inner, max_size=4),
    max_leaves=12,
)


@given(PLAIN, st.integers(3, 5))
def test_plain_values_are_restored(value, protocol):
    """Of protocol 2 bytes and sets are calls, and so records."""
    assert unpickle(pickle.dumps(value, protocol), anything, "x") == value


class Trap:
    """A pickle of it calls `os.system` when it is loaded."""

    def __reduce__(self):
        return os.system, ("echo taken",)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_pickle_calls_are_named_and_not_executed(tmp_path, protocol, monkeypatch):
    path = archived(tmp_path / "x.pt", pickle.dumps({"x": Trap()}, protocol), {})
    monkeypatch.setattr(os, "system", lambda *_: pytest.fail("it was called"))
    told = ckpt("inspect", "tree", path).output
    assert "posix.system" in told and "nothing in it was executed" in told


class QuantizedTensor:
    """As those of Transformer Engine: what makes one is a method of the class."""

    @classmethod
    def built(cls, *_):
        pytest.fail("it was called")

    def __reduce_ex__(self, protocol):
        return QuantizedTensor.built, (0,)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_called_method_is_reported_with_its_class(tmp_path, protocol):
    path = archived(tmp_path / "x.pt", pickle.dumps({"x": QuantizedTensor()}, protocol), {})
    told = ckpt("inspect", "tree", path).output
    assert "getattr" in told and "QuantizedTensor" in told and "tensor.dequantize()" in told


@pytest.mark.parametrize("protocol", range(2, 6))
def test_extra_module_state_is_left_out_and_reported(tmp_path, protocol):
    """FP8 scales of Transformer Engine before 1.14."""
    path = archived(
        tmp_path / "x.pt", pickle.dumps({"a._extra_state": io.BytesIO(b"s"), "n": 3}, protocol), {}
    )
    tree = ckpttools.open(path)
    assert [*map(dotted, tree)] == ["n"] and "a._extra_state (_io.BytesIO)" in str(
        tree.metadata.notes.remarks
    )


def names_in(data: bytes) -> set[str]:
    result = {str(arg).replace(" ", ".") for op, arg, _ in pickletools.genops(data) if op.name == "GLOBAL"}
    assert result
    return result


@given(st.integers(0, 2**32))
def test_no_input_imports_anything(number):
    """Mutants of a real pickle: a value or a FormatError, and never a look at a module."""
    seeds = [
        zipfile.ZipFile(FIXTURES / name).read(f"{name.split('.')[0]}/data.pkl")
        for name in ("full.pt", "module.pt")
    ]
    chosen = random.Random(number)
    data = bytearray(chosen.choice(seeds))
    for _ in range(chosen.randrange(1, 6)):
        data[chosen.randrange(len(data))] = chosen.randrange(256)
    imported = builtins.__import__

    def refused(name, *rest):
        if name.split(".")[0] in ("torch", "argparse", "numpy", "os", "posix"):
            pytest.fail(f"it imports {name}")
        return imported(name, *rest)

    builtins.__import__ = refused
    try:
        unpickle(bytes(data), is_of_training, "x")
    except FormatError:
        pass
    finally:
        builtins.__import__ = imported


def test_records_keep_the_state_of_objects():
    data, _ = pickled({"x": whole(np.zeros((2, 3), "f4"))})
    value = unpickle(data, is_of_training, "x")
    assert isinstance(value["x"], Record) and value["x"].name == "_rebuild_tensor_v2"
    assert value["x"].args[2:4] == ((2, 3), (3, 1))
    assert names_in(data) == {"torch._utils._rebuild_tensor_v2", "torch.FloatStorage"}


def shared(depth: int) -> bytes:
    """A tuple of twice the same tuple, so many times: 2 ** depth values in a few bytes."""
    out = io.BytesIO()
    out.write(b"\x80\x02K\x01")
    for number in range(depth):
        out.write(b"q" + bytes([number]) + b"h" + bytes([number]) + b"\x86")
    return out.getvalue()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (shared(60) + b".", "more than 1,[0-9]+ values"),
        (b"\x80\x02}" + shared(60)[2:] + b"K\x01s.", "a tuple used as a key"),
        (b"\x80\x02]q\x00h\x00a.", "nested more than 200 levels"),
        (b"\x80\x02\x8b\xff\xff\xff\x7f" + b"1" * 50, "truncated"),
        (b"\x80\x02" + b"(" * 5000 + b".", "damaged"),
        (b"\x80\x02cos\nsystem\n(X\x02\x00\x00\x00lstR.", "os.system"),
        (b"\x80\x06N.", "protocol 6"),
        (b"(lp0\n.", "damaged"),
        (b"", "damaged"),
    ],
)
def test_hostile_pickles_are_refused(tmp_path, data, says):
    with pytest.raises(FormatError, match=says):
        ckpttools.open(archived(tmp_path / "x.pt", data, {}))


ALIKE = b"".join(b"\x8a\x09" + (n * (2**61 - 1)).to_bytes(9, "little") + b"N" for n in range(99))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"(" + b"\x8f" * 1_000_000 + b"l.", "far more memory"),
        (b"}(" + ALIKE + b"u.", "60 bits used as a key"),
        (
            b"}(" + b"".join(b"M%bK\x00\x86N" % n.to_bytes(2, "little") for n in range(10_001)) + b"u.",
            "10,000 t",
        ),
        (b"".join(b"ca%d\nb\n0" % n for n in range(10_002)) + b"N.", "10,000 classes"),
        (b"K\x01" + b"q\x01\x30h\x01h\x01\x86" * 10 + b"\x85" * 150 + b".", "too many places"),
    ],
)
def test_small_pickle_bombs_are_refused(tmp_path, data, says):
    """Memory of 240 bytes a byte, keys whose hashes are alike, a million names, long paths to many places."""
    with pytest.raises(FormatError, match=says):
        ckpttools.open(archived(tmp_path / "x.pt", b"\x80\x02" + data, {}))


def changed(source, target, *edits):
    """A file of torch.save with other bytes in its pickle."""
    with zipfile.ZipFile(source) as archive, zipfile.ZipFile(target, "w") as built:
        for name in archive.namelist():
            data = archive.read(name)
            for old, new in edits if name.endswith("data.pkl") else ():
                assert old in data
                data = data.replace(old, new)
            built.writestr(name, data)
    return target


@pytest.mark.parametrize("mark", ("conj", "neg"))
def test_lazily_conjugated_views_are_refused(tmp_path, mark):
    """torch 2.13 writes `_rebuild_tensor_v2(…, {"conj": True})`: what is stored is not what the tensor is."""
    path = save(tmp_path / "x.pt", {"x": whole(np.ones(3, "f4"))})
    word = mark.encode()
    noted = b"}X" + len(word).to_bytes(4, "little") + word + b"\x88stq\x0bR"
    with pytest.raises(FormatError, match=f"x: its values are stored before.*{mark}"):
        ckpttools.open(changed(path, tmp_path / "y.pt", (b"tq\x0bR", noted)))


def test_unsupported_tensor_class_is_refused(tmp_path):
    """FSDP's ShardedTensor is a part of one: it is refused, not taken for an object beside the weights."""
    data = b"}X\x01\x00\x00\x00xctorch.distributed._shard.sharded_tensor.api\nShardedTensor\n)\x81s."
    with pytest.raises(FormatError, match=r"x: made by .*ShardedTensor"):
        ckpttools.open(archived(tmp_path / "x.pt", b"\x80\x02" + data, {}))


def test_two_keys_with_one_name_are_refused(tmp_path):
    tensor = whole(np.ones(1, "f4"))
    with pytest.raises(FormatError, match=r"two values of the file have the same name:\n    a\.b"):
        ckpttools.open(save(tmp_path / "x.pt", {"a": {"b": tensor}, "a.b": tensor}))


def test_pickle_copies_are_limited():
    """A list of a thousand made an ordered dictionary ten thousand times."""
    items = b"]q\x00(" + b"K\x01K\x02\x86" * 1000 + b"e0"
    again = b"ccollections\nOrderedDict\nq\x01" + b"0h\x01h\x00\x85R" * 10_000
    with pytest.raises(FormatError, match="more copies than its length allows"):
        unpickle(b"\x80\x02" + items + again + b".", anything, "x")


# ---- the archive


@given(st.integers(0, 2**32))
def test_damaged_file_is_refused_or_reads_the_same(tmp_path_factory, number):
    """Names, shapes and places are under the archive's checksum; elements are not, in no program."""
    whole_file = (FIXTURES / "pytorch_model.bin").read_bytes()
    chosen = random.Random(number)
    path = tmp_path_factory.mktemp("cut") / "x.bin"
    path.write_bytes(whole_file[: chosen.randrange(len(whole_file))])
    with pytest.raises(FormatError):
        ckpttools.open(path)


def test_file_without_checksums_is_read(tmp_path, monkeypatch):
    """As torch writes it after `torch.serialization.set_crc32_options(False)`: all are 0."""
    with monkeypatch.context() as patched:
        patched.setattr(zipfile, "crc32", lambda *_: 0)
        path = save(tmp_path / "x.pt", {"a": whole(np.ones(3, "f4"))})
    with zipfile.ZipFile(path) as archive:
        assert {item.CRC for item in archive.infolist()} == {0}
    assert ckpttools.open(path)["a"].read().tolist() == [1, 1, 1]


def test_flipped_bit_outside_of_tensors_is_detected(tmp_path):
    path = save(tmp_path / "x.pt", {"lr": 0.5, "a": whole(np.ones(3, "f4"))})
    path.write_bytes(path.read_bytes().replace(b"\x3f\xe0", b"\x3f\xe1", 1))
    with pytest.raises(FormatError, match="the bytes of archive") as told:
        ckpttools.open(path)
    assert "fetch the file again" in told.value.hint


def test_misleading_archives_are_refused(tmp_path):
    data, storages = pickled({"x": whole(np.zeros(4, "f4"))})
    big = tmp_path / "big.pt"
    with zipfile.ZipFile(big, "w") as archive:
        archive.writestr("a/data.pkl", data)
        archive.writestr("a/byteorder", "big")
    packed = tmp_path / "packed.pt"
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", data)
        archive.writestr("a/data/0", bytes(4096))
        archive.writestr("a/version", "3")
    two = tmp_path / "two.pt"
    with zipfile.ZipFile(two, "w") as archive:
        for root in "ab":
            archive.writestr(f"{root}/data.pkl", data)
    lacking = archived(tmp_path / "lacking.pt", data, {})
    short = archived(tmp_path / "short.pt", data, {"0": storages["0"][:-1]})
    says = {
        big: "big-endian",
        packed: "compressed",
        two: "2 members",
        lacking: "not in the file",
        short: "last element",
    }
    for path, why in says.items():
        with pytest.raises(FormatError, match=why):
            ckpttools.open(path)


# ---- archives made to mislead


def central(raw, name):
    """Where the directory of an archive says what a member is."""
    return raw.rfind(name) - 46


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (42, "archive/data/0", "archive/data/0 overlaps archive/data/1"),
        (42, "archive/data.pkl", "archive/data.pkl overlaps archive/data/1"),
        (24, 100, "archive/data/0 overlaps archive/data/1"),
    ],
)
def test_overlapping_members_are_refused(tmp_path, at, value, says):
    """Another member's place, or more bytes than it has: other numbers would be read."""
    first, second = (np.full(6, number, "f4") for number in (1, 2))
    path = save(tmp_path / "a.pt", {"a": whole(first), "b": whole(second)})
    with zipfile.ZipFile(path) as archive:
        locations = {item.filename: item.header_offset for item in archive.infolist()}
    raw = bytearray(path.read_bytes())
    start = central(raw, b"archive/data/1" if at == 42 else b"archive/data/0")
    number = locations[value] if at == 42 else value
    for field in (42,) if at == 42 else (20, 24):
        raw[start + field : start + field + 4] = number.to_bytes(4, "little")
    path.write_bytes(raw)
    assert says in run("hash", path, code=3)


def test_member_with_another_name_is_refused(tmp_path):
    """The directory and the member itself must agree on what it is."""
    path = save(tmp_path / "a.pt", {"a": whole(np.ones(6, "f4")), "b": whole(np.zeros(6, "f4"))})
    raw = bytearray(path.read_bytes())
    for name, other in ((b"archive/data/0", b"archive/data/2"), (b"archive/data/1", b"archive/data/0")):
        start = raw.rfind(name)
        raw[start : start + len(name)] = other
    start = raw.rfind(b"archive/data/2")
    raw[start : start + 14] = b"archive/data/1"
    path.write_bytes(raw)
    assert "is not at the offset in the archive's directory" in run("hash", path, code=3)


def test_archive_members_with_64_bit_sizes_are_read(tmp_path):
    data, storages = pickled({"a": whole(np.arange(6, dtype="f4"))})
    with zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_STORED) as archive:
        for name, content in {"data.pkl": data, "data/0": storages["0"]}.items():
            with archive.open(zipfile.ZipInfo(f"archive/{name}"), "w", force_zip64=True) as member:
                member.write(content)
    assert ckpttools.open(tmp_path / "a.pt")["a"].read().tolist() == [0, 1, 2, 3, 4, 5]


def test_values_beyond_the_memory_budget_are_refused(tmp_path, monkeypatch):
    """Whatever a pickle makes, no more is resident than was allowed: it is looked at on the way."""
    from ckpttools.formats.torch import unpickling

    monkeypatch.setattr(unpickling, "_CHECK_INTERVAL", 1 << 10)
    path = archived(tmp_path / "a.pt", b"\x80\x02]" + b"}a" * 4000 + b".", {})
    assert "does not fit into the memory limit" in run("hash", path, "--memory", "1MiB", code=4)


def test_index_without_a_file_of_its_series_is_refused(tmp_path):
    names = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    for name in names:
        save(tmp_path / name, {name[14:19]: whole(np.ones(3, "f4"))})
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"00001": names[0]}}))
    output = run("hash", tmp_path, code=3)
    assert f"which no other file has:\n    {names[1]}" in output and "mv -n" in output
    index.write_text(json.dumps({"weight_map": {"00001": names[0], "00002": names[1]}}))
    run("hash", tmp_path)


@pytest.mark.parametrize("args", [("x", None, []), (Global("torch", "_rebuild_tensor_v2"), None, [])])
def test_tensor_subclass_without_arguments_is_refused(args):
    record = Record(Global("torch._tensor", "_rebuild_from_type_v2"), args)
    with pytest.raises(NotReadableError, match="of an object that is not a tensor"):
        _unwrap(record)


# ---- checksums of data


def flipped(path, content, name=None):
    """Flips a bit in the middle of bytes that a file has once, and says which bytes these are."""
    data = bytearray(path.read_bytes())
    at = data.index(content)
    data[at + len(content) // 2] ^= 4
    path.write_bytes(data)
    return f"{name or 'archive/data/0'} (bytes {at:,} to {at + len(content):,}) has CRC-32"


def told_by_doctor(*arguments):
    declared = ckpt("doctor", *arguments, "--no-progress")
    return declared.exit_code, " ".join(declared.output.split())


def numbers(count, first):
    return np.arange(first, first + count, dtype="f4")


def test_flipped_bit_in_values_is_detected_by_checksums(tmp_path):
    """Nothing else sees it: neither torch nor any conversion looks at checksums of storages."""
    path = save(tmp_path / "x.pt", {"a": whole(numbers(3_000_000, 0)), "b": whole(numbers(9, -9))})
    assert told_by_doctor(path)[1].endswith("checksums not checked (--checksums)")
    assert told_by_doctor(path, "--checksums")[1].endswith("; checksums OK")
    crc = f"{zlib.crc32(numbers(9, -9).tobytes()):08x}"
    second = flipped(path, numbers(9, -9).tobytes(), "archive/data/1")
    assert told_by_doctor(path)[0] == 0
    code, declared = told_by_doctor(path, "--checksums")
    assert code == 1 and f"the data of 1 of 2 storages is damaged: {second}" in declared
    assert f"was written with {crc}" in declared and "restore it from another copy" in declared
    first = flipped(path, numbers(3_000_000, 0).tobytes())
    assert f"2 of 2 storages is damaged: {first}" in told_by_doctor(path, "--checksums")[1]
    assert (report := ckpttools.doctor(path, checksums=True)).checksums_compared and not report.healthy
    assert (
        ckpttools.doctor(path).checksums_compared is False and ckpttools.doctor(FIXTURES / "full.pt").healthy
    )


def test_files_without_checksums_have_no_findings(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(zipfile, "crc32", lambda *_: 0)
        path = save(tmp_path / "x.pt", {"a": whole(numbers(9, 1))})
    assert told_by_doctor(path, "--checksums")[0] == 0


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("dcp", "__2_0.distcp"),
        ("ranks", "model_world_size_4_rank_1.pt"),
        ("deepspeed/stage3/global_step3", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("deepspeed/stage1/global_step3_universal", "zero/head.weight/exp_avg.pt"),
        ("deepspeed/stage1/global_step3", "mp_rank_00_model_states.pt"),
    ],
)
def test_checksums_cover_all_saved_data(tmp_path, name, file):
    """Of what is not read by default, such as moments, too."""
    source = tmp_path / "c"
    shutil.copytree(FIXTURES / name, source)
    done = []
    assert ckpttools.doctor(source, checksums=True, observe=lambda *bytes: done.append(bytes)).healthy
    assert done[0][0] == 0 and done[-1][0] == done[-1][1] > 0
    damaged = source / file
    format = next(fmt for fmt in formats().values() if fmt.mismatch_reason(parse(source)) is None)
    result = format.checksums(parse(source), ReadOptions())
    hit = next(item for item in result if item.file.path == str(damaged))
    data = bytearray(damaged.read_bytes())
    data[hit.offset] ^= 1
    damaged.write_bytes(data)
    code, declared = told_by_doctor(source, "--checksums")
    assert code == 1 and f"{damaged} [checksums]" in declared
    assert f"{hit.name} (bytes {hit.offset:,} to {hit.offset + hit.nbytes:,})" in declared


def test_truncated_file_is_reported_once(tmp_path):
    path = save(tmp_path / "x.pt", {"a": whole(numbers(9, 1))})
    path.write_bytes(path.read_bytes()[:-40])
    code, declared = told_by_doctor(path, "--checksums")
    assert code == 1 and declared.count("[") == 1 and "[torch]" in declared


@pytest.mark.parametrize(("kind", "name"), [("torch-distributed", "dcp"), ("torch", "full.pt")])
def test_unreachable_bucket_is_an_error(gcs, kind, name):
    """Else it would be said that all data has its checksums."""
    files = [FIXTURES / name] if name.endswith(".pt") else (FIXTURES / name).iterdir()
    location = gcs.filled({str(file.relative_to(FIXTURES)): file.read_bytes() for file in files}) / name
    gcs.server.faults.append(Fault("0.distcp" if name == "dcp" else name, count=99, status=403))
    with pytest.raises(StorageError):
        list(formats()[kind].checksums(location, ReadOptions()))
