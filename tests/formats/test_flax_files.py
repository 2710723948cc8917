"""States that Flax wrote with msgpack: read to the bit, by ranges, with neither Flax nor msgpack."""

import json
import re
import shutil

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.command_line import ckpt, run
from support.internals import ReadOptions, open_tree

import ckpttools
from ckpttools import CheckpointError, Empty, FormatError, Text, UsageError

serialization = pytest.importorskip("flax.serialization")
msgpack = pytest.importorskip("msgpack")
checkpoints = pytest.importorskip("flax.training.checkpoints")

VALUES = {
    "embed": {"kernel": np.arange(12, dtype="f4").reshape(3, 4)},
    "layers": {"0": {"bias": np.ones(3, "f2")}, "1": {"bias": np.zeros((0, 2), "i4")}},
    "step": 7,
    "rate": 1e-3,
    "done": True,
    "none": None,
    "empty": {},
    "name": "x",
    "number": np.float32(3),
    "complex": 1j,
}


def written(path, value=None):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(serialization.msgpack_serialize(VALUES if value is None else value))
    return path


def test_flax_file_is_read(tmp_path):
    tree = open_tree(written(tmp_path / "flax_model.msgpack"))
    assert np.array_equal(tree["embed/kernel"].read(), VALUES["embed"]["kernel"])
    assert tree["layers", "0", "bias"].dtype.name == "float16" and tree["layers", "1", "bias"].shape == (0, 2)
    assert tree["step"].read() == 7 and tree["rate"].read() == 1e-3 and bool(tree["done"].read())
    assert tree["number"].read() == 3 and tree["number"].dtype.name == "float32"
    assert tree["none",] == Empty("None") and tree["empty",] == Empty("Dict") and tree["name",] == Text("x")
    assert {("step",), ("rate",), ("done",)} == tree.metadata.scalars
    assert "complex (a complex number)" in tree.metadata.notes.remarks[0]


def test_bfloat16_trainer_states_are_read(tmp_path):
    """`flax.training.checkpoints` writes files without an ending."""
    import jax.numpy as jnp

    weights = jnp.arange(6, dtype=jnp.bfloat16)
    file = written(tmp_path / "checkpoint_1000", {"params": {"w": weights}})
    assert open_tree(file)["params/w"].read().tobytes() == np.asarray(weights).tobytes()
    assert "flax-msgpack" in ckpt("inspect", "tree", file).output
    run("convert", "to-safetensors", file, tmp_path / "out")
    run("verify", tmp_path / "out", "--against", file)


def test_arrays_stored_in_pieces_are_read(tmp_path, monkeypatch):
    """Those of more than a gibibyte; here of more than 20 bytes."""
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 20)
    values = {"w": np.arange(60, dtype="i4").reshape(3, 4, 5), "v": np.arange(5, dtype="i2")}
    file = written(tmp_path / "m.msgpack", values)
    assert b"__msgpack_chunked_array__" in file.read_bytes()
    tree = open_tree(file)
    assert np.array_equal(tree["w"].read(), values["w"]) and np.array_equal(tree["v"].read(), values["v"])


def test_sharded_directory_is_read_by_its_index(tmp_path):
    written(tmp_path / "flax_model-00001-of-00002.msgpack", {"a": {"b": np.ones(3, "f4")}})
    written(tmp_path / "flax_model-00002-of-00002.msgpack", {"c": np.ones(3, "f4")})
    names = {"a/b": "flax_model-00001-of-00002.msgpack", "c": "flax_model-00002-of-00002.msgpack"}
    index = tmp_path / "flax_model.msgpack.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    assert len(open_tree(tmp_path).arrays) == 2
    index.write_text(json.dumps({"weight_map": {**names, "d": names["c"]}}))
    with pytest.raises(FormatError, match="do not hold the same"):
        open_tree(tmp_path)
    index.unlink()
    (tmp_path / "flax_model-00001-of-00002.msgpack").unlink()
    with pytest.raises(FormatError, match="missing"):
        open_tree(tmp_path)


def test_streamed_state_is_read(tmp_path):
    """EasyLM packs each array by itself, beside its path."""
    packer = msgpack.Packer()
    parts = {("params", "w"): np.arange(6, dtype="f4"), ("params", "b"): np.ones(2, "f2")}
    file = tmp_path / "streaming_params"
    file.write_bytes(
        b"".join(packer.pack((key, serialization.to_bytes(item))) for key, item in parts.items())
    )
    tree = open_tree(file)
    assert {path: item.read().tolist() for path, item in tree.arrays.items()} == {
        path: item.tolist() for path, item in parts.items()
    }


