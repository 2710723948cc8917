"""Arrays of tensorstore without the metadata of a tree: Levanter, T5X, Pax, and what JAX itself writes."""

import collections
import json
import os
import re
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command_line import ckpt, run
from support.internals import Location, ReadOptions, open_tree, parse

import ckpttools
from ckpttools import FormatError, LaterStepWarning, UsageError
from ckpttools.core.text import plural
from ckpttools.formats.zarr.legacy_runs import legacy_run_in

ts = pytest.importorskip("tensorstore")
ROOT = Path(__file__).parents[2]


def write(path, value, driver="zarr", fill=None, base=None):
    """An array by tensorstore: in a directory, or under a key of a database."""
    store = {"driver": "file", "path": str(path)}
    if base is not None:
        store = {"driver": "ocdbt", "base": f"file://{base}", "path": str(path)}
    chunk = [max(1, -(-n // 2)) for n in value.shape]
    if driver == "zarr":
        metadata = {"chunks": chunk, "dtype": value.dtype.str, "compressor": None, "fill_value": fill}
    else:
        grid = {"name": "regular", "configuration": {"chunk_shape": chunk}}
        metadata = {"data_type": value.dtype.name, "chunk_grid": grid, "fill_value": fill or 0}
    spec = {"driver": driver, "kvstore": store, "metadata": {"shape": list(value.shape), **metadata}}
    ts.open(spec, create=True, open=True).result().write(value).result()


VALUES = st.dictionaries(
    st.lists(st.sampled_from(("a", "b", "0", "w.x")), min_size=1, max_size=3).map("/".join),
    st.lists(st.integers(1, 3), max_size=2),
    min_size=1,
    max_size=4,
)


@settings(max_examples=25)
@given(VALUES, st.sampled_from(("zarr", "zarr3")), st.booleans())
def test_any_names_round_trip(tmp_path_factory, shapes, driver, in_database):
    root = tmp_path_factory.mktemp("z") / "c"
    nested = [name for name in shapes if any(other.startswith(f"{name}/") for other in shapes)]
    values = {
        name: np.arange(np.prod(shape), dtype="f4").reshape(shape) + 1
        for name, shape in shapes.items()
        if name not in nested
    }
    values = {f"model/{name}": value for name, value in values.items()}
    for name, value in values.items():
        write(name if in_database else root / name, value, driver, base=root if in_database else None)
    tree = open_tree(root)
    result = {".".join(map(str, path)): array.read().tolist() for path, array in tree.arrays.items()}
    assert result == {name.replace("/", "."): value.tolist() for name, value in values.items()} or len(
        {name.replace("/", ".") for name in values}
    ) < len(values)
    assert len(tree.arrays) == len(values) and tree.metadata.format == "zarr-tree"


def test_jax_array_serialization_is_read(tmp_path):
    """`jax.experimental.array_serialization`, which Levanter and Pax save with."""
    import jax.numpy as jnp
    from jax.experimental.array_serialization import serialization

    arrays = [jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3), jnp.zeros(4)]
    paths = [str(tmp_path / "step-12/model/w"), str(tmp_path / "step-12/model/b")]
    manager = serialization.GlobalAsyncCheckpointManager()
    manager.serialize_with_paths(arrays, paths, on_commit_callback=lambda: None)
    manager.wait_until_finished()
    (tmp_path / "step-12/metadata.json").write_text(json.dumps({"step": 12}))
    tree = open_tree(tmp_path / "step-12")
    assert tree.metadata.step == 12 and not tree.metadata.notes.remarks
    assert tree["model/w"].read().tobytes() == np.asarray(arrays[0]).tobytes()
    assert tree["model/b"].read().tolist() == [0, 0, 0, 0]
    run("convert", "to-orbax", tmp_path / "step-12", tmp_path / "out")
    run("verify", tmp_path / "out", "--against", tmp_path / "step-12")
    assert "structure and configuration OK" in ckpt("doctor", tmp_path / "step-12").output


def test_lost_and_omitted_chunks_are_distinguished(tmp_path):
    write(tmp_path / "c/w", np.arange(4, dtype="f4"))
    (tmp_path / "c/w/1").unlink()
    assert "c: w, chunk 1" in run("hash", tmp_path / "c", code=3)
    shutil.rmtree(tmp_path / "c/w")
    write(tmp_path / "c/w", np.array([1, 1, 0, 0], dtype="f4"), fill=0.0)
    assert not (tmp_path / "c/w/1").exists()
    tree = open_tree(tmp_path / "c")
    assert tree["w"].read().tolist() == [1, 1, 0, 0]
    (remark,) = tree.metadata.notes.remarks
    assert "chunks of 1 array are missing, such as of w" in remark


def test_steps_of_a_run_are_named(tmp_path):
    for step in ("step-10", "step-20"):
        write(tmp_path / step / "model/w", np.ones(3, "f4"))
    for words in (("hash", tmp_path), ("inspect", "tree", tmp_path, "--step", "10")):
        result = ckpt(*words)
        assert result.exit_code == 3
        told = result.output
        assert f"{tmp_path}/step-20" in told and "it is a run with 2 steps" in told
        assert f"name one of them: ckpt {words[0]}" in told and "safetensors" not in told
    assert "2 steps, 2 finished" in ckpt("inspect", "tree", tmp_path).output
    assert "\n2 checkpoints of zarr-tree\n" in ckpt("doctor", tmp_path).output


@pytest.mark.parametrize(("name", "declared", "keys"), [("step-10", 7, 2), ("7", 7, 2), ("7", None, 3)])
def test_single_step_is_opened_from_its_run(tmp_path, name, declared, keys):
    """A number alone may be a key, where nothing else says that it is a step."""
    write(tmp_path / name / "model/w", np.ones(3, "f4"), "zarr3")
    if declared:
        (tmp_path / name / "metadata.json").write_text(json.dumps({"step": declared}))
    tree = open_tree(tmp_path)
    assert [len(path) for path in tree] == [keys] and tree.metadata.step == declared
    assert "\n1 checkpoint of zarr-tree\n" in ckpt("doctor", tmp_path).output


def test_orbax_saves_without_metadata_are_refused(tmp_path):
    """Half of a save is no tree of its own."""
    item = tmp_path / "items"
    shutil.copytree(ROOT / "fixtures/golden/llama3.1/maxtext_scanned/0/items", item)
    (item / "_METADATA").unlink()
    with pytest.raises(FormatError, match="without _METADATA"):
        open_tree(item)


def test_neighboring_checkpoints_are_separate(tmp_path):
    """Of other programs, or several of this format, each with the file that lies at its root."""
    for name, step in (("a", "step-10"), ("b", "step-7")):
        write(tmp_path / name / step / "model/w", np.ones(3, "f4"), "zarr3")
        (tmp_path / name / step / "metadata.json").write_text(json.dumps({"step": 1}))
    told = run("hash", tmp_path, code=3)
    assert "it has 2 checkpoints" in told and f"name one of them: ckpt hash {tmp_path}/a" in told
    shutil.rmtree(tmp_path / "b")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    assert f"ckpt {tmp_path}/a" in ckpt(tmp_path).output


@pytest.mark.parametrize("driver", ("zarr", "zarr3"))
def test_array_inside_another_is_kept(tmp_path, driver):
    write(tmp_path / "c/m/w", np.arange(4, dtype="f4"), driver)
    write(tmp_path / "c/m/w/sub", np.ones(2, "f4"), driver)
    assert {"/".join(path): array.shape for path, array in open_tree(tmp_path / "c").arrays.items()} == {
        "m/w": (4,),
        "m/w/sub": (2,),
    }


@pytest.mark.parametrize(("driver", "document"), [("zarr", ".zarray"), ("zarr3", "zarr.json")])
@pytest.mark.parametrize("shape", ((), (4,), (2, 2)))
def test_chunks_without_array_metadata_are_refused(tmp_path, driver, document, shape):
    """Of 100 arrays one would be missing, and nobody would be told."""
    for name in "ab":
        write(tmp_path / "c/m" / name, np.ones(shape, "f4"), driver)
    (tmp_path / "c/m/b" / document).unlink()
    with pytest.raises(FormatError, match="chunks of an array are here without its metadata"):
        open_tree(tmp_path / "c")


def test_link_cycles_are_refused(tmp_path):
    """What is below has no end: of two such links 2^40 directories."""
    write(tmp_path / "c/m/w", np.ones(3, "f4"))
    (tmp_path / "v").symlink_to("c/m/w")
    (tmp_path / "c/m/v").symlink_to("../../v")
    assert len(open_tree(tmp_path / "c").arrays) == 2
    (tmp_path / "c/n").mkdir()
    for at, to in (("m/x", "../n"), ("n/y", "../m"), ("n/z", "../m")):
        (tmp_path / "c" / at).symlink_to(to)
    with pytest.raises(FormatError, match="a link leads to a directory that it is in"):
        open_tree(tmp_path / "c")


@pytest.mark.parametrize("document", ("", '{"zarr_format": 3, "node_type": "group"}'))
def test_exponential_links_are_refused(tmp_path, document):
    """Three steps make eight names of an array, nineteen 2^19; groups of zarr v3 have a document.

    Linux follows at most 40 links in a path. If it has to start over, it counts those of both attempts.
    """
    for number in range(19):
        (folder := tmp_path / str(number)).mkdir()
        if document:
            (folder / "zarr.json").write_text(document)
        for name in "ab":
            (folder / name).symlink_to(f"../{number + 1}")
    write(tmp_path / "19", np.ones(3, "f4"), "zarr3")
    assert len(open_tree(tmp_path / "16").arrays) == 8
    with pytest.raises(FormatError, match="links give a directory more than 1,000 names"):
        open_tree(tmp_path / "0")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b'{"node_type": "Array"}', "node_type 'Array'"),
        (b"\xff", "0xff"),
        (b"[" * 10**5, "nested"),
        (b"[]", "object"),
    ],
)
@pytest.mark.parametrize("in_database", (False, True))
def test_unknown_metadata_is_refused(tmp_path, text, told, in_database):
    """The array would be missing, and nobody would be told."""
    root = tmp_path / "c"
    write(
        "m/w" if in_database else root / "m/w", np.ones(3, "f4"), "zarr3", base=root if in_database else None
    )
    if in_database:
        store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{root}"}).result()
        store.write("m/x/zarr.json", text).result()
    else:
        (root / "m/x").mkdir()
        (root / "m/x/zarr.json").write_bytes(text)
    assert told in run("hash", root, code=3)


