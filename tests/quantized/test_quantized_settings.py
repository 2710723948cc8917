"""What configurations of published models say besides the method: beside it, of orders, of rotations."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import quantized_weights as built
from support.command_line import run
from support.internals import quantized_view

from ckpttools import FormatError


def numbers(tree, name):
    array = quantized_view(tree).dequantized().tree.arrays[name,]
    return array.read().view(ml_dtypes.bfloat16)


def test_dequantized_config_declares_no_quantization():
    """It may be said in several places."""
    weight = built.fp8_rows(np.random.default_rng(0), (8, 8))
    part = {"text_config": {"quantization_config": weight.config, "hidden_size": 8}}
    config = {"quantization_config": weight.config, "thinker_config": part}
    tree = quantized_view(built.tree_of(weight.arrays, config)).dequantized().tree
    assert tree.metadata.config == {"thinker_config": {"text_config": {"hidden_size": 8}}}
    assert config["thinker_config"]["text_config"]["quantization_config"] == weight.config


@pytest.mark.parametrize("coarse", ["channel", "tensor"])
def test_one_model_may_have_block_and_row_scales(coarse):
    rng = np.random.default_rng(0)
    blocks = built.fp8_blocks(rng, (16, 24), (8, 8), "bfloat16")
    other = built.fp8_rows(rng, (16, 24)) if coarse == "channel" else built.fp8_tensor(rng, (16, 24))
    arrays = {name.replace("m.", "a.").removesuffix("_inv"): item for name, item in blocks.arrays.items()}
    weights = {"num_bits": 8, "type": "float"}
    groups = {
        "group_0": {"weights": {**weights, "strategy": "block", "block_structure": [8, 8]}},
        "group_1": {"weights": {**weights, "strategy": coarse}},
    }
    declared = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    tree = built.tree_of({**arrays, **other.arrays}, {"quantization_config": declared})
    assert (numbers(tree, "a.q_proj.weight") == blocks.bfloat16).all()
    assert (numbers(tree, other.name) == other.bfloat16).all()


def test_extra_module_arrays_are_an_unsupported_scheme():
    """ModelOpt's AWQ divides weights by what it multiplies activations with: nothing is missing."""
    weight = built.fp8_tensor(np.random.default_rng(0), (16, 24))
    arrays = {**weight.arrays, "m.q_proj.pre_quant_scale": np.ones(24, np.float32)}
    declared = {"quant_method": "modelopt", "quant_algo": "FP8"}
    with pytest.raises(FormatError, match="unknown auxiliary tensors: pre_quant_scale") as error:
        quantized_view(built.tree_of(arrays, {"quantization_config": declared})).dequantized()
    assert "checkpoint again" not in str(error.value)


def test_deepseek_v4_config_declares_fp4_experts():
    weight = built.fp4_experts(np.random.default_rng(0), 6, 2)
    declared = {**weight.config}
    experts = declared.pop("expert_dtype")
    tree = built.tree_of(weight.arrays, {"expert_dtype": experts, "quantization_config": declared})
    assert np.array_equal(numbers(tree, weight.name), weight.bfloat16)
    assert not quantized_view(tree).dequantized().tree.metadata.config


@pytest.mark.parametrize("key", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 4, 6)])
def test_llama4_fused_experts_have_column_scales(key, shape):
    rng, name = np.random.default_rng(0), f"m.experts.{key}"
    codes = rng.normal(0, 50, shape).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(0.01, 1, (shape[0], 1, shape[2])).astype(np.float32)
    stored = scales if key == "gate_up_proj" else scales.transpose(0, 2, 1).copy()
    config = {"quantization_config": {"quant_method": "fbgemm_fp8"}}
    tree = built.tree_of({name: codes, f"{name}_scale": stored}, config)
    expected = (codes.astype(np.float32) * scales).astype(ml_dtypes.bfloat16)
    assert np.array_equal(numbers(tree, name), expected)