LEAVES = st.one_of(
    *(st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.text()),
    st.builds(
        lambda dtype, shape: np.arange(np.prod(shape)).astype(dtype).reshape(shape),
        st.sampled_from(("f4", "i1", "u2", "f8", "?")),
        st.lists(st.integers(0, 3), max_size=3),
    ),
)
# Without limits a tree is thousands of leaves, and a run takes from 6 to 40 seconds.
KEYS = st.text(max_size=8)
TREES = st.dictionaries(
    KEYS,
    st.recursive(LEAVES, lambda below: st.dictionaries(KEYS, below, max_size=4), max_leaves=12),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60)
@example({"/": None, "": {"": None}})
# Beyond 15 keys, and 31 bytes of one, msgpack writes their number in bytes of its own.
@example({str(k) * 20: {str(n): n for n in range(20)} for k in range(17)})
@example({"x" * 300: "y" * 70_000})
# The ends of what a number of each kind can say.
@example({str(n): n for k in (5, 7, 8, 15, 16, 31, 32, 63) for n in (2**k - 1, 1 - 2**k, -(2**k))})
@given(TREES)
def test_any_state_round_trips(tmp_path_factory, value):
    file = tmp_path_factory.mktemp("f") / "m.msgpack"
    serialized = serialization.msgpack_serialize(value)
    file.write_bytes(serialized)
    tree = open_tree(file)
    back = serialization.msgpack_restore(serialized)
    for path, leaf in tree.items():
        truth = back
        for key in path:
            truth = truth[key]
        if path in tree.arrays:
            assert leaf.read().tobytes() == np.asarray(truth, leaf.dtype.numpy).tobytes()
            assert leaf.shape == np.shape(truth)
        else:
            assert leaf == (
                Text(truth) if isinstance(truth, str) else Empty("None" if truth is None else "Dict")
            )


@settings(max_examples=150)
@given(st.binary(max_size=12), st.integers(0, 400), st.integers(0, 12))
def test_damaged_file_is_refused_or_read(tmp_path_factory, noise, at, cut):
    """Bytes put in and taken out anywhere: an error of ours, or other values; never another error."""
    file = tmp_path_factory.mktemp("f") / "m.msgpack"
    data = serialization.msgpack_serialize(VALUES)
    at = min(at, len(data))
    file.write_bytes(data[:at] + noise + data[at + cut :])
    try:
        tree = open_tree(file)
        for array in tree.arrays.values():
            array.read()
    except CheckpointError as error:
        assert error.location


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\xdf\xff\xff\xff\xff", "it is truncated"),
        (b"\x81\xa1a\xdd\xff\xff\xff\xff", "it is truncated"),
        (b"\x81\xa1a" + b"\x91" * 300 + b"\xc0", "nested more than"),
        (b"\x82\xa1a\x01\xa1a\x01", "duplicate key"),
        (b"\x81\xa1a\xc1", "no value starts with 0xc1"),
        (b"\x81\xa1a\xc7\x04\x01\x93\x90\xa1x\xc4\x00", "it is truncated"),
        (b"\x81\xa1a\xc7\x06\x01\x93\x90\xa1x\xc4\x00", "an unknown dtype: 'x'"),
        (b"\x81\x90\xc0", "a list used as a key"),
        (b"\x81\xa1a\xa1\xff", "a text that is not UTF-8"),
        (b"\x80\xc0", "1 bytes left over"),
    ],
)
def test_hostile_files_are_refused(tmp_path, data, says):
    (tmp_path / "m.msgpack").write_bytes(data)
    assert says in run("hash", tmp_path / "m.msgpack", code=3)


def test_oversized_values_are_bounded(tmp_path, monkeypatch):
    (tmp_path / "m.msgpack").write_bytes(b"\x81\xa1a\xdd\x00\x20\x00\x00" + b"\xc0" * (1 << 21))
    assert "more than 2,000,000 values" in run("hash", tmp_path / "m.msgpack", code=3)


# ---- beside arrays of tensorstore