def sharded(path, value):
    """An array of one shard with a piece for each row; tensorstore stores those that are not zero."""
    shape, names = list(value.shape), [{"name": "bytes", "configuration": {"endian": "little"}}]
    inner = {"chunk_shape": [1, shape[1]], "codecs": names, "index_codecs": [*names, {"name": "crc32c"}]}
    grid = {"name": "regular", "configuration": {"chunk_shape": shape}}
    metadata = {"data_type": "float32", "chunk_grid": grid, "shape": shape}
    metadata["codecs"] = [{"name": "sharding_indexed", "configuration": inner}]
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}, "metadata": metadata}
    ts.open(spec, create=True, open=True).result().write(value).result()


def test_omitted_shard_pieces_are_filled(tmp_path):
    """The index of a shard says so: nothing is lost, and nobody need be told."""
    value = np.array([[1, 2], [0, 0], [3, 4]], "f4")
    sharded(tmp_path / "c/m/w", value)
    tree = open_tree(tmp_path / "c")
    assert np.array_equal(tree["m", "w"].read(), value) and not tree.metadata.notes.remarks


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"zarr_format": 4}, "zarr_format 4"),
        ({"chunk_grid": {"name": "odd", "configuration": {"chunk_shape": [2]}}}, "chunk_grid 'odd'"),
        ({"fill_value": [1, 2]}, "invalid fill value"),
    ],
)
def test_other_metadata_is_refused(tmp_path, change, told):
    write(tmp_path / "c/m/w", np.ones(3, "f4"), "zarr3")
    location = tmp_path / "c/m/w/zarr.json"
    location.write_text(json.dumps(json.loads(location.read_text()) | change))
    assert told in run("hash", tmp_path / "c", code=3)


