"""`ckpt quantize`: which weights of a model, what beside them, and what config.json says then."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from support.command_line import ended, run, succeed
from support.golden_data import GOLDEN
from support.hf_models import write_llama
from support.internals import Constant, Dequantize, Fp8BlockEncoder, dotted, next_steps
from support.locations import FIXTURES

import ckpttools
from ckpttools import DTYPES, CoverageError, FormatError, LazyArray, Tree, UnknownNameError, UsageError
from ckpttools.core.message_terms import repeated_option
from ckpttools.maxtext.recognition import find_unowned_arrays
from ckpttools.quantized.config import is_linear, unquantized_modules
from ckpttools.quantized.encoders import Mxfp4Encoder
from ckpttools.testing.strategies import stored
from ckpttools.transforms.quantize import Quantize

INVERSE, PLAIN = "_scale_inv", "bfloat16"
TRAINERS = FIXTURES / "torch" / "trainers"


def config_of(directory: Path) -> dict:
    return json.loads((directory / "config.json").read_bytes())


def load_file(path: Path) -> dict[str, np.ndarray]:
    """All arrays; the library of safetensors gives numpy no float8."""
    return {dotted(name): array.read() for name, array in ckpttools.open(path).arrays.items()}


def shaped(*shape: int, dtype: str = PLAIN) -> LazyArray:
    return Constant(shape, DTYPES[dtype], bytes(DTYPES[dtype].itemsize))


def test_only_matrices_are_quantized(tmp_path):
    tensors = write_llama(tmp_path / "hf", hidden_size=192, intermediate_size=320, num_hidden_layers=2)
    receipt = ckpttools.quantize(tmp_path / "hf", tmp_path / "fp8")
    built = load_file(tmp_path / "fp8" / "model.safetensors")
    scales = {name.removesuffix(INVERSE) for name in built if name.endswith(INVERSE)}
    assert scales == {name for name in tensors if "_proj." in name} == set(receipt.errors)
    encoder = Fp8BlockEncoder()
    for name, tensor in tensors.items():
        if name not in scales:
            assert built[name].tobytes() == tensor.tobytes()
            continue
        expected = encoder.scales(tensor)
        assert built[name + INVERSE].tobytes() == expected.tobytes()
        assert built[name].tobytes() == encoder.codes(tensor, expected).tobytes()
    assert 0.02 < receipt.errors["model.layers.0.mlp.up_proj.weight"].relative < 0.03
    relative = [error.relative for error in receipt.errors.values()]
    assert relative == sorted(relative, reverse=True) and not receipt.counts
    before, after = config_of(tmp_path / "hf"), config_of(tmp_path / "fp8")
    declared = after.pop("quantization_config")
    assert after == before
    assert declared == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.embed_tokens"],
    }


def test_training_run_is_quantized_like_its_model(tmp_path):
    write_llama(tmp_path / "hf")
    ckpttools.hf_to_maxtext(tmp_path / "hf", tmp_path / "run")
    for source, location in (("hf", "expected"), ("run", "made")):
        ckpttools.quantize(tmp_path / source, tmp_path / location, exclude="*.down_proj.*")
    expected, built = (
        load_file(tmp_path / location / "model.safetensors") for location in ("expected", "made")
    )
    assert {name: item.tobytes() for name, item in built.items()} == {
        n: item.tobytes() for n, item in expected.items()
    }
    assert config_of(tmp_path / "expected") == config_of(tmp_path / "made")
    assert (
        "model.layers.3.mlp.down_proj"
        in config_of(tmp_path / "made")["quantization_config"]["modules_to_not_convert"]
    )


@pytest.mark.parametrize("left", ["fsdp/pytorch_model_fsdp_0", "torchtitan/step-10", "open-instruct"])
def test_trainer_checkpoints_are_quantized_under_hub_names(left, tmp_path):
    source, expected = TRAINERS / left, tmp_path / "expected"
    ckpttools.quantize(TRAINERS / "hub", expected)
    if left.startswith("torchtitan"):
        with pytest.raises(FormatError, match="more than a model") as refusal:
            ckpttools.quantize(source, tmp_path / "fp8")
        assert refusal.value.got == "optimizer.*, train_state.*" and not (tmp_path / "fp8").exists()
        others = ["optimizer", "train_state"]
        ckpttools.select(source, tmp_path / "model", drop=others, format="safetensors")
        source = tmp_path / "model"
    if left == "open-instruct":
        with pytest.raises(FormatError, match="do not belong to the model in config") as refusal:
            ckpttools.quantize(source, tmp_path / "fp8")
        assert 'format="safetensors")` extracts the model' in str(refusal.value.hint)
        with pytest.raises(CoverageError) as unconverted:
            ckpttools.hf_to_maxtext(source, tmp_path / "maxtext")
        assert 'format="safetensors")` extracts the model' in str(unconverted.value.hint)
        ckpttools.select(source, tmp_path / "model", prefix="policy", format="safetensors")
        source = tmp_path / "model"
    ckpttools.quantize(source, tmp_path / "fp8")
    built, known = (load_file(item / "model.safetensors") for item in (tmp_path / "fp8", expected))
    assert {name: item.tobytes() for name, item in built.items()} == {
        name: item.tobytes() for name, item in known.items()
    }
    assert config_of(tmp_path / "fp8") == config_of(expected)


def test_unknown_names_are_refused(tmp_path):
    names = ["tok_embeddings.weight", "layers.0.attention.wq.weight"]
    weights = {(name,): shaped(128, 128) for name in names}
    tree = Tree(weights).with_metadata(config={"model_type": "qwen3"})
    with pytest.raises(FormatError, match="do not know these names"):
        ckpttools.quantize(tree, tmp_path / "fp8")


def test_names_match_the_configured_family(tmp_path):
    hub = ckpttools.open(TRAINERS / "hub")
    own, config = {name: array for (name,), array in hub.arrays.items()}, hub.metadata.config

    def judged(
        arrays: dict[str, LazyArray], **declared: object
    ) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        tree = Tree({(name,): array for name, array in arrays.items()})
        result = find_unowned_arrays(tree.with_metadata(config={**config, **declared}))
        return result and (result.names, result.prefixes)

    head = {"v_head.summary.weight": shaped(1, 16)}
    both = {f"{part}.{name}": array for part in ("actor", "critic.net") for name, array in own.items()}
    assert judged(own) == ((), ())
    body = {name.removeprefix("model."): item for name, item in own.items() if name != "lm_head.weight"}
    assert judged(body) == ((), ())
    assert judged(own | head) == (tuple(head), ())
    assert judged(own | head, architectures=["LlamaForCausalLM"]) == (tuple(head), ())
    assert judged(own | head, architectures=["LlamaForSequenceClassification"]) == ((), ())
    assert judged(own | head, auto_map={"AutoModel": "own.py"}) is None
    assert judged(own | head, model_type="of nobody") is None
    names, prefixes = judged(both, architectures=["LlamaForSequenceClassification"])
    assert prefixes == ("actor", "critic.net") and "critic.net.model.layers.1.mlp.up_proj.weight" in names
    with pytest.raises(FormatError, match="v_head") as refusal:
        ckpttools.quantize(
            Tree({**hub.leaves, ("v_head.summary.weight",): shaped(1, 16)}, hub.metadata), tmp_path / "x"
        )
    assert 'drop="v_head.summary.weight" leaves them out' in str(refusal.value.hint)


def test_unquantized_arrays_get_requested_dtype(tmp_path):
    """A run in float32; what is quantized is so from its own numbers, not from rounded ones."""
    tensors = write_llama(tmp_path / "hf", dtype="float32", num_hidden_layers=2)
    config = config_of(tmp_path / "hf") | {"torch_dtype": PLAIN}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    ckpttools.hf_to_maxtext(tmp_path / "hf", tmp_path / "run")
    declared = " ".join(run("quantize", tmp_path / "hf", tmp_path / "wide").split())
    assert "7 arrays not quantized stay float32" in declared and "--dtype bfloat16" in declared
    for source, location in (("hf", "made"), ("run", "of-run")):
        declared = run("quantize", tmp_path / source, tmp_path / location, "--dtype", PLAIN)
        assert "stay float32" not in declared and "torch_dtype" not in declared
        assert "7 arrays: cast from float32 to bfloat16" in " ".join(declared.split())
    wide, built, of_run = (load_file(tmp_path / item) for item in ("wide", "made", "of-run"))
    assert built.keys() == wide.keys()
    for name, array in built.items():
        plain = name in tensors and f"{name}{INVERSE}" not in built
        expected = tensors[name].astype(DTYPES[PLAIN].numpy) if plain else wide[name]
        assert array.tobytes() == expected.tobytes() == of_run[name].tobytes(), name
    assert config_of(tmp_path / "wide")["torch_dtype"] == "float32"
    assert config_of(tmp_path / "made") == config_of(tmp_path / "of-run")
    assert config_of(tmp_path / "made")["torch_dtype"] == PLAIN
    with pytest.raises(UsageError, match="without scales"):
        ckpttools.quantize(tmp_path / "hf", tmp_path / "none", dtype="float8_e4m3fn")


def test_experts_of_gpt_oss_become_mxfp4(tmp_path):
    ckpttools.quantize(GOLDEN / "gpt-oss" / "hf", tmp_path / "mxfp4", scheme="mxfp4")
    before = load_file(GOLDEN / "gpt-oss" / "hf" / "model.safetensors")
    built = load_file(tmp_path / "mxfp4" / "model.safetensors")
    experts = {name for name in before if name.endswith(("gate_up_proj", "down_proj"))}
    assert experts and built.keys() == before.keys() - experts | {
        f"{name}{end}" for name in experts for end in ("_blocks", "_scales")
    }
    encoder = Mxfp4Encoder()
    for name in experts:
        swapped = np.ascontiguousarray(before[name].swapaxes(1, 2))
        flat = swapped.reshape(-1, swapped.shape[-1])
        scales = encoder.scales(flat)
        expected = encoder.codes(flat, scales).reshape(*swapped.shape[:2], -1, 16)
        assert built[f"{name}_blocks"].tobytes() == expected.tobytes()
        assert built[f"{name}_blocks"].shape == expected.shape
        assert built[f"{name}_scales"].tobytes() == scales.tobytes()
        assert built[f"{name}_scales"].shape == expected.shape[:-1]
    declared = config_of(tmp_path / "mxfp4")["quantization_config"]
    assert declared["quant_method"] == "mxfp4" and "lm_head" in declared["modules_to_not_convert"]


def test_quantize_prints_worst_arrays_and_all_as_json(tmp_path):
    write_llama(tmp_path / "hf")
    declared = run("quantize", tmp_path / "hf", tmp_path / "fp8")
    assert "rms / rms of values" in declared and "all 28 arrays" in declared and "INEXACT" in declared
    told = json.loads(ended("quantize", tmp_path / "hf", tmp_path / "again", "--json").stdout)
    assert len(told["errors"]) == 28 and {"elements", "largest", "rms", "rms_of_values", "relative"} == {
        field for item in told["errors"].values() for field in item
    }


def test_mxfp4_expert_loader_is_reported(tmp_path):
    """Their names are none that a family knows."""
    done = succeed("quantize", GOLDEN / "gpt-oss" / "hf", tmp_path / "mxfp4", "--scheme", "mxfp4")
    assert "AutoModelForCausalLM.from_pretrained" in done.output


def test_nan_is_refused_without_leaving_output(tmp_path):
    tensors = write_llama(tmp_path / "hf")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(FormatError, match="cannot be quantized") as caught:
        ckpttools.quantize(tmp_path / "hf", tmp_path / "fp8")
    assert caught.value.location == "model.layers.1.mlp.up_proj.weight"
    assert not (tmp_path / "fp8").exists()
    # Going on is offered last: it fails as it did.
    words = "quantize", tmp_path / "hf", tmp_path / "by-command"
    run(*words, code=3)
    told = " ".join(run(*words, "--exclude", "*.up_proj.weight", code=2).split())
    assert "another conversion: the same command, started with other options" in told
    assert told.index("--overwrite; to resume it") < told.index(
        f"ckpt quantize {tmp_path}/hf", told.index("hint")
    )
    ckpttools.quantize(
        tmp_path / "hf", tmp_path / "fp8", exclude="model.layers.1.mlp.up_proj.weight", overwrite=True
    )


@pytest.mark.parametrize(
    ("exclude", "rest"),
    [
        ("*.q_proj.*", ["*.k_proj.weight", "*.v_proj.weight"]),
        ("model.layers.1.mlp.up_proj.weight", ["model.layers.1.mlp.gate_proj.weight"]),
        ("*.kv_a_proj_with_mqa.weight", ["*.q_a_proj.weight"]),
        ("*.experts.1.down_proj.weight", ["*.experts.*"]),
        ("*.experts.*.gate_proj.weight", ["*.experts.*"]),
        ("*.down_proj.weight", ["*.experts.*"]),
        ("*layers.0*", []),
        ("*.o_proj.weight", []),
        ("*.experts.*", []),
        ("*self_attn*", []),
    ],
)
def test_vllm_fused_modules_must_be_excluded_together(exclude, rest):
    keys = [f"self_attn.{key}_proj" for key in ("q", "k", "v", "o", "q_a")]
    keys += ["self_attn.kv_a_proj_with_mqa"]
    blocks = ["mlp", "mlp.shared_experts", *(f"mlp.experts.{n}" for n in range(2))]
    keys += [f"{block}.{key}_proj" for block in blocks for key in ("gate", "up", "down")]
    names = [f"model.layers.{n}.{key}.weight" for n in range(2) for key in keys]
    tree = Tree({(name,): shaped(128, 128) for name in names}).with_metadata(config={"model_type": "llama"})
    told = [remark for remark in Quantize(exclude=[exclude])(tree).notes.remarks if "vLLM" in remark]
    assert len(told) == bool(rest)
    assert all(f"add {repeated_option('exclude', rest)} to leave out all of these" in item for item in told)
    if rest:
        assert not Quantize(exclude=[exclude, *rest])(tree).notes.remarks


def test_exclude_patterns_use_hub_names(tmp_path):
    write_llama(tmp_path / "hf")
    ckpttools.hf_to_maxtext(tmp_path / "hf", tmp_path / "run")
    with pytest.raises(UsageError, match="no array name matches the pattern") as caught:
        ckpttools.quantize(tmp_path / "run", tmp_path / "fp8", exclude="*query*")
    assert "names that arrays get on the Hub" in str(caught.value)


def test_vllm_is_suggested_for_supported_schemes(tmp_path):
    write_llama(tmp_path / "hf")
    for exclude, is_loaded in (("*.q_proj.*", False), ("*.self_attn.*", True)):
        ckpttools.quantize(tmp_path / "hf", tmp_path / "fp8", exclude=exclude, overwrite=True)
        steps = next_steps(tmp_path / "fp8")
        assert [use.split()[0] for use in steps.uses[1:]] == ["vllm"] * is_loaded


def test_invalid_quantize_options_are_refused(tmp_path):
    write_llama(tmp_path / "hf")
    with pytest.raises(UnknownNameError, match="unknown quantization scheme"):
        Quantize("fp7")
    with pytest.raises(UsageError, match="matches"):
        ckpttools.quantize(tmp_path / "hf", tmp_path / "fp8", exclude="*.nothing")
    with pytest.raises(UsageError, match="no array can be quantized"):
        ckpttools.quantize(tmp_path / "hf", tmp_path / "fp8", scheme="mxfp4")
    with pytest.raises(UsageError, match="applies only to MaxText"):
        ckpttools.quantize(tmp_path / "hf", tmp_path / "fp8", like=tmp_path / "hf")
    with pytest.raises(UsageError, match="applies only to MaxText"):
        ckpttools.quantize(tmp_path / "hf", tmp_path / "fp8", carry=True)
    ckpttools.quantize(tmp_path / "hf", tmp_path / "fp8")
    with pytest.raises(FormatError, match="already quantized"):
        ckpttools.quantize(tmp_path / "fp8", tmp_path / "twice")


def test_smaller_edge_blocks_are_reported(tmp_path):
    write_llama(tmp_path / "hf", intermediate_size=200)
    notes = ckpttools.quantize.plan(tmp_path / "hf", tmp_path / "fp8").plan.notes
    assert any("smaller than the others" in remark for remark in notes.remarks)
    write_llama(tmp_path / "even", intermediate_size=256)
    notes = ckpttools.quantize.plan(tmp_path / "even", tmp_path / "fp8").plan.notes
    assert not any("smaller than the others" in remark for remark in notes.remarks)


def test_fused_experts_are_split_for_their_loaders(tmp_path):
    """Of fused codes transformers 5.23 takes no scales where it dequantizes."""
    names = [f"model.layers.0.mlp.experts.{key}" for key in ("gate_up_proj", "down_proj")]
    tensors = {
        name: np.random.default_rng(0).standard_normal(shape).astype(ml_dtypes.bfloat16)
        for name, shape in zip(names, [(2, 256, 256), (2, 256, 128)], strict=True)
    }
    text = {"hidden_size": 256, "model_type": "qwen3_5_moe_text"}
    for kind in ("gemma4_text", "qwen3_5_moe_text"):
        config = {"text_config": {**text, "model_type": kind}}
        leaves = {(name,): stored(item, DTYPES[PLAIN]) for name, item in tensors.items()}
        leaves |= {("model.layers.0.self_attn.q_proj.weight",): shaped(128, 128)}
        tree = Quantize()(Tree(leaves).with_metadata(config=config))
        assert any("of fused experts; this scheme" in remark for remark in tree.notes.remarks) is (
            kind == "gemma4_text"
        )
    plain = {dotted(path): item.read() for path, item in Dequantize("float32")(tree.tree).tree.arrays.items()}
    for expert, (gate_up, down) in enumerate(zip(*tensors.values(), strict=True)):
        expected = {"gate_proj": gate_up[:128], "up_proj": gate_up[128:], "down_proj": down}
        for key, matrix in expected.items():
            built = plain[f"model.layers.0.mlp.experts.{expert}.{key}.weight"]
            encoder = Fp8BlockEncoder()
            scales = encoder.scales(matrix)
            assert (built == encoder.decoded(encoder.codes(matrix, scales), scales)).all()


@pytest.mark.parametrize(
    ("name", "linear"),
    {
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": True,
        "model.layers.0.mlp.experts.7.w1.weight": True,
        "model.layers.0.mlp.shared_expert.gate_proj.weight": True,
        "model.layers.0.mlp.gate.weight": False,
        "model.layers.0.mlp.shared_expert_gate.weight": False,
        "model.layers.0.linear_attn.in_proj_a.weight": False,
        "model.layers.0.self_attn.q_norm.weight": False,
        "model.layers.0.router.proj.weight": False,
        "transformer.h.0.attn.c_attn.weight": False,
        "model.embed_tokens.weight": False,
        "lm_head.weight": False,
        "model.visual.blocks.0.attn.proj.weight": False,
        "model.layers.0.self_attn.q_proj.bias": False,
    }.items(),
)
def test_linear_layer_matrices_are_identified(name, linear):
    assert is_linear(name, shaped(8, 8)) is linear
    assert not is_linear(name, shaped(8, 8, dtype="int8")) and not is_linear(name, shaped(8, 8, 8))


def test_ignored_modules_have_full_names():
    """vLLM takes no others, and `model.layers.1` would be a part of `model.layers.10`."""
    arrays = {
        "model.visual.blocks.0.attn.qkv.weight": shaped(8, 8),
        "model.layers.1.mlp.up_proj.weight": shaped(8, 8),
        "model.layers.1.mlp.experts.down_proj": shaped(2, 8, 8),
        "model.visual.blocks.0.norm.weight": shaped(8),
        "model.layers.0.mlp.gate.weight": shaped(8, 8),
        "model.layers.0.mlp.gate_proj.weight": shaped(8, 8),
        "model.layers.0.input_layernorm.weight": shaped(8),
        "lm_head.weight": shaped(8, 8),
    }
    left = unquantized_modules(arrays, {"model.layers.0.mlp.gate_proj.weight"})
    layers = ("0.mlp.gate", "1.mlp.experts", "1.mlp.up_proj")
    assert left == [
        "lm_head",
        *(f"model.layers.{layer}" for layer in layers),
        "model.visual.blocks.0.attn.qkv",
    ]
    # Of tied heads, too, loaders make a linear layer.
    del arrays["lm_head.weight"]
    assert unquantized_modules(arrays, {"model.layers.0.mlp.gate_proj.weight"}) == left


def test_input_dtype_does_not_change_quantized_values(tmp_path):
    tensors = write_llama(tmp_path / "hf", num_hidden_layers=1)
    wide = {name: item.astype(np.float32) for name, item in tensors.items()}
    for dtype in (ml_dtypes.bfloat16, np.float32, np.float64):
        location = tmp_path / np.dtype(dtype).name
        location.mkdir()
        save_file({name: item.astype(dtype) for name, item in wide.items()}, location / "model.safetensors")
        (location / "config.json").write_bytes((tmp_path / "hf" / "config.json").read_bytes())
        ckpttools.quantize(location, tmp_path / f"{location.name}-fp8")
    built = [
        load_file(tmp_path / f"{name}-fp8" / "model.safetensors") for name in (PLAIN, "float32", "float64")
    ]
    for name in (item for item in built[0] if "_proj." in item):
        assert len({item[name].tobytes() for item in built}) == 1
