"""ZeRO checkpoints of DeepSpeed: weights from the flat vectors of all processes, to the bit."""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command_line import ckpt, run
from support.internals import ReadOptions, dotted, open_tree
from support.torch_files import save, whole

import ckpttools
from ckpttools import FormatError, Region

FIXTURES = Path(__file__).parents[2] / "fixtures/torch/zero"
TRAINED = FIXTURES.parent / "deepspeed"


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_weights_match_the_deepspeed_script(stage):
    """`zero_to_fp32.py` of DeepSpeed 0.19.8 on the same files; stage 2 with gaps behind parameters."""
    theirs = open_tree(FIXTURES / f"stage{stage}.safetensors").arrays
    ours = open_tree(FIXTURES / f"stage{stage}").arrays
    assert ours.keys() == theirs.keys()
    for path, array in theirs.items():
        assert (ours[path].shape, ours[path].dtype) == (array.shape, array.dtype), path
        assert ours[path].read().tobytes() == array.read().tobytes(), path


@pytest.mark.parametrize("stage", (1, 3))
def test_zero_weights_match_deepspeed_scripts(stage):
    """Weights as `zero_to_fp32.py` has them; moments as `ds_to_universal.py` has them, read as its files."""
    files, both = TRAINED / f"stage{stage}", ReadOptions(with_optimizer=True)
    ours = open_tree(files / "global_step3", both).arrays
    for path, array in open_tree(f"{files}.safetensors").arrays.items():
        assert ours[path].read().astype(array.dtype.numpy).tobytes() == array.read().tobytes(), path
    assert ckpttools.open(files / "global_step3", with_optimizer=True).arrays.keys() == ours.keys()
    theirs = open_tree(files / "global_step3_universal", both).arrays
    assert ours.keys() - theirs.keys() <= {("optimizer_state", "step")}
    for path, array in theirs.items():
        assert (ours[path].shape, ours[path].dtype) == (array.shape, array.dtype), path
        assert ours[path].read().tobytes() == array.read().tobytes(), path


def test_universal_checkpoints_are_read(tmp_path):
    source = tmp_path / "c"
    shutil.copytree(TRAINED / "stage1", source)
    (source / "latest").unlink()
    run("convert", "to-safetensors", source, tmp_path / "out", "--with-optimizer")
    run("verify", tmp_path / "out", "--against", TRAINED / "stage1", "--with-optimizer")
    assert "deepspeed-universal" in ckpt("inspect", "tree", source).output
    zero = source / "global_step3_universal/zero"
    save(zero / "norm.bias/exp_avg.pt", {"param": "x"})
    assert "norm.bias/exp_avg.pt: not a tensor" in run("hash", source, "--with-optimizer", code=3)
    (zero / "head.weight/fp32.pt").unlink()
    assert "head.weight/fp32.pt" in run("hash", source, code=3)
    shutil.rmtree(zero / "head.weight")
    assert "parameters are missing:\n    head.weight" in run("hash", source, code=3)


def test_commands_accept_zero_checkpoints(tmp_path):
    source = FIXTURES / "stage3"
    run("convert", "to-safetensors", source, tmp_path / "out")
    run("verify", tmp_path / "out", "--against", source)
    assert "deepspeed-zero" in ckpt("inspect", "tree", source / "global_step7").output
    assert (
        "\n1 checkpoint of deepspeed-zero\n\nstructure and configuration OK" in ckpt("doctor", source).output
    )


def test_files_of_two_saves_are_refused(tmp_path):
    """With and without bf16_: of fp16 training that went on in bfloat16."""
    part = tmp_path / "c"
    shutil.copytree(FIXTURES / "stage1", part)
    file = part / "global_step7/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(file, file.with_name(file.name.removeprefix("bf16_")))
    assert "the directory has files of two saves" in run("hash", part, code=3)