# ---- Orbax before `_METADATA`: small arrays are in a file `checkpoint`, the others are named there

LEGACY = {("params", "kernel"), ("params", "bias"), ("opt", "count"), ("step",)}


def write_legacy_item(item, driver="zarr", in_database=False):
    """Write an item with one array of tensorstore and three leaves in the file `checkpoint`."""
    serialization = pytest.importorskip("flax.serialization")
    item.mkdir(parents=True)
    kernel = np.arange(24, dtype="f4").reshape(4, 6)
    write(
        "params.kernel" if in_database else item / "params.kernel",
        kernel,
        driver,
        base=item if in_database else None,
    )
    params = {"kernel": "PLACEHOLDER://params.kernel", "bias": np.ones(6, "f4")}
    state = {"params": params, "opt": {"count": np.int32(3)}, "step": 7}
    (item / "checkpoint").write_bytes(serialization.msgpack_serialize(state))


@pytest.mark.parametrize(("driver", "in_database"), [("zarr", False), ("zarr3", False), ("zarr", True)])
@pytest.mark.parametrize(
    "below",
    ("default", "100", "100/default", "step_100/default", "checkpoints/100/state", "a/b/checkpoint_5/items"),
)
def test_legacy_orbax_opens_completely_at_every_level(tmp_path, below, driver, in_database):
    root = tmp_path / "run"
    item = root / below
    write_legacy_item(item, driver, in_database)
    (item.parent / "commit_success.txt").touch()
    (root / "config.json").write_text("{}")
    levels = [item, *item.parents[: len(Path(below).parts)]]
    assert levels[-1] == root
    for level in levels:
        tree = open_tree(level)
        assert tree.keys() == LEGACY, level
        assert tree.metadata.location == str(item)
        assert np.array_equal(tree["params/kernel"].read(), np.arange(24, dtype="f4").reshape(4, 6))
    assert "1 checkpoint of zarr-tree\n" in ckpt("doctor", root).output


