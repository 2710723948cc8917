"""Items without arrays, and steps with several items, as Orbax writes and restores them."""

from __future__ import annotations

import json
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from support.command_line import ckpt, run, succeed

import ckpttools
from ckpttools import ChosenItemWarning, FormatError, Text

WITHOUT_ARRAYS = {
    "strings": {"config": '{"class_name": "Functional"}', "name": "model"},
    "one_string": "text",
    "nested_strings": {"a": [{"b": "x"}, "y"], "c": ["z", None]},
    "unicode": {"ü": "ä/ö", "new\nline": ""},
    "empty_nodes": {"a": None, "b": {}, "c": []},
    "strings_and_empty_nodes": {"a": None, "b": "x", "c": {"d": {}}},
}
ONLY_NUMBERS = {
    "numbers": {"step": 3, "rate": 0.5, "flag": True},
    "one_number": 5,
    "numbers_and_strings": {"step": 7, "name": "x", "none": None},
    "numpy_number": {"step": np.int64(3_000_000_017)},
}
TREES = WITHOUT_ARRAYS | ONLY_NUMBERS
MODEL = {
    "decoder": {"kernel": jnp.arange(12.0).reshape(3, 4), "bias": jnp.ones(4)},
    "head": {"kernel": jnp.ones((4, 2), jnp.bfloat16)},
}
NUM_MODEL = len(jax.tree.leaves(MODEL))
OPTIMIZERS = {
    "adam": optax.adamw(1e-3).init(MODEL),
    "momentum": optax.sgd(1e-3, momentum=0.9).init(MODEL),
    "lion": optax.lion(1e-3).init(MODEL),
}


def saved(path, tree, **how):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**how)) as checkpointer:
        checkpointer.save(path, tree)
    return path


def saved_step(run_directory, step=1, **items):
    with ocp.CheckpointManager(run_directory) as manager:
        trees = {name: ocp.args.PyTreeSave(tree) for name, tree in items.items()}
        manager.save(step, args=ocp.args.Composite(**trees))
    return run_directory / str(step)


def restored(path):
    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(path)