def test_absurd_number_of_processes_is_refused(tmp_path):
    """It is asked for each of them: a file may say any number, and a name too."""
    step = write_zero(tmp_path / "z", 1, [{"a": np.ones(3, "f4")}], 1)
    state = {"zero_stage": 1, "partition_count": 1 << 60}
    save(step / "zero_pp_rank_0_mp_rank_00_optim_states.pt", {"optimizer_state_dict": state})
    with pytest.raises(FormatError, match="the number of processes"):
        open_tree(step)
    (tmp_path / "r").mkdir()
    save(tmp_path / "r/model_world_size_999999999999_rank_0.pt", {"a": whole(np.ones(3, "f4"))})
    with pytest.raises(FormatError, match="have an invalid number of processes"):
        open_tree(tmp_path / "r")


@pytest.mark.parametrize(
    ("counts", "frozen", "why"),
    [
        ([1, "2"], {}, "the number of processes"),
        ([1], ["a"], "shapes of parameters"),
        (1, {"a": "3"}, "shapes"),
    ],
)
def test_non_tensor_values_are_read(tmp_path, counts, frozen, why):
    step = write_zero(tmp_path / "z", 2, [{"a": np.ones(3, "f4")}], 1)
    kept = whole(np.ones(3, "f4"))
    state = {"zero_stage": 2, "partition_count": counts, "single_partition_of_fp32_groups": [kept]}
    save(step / "zero_pp_rank_0_mp_rank_00_optim_states.pt", {"optimizer_state_dict": state})
    declared = {"param_shapes": [{"a": (3,)}], "buffer_names": [], "frozen_param_shapes": frozen}
    save(step / "mp_rank_00_model_states.pt", {"module": {}, **declared})
    with pytest.raises(FormatError, match=why):
        open_tree(step)


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_parameter_without_elements_is_read(tmp_path, stage):
    group = {"a": np.ones(3, "f4"), "empty": np.zeros((0, 4), "f4"), "b": np.full(2, 7, "f4")}
    tree = open_tree(write_zero(tmp_path / "z", stage, [group], 2))
    assert tree["empty"].read().shape == (0, 4) and tree["b"].read().tolist() == [7, 7]


def test_unlisted_frozen_weights_are_read(tmp_path):
    """Of DeepSpeed before it kept `frozen_param_shapes`: the model's own file has them."""
    step = write_zero(tmp_path / "z", 2, [{"a": np.ones(3, "f4")}], 2)
    frozen = np.arange(6, dtype="f4").reshape(2, 3)
    shapes = {"param_shapes": [{"a": (3,)}], "buffer_names": [], "shared_params": {}}
    save(step / "mp_rank_00_model_states.pt", {"module": {"frozen": whole(frozen)}, **shapes})
    tree = open_tree(step)
    assert np.array_equal(tree["frozen"].read(), frozen) and tree["a"].read().tolist() == [1, 1, 1]


# ---- checkpoints of any stage and number of processes, as DeepSpeed lays them out


def padded(vector, length):
    return np.concatenate([vector, np.zeros(length - vector.size, vector.dtype)])


