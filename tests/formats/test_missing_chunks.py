"""Chunks that are not there: told wherever a tree is shown, refused where all is expected, never zeros."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.command_line import ckpt
from support.internals import inspect_tree
from support.locations import GOLDEN, ORBAX
from support.orbax_items import LITTLE, write_item, zarr3

import ckpttools
from ckpttools import FormatError
from ckpttools.array.gaps import missing_chunks
from ckpttools.inspection.html_report import contents

HOSTS = ORBAX / "emergency"
WRITING = (
    "strip-optimizer SRC DST",
    "cast SRC DST --dtype float16",
    "select SRC DST --keep params/**",
    "convert to-safetensors SRC DST",
    "convert to-orbax SRC DST",
    "convert to-orbax SRC DST --reference",
    "convert to-zarr3 SRC DST",
)
F32 = np.dtype("float32")


def wide(*words):
    # No path is broken, however long it is.
    return ckpt(*words, COLUMNS="1000")


def without_saying_so(host: Path) -> None:
    """Follows what was the hint once: then what is missing would be zeros."""
    document = json.loads((host / "3/state/_METADATA").read_bytes())
    document["store_array_data_equal_to_fill_value"] = False
    (host / "3/state/_METADATA").write_text(json.dumps(document))


@pytest.mark.parametrize("says_left_out", [False, True])
def test_checkpoint_of_one_host_is_reported(tmp_path, says_left_out):
    shutil.copytree(HOSTS, tmp_path / "run")
    host, other = tmp_path / "run/local_host2", tmp_path / "run/local_host3/3/state"
    if says_left_out:
        without_saying_so(host)
    shown = wide("inspect", "tree", host)
    # Where lines break depends on how long the path is.
    text = " ".join(shown.output.split())
    assert "6 of 12 chunks of 3 arrays are missing" in text
    assert f"the rest is in the directories of the other hosts: {other}" in text
    (warning,) = (
        load
        for load in json.loads(wide("inspect", "tree", host, "--json").output)["warnings"]
        if load["name"] == "missing-chunks"
    )
    assert set(warning["arrays"]) == {
        "opt_state/0/mu/params/w_fsdp",
        "params/params/decoder/w_col",
        "params/params/decoder/w_fsdp",
    }
    assert str(other) in wide("doctor", host).output
    page = contents(inspect_tree(ckpttools.open(host)), None, {})
    assert any("6 of 12 chunks" in text for text in page["facts"]["warnings"])
    assert "6 missing" in wide("inspect", "chunks", host).output
    before = sorted(tmp_path.iterdir())
    for command in WRITING:
        words = {"SRC": host, "DST": tmp_path / "out"}
        ended = wide(*(words.get(word, word) for word in command.split()))
        assert ended.exit_code == 3, command
        assert "are missing" in ended.output, command
        assert str(other) in ended.output, command
        assert "fill_value" not in ended.output, command
        assert sorted(tmp_path.iterdir()) == before, command
    for command in ("hash", "inspect stats"):
        assert wide(*command.split(), host).exit_code == 3


def test_hint_completes_the_checkpoint(tmp_path):
    whole = tmp_path / "whole"
    for host in ("local_host2", "local_host3"):
        for process in (HOSTS / host / "3/state").glob("ocdbt.process_*"):
            shutil.copytree(process, whole / process.name)
    shutil.copy(HOSTS / "local_host2/3/state/_METADATA", whole)
    tree = ckpttools.open(whole)
    assert missing_chunks(tree.arrays.values()) is None
    assert wide("convert", "to-safetensors", whole, tmp_path / "out").exit_code == 0
    shutil.rmtree(whole / "ocdbt.process_3")
    with pytest.raises(FormatError) as caught:
        ckpttools.open(whole).arrays["params", "params", "decoder", "w_col"].read()
    assert "this is what ocdbt.process_2 wrote" in caught.value.hint


@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_lost_chunk_is_reported(tmp_path, use_ocdbt):
    values = np.arange(1200, dtype=F32).reshape(600, 2)
    values[300:] = 0  # left out by tensorstore, as if it were lost
    arrays = {("w",): (zarr3([LITTLE], [300, 2]), values)}
    item = write_item(tmp_path / "item", arrays, use_ocdbt=use_ocdbt, all_chunks=False)
    assert missing_chunks(ckpttools.open(item).arrays.values()) is None
    document = json.loads((item / "_METADATA").read_bytes())
    for declared, suggests in ((True, False), (None, True)):
        document["store_array_data_equal_to_fill_value"] = declared
        (item / "_METADATA").write_text(json.dumps(document))
        result = missing_chunks(ckpttools.open(item).arrays.values())
        assert result is not None
        assert result.summary == "1 of 2 chunks of 1 array is missing, such as w/c/1/0"
        assert "fetch the checkpoint again" in result.hint
        assert ("fill_value" in result.hint) is suggests


def test_other_file_names_do_not_count_as_chunks(tmp_path):
    item = write_item(tmp_path / "item", {("w",): (zarr3([LITTLE], [1]), np.ones(2, F32))}, use_ocdbt=False)
    (item / "w/c/1").unlink()
    for name in ("01", "00", "1" * 200, "x"):
        (item / "w/c" / name).write_bytes(bytes(4))
    result = missing_chunks(ckpttools.open(item).arrays.values())
    assert result is not None
    assert result.summary.startswith("1 of 2 chunks")


def calls_of(work: Callable[[], None], limit: int = 1_000_000) -> int:
    """How many Python functions work calls, generators gone on with included; stops it after too many."""
    count = 0

    def counted(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call"
        if count > limit:
            sys.setprofile(None)
            raise AssertionError(f"more than {limit} calls")

    sys.setprofile(counted)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_damaged_shape_with_huge_chunk_count_is_handled(tmp_path):
    item = write_item(tmp_path / "item", {("w",): (zarr3([LITTLE], [1]), np.ones(2, F32))}, use_ocdbt=False)
    document = json.loads((item / "w/zarr.json").read_bytes())

    def looked_at(length: int) -> None:
        (item / "w/zarr.json").write_text(json.dumps(document | {"shape": [length]}))
        assert f"of {length:,} chunks" in wide("inspect", "tree", item).output
        assert wide("convert", "to-safetensors", item, tmp_path / "out").exit_code == 3

    looked_at(3)  # imports
    few = calls_of(lambda: looked_at(3))
    assert calls_of(lambda: looked_at(10**15), 2 * few) < 1.1 * few


@pytest.mark.parametrize(("nbytes", "code"), [(None, 3), (100_000, 3)], ids=["deleted", "truncated"])
def test_data_file_shorter_than_its_index_is_reported(tmp_path, nbytes, code):
    source = shutil.copytree(GOLDEN / "llama3.1/maxtext_scanned", tmp_path / "source")
    file = max((source / "0/items").glob("ocdbt.process_0/d/*"), key=lambda file: file.stat().st_size)
    if nbytes is None:
        file.unlink()
    else:
        os.truncate(file, nbytes)
    result = json.loads(wide("inspect", "tree", source, "--json").output)
    (warning,) = (item for item in result["warnings"] if item["name"] == "missing-chunks")
    assert str(file) in warning["text"]
    assert f" of {len(warning['arrays'])} array" in warning["text"]
    assert ("deleted or not copied" if nbytes is None else "truncated") in warning["text"]
    assert warning["arrays"]
    for path, array in ckpttools.open(source).arrays.items():
        if "/".join(path) in warning["arrays"]:
            with pytest.raises(FormatError):
                array.read()
        else:
            array.read()
    assert file.name in wide("inspect", "tree", source).output
    page = contents(inspect_tree(ckpttools.open(source)), None, {})
    assert any(file.name in text for text in page["facts"]["warnings"])
    before = sorted(tmp_path.iterdir())
    for words in (
        ("convert", "to-safetensors", source, tmp_path / "out"),
        ("convert", "maxtext-to-hf", source, tmp_path / "out", "--like", GOLDEN / "llama3.1/hf"),
    ):
        ended = wide(*words)
        assert ended.exit_code == code
        assert file.name in ended.output
        assert sorted(tmp_path.iterdir()) == before