def zarr_array(path, value):
    import tensorstore

    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": str(path)},
        "metadata": {
            "shape": value.shape,
            "chunks": value.shape,
            "dtype": "<f4",
            "compressor": {"id": "gzip"},
        },
    }
    tensorstore.open(spec, create=True, open=True).result().write(value).result()


@pytest.mark.parametrize("how", ("t5x", "orbax"))
def test_state_with_tensorstore_arrays_is_explained(tmp_path, how):
    """T5X's specification of tensorstore, and the placeholder of the first versions of Orbax."""
    value, run_directory = np.arange(12, dtype="f4").reshape(3, 4), tmp_path
    tmp_path = tmp_path / "checkpoint_1000"
    zarr_array(tmp_path / "target.decoder.kernel", value)
    spec = {
        "driver": "zarr",
        "dtype": "float32",
        "kvstore": {"driver": "file", "path": "target.decoder.kernel"},
    }
    named = spec if how == "t5x" else "PLACEHOLDER://target.decoder.kernel"
    declared = {"version": 3, "optimizer": {"target": {"decoder": {"kernel": named, "bias": value[0]}}}}
    written(tmp_path / "checkpoint", declared)
    tree = open_tree(tmp_path)
    assert np.array_equal(tree["optimizer/target/decoder/kernel"].read(), value)
    assert np.array_equal(tree["optimizer/target/decoder/bias"].read(), value[0])
    # Of a run with one step it is that which is meant: small arrays lie in a file of it.
    assert open_tree(run_directory).keys() == tree.keys()
    assert "\n1 step, 1 checkpoint of zarr-tree\n" in ckpt("doctor", run_directory).output
    zarr_array(tmp_path / "target.other", value)
    assert "here, but not named there (1):\n    target.other" in run("hash", tmp_path, code=3)
    assert "not named there (1): target.other; expected" in " ".join(ckpt("doctor", tmp_path).output.split())
    shutil.rmtree(tmp_path / "target.other")
    shutil.rmtree(tmp_path / "target.decoder.kernel")
    assert "separate directories" in run("hash", tmp_path / "checkpoint", code=3)


# ---- directories of states


@pytest.mark.parametrize(
    ("names", "latest", "step"),
    [
        (["checkpoint"], "checkpoint", None),
        (["checkpoint_0"], "checkpoint_0", 0),
        (["checkpoint_9", "checkpoint_10"], "checkpoint_10", 10),
        (["checkpoint_99", "checkpoint_100", "checkpoint_0007"], "checkpoint_100", 100),
        (["checkpoint", "checkpoint_3"], "checkpoint_3", 3),
        (["checkpoint_3", "checkpoint_tmp"], "checkpoint_3", 3),
        (["checkpoint_3", "checkpoint_12.tmp", "checkpoint_13_gda"], "checkpoint_3", 3),
        (["checkpoint_1.5", "checkpoint_1.25"], "checkpoint_1.5", None),
        (["checkpoint_2", "checkpoint_2.5"], "checkpoint_2.5", None),
        (["checkpoint_2", "config.json", "events.out"], "checkpoint_2", 2),
    ],
)
def test_directory_of_states_opens_the_latest(tmp_path, names, latest, step):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in names:
        written(folder / name, {"name": name, "w": np.ones(3, "f4")})
    if "config.json" in names:
        (folder / "config.json").write_text("{}")
    tree = open_tree(folder)
    assert tree["name",] == Text(latest) and tree.metadata.step == step
    assert tree.metadata.location == str(folder / latest)
    assert f"run/{latest}\n" in ckpt(folder).output
    numbered = [name for name in names if re.fullmatch(r"checkpoint_[\d.]+", name)]
    count = "1 checkpoint" if len(numbered) < 2 else f"{len(numbered)} checkpoints"
    assert f"\n{count} of flax-msgpack\n" in ckpt("doctor", folder).output


@settings(max_examples=30)
@given(st.sets(st.integers(0, 10**6), min_size=1, max_size=5), st.data())
def test_step_selects_a_state(tmp_path_factory, steps, data):
    folder = tmp_path_factory.mktemp("f")
    for number in steps:
        written(folder / f"checkpoint_{number}", {"at": number})
    assert open_tree(folder)["at"].read() == max(steps)
    chosen = data.draw(st.sampled_from(sorted(steps)))
    assert open_tree(folder, ReadOptions(step=chosen))["at"].read() == chosen
    with pytest.raises(UsageError, match=r"step \d+ does not exist"):
        open_tree(folder, ReadOptions(step=10**6 + 1))