def assert_same_leaves(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        is_array = isinstance(b, np.ndarray | jax.Array)
        assert isinstance(a, np.ndarray | jax.Array) if is_array else type(a) is type(b)
        assert np.array_equal(np.asarray(a), np.asarray(b))


class TestItemsWithoutArrays:
    @pytest.mark.parametrize("name", TREES)
    @pytest.mark.parametrize("use_ocdbt", [True, False])
    def test_tree_survives_a_conversion(self, tmp_path, name, use_ocdbt):
        source = saved(tmp_path / "0", TREES[name], use_ocdbt=use_ocdbt, use_zarr3=use_ocdbt)
        expected = restored(source)
        assert (source / "manifest.ocdbt").exists() == (use_ocdbt and name in ONLY_NUMBERS)
        texts = [leaf.value for leaf in ckpttools.open(source).values() if isinstance(leaf, Text)]
        assert texts == [leaf for leaf in jax.tree.leaves(expected) if isinstance(leaf, str)]
        ckpttools.convert(source, tmp_path / "out", format="orbax", level="item", ocdbt=use_ocdbt)
        assert_same_leaves(restored(tmp_path / "out"), expected)

    @pytest.mark.parametrize("name", WITHOUT_ARRAYS)
    def test_commands_agree_with_orbax(self, tmp_path, name):
        step = saved_step(tmp_path / "run", pytree=MODEL, model_config=WITHOUT_ARRAYS[name])
        assert not (step / "model_config" / "manifest.ocdbt").exists()
        assert (
            run("doctor", step.parent).splitlines()[-1] == "no errors, 1 info; values not checked (--values)"
        )
        (listing,) = ckpttools.ls(step.parent).steps
        assert listing.unfinished_reason is None
        assert [(item.name, item.kind) for item in listing.items] == [
            ("model_config", "other"),
            ("pytree", "parameters"),
        ]
        run("copy", step.parent, tmp_path / "copy")
        with ocp.CheckpointManager(tmp_path / "copy") as manager:
            both = {"model_config": ocp.args.PyTreeRestore(), "pytree": ocp.args.PyTreeRestore()}
            got = manager.restore(1, args=ocp.args.Composite(**both))
        assert_same_leaves(got["model_config"], restored(step / "model_config"))
        assert_same_leaves(got["pytree"], MODEL)
        with pytest.warns(ChosenItemWarning, match="pytree of .* is opened; open model_config"):
            assert len(ckpttools.open(step.parent).arrays) == NUM_MODEL

    @pytest.mark.parametrize("name", ["numbers", "numbers_and_strings"])
    def test_missing_index_of_numbers_is_an_error(self, tmp_path, name):
        source = saved(tmp_path / "0", ONLY_NUMBERS[name])
        shutil.rmtree(source / "ocdbt.process_0")
        (source / "manifest.ocdbt").unlink()
        with pytest.raises(FormatError, match=r"no manifest\.ocdbt"):
            ckpttools.open(source)
        assert "no manifest.ocdbt" in run("doctor", source, code=1)
        with pytest.raises(ValueError, match="NOT_FOUND"):
            restored(source)

    def test_lost_strings_are_an_error(self, tmp_path):
        source = saved(tmp_path / "0", WITHOUT_ARRAYS["strings"])
        (source / "_strings.json").unlink()
        result = ckpt("inspect", "tree", source)
        assert result.exit_code in (3, 5) and "_strings.json" in result.output
        assert "_strings.json" in run("doctor", source, code=1)

    def test_damaged_metadata_needs_an_index(self, tmp_path):
        source = saved(tmp_path / "0", WITHOUT_ARRAYS["strings"])
        document = json.loads((source / "_METADATA").read_text())
        document["tree_metadata"] = {"('a',)": None}
        (source / "_METADATA").write_text(json.dumps(document))
        assert ckpt("inspect", "tree", source).exit_code == 3
        assert ckpt("doctor", source).exit_code == 1


class TestStepsWithSeveralItems:
    @pytest.mark.parametrize(
        "items",
        [
            {"pytree": MODEL, "model_config": {"config": "{}"}},
            {"a": {"x": "y"}, "b": {"x": "z"}},
            {"encoder": {"w": jnp.ones(2)}, "decoder": {"w": jnp.ones(3)}},
            {"params": MODEL, "opt_state": OPTIMIZERS["adam"], "rng": {"key": jnp.zeros(2, jnp.uint32)}},
            {"state": MODEL, "ema": MODEL, "opt": OPTIMIZERS["adam"]},
            {"state": MODEL, "meta": {"epoch": 3, "name": "run"}},
        ],
        ids=lambda items: "+".join(items),
    )
    def test_inspect_tree_shows_all_items(self, tmp_path, items):
        step = saved_step(tmp_path / "run", **items)
        report = json.loads(succeed("inspect", "tree", step, "--json").output)
        assert report["path"] == str(step) and set(report["items"]) == set(items)
        heads = {item["path"].split("/")[0] for item in report["arrays"]}
        assert heads == {name for name, of in report["items"].items() if of["num_arrays"]}
        for name, of in report["items"].items():
            leaves = [leaf for leaf in jax.tree.leaves(restored(step / name)) if leaf is not None]
            assert of["num_arrays"] + of["num_strings"] == len(leaves)
        text = succeed("inspect", "tree", step.parent, "--sharding").output
        assert all(f"{name} (" in text for name in items)

    @pytest.mark.parametrize(
        "items",
        [
            {"encoder": {"w": jnp.ones(2)}, "decoder": {"w": jnp.ones(3)}},
            {"state": MODEL, "ema": MODEL},
            {"state": MODEL, "ema": MODEL, "opt": OPTIMIZERS["adam"]},
            {"state": MODEL, "opt": OPTIMIZERS["adam"], "data": {"position": 3}},
        ],
        ids=lambda items: "+".join(items),
    )
    def test_conversion_requires_a_choice_of_item(self, tmp_path, items):
        step = saved_step(tmp_path / "run", **items)
        for command in (("convert", "to-safetensors"), ("convert", "to-orbax"), ("strip-optimizer",)):
            output = run(*command, step, tmp_path / "out", code=3)
            assert "there are several items" in output and f"such as {step}/" in output
            assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        "others",
        [
            {"opt_state": OPTIMIZERS["adam"]},
            {"optimizer": OPTIMIZERS["adam"], "rng": {"key": jnp.zeros(2, jnp.uint32)}},
            {"config": {"text": "x"}},
            {"meta": {"epoch": 3}},
        ],
        ids="+".join,
    )
    def test_conversion_opens_the_only_model_and_names_other_items(self, tmp_path, others):
        step = saved_step(tmp_path / "run", weights=MODEL, **others)
        output = run("convert", "to-safetensors", step, tmp_path / "out")
        assert f"weights of {step} is opened; open" in output
        assert all(name in output for name in others)
        assert len(ckpttools.open(tmp_path / "out").arrays) == NUM_MODEL

    def test_only_item_with_arrays_is_opened(self, tmp_path):
        step = saved_step(tmp_path / "run", model_config={"c": "x"}, opt=OPTIMIZERS["adam"])
        with pytest.warns(ChosenItemWarning, match="opt of .* is opened; open model_config"):
            assert ckpttools.open(step).metadata.item == "opt"

    def test_diff_of_steps_compares_all_items(self, tmp_path):
        other = jax.tree.map(lambda leaf: leaf + 1, OPTIMIZERS["adam"])
        a, b, c = (
            saved_step(tmp_path / name, model_params=MODEL, optimizer_state={"opt_state": state})
            for name, state in (("a", OPTIMIZERS["adam"]), ("b", OPTIMIZERS["adam"]), ("c", other))
        )
        run("diff", a, b)
        assert "optimizer_state" in run("diff", a, c, code=1)
        run("diff", a, b / "model_params")


