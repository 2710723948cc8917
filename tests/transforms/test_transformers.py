"""transformers loads the output of `maxtext-to-hf` without missing or extra tensors, and with its shapes.

Needs the extra `transformers` (torch and transformers), which the suite does without.
"""

from __future__ import annotations

import json

import pytest
from support.golden_data import FAMILIES, convert
from support.locations import GOLDEN, GOLDEN_0_2_5

import ckpttools
from ckpttools import Resources, ToHuggingFace, ToMaxText, plan_to_huggingface, plan_to_maxtext

torch = pytest.importorskip("torch", reason="the extra `transformers` is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
safetensors_torch = pytest.importorskip(
    "safetensors.torch", reason="the extra `transformers` is not installed"
)


# Models with towers that `carry` does not bring back: all of it goes through MaxText's names.
TOWERS = {
    "gemma3-vision": "vision_tower",
    "gemma4-vision": "vision_tower",
    "qwen3-vl": "visual",
    "qwen3-vl-moe": "visual",
    "qwen3-omni": "audio_tower",
    "qwen3.5": "visual",
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return golden models after a round trip."""

    def export(family):
        directory = tmp_path_factory.mktemp(family)
        convert(directory / "maxtext", family, carry=True)
        source = directory / "maxtext"
        plan_to_huggingface(source, ToHuggingFace(), Resources(jobs=2)).run(directory / "hf")
        return directory / "hf"

    return export


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_model_loads_every_tensor(exported, family):
    directory = exported(family)
    name = json.loads((directory / "config.json").read_bytes())["architectures"][0]
    kind = getattr(transformers, name)
    model, loaded = kind.from_pretrained(directory, output_loading_info=True, dtype="auto")
    assert {what: sorted(names) for what, names in loaded.items() if names} == {}
    original = kind.from_pretrained(GOLDEN / family / "hf", dtype="auto").state_dict()
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, original[key]), key


@pytest.mark.parametrize("family", FAMILIES)
def test_config_describes_a_model_of_the_same_shapes(exported, family):
    """Without weights, on the meta device, the names that the model expects are those in the files."""
    directory = exported(family)
    config = transformers.AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    loaded = type(model).from_pretrained(directory, output_loading_info=True, dtype="auto")[1]
    assert not loaded["missing_keys"]
    assert not loaded["unexpected_keys"]
    assert not loaded["mismatched_keys"]


@pytest.mark.parametrize("model", TOWERS)
def test_towers_have_the_names_and_shapes_of_transformers(tmp_path, model):
    """transformers only warns about arrays that it initializes randomly."""
    source = GOLDEN_0_2_5 / model / "hf"
    # MaxText does not scan layers that use tower outputs, and does not support talkers.
    options = ToMaxText(scan=False, carry=True, exact=True)
    plan_to_maxtext(source, options, Resources(jobs=2)).run(tmp_path / "maxtext")
    plan_to_huggingface(tmp_path / "maxtext", ToHuggingFace(), Resources(jobs=2)).run(tmp_path / "hf")
    assert any(TOWERS[model] in str(path[0]) for path in ckpttools.open(tmp_path / "hf").arrays)
    name = json.loads((tmp_path / "hf" / "config.json").read_bytes())["architectures"][0]
    kind = getattr(transformers, name)
    built, loaded = kind.from_pretrained(tmp_path / "hf", output_loading_info=True, dtype="auto")
    assert {what: sorted(names) for what, names in loaded.items() if names} == {}
    original = kind.from_pretrained(source, dtype="auto").state_dict()
    towers = {key: tensor for key, tensor in built.state_dict().items() if TOWERS[model] in key}
    assert towers
    for key, tensor in towers.items():
        assert torch.equal(tensor, original[key]), key


SIZES = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 320,
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "layer_types": ["linear_attention", "full_attention"],
    "shared_expert_intermediate_size": 128,
}
# Scheme, dtype, class, and what its configuration says beside `SIZES`.
QUANTIZED = {
    "float16": ("fp8-block128", "float16", "LlamaForCausalLM", {}),
    "float32": ("fp8-block128", "float32", "LlamaForCausalLM", {}),
    "tied": ("fp8-block128", "bfloat16", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    "single experts": ("fp8-block128", "bfloat16", "Qwen3MoeForCausalLM", MIXTURE),
    "fused experts": ("fp8-block128", "bfloat16", "Qwen3_5MoeForCausalLM", MIXTURE | LINEAR),
    "mxfp4": ("mxfp4", "bfloat16", "GptOssForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


@pytest.mark.parametrize("case", QUANTIZED)
def test_transformers_model_loads_quantized_weights(tmp_path, case):
    pytest.importorskip("accelerate", reason="transformers dequantizes with it alone")
    scheme, dtype, name, declared = QUANTIZED[case]
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**SIZES, **declared)).to(getattr(torch, dtype))
    drawn = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=drawn) * 0.05)
    model.save_pretrained(tmp_path / "hf")
    if case == "fused experts":
        fuse(tmp_path / "hf" / "model.safetensors")
    ckpttools.quantize(tmp_path / "hf", tmp_path / "quantized", scheme=scheme)
    ckpttools.cast(tmp_path / "quantized", tmp_path / "plain", dtype=dtype)
    built, loaded = kind.from_pretrained(tmp_path / "quantized", output_loading_info=True, dtype=dtype)
    assert {what: sorted(names) for what, names in loaded.items() if names} == {}
    expected = kind.from_pretrained(tmp_path / "plain", dtype=dtype).state_dict()
    for key, tensor in built.state_dict().items():
        assert torch.equal(tensor, expected[key]), key
    if scheme != "mxfp4":
        declared = json.loads((tmp_path / "quantized" / "config.json").read_bytes())["quantization_config"]
        assert linear_in_fp8(kind, built.config, declared["modules_to_not_convert"]) == {
            name.removesuffix(".weight_scale_inv")
            for name in safetensors_torch.load_file(tmp_path / "quantized" / "model.safetensors")
            if name.endswith("_scale_inv") and ".experts." not in name
        }


def linear_in_fp8(kind, config, left) -> set[str]:
    """Return the linear layers and single experts that are FP8 if transformers computes in it, on a GPU."""
    declared = transformers.FineGrainedFP8Config(modules_to_not_convert=left)
    from transformers.integrations.finegrained_fp8 import FP8Linear, replace_with_fp8_linear

    with torch.device("meta"):
        model = kind(config)
    replace_with_fp8_linear(
        model, modules_to_not_convert=left, quantization_config=declared, pre_quantized=True
    )
    return {name for name, item in model.named_modules() if isinstance(item, FP8Linear)}


def fuse(file):
    """Fuse single experts into one array per layer, as in published Qwen3.5 files."""
    tensors = safetensors_torch.load_file(file)
    modules = sorted({name.rpartition(".experts.")[0] for name in tensors if ".experts." in name})
    for module in modules:
        single = [
            [tensors.pop(f"{module}.experts.{k}.{key}_proj.weight") for key in ("gate", "up", "down")]
            for k in range(MIXTURE["num_experts"])
        ]
        tensors[f"{module}.experts.gate_up_proj"] = torch.stack(
            [torch.cat([gate, up]) for gate, up, _ in single]
        )
        tensors[f"{module}.experts.down_proj"] = torch.stack([down for *_, down in single])
    safetensors_torch.save_file(tensors, file, metadata={"format": "pt"})