def _legacy_items(root):
    for item in ("params", "opt_state"):
        write_legacy_item(root / "100" / item)
    return root / "100"


def _legacy_steps_with_several_items(root):
    write_legacy_item(root / "90/params")
    return _legacy_items(root)


def _legacy_item_after_many_directories(root):
    for number in range(30):
        write(root / f"a{number}", np.ones(2, "f4"))
    write_legacy_item(root / "z/100/default")
    return root / "z/100/default"


def _legacy_item_in_a_tree(root):
    write(root / "model/a", np.ones(2, "f4"))
    write_legacy_item(root / "model/b/c")
    return root / "model/b/c"


def _legacy_database_in_a_tree(root):
    write(root / "model/a", np.ones(2, "f4"))
    write_legacy_item(root / "model/b/c", in_database=True)
    return root / "model/b/c"


def _item_with_metadata_in_a_tree(root):
    write(root / "model/x/a", np.ones(2, "f4"))
    shutil.copytree(ROOT / "fixtures/golden/llama3.1/maxtext_scanned/0/items", root / "model/y/b/c")
    return root / "model/y/b/c"


def _legacy_item_below_a_legacy_item(root):
    write_legacy_item(root)
    write_legacy_item(root / "old/100")
    return root / "old/100"


@pytest.mark.parametrize(
    "make",
    (
        *(_legacy_items, _legacy_steps_with_several_items, _legacy_item_after_many_directories),
        *(_legacy_item_in_a_tree, _legacy_database_in_a_tree, _item_with_metadata_in_a_tree),
        _legacy_item_below_a_legacy_item,
    ),
)
def test_parent_of_several_checkpoints_lists_them(tmp_path, make):
    """Read as one tree, the arrays in files `checkpoint` would be missing without an error."""
    path = make(tmp_path / "run")
    told = run("hash", tmp_path / "run", code=3)
    # A directory that is only above the checkpoint opens it, too.
    assert str(path) in told or str(path.parent) in told


@pytest.mark.parametrize(
    "keys", ("model/descriptor/w", "layers/0/w layers/1/w", "a/7/b/0/w a/7/b/1/w", "a/b/c/w")
)
def test_numeric_keys_are_not_steps(tmp_path, keys):
    for key in keys.split():
        write(tmp_path / "c" / key, np.ones(2, "f4"))
    assert {"/".join(path) for path in open_tree(tmp_path / "c")} == {*keys.split()}


def test_unfinished_legacy_saves_are_refused_from_every_level(tmp_path):
    item = tmp_path / "run/100.orbax-checkpoint-tmp-17/default"
    write_legacy_item(item)
    for level in (item, item.parent, tmp_path / "run"):
        assert "Error" in run("hash", level, code=3)
    (item / "checkpoint").unlink()
    write(tmp_path / "run/a/w", np.ones(2, "f4"))
    assert "a directory below is an unfinished save" in run("hash", tmp_path / "run", code=3)


def test_legacy_state_with_missing_arrays_is_refused(tmp_path):
    write_legacy_item(tmp_path / "run/100/default")
    shutil.rmtree(tmp_path / "run/100/default/params.kernel")
    for level in ("run/100/default", "run/100", "run"):
        run("hash", tmp_path / level, code=3)


def _with_metrics(run):
    (run / "10/metrics").mkdir(parents=True)
    (run / "10/metrics/metrics").write_text("{}")


def _with_unfinished_save(run):
    write_legacy_item(run / "11.orbax-checkpoint-tmp-17/default")


def _with_unfinished_empty_save(run):
    (run / "11.orbax-checkpoint-tmp-17").mkdir(parents=True)


def _with_logs(run):
    (run / "tensorboard").mkdir(parents=True)
    (run / "tensorboard/events").write_text("")


def _with_arrays(run):
    write(run / "ema/kernel", np.ones(3, "f4"))


def _with_arrays_and_a_state(run):
    write_legacy_item(run / "best/params")
    _with_arrays(run)