def test_fused_experts_with_scales_of_rows_are_refused():
    codes = np.ones((2, 4, 6), ml_dtypes.float8_e4m3fn)
    arrays = {"m.experts.down_proj": codes, "m.experts.down_proj_scale": np.ones((2, 4, 1), np.float32)}
    tree = built.tree_of(arrays, {"quantization_config": {"quant_method": "fbgemm_fp8"}})
    assert "2, 1, 6" in quantized_view(tree).faults[0]


def int4(**weights: str | bool):
    weight = built.int4(np.random.default_rng(0), 4, 8, 32)
    group = next(iter(weight.config["config_groups"].values()))
    group = {"weights": {**group["weights"], **weights}}
    return weight, {**weight.config, "config_groups": {"group_0": group}}


@pytest.mark.parametrize("odd", [{"actorder": "group"}, {"type": "float"}, {"symmetric": False}])
def test_other_bits_and_reordered_groups_are_refused(odd):
    weight, config = int4(**odd)
    with pytest.raises(FormatError):
        quantized_view(built.tree_of(weight.arrays, {"quantization_config": config})).dequantized()


ZERO_POINT = "m.experts.0.up_proj.weight_zero_point"
ODD_ZEROS = {
    "without any": None,
    "of rows": np.zeros((8, 2), np.int32),
    "of groups": np.zeros((1, 3), np.int32),
    "not packed": np.zeros((1, 2), np.int8),
}


@pytest.mark.parametrize("odd", ODD_ZEROS)
def test_mismatched_zero_points_are_refused(odd):
    weight = built.int4(np.random.default_rng(0), 8, 2, 8, shifted=True)
    assert weight.arrays[ZERO_POINT].shape == (1, 2)
    arrays = {name: item for name, item in weight.arrays.items() if name != ZERO_POINT}
    arrays |= {} if ODD_ZEROS[odd] is None else {ZERO_POINT: ODD_ZEROS[odd]}
    with pytest.raises(FormatError, match="weight_zero_point"):
        quantized_view(built.tree_of(arrays, {"quantization_config": weight.config})).dequantized()


def test_plan_file_keeps_zero_points(tmp_path):
    weight = built.int4(np.random.default_rng(0), 29, 4, 8, shifted=True)
    (tmp_path / "hf").mkdir()
    save_file(dict(weight.arrays), tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"quantization_config": weight.config}))
    run("plan", "-o", tmp_path / "plan", "cast", tmp_path / "hf", tmp_path / "out", "--dtype", "bfloat16")
    run("run", tmp_path / "plan", "--part", "0/1")
    run("run", tmp_path / "plan", "--publish")
    (result,) = load_file(tmp_path / "out" / "model.safetensors").values()
    assert result.tobytes() == weight.bfloat16.tobytes()


@pytest.mark.parametrize(
    ("locations", "is_read"),
    [
        (["weight_input", "weight_output"], True),
        (["q_attn", "k_cache"], True),
        (["input", "weight_input"], False),
    ],
)
def test_runtime_rotations_are_refused(locations, is_read):
    weight, config = int4(actorder="weight")
    apply = [{"targets": ["Linear"], "location": location} for location in locations]
    config["transform_config"] = {"config_groups": {"R4": {"type": "hadamard", "apply": apply}}}
    tree = built.tree_of(weight.arrays, {"quantization_config": config})
    assert bool(quantized_view(tree).faults) is not is_read
    if is_read:
        assert np.array_equal(numbers(tree, weight.name), weight.bfloat16)


def test_expert_tables_are_not_quantized_values():
    floats = {f"layers.mlp.{key}": np.ones((2, 4, 4), ml_dtypes.bfloat16) for key in ("wi_0", "wi_1", "wo")}
    arrays = {**floats, "layers.mlp.tid2eid": np.zeros((9, 2), np.int32)}
    tree = built.tree_of(arrays, {"quantization_config": {"quant_method": "fp8"}})
    assert not quantized_view(tree).weights