@pytest.mark.parametrize(
    ("names", "optimizer"),
    [(("state", "opt"), "adam"), (("params", "optim"), "momentum"), (("model", "opt"), "lion")],
)
class TestTrainingStateInTwoItems:
    @pytest.fixture
    def step(self, tmp_path, optimizer, names):
        items = dict(zip(names, (MODEL, OPTIMIZERS[optimizer]), strict=True))
        return saved_step(tmp_path / "run", config={"text": "x"}, **items)

    def test_arrays_of_two_items_have_roles(self, step, names):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ChosenItemWarning)
            report = ckpttools.inspect(step)
        roles = {name: {a.role for a in report.arrays if a.path.split("/")[0] == name} for name in names}
        assert roles == {names[0]: {"parameter"}, names[1]: {"optimizer"}}
        (listing,) = ckpttools.ls(step.parent).steps
        kinds = {item.name: item.kind for item in listing.items}
        assert kinds == {names[0]: "parameters", names[1]: "optimizer", "config": "other"}

    def test_strip_keeps_the_model_item(self, tmp_path, step, names):
        run("strip-optimizer", step, tmp_path / "out")
        assert_same_leaves(restored(tmp_path / "out" / "0" / "items"), MODEL)

    def test_conversions_keep_both_items(self, tmp_path, step, names, optimizer):
        run("convert", "to-orbax", step.parent, tmp_path / "orbax", "--level", "item")
        got = restored(tmp_path / "orbax")
        assert set(got) == set(names)
        for name in names:
            assert_same_leaves(got[name], restored(step / name))
        run("convert", "to-safetensors", step, tmp_path / "tensors")
        assert ckpttools.open(tmp_path / "tensors").arrays.keys() == ckpttools.open(step).arrays.keys()
        run("diff", step, tmp_path / "orbax")

    def test_diff_compares_the_optimizer_item(self, tmp_path, step, names, optimizer):
        other = jax.tree.map(lambda leaf: leaf + 1, OPTIMIZERS[optimizer])
        changed = saved_step(tmp_path / "other", **{names[0]: MODEL, names[1]: other})
        output = run("diff", step, changed, code=1)
        assert f"{names[1]}/" in output and f"{names[0]}/" not in output.partition("Different")[0]