@pytest.mark.parametrize("left", (0, 1, 20))
def test_damaged_latest_state_is_not_replaced_by_an_older_one(tmp_path, left):
    written(tmp_path / "checkpoint_9")
    latest = written(tmp_path / "checkpoint_10")
    latest.write_bytes(latest.read_bytes()[:left])
    assert "checkpoint_10" in run("hash", tmp_path, code=3)


@pytest.mark.parametrize("step", (1, 2, 10))
@pytest.mark.parametrize("left", (0, 1, 5, -9))
def test_doctor_examines_every_state_in_a_directory(tmp_path, step, left):
    folder = tmp_path / "run"
    folder.mkdir()
    for number in (1, 2, 10):
        written(folder / f"checkpoint_{number}", {"w": np.ones(9, "f4")})
    damaged = folder / f"checkpoint_{step}"
    damaged.write_bytes(damaged.read_bytes()[:left])
    report = ckpttools.doctor(folder)
    assert [finding.location for finding in report.findings if finding.level == "error"] == [str(damaged)]
    assert report.examined == ("3 checkpoints of flax-msgpack",)
    latest = 2 if step == 10 else 10
    assert f"the latest other state is {folder}/checkpoint_{latest}" in report.findings[0].hint
    assert str(damaged) in run("copy", folder, tmp_path / "copy", code=3) and not (tmp_path / "copy").exists()
    assert {item.step for item in ckpttools.ls(folder).steps if item.unfinished_reason} == {step}


def test_zero_filled_state_is_damaged(tmp_path):
    written(tmp_path / "checkpoint_2")
    (tmp_path / "checkpoint_1").write_bytes(bytes(100))
    (tmp_path / "checkpoint_3x").write_bytes(bytes(100))
    assert [finding.location for finding in ckpttools.doctor(tmp_path).findings] == [
        str(tmp_path / "checkpoint_1")
    ]


def test_files_of_other_programs_are_not_flax_states(tmp_path):
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-1"')
    (tmp_path / "checkpoint_3").write_bytes(b"PK\x03\x04")
    assert "is not a checkpoint of a known format" in run("hash", tmp_path, code=3)


def test_multiprocess_placeholders_are_not_read_as_text(tmp_path):
    """`flax.training.checkpoints` writes them next to the file, and a placeholder into it."""
    file = written(tmp_path / "checkpoint_10", {"w": "//GDAPlaceholder:w", "b": np.ones(3, "f4")})
    zarr_array(tmp_path / "checkpoint_10_gda/w", np.ones((2, 2), "f4"))
    for path in (file, tmp_path):
        told = run("hash", path, code=3)
        assert "some arrays are in separate directories" in told and "checkpoint_10_gda" in told