def write_zero(root, stage, groups, world, cut_at=0, steps=(3,), is_elastic=False, devices=()):
    """Writes `groups`, dictionaries of arrays, as `world` processes would have; returns the directory.

    Moments are twice and three times the weights; process r has taken `steps[r]`, those after it the last.
    Where `devices` are said, one for each process, the model has a buffer on them.
    """
    shapes = [{name: array.shape for name, array in group.items()} for group in groups]
    model = {"module": {}, "buffer_names": [], "param_shapes": shapes, "shared_params": {}}
    if devices:
        model |= {"module": {"buffer": whole(np.ones(1, "f4"))}, "buffer_names": ["buffer"]}
    vectors = [np.concatenate([item.reshape(-1) for item in group.values()]) for group in groups]
    root.mkdir(parents=True, exist_ok=True)
    for rank in range(world):
        device = devices[rank] if devices else "cpu"
        state = {"zero_stage": stage, "partition_count": world}
        if stage < 3:
            parts = [part_of_group(vector, rank, world) for vector in vectors]
            state["single_partition_of_fp32_groups"] = [whole(part) for part in parts]
        else:
            every = [item for group in groups for item in group.values()]
            flat = np.concatenate([part_of_each(item, rank, world) for item in every])
            at = min(cut_at, flat.size - 1)
            parts = [flat[:at].copy(), flat[at:].copy()] if at else [flat]
            state["fp32_flat_groups"] = [whole(part) for part in parts]
            save(root / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", model, device=device)
        state |= kept_of(parts, stage, steps[min(rank, len(steps) - 1)], is_elastic)
        save(
            root / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            {"optimizer_state_dict": state},
            device=device,
        )
    if stage < 3:
        save(root / "mp_rank_00_model_states.pt", model)
    return root


def kept_of(parts, stage, step, is_elastic):
    """What the optimizer keeps of vectors; behind those of stages 1 and 2 there may be padding."""
    behind = 2 if stage < 3 and not is_elastic else 0
    kept = [
        {
            "step": step,
            "exp_avg": whole(padded(part * 2, part.size + behind)),
            "exp_avg_sq": whole(padded(part * 3, part.size + behind)),
            "odd": "x",
        }
        for part in parts
    ]
    name = "base_optimizer_state" if stage < 3 else "optimizer_state_dict"
    return {name: kept if is_elastic else {"state": dict(enumerate(kept)), "param_groups": [{"lr": 0.1}]}}


def part_of_group(vector, rank, world):
    """The vector is padded to twice the number of processes, and what of that is padding is not saved."""
    part = math.ceil(vector.size / (2 * world)) * 2
    return vector[rank * part : (rank + 1) * part].copy()


def part_of_each(array, rank, world):
    part = math.ceil(array.size / world)
    return padded(array.reshape(-1), part * world)[rank * part : (rank + 1) * part]


@st.composite
def models(draw):
    sizes = st.lists(st.integers(1, 5), min_size=1, max_size=3)
    groups = draw(st.lists(st.lists(sizes, min_size=1, max_size=4), min_size=1, max_size=2))
    count = iter(range(1, 10**6))

    def built(shape):
        return np.array([next(count) for _ in range(math.prod(shape))], "f4").reshape(shape)

    return [
        {f"g{number}.p{location}": built(shape) for location, shape in enumerate(group)}
        for number, group in enumerate(groups)
    ]


@settings(max_examples=30)
@given(models(), st.sampled_from((1, 2, 3)), st.integers(1, 7), st.integers(0, 40), st.booleans(), st.data())
def test_any_model_is_read_from_any_number_of_processes(
    tmp_path_factory, groups, stage, world, cut_at, is_elastic, data
):
    """A parameter may lie in the vectors of several processes, and with stage 3 in two vectors of one."""
    root = tmp_path_factory.mktemp("zero") / "t"
    write_zero(root, stage, groups, world, cut_at, is_elastic=is_elastic and stage < 3)
    truths = {name: array for group in groups for name, array in group.items()}
    weights = open_tree(root)
    assert {dotted(path) for path in weights.arrays} == truths.keys()
    for factor, moment in ((2, "exp_avg"), (3, "exp_avg_sq")):
        truths |= {
            f"optimizer_state.{dotted(path)}.{moment}": truths[dotted(path)] * factor for path in weights
        }
    tree = open_tree(root, ReadOptions(with_optimizer=True))
    assert {dotted(path) for path in tree.arrays} == {*truths, "optimizer_state.step"}
    assert tree["optimizer_state", "step"].read() == 3
    for path, truth in ((path, truths.get(dotted(path))) for path in tree.arrays):
        if truth is None:
            continue
        assert np.array_equal(tree[path].read(), truth)
        start = tuple(data.draw(st.integers(0, n - 1)) for n in truth.shape)
        region = Region(start, tuple(min(a + 2, n) for a, n in zip(start, truth.shape, strict=True)))
        assert np.array_equal(tree[path].read(region), truth[region.slices])


MODEL = [{"a": np.arange(60, dtype="f4").reshape(3, 20), "b": np.arange(7, dtype="f4")}]


@pytest.mark.parametrize("stage", (2, 3))
def test_missing_files_are_named(tmp_path, stage):
    root = write_zero(tmp_path / "t", stage, MODEL, 3)
    (root / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    told = run("hash", root, code=3)
    assert "3 processes saved, but there are files of 2" in told and "rank 1 is missing" in told
    shutil.rmtree(root)
    root = write_zero(tmp_path / "t", stage, MODEL, 3)
    name = "mp_rank_00_model_states.pt" if stage == 2 else "zero_pp_rank_2_mp_rank_00_model_states.pt"
    (root / name).unlink()
    assert name in run("hash", root, code=3)


@pytest.mark.parametrize("stage", (1, 3))
def test_files_of_another_run_are_refused(tmp_path, stage):
    root = write_zero(tmp_path / "t", stage, MODEL, 2)
    other = write_zero(tmp_path / "o", stage, [{"a": np.ones(4, "f4")}], 2)
    shutil.copy(other / "zero_pp_rank_1_mp_rank_00_optim_states.pt", root)
    assert "are inconsistent" in run("hash", root, code=3)


@pytest.mark.parametrize("stage", (2, 3))
def test_ranks_of_two_steps_are_refused(tmp_path, stage):
    """Shapes are the same: without this a mixture of two saves would be read at exit code 0."""
    root = write_zero(tmp_path / "t", stage, MODEL, 3, steps=(7, 7, 8))
    assert "from step 8" in run("hash", root, code=3)


@pytest.mark.parametrize("stage", (2, 3))
def test_copied_file_is_reported(tmp_path, stage):
    root = write_zero(tmp_path / "t", stage, [{"a": np.arange(60, dtype="f4")}], 3)
    first, _, last = sorted(root.glob("*optim_states.pt"))
    shutil.copy(last, first)
    assert f"{first.name} = {last.name}" in run("hash", root, code=3)


def test_exchanged_file_names_are_reported(tmp_path):
    """DeepSpeed's own: vectors of equal lengths, which would make up other weights."""
    shutil.copytree(TRAINED / "stage1/global_step3", tmp_path / "t")
    first, second, *_ = sorted((tmp_path / "t").glob("*optim_states.pt"))
    first.rename(tmp_path / "x")
    second.rename(first)
    (tmp_path / "x").rename(second)
    assert f"{first.name} is rank 1's file" in run("hash", tmp_path / "t", code=3)


def test_moments_are_read_on_request(tmp_path):
    root = write_zero(tmp_path / "t", 2, MODEL, 2)
    assert "moments are left out" in run("convert", "to-safetensors", root, tmp_path / "w")
    run("convert", "to-safetensors", root, tmp_path / "all", "--with-optimizer")
    assert run("hash", root, "--with-optimizer") != run("hash", root)
    assert run("hash", root, "--with-optimizer").split()[-1] == run("hash", tmp_path / "all").split()[-1]
    run("strip-optimizer", tmp_path / "all", tmp_path / "weights")
    run("verify", tmp_path / "weights", "--against", root)


def test_unknown_zero_layout_is_refused(tmp_path):
    root = write_zero(tmp_path / "t", 1, MODEL, 1)
    save(root / "zero_pp_rank_0_mp_rank_01_optim_states.pt", {"optimizer_state_dict": {}})
    assert "tensor or pipeline parallelism" in run("hash", root, code=3)
    (root / "zero_pp_rank_0_mp_rank_01_optim_states.pt").unlink()
    save(root / "zero_pp_rank_0_mp_rank_00_optim_states.pt", {"optimizer_state_dict": {"zero_stage": 4}})
    assert "ZeRO stage is unknown" in run("hash", root, code=3)
    (tmp_path / "t/latest").write_text("../x")
    with pytest.raises(FormatError):
        open_tree(root)


def test_copied_shape_file_is_reported(tmp_path):
    """With stage 3 each has other parts of the weights that are not trained."""
    part = tmp_path / "c"
    shutil.copytree(TRAINED / "stage3", part)
    first, second = sorted(part.glob("*/*_model_states.pt"))[:2]
    shutil.copy(first, second)
    assert f"{first.name} = {second.name}" in run("hash", part, code=3)


@pytest.mark.parametrize(("latest", "kept"), [("latest", "global_step3"), ("latest_universal", "y")])
def test_missing_named_step_is_reported(tmp_path, latest, kept):
    source = tmp_path / "c"
    source.mkdir()
    shutil.copytree(
        TRAINED / "stage1/global_step3_universal" if kept == "y" else FIXTURES / "stage1/global_step7",
        source / kept,
    )
    (source / latest).write_text("global_step12")
    for command in (("hash", source), ("inspect", "tree", source)):
        declared = ckpt(*command)
        assert (
            declared.exit_code == 3
            and f"{latest} names the step global_step12, which does not exist" in declared.output
        )
        assert (
            f"one that exists: {kept}" in declared.output and f"such as {source / kept};" in declared.output
        )
    assert f"{latest} names the step global_step12" in " ".join(ckpt("doctor", source).output.split())
    run("hash", source / kept)
    (source / latest).write_text(kept)
    run("hash", source)


def test_universal_checkpoint_of_deleted_step_is_opened(tmp_path):
    source = tmp_path / "c"
    shutil.copytree(TRAINED / "stage1", source)
    (source / "global_step3").rename(source / "global_step2")
    run("verify", source, "--against", TRAINED / "stage1")


NODE = [f"cuda:{number}" for number in range(3)]


def exchange(one, other):
    spare = one.with_name("spare")
    one.rename(spare)
    other.rename(one)
    spare.rename(other)


def test_exchanged_stage_3_files_are_found_by_device(tmp_path):
    """On accelerators alone; nothing else in a file says of which process it is."""
    step = write_zero(tmp_path / "z", 3, MODEL, 3, devices=NODE)
    whole_tree = run("hash", step)
    exchange(*sorted(step.glob("*optim_states.pt"))[1:])
    told = " ".join(run("hash", step, code=3).split())
    assert "rank_1_mp_rank_00_optim_states.pt was saved on cuda:2 and zero_pp_rank_1_mp_rank_00_model" in told
    exchange(*sorted(step.glob("*model_states.pt"))[1:])
    (remark,) = open_tree(step, ReadOptions(with_optimizer=True)).metadata.notes.remarks
    saved_on = "rank_1_mp_rank_00_optim_states.pt was saved on cuda:2"
    assert f"{saved_on}, but processes usually have the order" in remark
    exchange(*sorted(step.glob("*optim_states.pt"))[1:])
    exchange(*sorted(step.glob("*model_states.pt"))[1:])
    assert run("hash", step) == whole_tree


@pytest.mark.parametrize(
    "devices", [NODE + NODE, sorted(NODE + NODE), ["cuda:0"] * 6, ["cpu"] * 6, [*NODE, "cpu", "cpu", "cpu"]]
)
def test_device_orders_of_launchers_are_accepted(tmp_path, devices):
    step = write_zero(tmp_path / "z", 3, MODEL, 6, devices=devices)
    assert not open_tree(step, ReadOptions(with_optimizer=True)).metadata.notes.remarks


def universal(tmp_path, stage="stage1"):
    built = tmp_path / "u"
    shutil.copytree(TRAINED / stage / "global_step3_universal", built)
    return built


def test_universal_checkpoint_reports_left_out_moments(tmp_path):
    source = universal(tmp_path)
    (remark,) = open_tree(source).metadata.notes.remarks
    assert "moments are left out" in remark
    assert not open_tree(source, ReadOptions(with_optimizer=True)).metadata.notes.remarks


@pytest.mark.parametrize("stage", ("stage1", "stage3"))
def test_missing_moments_of_universal_checkpoint_are_refused(tmp_path, stage):
    """Parameters of which an optimizer keeps something else have none of the files of others."""
    source = universal(tmp_path, stage)
    folders = [item for item in (source / "zero").iterdir() if (item / "exp_avg.pt").exists()]
    for folder in folders[:3]:
        (folder / "exp_avg.pt").rename(folder / "momentum_buffer.pt")
        (folder / "exp_avg_sq.pt").unlink()
    assert open_tree(source, ReadOptions(with_optimizer=True)).arrays
    (folders[4] / "exp_avg_sq.pt").unlink()
    declared = run("hash", source, "--with-optimizer", code=3)
    assert f"moments are missing:\n    {folders[4].name}/exp_avg_sq.pt" in declared
    run("hash", source)
    assert "moments are missing" in ckpt("doctor", source).output


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("head.weight", "fp32.pt", (6, 6)), "head.weight/fp32.pt has shape [6, 6], in the model [11, 6]"),
        (
            ("head.weight", "exp_avg.pt", (6, 6)),
            "head.weight/exp_avg.pt has shape [6, 6], but its weights have [11, 6]",
        ),
        (("other.weight", "fp32.pt", (6, 6)), "other.weight is not a parameter of the model"),
    ],
)
def test_universal_checkpoint_with_foreign_files_is_refused(tmp_path, change, says):
    name, file, shape = change
    source = universal(tmp_path)
    (source / "zero" / name).mkdir(exist_ok=True)
    save(source / "zero" / name / file, {"param": whole(np.ones(shape, "f4"))})
    assert says in " ".join(run("hash", source, "--with-optimizer", code=3).split())
    # What is cut over processes has its whole shape nowhere else.
    if file == "fp32.pt":
        shutil.copy(source / "mp_rank_00_model_states.pt", source / "mp_rank_01_model_states.pt")
        run("hash", source)
    if name == "head.weight" and file == "fp32.pt":
        (source / "mp_rank_01_model_states.pt").unlink()
        for key in ("vocab_tensor", "vocab_divisibility_padding_tensor"):
            save(source / "zero" / name / file, {"param": whole(np.ones(shape, "f4")), key: True})
            run("hash", source)


