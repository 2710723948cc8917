"""Plans in files: arrays that were lines of text hold what they held, and tasks are those of the plan."""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command_line import ckpt, succeed
from support.internals import Cast, Convert, Multiply, NodeLines, Nodes, Scratch, elementwise
from support.locations import GOLDEN, HF, TRAINED

import ckpttools
from ckpttools import DTYPES, FormatError
from ckpttools.api.plans import header_of
from ckpttools.mapping.values import Add
from ckpttools.plan.array_lines import NotInLinesError, decode_dataclass
from ckpttools.plan.parts import dealt
from ckpttools.plan.plan_file import decode_plan, encode_plan
from ckpttools.testing.strategies import lazy_arrays, regions, stored
from ckpttools.transforms.functions import InMemory

MAXTEXT = GOLDEN / "llama3.1" / "maxtext_scanned"


def said_and_made(array):
    """The array as lines of text, and what those say."""
    files = []

    def number(source):
        files.append(source)
        return len(files) - 1

    lines = NodeLines(number)
    last = lines.number(array)
    return Nodes([line.encode() for line in lines.lines], files.__getitem__).array(last)


@pytest.mark.parametrize("declared", ['["nothing", [2], "float32"]', '["take"]', "[]", "{}", "7", '"stored"'])
def test_line_without_an_array_is_refused(declared):
    with pytest.raises(FormatError, match="a line of the plan does not describe an array"):
        Nodes([declared.encode()], [].__getitem__).array(0)


@given(st.data())
def test_arrays_round_trip_through_plan_lines(data):
    known = data.draw(lazy_arrays())
    built = said_and_made(known.array)
    assert (built.shape, built.dtype, type(built)) == (
        known.array.shape,
        known.array.dtype,
        type(known.array),
    )
    region = data.draw(regions(built.shape))
    out = np.empty(region.shape, built.dtype.carrier)
    # A worker has what the plan was made with.
    built.read_into(region, out, Scratch(known.array.scratch_bytes))
    np.testing.assert_array_equal(out, known.truth[region.slices])
    assert built.first_byte(region) == known.array.first_byte(region)


@pytest.mark.parametrize(
    "op",
    [
        Multiply(0.1 + 0.2, divide=True, wide=True),
        Add(-1.0),
        Cast(DTYPES["float32"], DTYPES["bfloat16"]),
        Convert(DTYPES["float8_e4m3fn"], "an array"),
    ],
)
def test_element_functions_round_trip(op):
    source = stored(np.arange(60, dtype="<u2").reshape(6, 10), DTYPES["bfloat16"])
    array = elementwise(source, op)
    built = said_and_made(array)
    assert built.op == op
    np.testing.assert_array_equal(
        built.read().view(built.dtype.carrier), array.read().view(built.dtype.carrier)
    )


@pytest.mark.parametrize("source", [TRAINED, MAXTEXT, HF], ids=lambda location: location.name)
def test_checkpoint_arrays_round_trip(source):
    for path, array in ckpttools.open(source).arrays.items():
        built = said_and_made(array)
        one, other = (item.read().view(array.dtype.carrier) for item in (built, array))
        np.testing.assert_array_equal(one, other, str(path))


def test_compressed_chunks_and_shards_round_trip(tmp_path):
    ckpttools.convert(MAXTEXT, tmp_path / "out", format="orbax", compression="zstd")
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(tmp_path / "sharded", mode="w")
    values = np.arange(64 * 48, dtype=np.float32).reshape(64, 48)
    built = group.create_array("a", shape=(64, 48), chunks=(8, 16), shards=(32, 48), dtype="float32")
    built[...] = values
    for location in (tmp_path / "out", tmp_path / "sharded"):
        for path, array in ckpttools.open(location).arrays.items():
            np.testing.assert_array_equal(said_and_made(array).read(), array.read(), str(path))


def test_unsupported_plan_objects_are_refused():
    array = InMemory((3,), DTYPES["float32"], np.zeros(3, np.float32))
    with pytest.raises(NotInLinesError):
        said_and_made(array)


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "ckpttools.mapping.values:np",
        "ckpttools.core.dtypes:DType",
        "ckpttools.mapping.values:a.b",
        "",
    ],
)
def test_only_plan_classes_are_decoded(name):
    with pytest.raises((ValueError, AttributeError)):
        decode_dataclass([name, {}], ("ckpttools.mapping.",))


@pytest.mark.parametrize("count", [1, 3, 40])
@pytest.mark.parametrize("scan", [True, False])
def test_parts_contain_exactly_the_tasks_of_the_plan(tmp_path, count, scan):
    prepared = ckpttools.hf_to_maxtext.plan(HF, tmp_path / "out", scan=scan)
    file = decode_plan(encode_plan(prepared.plan, header_of(prepared)), "here")
    assert file.header.has_tasks and file.header.call["arguments"]["scan"] == scan
    cuts = dealt(file.groups, count)
    result = []
    for first, stop in pairwise(cuts):
        plan, opened = file.part(first, stop, 1, lambda path: path)
        for task in plan.tasks:
            known = prepared.plan.layout.placements[task.path]
            assert plan.layout.placements[task.path] == known
            array = prepared.plan.tree.arrays[task.path]
            read = [
                item.read(task.region).view(item.dtype.carrier)
                for item in (plan.tree.arrays[task.path], array)
            ]
            np.testing.assert_array_equal(*read)
        result += plan.tasks
        assert {file.path for file in opened.files} <= {str(HF / "model.safetensors")}
    told = [(task.path, task.region, task.bytes_in, task.bytes_out) for task in prepared.plan.tasks]
    assert [(task.path, task.region, task.bytes_in, task.bytes_out) for task in result] == told


class TestHostilePlans:
    """Plans that somebody has changed, with a checksum that is right."""

    @pytest.fixture
    def lines(self, tmp_path):
        succeed("plan", "convert", "to-safetensors", HF, tmp_path / "out", "-o", tmp_path / "plan")
        return (tmp_path / "plan").read_bytes().split(b"\n")[:-2]

    def refused(self, tmp_path, lines):
        whole = b"\n".join(lines) + b"\n"
        (tmp_path / "plan").write_bytes(whole + hashlib.sha256(whole).hexdigest().encode() + b"\n")
        done = ckpt("run", tmp_path / "plan", "--part", "0/1")
        assert done.exit_code == 3, done.output
        assert not (tmp_path / "out.partial").exists()
        return done.output

    @pytest.mark.parametrize("change", ["missing", "unknown", "kind"])
    def test_invalid_header_is_refused(self, tmp_path, lines, change):
        kind, header, sizes = json.loads(lines[0])
        if change == "missing":
            del header["memory"]
        elif change == "unknown":
            header["other"] = 1
        else:
            header["tasks"] = "x"
        lines[0] = json.dumps([kind, header, sizes], separators=(",", ":")).encode()
        assert "has invalid contents" in self.refused(tmp_path, lines)

    def test_file_outside_the_destination_is_refused(self, tmp_path, lines):
        changed = [line.replace(b"model.safetensors", b"../../evil.safetensors") for line in lines]
        assert "outside the destination" in self.refused(tmp_path, changed)
        outside = [*lines[:7], *changed[7:]]
        assert "outside the destination" in self.refused(tmp_path, outside)
