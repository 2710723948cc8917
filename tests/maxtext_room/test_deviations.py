"""The table of known deviations: what applies to which model, and which commands report it."""

import json
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command_line import succeed
from support.internals import VERSIONS, families

import ckpttools
from ckpttools import FormatError
from ckpttools.maxtext.config.deviations import known_deviations, rounded_root

YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
SIZES = {
    "hidden_size": 40,
    "num_hidden_layers": 4,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 65536,
}
OLMO3 = {**SIZES, "model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"], "rope_theta": 5e5}
OLMO3 |= {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": 4096}
GEMMA3 = {**SIZES, "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "head_dim": 16}
GEMMA3 |= {"query_pre_attn_scalar": 16}
LOCAL = {"rope_type": "default", "rope_theta": 5e5}
NESTED = {"full_attention": {**YARN, "rope_theta": 5e5}, "sliding_attention": LOCAL}
DEEPSEEK = {**SIZES, "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"]}
DEEPSEEK |= {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 16}
DEEPSEEK |= {"qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK |= {"moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_shared_experts": 1}
STRETCHED = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
SCALED = {**STRETCHED, "mscale": 0.707, "mscale_all_dim": 0.707}
LLAMA4 = {**SIZES, "model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"], "head_dim": 16}
LLAMA4 |= {"intermediate_size_mlp": 48, "num_local_experts": 4, "attention_chunk_size": 8192}
LLAMA4 |= {"rope_theta": 500000.0}
SCOUT = {"rope_type": "llama3", "original_max_position_embeddings": 8192, "factor": 16.0}
SCOUT |= {"low_freq_factor": 1.0, "high_freq_factor": 1.0}
OF_LLAMA31 = {**SCOUT, "factor": 8.0, "high_freq_factor": 4.0}
SHORT, WITHOUT = "YaRN scales the attention scores", "YaRN scales the rotary part"
OLMO, ROOT, HEAD = "layers with full attention use YaRN", "multiplied by", "the output head is"


def reported(path, config):
    """The deviations of a configuration."""
    file = path / "config.json"
    file.write_text(json.dumps(config))
    return ckpttools.maxtext_config(file).deviations


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({**OLMO3, "rope_scaling": YARN}, [OLMO]),
        ({**OLMO3, "rope_parameters": NESTED}, [OLMO]),
        ({**OLMO3, "rope_parameters": {**NESTED, "sliding_attention": NESTED["full_attention"]}}, []),
        (OLMO3, []),
        ({**OLMO3, "rope_parameters": {"full_attention": LOCAL, "sliding_attention": LOCAL}}, []),
        ({**OLMO3, "model_type": "olmo2", "layer_types": ["full_attention"] * 4, "rope_scaling": YARN}, None),
        (GEMMA3, [HEAD, ROOT]),
        ({**GEMMA3, "hidden_size": 64}, [HEAD]),
        ({**GEMMA3, "hidden_size": 1152}, [HEAD, ROOT]),
        ({**GEMMA3, "tie_word_embeddings": False}, []),
        (DEEPSEEK, []),
        ({**DEEPSEEK, "rope_scaling": SCALED}, []),
        ({**DEEPSEEK, "rope_scaling": SCALED, "max_position_embeddings": 4097}, []),
        ({**DEEPSEEK, "rope_scaling": SCALED, "max_position_embeddings": 4096}, [SHORT]),
        ({**DEEPSEEK, "rope_scaling": SCALED, "max_position_embeddings": 256}, [SHORT]),
        ({**DEEPSEEK, "rope_scaling": {**SCALED, "factor": 1.0}, "max_position_embeddings": 256}, []),
        ({**DEEPSEEK, "rope_scaling": STRETCHED}, [WITHOUT]),
        ({**DEEPSEEK, "rope_scaling": {**SCALED, "mscale": 0, "mscale_all_dim": 0}}, [WITHOUT]),
        ({**DEEPSEEK, "rope_scaling": STRETCHED, "max_position_embeddings": 256}, [WITHOUT]),
        ({**LLAMA4, "rope_scaling": OF_LLAMA31}, []),
        ({**LLAMA4, "rope_scaling": SCOUT}, ["rope_scaling.factor is 16", "high_freq_factor is 1"]),
    ],
)
def test_deviations_apply_to_affected_models(tmp_path, config, expected):
    result = reported(tmp_path, config)
    if expected is None:
        assert not any(item.what.startswith(OLMO) for item in result)
        return
    assert len(result) == len(expected)
    assert all(text in item.what for text, item in zip(expected, result, strict=True))


@pytest.mark.parametrize(
    ("width", "percent"), [(640, -0.19), (1152, 0.17), (2560, -0.19), (3840, 0.05), (5376, 0.24)]
)
def test_released_sizes_of_gemma3_are_reported_with_their_deviation(tmp_path, width, percent):
    result = reported(tmp_path, {**GEMMA3, "hidden_size": width})
    assert f"off by {percent:+.2f}%" in result[-1].effect
    assert 'tied="materialize"' in result[-1].remedy