def test_universal_checkpoint_with_wrong_dtype_is_refused(tmp_path):
    source = universal(tmp_path)
    save(source / "zero/norm.bias/fp32.pt", {"param": whole(np.ones(6, "i8"))})
    assert "norm.bias/fp32.pt has int64" in " ".join(run("hash", source, code=3).split())
    save(source / "zero/norm.bias/fp32.pt", {"param": whole(np.ones(6, "f4"))})
    (source / "mp_rank_01_model_states.pt").mkdir()
    assert str(open_tree(source).arrays["layers.0.bias",].dtype) == "bfloat16"


@pytest.mark.parametrize("stage", (2, 3))
def test_moments_of_only_some_parameters_are_left_out(tmp_path, stage):
    """As where Muon takes the matrices, and Adam the rest: what is left out is told."""
    step = write_zero(tmp_path / "z", stage, [{"a": np.ones(4, "f4")}, {"b": np.ones(4, "f4")}], 2, cut_at=2)
    (remark,) = open_tree(step).metadata.notes.remarks
    assert "moments are left out" in remark
    for rank in range(2):
        part = whole(np.ones(2, "f4"))
        kept = {0: {"exp_avg": part, "momentum": part}, 1: {"exp_avg": part, "exp_avg_sq": part, "odd": "x"}}
        name, vectors = (
            ("base_optimizer_state", "single_partition_of_fp32_groups")
            if stage == 2
            else ("optimizer_state_dict", "fp32_flat_groups")
        )
        state = {"zero_stage": stage, "partition_count": 2, vectors: [part, part], name: {"state": kept}}
        save(step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", {"optimizer_state_dict": state})
    tree = open_tree(step, ReadOptions(with_optimizer=True))
    assert ("optimizer_state", "b", "exp_avg") in tree and ("optimizer_state", "a", "momentum") not in tree
    (remark,) = tree.metadata.notes.remarks
    assert remark.endswith("only some parameters have it: momentum, exp_avg_sq")
