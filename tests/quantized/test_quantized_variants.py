"""Variants of the hub's schemes that are not read: refused by name, with what makes plain weights of them."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from support import quantized_weights as built
from support.command_line import ended, succeed
from support.internals import Dequantize, quantized_view

from ckpttools import DTYPES, CastTo, FormatError, Tree
from ckpttools.testing.strategies import noise, stored
from ckpttools.transforms.quantize import Quantize

TOOL = "CompressedTensorsConfig"
Q_PROJ = "m.q_proj"
INT8 = {f"{Q_PROJ}.weight": np.ones((4, 8), np.int8), f"{Q_PROJ}.weight_scale": np.ones((4, 1), np.float32)}
MX = {
    f"{Q_PROJ}.weight_packed": np.ones((4, 16), np.uint8),
    f"{Q_PROJ}.weight_scale": np.ones((4, 1), np.uint8),
}
SPARSE = {
    f"{Q_PROJ}.compressed": np.ones((4, 4), ml_dtypes.float8_e4m3fn),
    f"{Q_PROJ}.bitmask": np.ones((4, 1), np.uint8),
    f"{Q_PROJ}.weight_scale": np.ones((4, 1), np.float32),
}
MARLIN = {
    f"{Q_PROJ}.weight_packed": np.ones((1, 32), np.int32),
    f"{Q_PROJ}.scale_packed": np.ones((1, 16), np.float16),
    f"{Q_PROJ}.meta": np.ones((16, 1), np.int16),
}


def groups(**weights: object) -> dict[str, object]:
    return {"config_groups": {"group_0": {"weights": weights}}}


def int4_model(**declared: object) -> tuple[dict[str, np.ndarray], dict[str, object]]:
    weight = built.int4(np.random.default_rng(0), 4, 8, 32)
    return dict(weight.arrays), {**weight.config, **declared}


INT4, INT4_SAID = int4_model()
WHOLE_8 = groups(num_bits=8, type="int", strategy="channel")


@pytest.mark.parametrize(
    ("arrays", "declared", "named"),
    [
        (INT8, {"format": "int-quantized", **WHOLE_8}, "format: int-quantized"),
        (MX, {"format": "mxfp4-pack-quantized"}, "format: mxfp4-pack-quantized"),
        (MARLIN, {"format": "marlin-24"}, "format: marlin-24"),
        (
            SPARSE,
            {"format": "float-quantized", "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config: weights are stored as sparse-24-bitmask",
        ),
        (INT4, {**INT4_SAID, "sparsity_config": {"format": "sparse-bitmask"}}, "sparse-bitmask"),
        (
            INT4,
            {**INT4_SAID, "config_groups": {"g": {"format": "marlin-24", "weights": {"num_bits": 4}}}},
            "format: marlin-24",
        ),
        (
            INT4 | {"m.experts.0.up_proj.weight_g_idx": np.arange(64, dtype=np.int32)},
            INT4_SAID,
            "weight_g_idx",
        ),
        (
            INT4 | {"m.experts.0.up_proj.weight_zero_point": np.ones((1, 2), np.int32)},
            INT4_SAID,
            "weight_zero_point",
        ),
    ],
)
def test_unsupported_scheme_error_names_its_reader(arrays, declared, named):
    tree = built.tree_of(arrays, {"quantization_config": {"quant_method": "compressed-tensors", **declared}})
    with pytest.raises(FormatError) as error:
        quantized_view(tree).dequantized()
    assert named in str(error.value)
    assert TOOL in str(error.value.hint)
    assert "get the checkpoint again" not in str(error.value)


def test_codes_contradicting_the_config_are_refused():
    weight = built.fp8_blocks(np.random.default_rng(0), (4, 4), (2, 2))
    for declared in ("e4m3", "e5m2"):
        tree = built.tree_of(weight.arrays, {"quantization_config": {**weight.config, "fmt": declared}})
        assert bool(quantized_view(tree).faults) is (declared == "e5m2")


def test_duplicate_names_are_refused():
    """Schemes go by keys joined by dots: one of the two would be lost, or read in place of the other."""
    weight = built.fp8_blocks(np.random.default_rng(0), (8, 8), (4, 4))
    tree = weight.tree
    twice = Tree({**tree.leaves, tuple(weight.name.split(".")): tree.arrays[(weight.name,)]}, tree.metadata)
    for change in (Dequantize(), CastTo("bfloat16")):
        with pytest.raises(FormatError, match="several arrays have one name"):
            change(twice)
    plain = stored(noise((8, 8), DTYPES["bfloat16"]), DTYPES["bfloat16"])
    with pytest.raises(FormatError, match="several arrays have one name"):
        Quantize()(Tree({("m.q_proj.weight",): plain, ("m", "q_proj", "weight"): plain}))


def test_dense_sparsity_is_supported():
    arrays, declared = int4_model(sparsity_config={"format": "dense"})
    assert (
        len(quantized_view(built.tree_of(arrays, {"quantization_config": declared})).dequantized().weights)
        == 1
    )


def test_missing_scale_is_not_taken_for_a_variant():
    arrays, declared = int4_model()
    del arrays["m.experts.0.up_proj.weight_scale"]
    with pytest.raises(FormatError) as error:
        quantized_view(built.tree_of(arrays, {"quantization_config": declared})).dequantized()
    assert "download the checkpoint again" in str(error.value.hint)


@pytest.mark.parametrize("block", [[True, True], [128, True], [128.0, 128.0], "128x128", [128], [0, 128]])
def test_invalid_block_shape_is_refused(block):
    weight = built.fp8_blocks(np.random.default_rng(0), (4, 4), (1, 1))
    tree = built.tree_of(
        weight.arrays, {"quantization_config": {**weight.config, "weight_block_size": block}}
    )
    with pytest.raises(FormatError, match="is not a block"):
        quantized_view(tree).dequantized()


@pytest.mark.parametrize(
    "shape", [[4, 40], [4, 56], [4, 60], [4, 63], [4, 65], [4, -64], [64, 4], [4], [4.0, 60.0]]
)
def test_wrong_stored_shape_is_refused(shape):
    arrays, declared = int4_model()
    arrays["m.experts.0.up_proj.weight_shape"] = np.array(shape)
    with pytest.raises(FormatError) as error:
        Dequantize()(built.tree_of(arrays, {"quantization_config": declared}))
    assert "up_proj.weight" in str(error.value)
    assert "download the checkpoint again" in str(error.value.hint)


CACHES = {f"m.self_attn.{name}": np.ones((), np.float32) for name in ("k_scale", "v_scale")}
PLAIN = {"m.self_attn.v_proj.weight": np.ones((4, 4), ml_dtypes.bfloat16)}


@pytest.mark.parametrize("is_quantized", [True, False])
def test_cache_scales_are_left_out_with_a_note(is_quantized):
    weight = built.fp8_tensor(np.random.default_rng(0), (4, 4))
    arrays = {**PLAIN, **CACHES, **(weight.arrays if is_quantized else {})}
    tree = built.tree_of(arrays, {"quantization_config": weight.config})
    done = Dequantize("bfloat16")(tree)
    expected = {*PLAIN, weight.name} if is_quantized else {*PLAIN}
    assert {path[0] for path in done.tree.arrays} == expected
    assert any("k_scale, v_scale" in line for line in done.notes.remarks)
    assert not done.tree.metadata.config


def test_norm_with_scale_name_is_a_weight():
    weight = built.fp8_tensor(np.random.default_rng(0), (4, 4))
    norms = {f"m.{name}_norm_scale": np.ones(4, np.float32) for name in ("q", "k", "output")}
    tree = built.tree_of({**norms, **weight.arrays}, {"quantization_config": weight.config})
    assert {path[0] for path in Dequantize("bfloat16")(tree).tree.arrays} == {*norms, weight.name}


def test_doctor_and_cast_name_the_reader_of_a_variant(tmp_path):
    declared = {"quant_method": "compressed-tensors", "format": "int-quantized", **WHOLE_8}
    model = tmp_path / "model"
    model.mkdir()
    save_file(INT8, model / "model.safetensors")
    (model / "config.json").write_text(json.dumps({"quantization_config": declared}))
    told = " ".join(succeed("doctor", model).output.split())
    assert TOOL in told
    assert "ckpt cast" not in told
    refused = ended("cast", model, tmp_path / "out", "--dtype", "bfloat16", code=3)
    assert "format: int-quantized" in refused.output