def test_llama4_factors_are_reported_with_their_deviation(tmp_path):
    (factor,) = (item for item in reported(tmp_path, {**LLAMA4, "rope_scaling": SCOUT}) if item.effect)
    assert "2.0 after 512" in factor.effect and "rope_use_scale=false" in factor.effect


@given(st.integers(1, 1 << 20))
def test_rounded_root_matches_bfloat16(width):
    assert rounded_root(width) == float(ml_dtypes.bfloat16(np.float64(math.sqrt(width))))


def test_entries_name_existing_families_fields_and_versions():
    known = known_deviations()
    assert len({item.name for item in known}) == len(known)
    for item in known:
        assert set(item.families) <= families().keys() and set(item.versions) <= VERSIONS.keys()
        assert not (item.applies and item.field)
        fields = {
            limit.expected.left.name
            for name in item.families or families()
            for limit in families()[name].settings.limits
        }
        assert not item.field or item.field in fields


@pytest.mark.parametrize(
    ("config", "phrase"),
    [
        ({**OLMO3, "rope_scaling": YARN}, "rope_type=default"),
        (GEMMA3, "--tied materialize"),
        ({**DEEPSEEK, "rope_scaling": STRETCHED}, "set mscale=0 and rope_attention_scaling=true"),
    ],
)
def test_commands_report_applicable_deviations_with_advice(tmp_path, config, phrase):
    (tmp_path / "config.json").write_text(json.dumps(config))
    ckpttools.synth(tmp_path / "config.json", tmp_path / "hf")
    for words in (("convert", "hf-to-maxtext", tmp_path / "hf"), ("maxtext-config",)):
        assert phrase in " ".join(succeed(*words, tmp_path / "mt").stderr.split())
    report = ckpttools.doctor(tmp_path / "mt")
    assert report.healthy or {finding.level for finding in report.findings} == {"info"}
    assert any(phrase.split()[-1] in finding.hint for finding in report.findings)
    assert ckpttools.doctor(tmp_path / "hf").findings == ()


def test_separate_head_removes_tied_head_deviations(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3))
    ckpttools.synth(tmp_path / "config.json", tmp_path / "hf")
    ckpttools.hf_to_maxtext(tmp_path / "hf", tmp_path / "mt", tied="materialize")
    result = ckpttools.maxtext_config(tmp_path / "mt")
    assert result.deviations == () and result.as_mapping()["logits_via_embedding"] is False
    tree = ckpttools.open(tmp_path / "mt")
    (kernel,) = (np.asarray(tree.arrays[path].read()) for path in tree.arrays if "logits_dense" in path)
    head = ckpttools.open(tmp_path / "hf").arrays["model.embed_tokens.weight",].read()
    assert np.array_equal(kernel.view(np.uint16), np.asarray(head).T.view(np.uint16))


@pytest.mark.parametrize("count", [1, 3, 5])
def test_conversions_refuse_layer_lists_reported_by_doctor(tmp_path, count):
    (tmp_path / "config.json").write_text(json.dumps({**GEMMA3, "num_hidden_layers": 6}))
    ckpttools.synth(tmp_path / "config.json", tmp_path / "hf")
    config = tmp_path / "hf" / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"layer_types": ["full_attention"] * count})
    )
    assert [finding.check for finding in ckpttools.doctor(tmp_path / "hf").findings] == ["layer-lists"]
    with pytest.raises(FormatError, match=f"layer_types has {count} entr.*num_hidden_layers is 6"):
        ckpttools.hf_to_maxtext(tmp_path / "hf", tmp_path / "mt")
    assert not (tmp_path / "mt").exists()


def test_reverse_conversion_reports_deviations(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**OLMO3, "rope_scaling": YARN}))
    ckpttools.synth(tmp_path / "config.json", tmp_path / "hf")
    ckpttools.hf_to_maxtext(tmp_path / "hf", tmp_path / "mt")
    planned = ckpttools.maxtext_to_hf.plan(tmp_path / "mt", tmp_path / "back")
    assert any(OLMO in remark for remark in planned.plan.notes.remarks)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({**OLMO3, "rope_scaling": YARN}, "default"),
        ({**OLMO3, "rope_parameters": NESTED}, "default"),
        ({**OLMO3, "rope_parameters": {**NESTED, "sliding_attention": NESTED["full_attention"]}}, "yarn"),
        ({**OLMO3, "model_type": "olmo2", "layer_types": None, "rope_scaling": YARN}, "yarn"),
        (OLMO3, "default"),
    ],
)
def test_olmo3_settings_have_the_rope_of_most_layers(tmp_path, config, expected):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert ckpttools.maxtext_config(file).as_mapping()["rope_type"] == expected
    checked = ckpttools.maxtext_config(file, check=["rope_type=yarn"])
    assert bool(checked.contradictions) == (expected != "yarn")