def _with_commit_files(run):
    for step in ("9", "10"):
        (run / step).mkdir(parents=True)
        (run / step / "commit_success.txt").touch()


@pytest.mark.parametrize("in_database", [False, True])
@pytest.mark.parametrize(
    ("names", "add"),
    [
        (("9/default", "10/default"), None),
        (("9", "10"), None),
        (("checkpoint_9", "checkpoint_10"), None),
        (("checkpoints/9", "checkpoints/10"), None),
        (("0009/state", "0010/state"), None),
        (("10/default",), _with_logs),
        (("10/default",), _with_arrays),
        (("9/default", "10/default"), _with_arrays_and_a_state),
        (("checkpoints/9", "checkpoints/10"), _with_logs),
        (("10/default",), _with_unfinished_empty_save),
        *((("9/default", "10/default"), add) for add in (_with_metrics, _with_logs, _with_commit_files)),
        *((("9/default", "10/default"), add) for add in (_with_unfinished_save, _with_unfinished_empty_save)),
    ],
)
def test_legacy_run_opens_its_latest_finished_step(tmp_path, names, add, in_database):
    root = tmp_path / "run"
    if add:
        add(root)
    for name in names:
        write_legacy_item(root / name, in_database=in_database)
    steps = [int(name.split("/")[-2 if name[-1].isalpha() else -1].rpartition("_")[2]) for name in names]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tree = open_tree(root)
    is_later = add in (_with_unfinished_save, _with_unfinished_empty_save)
    assert [item.category for item in caught] == [LaterStepWarning] * is_later
    assert tree.keys() == LEGACY
    assert (tree.metadata.step, tree.metadata.location) == (10, str(root / names[-1]))
    for step, name in zip(steps, names, strict=True):
        tree = open_tree(root, ReadOptions(step=step))
        assert (tree.metadata.step, tree.metadata.location) == (step, str(root / name))
    with pytest.raises(UsageError, match="step 8 does not exist"):
        open_tree(root, ReadOptions(step=8))
    listed = ckpttools.ls(root)
    assert [item.step for item in listed.finished] == steps
    others = {_with_arrays: 1, _with_arrays_and_a_state: 2}.get(add, 0)
    count = plural(len(names) + others, "checkpoint")
    assert f"{count} of zarr-tree\n" in ckpt("doctor", root).output
    run("convert", "to-safetensors", root, tmp_path / "out")
    run("verify", tmp_path / "out", "--against", root)


@pytest.mark.parametrize(
    ("names", "add", "latest"),
    [
        (("9/default", "10/default"), None, 10),
        (("9/items", "10/items"), None, 10),
        (("9", "10"), None, 10),
        (("checkpoint_9", "checkpoint_10"), None, None),  # Orbax lists plain numbers
        (("checkpoints/9", "checkpoints/10"), None, 10),
        (("9/params", "9/opt_state", "10/params", "10/opt_state"), None, 10),
        (("10/params", "10/opt_state"), None, 10),
        (("10/default",), _with_logs, 10),
        (("10/default",), _with_arrays, 10),
        (("9/default", "10/default"), _with_arrays_and_a_state, 10),
        (("checkpoints/9", "checkpoints/10"), _with_logs, 10),
        (("9/default", "10/default"), _with_metrics, 10),
        (("9/default", "10/default"), _with_commit_files, 10),
        (("9/default", "10/default"), _with_unfinished_save, 10),
        (("9/default", "10/default"), _with_unfinished_empty_save, 10),
    ],
)
def test_commands_agree_on_the_steps_of_a_legacy_run(tmp_path, names, add, latest):
    root, steps = tmp_path / "run", sorted({int(re.search(r"\d+", name)[0]) for name in names})
    if add:
        add(root)
    for name in names:
        write_legacy_item(root / name)
    listing = ckpttools.ls(root)
    assert [step.step for step in listing.finished] == steps
    assert (listing.latest, listing.resume_step) == (latest, latest)
    assert ckpttools.ls(root / names[-1]).path == listing.path
    pruned = ckpttools.prune.plan(listing.path, keep_last=1).report
    assert [(step.step, step.outcome) for step in pruned.steps] == [(step, "left alone") for step in steps]
    assert all("the layout of Orbax before _METADATA" in step.reason for step in pruned.steps)
    report = ckpttools.copy(root, tmp_path / "copy")
    parts = [part.name for part in report.parts if re.search(r"\d", part.name)]
    assert len(parts) == len(steps)
    is_unfinished = add in (_with_unfinished_save, _with_unfinished_empty_save)
    is_above = names[0].startswith("checkpoints/") and add is _with_logs
    expected = ["11.orbax-checkpoint-tmp-17"] * is_unfinished + ["tensorboard"] * is_above
    assert [*report.omitted] == expected
    assert not [*(tmp_path / "copy").rglob("*orbax-checkpoint-tmp*")]
    assert [step.step for step in ckpttools.ls(tmp_path / "copy").finished] == steps
    again = ckpttools.copy(root, tmp_path / "copy")
    assert {part.outcome for part in again.parts} == {"there already"}
    output = ckpt("doctor", root).output
    others = {_with_arrays: 1, _with_arrays_and_a_state: 2}.get(add, 0)
    items = f"{plural(len(names) + others, 'checkpoint')} of zarr-tree\n"
    assert f"{len(steps)} step{'s' * (len(steps) > 1)}, " in output and items in output
    assert " no errors" in output.replace("\n", " ") or "configuration OK" in output