class TestStepsInFilesAndDirectories:
    """`flax.training.checkpoints` writes files, or directories with Orbax, and lists both as one run."""

    @pytest.fixture
    def run_of(self, tmp_path):
        import orbax.checkpoint as ocp

        def built(**steps):
            # In order, as Flax removes steps later than the one that it writes.
            for number, kind in sorted(
                (int(name.removeprefix("step_")), kind) for name, kind in steps.items()
            ):
                state = {"w": np.full(3, number, np.float32), "step": number}
                location = tmp_path / "run" / f"checkpoint_{number}"
                if kind == "orbax":
                    with ocp.PyTreeCheckpointer() as checkpointer:
                        checkpointer.save(location, state)
                else:
                    location.parent.mkdir(exist_ok=True)
                    location.write_bytes(serialization.to_bytes(state))
            return tmp_path / "run"

        return built

    @pytest.mark.parametrize(
        "steps",
        [
            {"step_9": "orbax", "step_10": "msgpack"},
            {"step_9": "msgpack", "step_10": "orbax"},
            {"step_1": "msgpack", "step_2": "orbax", "step_30": "msgpack", "step_100": "orbax"},
            {"step_2": "orbax", "step_3": "orbax", "step_1": "msgpack"},
        ],
        ids=lambda steps: "+".join(steps),
    )
    def test_latest_step_and_listing_match_flax(self, run_of, steps):
        run = run_of(**steps)
        expected = [int(step) for step in checkpoints.available_steps(run)]
        assert sorted(expected) == [item.step for item in ckpttools.ls(run).steps]
        assert all(item.unfinished_reason is None for item in ckpttools.ls(run).steps)
        for step in (None, *expected):
            tree = ckpttools.open(run, step=step)
            restored = checkpoints.restore_checkpoint(run, None, step=step)
            assert tree.metadata.step == restored["step"]
            assert np.array_equal(tree.arrays["w",].read(), restored["w"])

    def test_damaged_latest_file_is_an_error(self, run_of):
        run = run_of(step_9="orbax", step_10="msgpack")
        (run / "checkpoint_10").write_bytes((run / "checkpoint_10").read_bytes()[:-4])
        with pytest.raises(FormatError):
            ckpttools.open(run)
        assert ckpttools.open(run, step=9).metadata.step == 9
        assert [step.unfinished_reason is None for step in ckpttools.ls(run).steps] == [True, False]

    def test_copy_leaves_out_a_damaged_file_and_names_it(self, run_of, tmp_path):
        run = run_of(step_1="msgpack", step_2="msgpack", step_9="orbax")
        (run / "checkpoint_2").write_bytes((run / "checkpoint_2").read_bytes()[:-4])
        report = ckpttools.copy(run, tmp_path / "copy")
        assert [*report.omitted] == ["checkpoint_2"] and (tmp_path / "copy/checkpoint_1").is_file()

    def test_prune_keeps_single_file_states(self, run_of):
        run = run_of(step_1="msgpack", step_2="orbax", step_3="orbax")
        fates = {fate.step: fate.outcome for fate in ckpttools.prune(run, keep_last=1).steps}
        assert fates == {1: "left alone", 2: "deleted", 3: "kept"}
        assert [int(step) for step in checkpoints.available_steps(run)] == [1, 3]

    def test_directories_with_other_names_are_not_steps(self, run_of):
        run = run_of(step_9="orbax", step_10="msgpack")
        (run / "checkpoint_9").rename(run / "9")
        assert ckpttools.open(run).metadata.step == 9


@pytest.mark.parametrize("chosen", [[100], [200], [100, 300], [100, 200, 300], 1, 2, 5])
def test_copy_copies_the_selected_states(tmp_path, chosen):
    for step in (100, 200, 300):
        written(tmp_path / f"run/checkpoint_{step}", {"w": np.full(3, step, "f4")})
    (tmp_path / "run/config.json").write_text("{}")
    options = ["--latest", chosen] if type(chosen) is int else [f"--step={step}" for step in chosen]
    result = ckpt("copy", tmp_path / "run", tmp_path / "out", *map(str, options))
    assert result.exit_code == 0, result.output
    expected = [100, 200, 300][-chosen:] if type(chosen) is int else chosen
    names = {f"checkpoint_{step}" for step in expected} | {"config.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names


def test_copy_of_a_missing_state_lists_the_steps(tmp_path):
    written(tmp_path / "run/checkpoint_100", {"w": np.ones(3, "f4")})
    result = ckpt("copy", tmp_path / "run", tmp_path / "out", "--step", "7")
    assert result.exit_code == 2
    assert "step 7 does not exist" in result.output
    assert "one of 100" in result.output
    assert not (tmp_path / "out").exists()


def test_copy_of_a_damaged_state_is_refused(tmp_path):
    whole = written(tmp_path / "run/checkpoint_100", {"w": np.ones(300, "f4")})
    (tmp_path / "run/checkpoint_200").write_bytes(whole.read_bytes()[:200])
    assert ckpt("copy", tmp_path / "run", tmp_path / "a", "--step", "200").exit_code == 3
    result = ckpt("copy", tmp_path / "run", tmp_path / "b", "--latest", "1")
    assert result.exit_code == 0, result.output
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["checkpoint_100"]


def test_verify_names_the_compared_state(tmp_path):
    for step in (100, 200):
        written(tmp_path / f"run/checkpoint_{step}", {"w": np.full(3, step, "f4")})
    latest = ckpt("verify", tmp_path / "run", "--against", tmp_path / "run").output
    assert latest.count("checkpoint_200") == 2
    first = ckpt("verify", tmp_path / "run", "--step", "100", "--against", tmp_path / "run/checkpoint_100")
    assert first.exit_code == 0
    assert first.output.count("checkpoint_100") == 2