def test_copy_adds_selected_steps_of_a_legacy_run(tmp_path):
    for step in ("1", "2", "3"):
        write_legacy_item(tmp_path / "run" / step / "default")
    ckpttools.copy(tmp_path / "run", tmp_path / "copy", latest=1)
    assert [step.step for step in ckpttools.ls(tmp_path / "copy").finished] == [3]
    ckpttools.copy(tmp_path / "run", tmp_path / "copy", steps=[1])
    assert [step.step for step in ckpttools.ls(tmp_path / "copy").finished] == [1, 3]
    with pytest.raises(UsageError, match="step 7 does not exist"):
        ckpttools.copy(tmp_path / "run", tmp_path / "copy", steps=[7])


@pytest.mark.parametrize(
    "damage",
    [
        lambda run: shutil.rmtree(run / "10/default"),
        lambda run: (run / "10/default/checkpoint").unlink(),
        lambda run: shutil.rmtree(run / "10/default/params.kernel"),
        lambda run: (run / "10/default/params.kernel/.zarray").unlink(),
    ],
)
def test_copy_refuses_a_damaged_step_of_a_legacy_run(tmp_path, damage):
    for step in ("9", "10"):
        write_legacy_item(tmp_path / "run" / step / "default")
    damage(tmp_path / "run")
    with pytest.raises(FormatError):
        ckpttools.copy(tmp_path / "run", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    ckpttools.copy(tmp_path / "run", tmp_path / "copy", steps=[9])
    assert open_tree(tmp_path / "copy").metadata.step == 9


def test_copy_of_a_legacy_run_to_a_bucket_gets_commit_files(tmp_path, cloud):
    for step in ("9", "10"):
        write_legacy_item(tmp_path / "run" / step / "default")
    location = cloud.filled({}) / "copy"
    ckpttools.copy(tmp_path / "run", location)
    assert [step.step for step in ckpttools.ls(location).finished] == [9, 10]
    assert open_tree(location).metadata.step == 10


def test_copy_of_a_run_with_both_layouts_has_all_steps(tmp_path):
    shutil.copytree(ROOT / "fixtures/golden/llama3.1/maxtext_scanned/0", tmp_path / "run/5")
    write_legacy_item(tmp_path / "run/2/default")
    ckpttools.copy(tmp_path / "run", tmp_path / "copy")
    assert [step.step for step in ckpttools.ls(tmp_path / "copy").finished] == [2, 5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: shutil.rmtree(run / "10/default"), "no file checkpoint"),
        (lambda run: (run / "10/default/checkpoint").unlink(), "no file checkpoint"),
        (lambda run: (run / "9/commit_success.txt").touch(), "no commit_success.txt, which other steps have"),
        (lambda run: shutil.rmtree(run / "10/default/params.kernel"), "not of one checkpoint"),
        (lambda run: (run / "10/default/checkpoint").write_bytes(b"\x82\xa6params"), ""),
    ],
)
def test_legacy_run_with_a_damaged_latest_step_is_refused(tmp_path, change, message):
    """An older step would look like the weights that were asked for."""
    for step in ("9", "10"):
        write_legacy_item(tmp_path / "run" / step / "default")
    change(tmp_path / "run")
    output = run("hash", tmp_path / "run", code=3)
    assert message in output
    assert run("convert", "to-safetensors", tmp_path / "run", tmp_path / "out", code=3)
    assert [item.step for item in ckpttools.ls(tmp_path / "run").finished] == [9]
    assert open_tree(tmp_path / "run", ReadOptions(step=9)).keys() == LEGACY


@pytest.mark.parametrize(
    ("committed", "opened", "finished"),
    [((9, 10), 10, [9, 10]), ((9,), 9, [9]), ((), None, []), ((10,), 10, [10])],
)
def test_legacy_run_in_a_bucket_uses_commit_files(tmp_path, cloud, committed, opened, finished):
    for step in (9, 10):
        write_legacy_item(tmp_path / "run" / str(step) / "default")
        if step in committed:
            (tmp_path / "run" / str(step) / "commit_success.txt").touch()
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    location = cloud.filled({str(path.relative_to(tmp_path)): path.read_bytes() for path in files}) / "run"
    assert [item.step for item in ckpttools.ls(location).finished] == finished
    if opened is None:
        with pytest.raises(FormatError, match="no commit_success"):
            open_tree(location)
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert open_tree(location).metadata.step == opened
    assert [item.category for item in caught] == [LaterStepWarning] * (opened == 9)


def _empty_directories(run):
    for number in range(100, 125):
        (run / str(number)).mkdir(parents=True)


def _arrays_in_numbered_directories(run):
    for number in range(100, 125):
        write(run / str(number) / "w", np.ones(2, "f4"))


def _new_steps(run):
    for number in range(100, 125):
        shutil.copytree(ROOT / "fixtures/golden/llama3.1/maxtext_scanned/0", run / str(number))


@pytest.mark.parametrize("name", ["{}/default", "{}", "checkpoints/{}/state"])
@pytest.mark.parametrize("add", [_empty_directories, _arrays_in_numbered_directories])
def test_any_step_identifies_a_legacy_run(tmp_path, name, add):
    root = tmp_path / "run"
    for step in (1, 2, 3):
        write_legacy_item(root / name.format(step))
    add(root / "checkpoints" if name.startswith("checkpoints") else root)
    listing = ckpttools.ls(root)
    assert len(listing.steps) == 28 and [step.step for step in listing.finished] == [1, 2, 3]
    assert listing.latest == 124
    pruned = ckpttools.prune.plan(listing.path, keep_last=1).report
    assert {step.outcome for step in pruned.steps} == {"left alone"} and len(pruned.steps) == 28
    for command in (("convert", "to-safetensors", root, tmp_path / "out"), ("copy", root, tmp_path / "copy")):
        assert "no file checkpoint and no step metadata" in run(*command, code=3)
    assert open_tree(root, ReadOptions(step=3)).metadata.step == 3
    ckpttools.copy(root, tmp_path / "copy", steps=[2])
    assert [step.step for step in ckpttools.ls(tmp_path / "copy").finished] == [2]


def test_old_steps_before_many_new_ones_are_listed_and_copied(tmp_path):
    for step in (1, 2, 3):
        write_legacy_item(tmp_path / "run" / str(step) / "default")
    _new_steps(tmp_path / "run")
    expected = [1, 2, 3, *range(100, 125)]
    assert [step.step for step in ckpttools.ls(tmp_path / "run").finished] == expected
    ckpttools.copy(tmp_path / "run", tmp_path / "copy")
    assert [step.step for step in ckpttools.ls(tmp_path / "copy").finished] == expected


def test_steps_with_another_prefix_are_not_part_of_a_new_run(tmp_path):
    shutil.copytree(ROOT / "fixtures/golden/llama3.1/maxtext_scanned/0", tmp_path / "run/5")
    write_legacy_item(tmp_path / "run/backup_2/default")
    assert [step.step for step in ckpttools.ls(tmp_path / "run").steps] == [5]


def test_legacy_steps_are_found_next_to_other_numbered_directories(tmp_path):
    (tmp_path / "run/2023").mkdir(parents=True)
    for step in (9, 10):
        write_legacy_item(tmp_path / f"run/checkpoint_{step}")
    assert [step.step for step in ckpttools.ls(tmp_path / "run").finished] == [9, 10]
    assert open_tree(tmp_path / "run").metadata.step == 10


def test_single_legacy_step_respects_commit_files_and_the_given_step(tmp_path, cloud):
    write_legacy_item(tmp_path / "run/10/default")
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    location = cloud.filled({str(path.relative_to(tmp_path)): path.read_bytes() for path in files}) / "run"
    with pytest.raises(FormatError, match=r"no commit_success\.txt"):
        open_tree(location)
    with pytest.raises(UsageError, match="step 8 does not exist"):
        open_tree(tmp_path / "run", ReadOptions(step=8))


def test_probing_a_run_of_new_steps_lists_each_step_at_most_once(tmp_path, monkeypatch):
    _new_steps(tmp_path / "run")
    listed = collections.Counter()
    entries = Location.entries
    monkeypatch.setattr(Location, "entries", lambda self: (listed.update([self.name]), entries(self))[1])
    directory = parse(tmp_path / "run")
    assert legacy_run_in(directory) is None
    assert {name: count for name, count in listed.items() if count > 1} == {}
    known = [directory / str(number) for number in range(100, 125)]
    listed.clear()
    assert legacy_run_in(directory, known) is None and listed == {"run": 1}


def test_legacy_steps_among_new_steps_are_never_skipped(tmp_path):
    shutil.copytree(ROOT / "fixtures/golden/llama3.1/maxtext_scanned/0", tmp_path / "run/5")
    write_legacy_item(tmp_path / "run/2/default")
    assert open_tree(tmp_path / "run").metadata.step == 5
    assert str(tmp_path / "run/2") in ckpt("inspect", "tree", tmp_path / "run", "--step", "2").output
    write_legacy_item(tmp_path / "run/10/default")
    assert str(tmp_path / "run/10") in run("hash", tmp_path / "run", code=3)
    listed = ckpttools.ls(tmp_path / "run")
    assert [item.step for item in listed.finished] == [2, 5, 10] and listed.latest == 10


def _remove_items(run):
    shutil.rmtree(run / "10/default")


def _remove_state(run):
    (run / "10/default/checkpoint").unlink()


def _commit_earlier_steps(run):
    (run / "9/commit_success.txt").touch()


def _commit_later_step(run):
    (run / "10/commit_success.txt").touch()


def _empty_later_step(run):
    (run / "11").mkdir()


def _empty_earlier_step(run):
    (run / "5").mkdir()


@pytest.mark.parametrize(
    ("change", "step"),
    [
        *((_remove_items, 10), (_remove_state, 10), (_commit_earlier_steps, 10), (_commit_later_step, 9)),
        *((_empty_later_step, 11), (_empty_earlier_step, 5)),
    ],
)
@pytest.mark.parametrize("directory", ["run", "run/checkpoints"])
def test_doctor_names_the_legacy_step_that_blocks_a_run(tmp_path, change, step, directory):
    for number in ("9", "10"):
        write_legacy_item(tmp_path / directory / number / "default")
    assert ckpttools.doctor(tmp_path / "run").healthy
    change(tmp_path / directory)
    run("copy", tmp_path / "run", tmp_path / "copy", code=3)
    location = tmp_path / directory / str(step)
    for asked in ("run", directory, *([f"{directory}/{step}"] if any(location.iterdir()) else [])):
        result = ckpttools.doctor(tmp_path / asked)
        assert [finding.location for finding in result.findings if finding.level == "error"] == [
            str(location)
        ]
        assert "not known to be a finished save" in result.findings[0].what
    assert ckpttools.doctor(tmp_path / directory / ("9" if step == 10 else "10")).healthy
    for path in (location, *location.rglob("*")):
        os.utime(path, (0, 0))
    run("doctor", tmp_path / "run", "--fix", "set-aside")
    assert ckpttools.doctor(tmp_path / "run").healthy
    ckpttools.copy(tmp_path / "run", tmp_path / "copy")
    assert open_tree(tmp_path / "run").keys() == LEGACY


def test_doctor_reports_a_legacy_step_after_new_steps(tmp_path):
    shutil.copytree(ROOT / "fixtures/golden/llama3.1/maxtext_scanned/0", tmp_path / "run/5")
    write_legacy_item(tmp_path / "run/2/default")
    (tmp_path / "run/3").mkdir()
    assert ckpttools.doctor(tmp_path / "run").healthy
    write_legacy_item(tmp_path / "run/10/default")
    run("convert", "to-safetensors", tmp_path / "run", tmp_path / "out", code=3)
    result = ckpttools.doctor(tmp_path / "run")
    assert [item.location for item in result.findings if item.level == "error"] == [str(tmp_path / "run/10")]


@pytest.mark.parametrize("committed", [(9,), ()])
def test_doctor_reports_legacy_steps_without_commit_files_in_a_bucket(tmp_path, cloud, committed):
    for step in (9, 10):
        write_legacy_item(tmp_path / "run" / str(step) / "default")
        if step in committed:
            (tmp_path / "run" / str(step) / "commit_success.txt").touch()
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    location = cloud.filled({str(path.relative_to(tmp_path)): path.read_bytes() for path in files}) / "run"
    result = ckpttools.doctor(location)
    level = "warning" if committed else "error"
    found = {item.location: item.level for item in result.findings if "commit_success.txt" in item.what}
    assert found == {str(location / str(step)): level for step in (9, 10) if step not in committed}
