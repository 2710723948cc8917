"""`ckpt maxtext-config`: what MaxText must be told, by configurations of the hub and of the golden data."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from copy import deepcopy

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command_line import ckpt, succeed
from support.internals import families
from support.locations import DOCS, GOLDEN, GOLDEN_0_2_5

import ckpttools
from ckpttools import ConfigError, CoverageError, MappingError, UsageError
from ckpttools.mapping.settings import setting_rules
from ckpttools.mapping.sizes import nested_value
from ckpttools.maxtext.config.infer_settings import matching_model, model_settings
from ckpttools.maxtext.config.model_facts import ModelFacts, _without_item_keys
from ckpttools.maxtext.config.models import named_models
from ckpttools.maxtext.config.setting_kinds import setting_kinds
from ckpttools.maxtext.loading.command import parse_command
from ckpttools.maxtext.loading.yaml_values import load_yaml

MODELS = ("gemma2", "gemma4-e2b", "gemma4-moe", "gemma4-vision", "llama4-scout", "qwen3-omni", "qwen3.5")

# Of the hub, what of them decides.
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201088,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_theta": 150000,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "max_position_embeddings": 131072,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
}
NAMED = {
    "llama3-8b": LLAMA_8B,
    "llama3.1-8b": {**LLAMA_8B, "rope_scaling": LLAMA3_ROPE},
    "qwen3-8b": QWEN3_8B,
    "gpt-oss-20b": GPT_OSS_20B,
}
# Of the hub, too.
SEEING = {
    "gemma3-4b": {
        "model_type": "gemma3",
        "mm_tokens_per_image": 256,
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_attention_heads": 8,
            "num_hidden_layers": 34,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262144,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "sliding_window": 1024,
            "tie_word_embeddings": True,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 1152,
            "image_size": 896,
            "intermediate_size": 4304,
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "patch_size": 14,
            "vision_use_head": False,
        },
    },
    "qwen3-vl-4b": {
        "model_type": "qwen3_vl",
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "attention_bias": False,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-06,
            "rope_theta": 5000000,
            "rope_scaling": {
                "mrope_interleaved": True,
                "mrope_section": [24, 20, 20],
                "rope_type": "default",
            },
            "tie_word_embeddings": True,
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "deepstack_visual_indexes": [5, 11, 17],
            "depth": 24,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 1024,
            "in_channels": 3,
            "intermediate_size": 4096,
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": 2560,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    },
}
TOWERS = {
    "gemma4-vision": {"vision_encoder_block": "gemma4", "rope_theta_for_vit": 100},
    "qwen3.5": {"vision_encoder_block": "qwen3_5", "mrope_section": [2, 1, 1], "use_mrope": True},
    "qwen3-omni": {"vision_encoder_block": "qwen3_omni", "use_audio": True, "n_window_for_audio": 8},
}
ALL = sorted(
    (item.parent for location in (GOLDEN, GOLDEN_0_2_5) for item in location.glob("*/hf/config.json")),
    key=str,
)
ALL = [pytest.param(item, id="/".join(item.parts[-3:-1])) for item in ALL]
CASES = sorted(item.parent.parent.name for item in GOLDEN.glob("*/hf/config.json"))


def written(directory, config):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def given_to(source, **options):
    return dict(ckpttools.maxtext_config(source, **options).as_mapping())


class TestNames:
    @pytest.mark.parametrize("name", NAMED)
    def test_matching_maxtext_model_is_named(self, tmp_path, name):
        result = ckpttools.maxtext_config(written(tmp_path / "m", NAMED[name]))
        assert (result.model_name, result.is_named) == (name, True)
        assert result.arguments() == (f"model_name={name}", "scan_layers=true")

    @pytest.mark.parametrize("name", NAMED)
    @given(data=st.data())
    def test_differing_maxtext_model_is_not_named(self, tmp_path_factory, name, data):
        numbers = [key for key, value in NAMED[name].items() if type(value) in (int, float)]
        key = data.draw(st.sampled_from(sorted(set(numbers) - {"head_dim", "num_key_value_heads"})))
        config = {**NAMED[name], key: NAMED[name][key] * 2}
        result = ckpttools.maxtext_config(written(tmp_path_factory.mktemp("m"), config))
        assert not result.is_named
        assert result.as_mapping()["decoder_block"] == {"l": "llama2", "q": "qwen3", "g": "gpt_oss"}[name[0]]

    def test_padding_rows_are_counted_if_present(self, tmp_path):
        succeed("convert", "hf-to-maxtext", GOLDEN / "gemma2" / "hf", tmp_path / "m", "--pad-vocab", 260)
        assert given_to(GOLDEN / "gemma2" / "hf")["vocab_size"] == 256
        assert given_to(tmp_path / "m")["vocab_size"] == 260

    def test_names_of_another_version_are_not_printed(self, tmp_path):
        location = written(tmp_path / "m", LLAMA_8B)
        assert given_to(location, maxtext="e591f30")["model_name"] == "llama3-8b"


class TestSettings:
    @pytest.mark.parametrize("case", CASES)
    def test_checkpoint_gives_the_settings_of_its_model(self, tmp_path, case):
        hf = GOLDEN / case / "hf"
        for scan in (True, False):
            way = "--scan" if scan else "--no-scan"
            succeed("convert", "hf-to-maxtext", hf, tmp_path / way, way)
            result = given_to(tmp_path / way)
            assert result.pop("load_parameters_path") == str(tmp_path / way / "0" / "items")
            assert result == given_to(hf, scan=scan)
            assert result["scan_layers"] is scan

    def test_printed_paths_are_absolute(self, tmp_path, monkeypatch):
        """Orbax refuses others."""
        succeed("convert", "hf-to-maxtext", GOLDEN / "llama3.1" / "hf", tmp_path / "out")
        monkeypatch.chdir(tmp_path)
        assert given_to("out")["load_parameters_path"] == str(tmp_path / "out" / "0" / "items")
        expected = f"load_parameters_path={tmp_path / 'out' / '0' / 'items'}"
        assert ckpttools.maxtext_config("out", check=[expected]).contradictions == ()

    def test_tower_settings_are_printed(self, tmp_path):
        vision = GOLDEN_0_2_5 / "gemma3-vision" / "hf"
        succeed("convert", "hf-to-maxtext", vision, tmp_path / "whole")
        succeed("convert", "hf-to-maxtext", vision, tmp_path / "text", "--text-only")
        given = given_to(tmp_path / "whole")
        assert given["use_multimodal"] is True and given["vision_encoder_block"] == "gemma3"
        assert given["hidden_size_for_vit"] == 24 and given["patch_size_for_vit"] == 28
        assert not any("vit" in name or "multimodal" in name for name in given_to(tmp_path / "text"))
        assert ckpttools.maxtext_config(tmp_path / "text").notes[0].startswith("text only")

    @pytest.mark.parametrize("model", MODELS)
    def test_config_only_gives_the_same_settings(self, tmp_path, model):
        """Such as heads of global layers, of which Gemma 4 says the sizes layer by layer."""
        (source,) = (item / model / "hf" for item in (GOLDEN_0_2_5, GOLDEN) if (item / model).is_dir())
        shutil.copy(source / "config.json", tmp_path)
        alone = ckpttools.maxtext_config(tmp_path / "config.json").arguments()
        assert alone == ckpttools.maxtext_config(source).arguments()

    def test_tower_without_scanning_gets_unscanned_layers(self):
        given = given_to(GOLDEN_0_2_5 / "qwen3-vl" / "hf")
        assert given["scan_layers"] is False and given["mrope_section"] == [4, 2, 2]
        assert given["deepstack_visual_indexes_for_vit"] == [0, 1]

    def test_missing_config_error_asks_for_the_model(self):
        with pytest.raises(ConfigError, match="does not exist next to the weights") as caught:
            ckpttools.maxtext_config(GOLDEN / "llama3.1" / "maxtext_scanned")
        assert "like" in caught.value.hint

    @pytest.mark.parametrize("case", CASES)
    def test_printed_config_parses_back(self, case):
        result = ckpttools.maxtext_config(GOLDEN / case / "hf")
        assert parse_command(result.arguments()).overrides == result.as_mapping()
        content = load_yaml(result.yaml())
        kept = {key: value for key, value in result.as_mapping().items() if key in content}
        assert kept == {key: value for key, value in content.items() if key != "base_config"}
        assert yaml.safe_load(result.yaml()).keys() == content.keys()

    @pytest.mark.parametrize("case", CASES)
    def test_yaml_file_is_printed_by_line(self, case):
        hf = GOLDEN / case / "hf"
        assert ckpt("maxtext-config", hf, "--format", "yaml").stdout == ckpttools.maxtext_config(hf).yaml()

    @pytest.mark.parametrize("value", ["1e-05 x=1", "1e-05", [1], {}, True, 1e400, 10**30])
    def test_non_numeric_setting_is_refused(self, tmp_path, value):
        location = written(tmp_path / "m", {**LLAMA_8B, "rms_norm_eps": value})
        with pytest.raises(
            ConfigError, match="rms_norm_eps does not give a valid normalization_layer_epsilon"
        ):
            ckpttools.maxtext_config(location)

    def test_rope_parameters_win_over_rope_scaling(self, tmp_path):
        both = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_scaling": LLAMA3_ROPE}
        assert given_to(written(tmp_path / "m", {**LLAMA_8B, **both}))["model_name"] == "llama3.1-8b"

    def test_model_with_named_code_is_named_and_overridden(self):
        result = given_to(GOLDEN / "gemma3" / "hf")
        assert (result["model_name"], result["override_model_config"]) == ("gemma3-4b", True)
        assert (result["local_rope_max_timescale"], result["rope_max_timescale"]) == (10_000, 1_000_000)

    def test_older_rope_fields_are_read(self, tmp_path):
        config = json.loads((GOLDEN / "gemma3" / "hf" / "config.json").read_text())
        text = config["text_config"]
        del text["rope_parameters"]
        text |= {
            "rope_theta": 2e6,
            "rope_local_base_freq": 2e4,
            "rope_scaling": {"factor": 8.0, "type": "linear"},
        }
        result = given_to(written(tmp_path / "m", config))
        expected = {
            "rope_max_timescale": 2_000_000,
            "local_rope_max_timescale": 20_000,
            "rope_linear_scaling_factor": 8,
        }
        assert result.items() >= expected.items()

    def test_unusual_scan_axis_is_stated(self, tmp_path):
        succeed("convert", "hf-to-maxtext", GOLDEN / "qwen3" / "hf", tmp_path / "m", "--scan-axis", 0)
        assert given_to(tmp_path / "m")["param_scan_axis"] == 0
        with pytest.raises(UsageError, match="stored differently"):
            ckpttools.maxtext_config(tmp_path / "m", scan=False)

    def test_conflicting_rope_bases_are_noted(self, tmp_path):
        declared = {
            **LLAMA_8B,
            "rope_theta": 777,
            "rope_parameters": {"rope_theta": 5000, "rope_type": "default"},
        }
        declared.pop("rope_scaling", None)
        result = ckpttools.maxtext_config(written(tmp_path / "m", declared))
        assert result.as_mapping()["rope_max_timescale"] == 5000
        assert "rope_parameters.rope_theta is 5000" in result.notes[0]
        assert "but rope_theta is 777" in result.notes[0]
        assert not ckpttools.maxtext_config(written(tmp_path / "m", {**declared, "rope_theta": 5000})).notes

    def test_missing_setting_is_refused(self, tmp_path):
        config = {**LLAMA_8B, "rms_norm_eps": None}
        with pytest.raises(ConfigError, match="normalization_layer_epsilon is unknown"):
            ckpttools.maxtext_config(written(tmp_path / "m", config))
        with pytest.raises(ConfigError, match="MaxText has no value of mlp_activations") as caught:
            ckpttools.maxtext_config(written(tmp_path / "m", {**LLAMA_8B, "hidden_act": "relu2"}))
        assert caught.value.got == 'hidden_act "relu2"'


class TestDeviations:
    def test_llama_3_2_rope_factor_is_reported(self):
        result = ckpttools.maxtext_config(GOLDEN / "llama3.2-tied" / "hf").deviations
        assert [item.what for item in result] == [
            "rope_parameters.factor is 32",
            "the output head is the embedding",
        ]
        assert ckpttools.maxtext_config(GOLDEN / "llama3.1" / "hf").deviations == ()

    @pytest.mark.parametrize(
        ("field", "value"), [("sliding_window", 4096), ("rope_scaling", {"type": "dynamic"})]
    )
    def test_unsupported_mistral_fields_are_reported(self, tmp_path, field, value):
        config = {**LLAMA_8B, "model_type": "mistral", "sliding_window": None, field: value}
        (result,) = ckpttools.maxtext_config(written(tmp_path / "m", config)).deviations
        assert "MaxText" in result.reason

    @pytest.mark.parametrize(
        ("case", "kinds"),
        [
            ("gemma2", {"layer_types": ["full_attention"] * 4}),
            ("gemma3", {"layer_types": ["sliding_attention"] * 8}),
            ("gpt-oss", {"layer_types": ["full_attention"] * 4}),
            ("gpt-oss", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
            ("llama4-scout", {"no_rope_layers": [1] * 8}),
        ],
    )
    def test_unsupported_layer_kinds_are_reported(self, tmp_path, case, kinds):
        config = json.loads((GOLDEN / case / "hf" / "config.json").read_text())
        usual = ckpttools.maxtext_config(written(tmp_path / "m", config)).deviations
        config.get("text_config", config).update(kinds)
        *others, result = sorted(
            ckpttools.maxtext_config(written(tmp_path / "m", config)).deviations,
            key=lambda deviation: any(kind in deviation.what for kind in kinds),
        )
        assert set(others) == set(usual)
        assert "full attention" in result.reason

    def test_bidirectional_model_is_reported(self, tmp_path):
        config = json.loads((GOLDEN / "gemma3" / "hf" / "config.json").read_text())
        config["text_config"]["use_bidirectional_attention"] = True
        result = ckpttools.maxtext_config(written(tmp_path / "m", config)).deviations
        assert "text_config.use_bidirectional_attention is true" in [item.what for item in result]


class TestCheck:
    def test_contradicting_settings_are_reported(self, tmp_path):
        hf = GOLDEN / "llama3.1" / "hf"
        result = ckpttools.maxtext_config(hf, check=["rope_type=default", "base_emb_dim=64"]).contradictions
        assert [(item.name, item.declared, item.expected) for item in result] == [
            ("rope_type", "default", "llama3.1")
        ]

    @pytest.mark.parametrize("case", CASES)
    def test_printed_settings_have_no_contradictions(self, tmp_path, case):
        hf = GOLDEN / case / "hf"
        told = ckpttools.maxtext_config(hf)
        assert ckpttools.maxtext_config(hf, check=told.arguments()).contradictions == ()
        if "override_model_config" not in told.as_mapping():
            file = tmp_path / "mine.yml"
            file.write_text(told.yaml())
            assert ckpttools.maxtext_config(hf, check=[file]).contradictions == ()

    @settings(max_examples=3)
    @given(data=st.data())
    def test_any_different_value_contradicts(self, data):
        hf = GOLDEN / "mixtral-8x7b" / "hf"
        told = ckpttools.maxtext_config(hf).as_mapping()
        for name in [name for name, value in told.items() if type(value) is int]:
            value = data.draw(st.integers(0, 10**6).filter(told[name].__ne__))
            result = ckpttools.maxtext_config(hf, check=[f"{name}={value}"]).contradictions
            assert [item.name for item in result] == [name]

    @settings(max_examples=20)
    @given(data=st.data())
    def test_unknown_setting_suggests_a_similar_one(self, data):
        name = data.draw(st.sampled_from(sorted(setting_kinds("0.2.5"))).filter(lambda name: "." not in name))
        wrong = f"{name}{data.draw(st.sampled_from('xqz'))}"
        result = ckpttools.maxtext_config(GOLDEN / "qwen3" / "hf", check=[f"{wrong}=1"])
        (mistake,) = result.invalid_settings
        assert (mistake.name, result.contradictions) == (wrong, ())
        assert "did you mean" in mistake.hint

    @pytest.mark.parametrize(
        ("declared", "expected"),
        [
            ("steps=abc", "an integer"),
            ("steps=1.5", "an integer"),
            ("base_mlp_dim=-64", "an integer above 0"),
            ("base_emb_dim=0", "an integer above 0"),
            ("dropout_rate=-0.5", "a number of 0 or more"),
            ("scan_layers=maybe", "true or false"),
            ("run_name=5", "text"),
            ("mlp_activations=silu", "[a, list]"),
            ("decoder_block=lama2", "one of "),
            ("model_name=llama3.1-9b", "one of "),
            ("base_emb_dim=none", "not null"),
        ],
    )
    def test_unsupported_value_is_refused(self, declared, expected):
        (mistake,) = ckpttools.maxtext_config(GOLDEN / "qwen3" / "hf", check=[declared]).invalid_settings
        assert expected in mistake.reason

    @pytest.mark.parametrize(
        "declared",
        ["steps=10", "run_name=", "enable_checkpointing=False", "quantization=none", "lora.lora_rank=4"],
    )
    def test_supported_value_is_accepted(self, declared):
        assert ckpttools.maxtext_config(GOLDEN / "qwen3" / "hf", check=[declared]).invalid_settings == ()

    @pytest.mark.parametrize(
        ("declared", "hint"),
        [("lora_rank=4", "write lora.lora_rank"), ("lora.lora_rankk=4", "lora.lora_rank?")],
    )
    def test_settings_of_other_groups_get_a_hint(self, declared, hint):
        (mistake,) = ckpttools.maxtext_config(GOLDEN / "qwen3" / "hf", check=[declared]).invalid_settings
        assert mistake.hint.endswith(hint)

    def test_versions_have_different_settings(self):
        hf = GOLDEN / "qwen3" / "hf"
        for name, version in {"pure_nnx": "e591f30", "use_lineage": "0.2.5"}.items():
            refusing = {
                item: ckpttools.maxtext_config(hf, check=[f"{name}=true"], maxtext=item).invalid_settings
                for item in ("e591f30", "0.2.5")
            }
            assert [item for item, result in refusing.items() if not result] == [version]

    @pytest.mark.parametrize("case", ALL)
    def test_printed_settings_have_no_mistakes(self, case):
        assert (
            ckpttools.maxtext_config(case, check=ckpttools.maxtext_config(case).arguments()).invalid_settings
            == ()
        )

    LINE = (
        "python3 -m maxtext.trainers.pre_train.train src/maxtext/configs/base.yml run_name='a b' "
        "rope_type=default steps=5"
    )

    @pytest.mark.parametrize(
        "words",
        [
            shlex.split(LINE),
            [LINE],
            [LINE.replace(" rope", " \\\n  rope")],
            [f"XLA_FLAGS=--a JAX_PLATFORMS=cpu {LINE} 2>&1 | tee log"],
            ["--", *shlex.split(LINE)],
        ],
    )
    def test_pasted_command_is_parsed(self, words):
        done = ckpt("maxtext-config", GOLDEN / "llama3.1" / "hf", "--check", *words)
        assert done.exit_code == 1
        assert "rope_type=default  (command line)" in done.output
        assert "refused" not in done.output and "run_name" not in done.output

    def test_misspelled_options_are_reported(self):
        done = ckpt("maxtext-config", GOLDEN / "llama3.1" / "hf", "--chek", "rope_type=default")
        assert done.exit_code == 2 and "--check" in done.output

    def test_config_file_includes_defaults(self, tmp_path):
        file = tmp_path / "mine.yml"
        file.write_text("base_config: base.yml\nmodel_name: llama3.1-8b\n")
        hf = written(tmp_path / "m", {**LLAMA_8B, "rope_scaling": LLAMA3_ROPE})
        assert ckpttools.maxtext_config(hf, check=[file]).contradictions == ()
        done = ckpt("maxtext-config", hf, "--check", file, "param_scan_axis=0", "model_name=llama3-8b")
        assert done.exit_code == 1
        assert "rope_type=default" in done.output

    def test_settings_file_is_checked(self, tmp_path):
        file = tmp_path / "mine.yml"
        file.write_text("base_config: base.yml\nmodle_name: llama3.1-8b\nlora: {lora_rank: many}\n")
        result = ckpttools.maxtext_config(GOLDEN / "llama3.1" / "hf", check=[file]).invalid_settings
        assert [(item.name, item.declared_in) for item in result] == [
            ("modle_name", str(file)),
            ("lora.lora_rank", str(file)),
        ]


class TestKnownFields:
    """Every field of a configuration is read, known to change nothing, or reported."""

    @pytest.mark.parametrize("case", ALL)
    def test_transformers_fields_are_all_known(self, case):
        # The golden DeepSeek V4 has a field that its model does not read.
        known = ("rope_parameters.rope_theta 10000.0",) if "deepseek4" in case.parts else ()
        assert ckpttools.maxtext_config(case).unmapped_fields == known

    @pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
    @pytest.mark.parametrize("value", ["yarn", ["yarn"], 8, True])
    def test_invalid_rope_sections_are_reported(self, tmp_path, field, value):
        hf = written(tmp_path / "m", {**LLAMA_8B, field: value})
        assert ckpttools.maxtext_config(hf).unmapped_fields == (f"{field} {json.dumps(value)}",)

    @pytest.mark.parametrize("case", ALL)
    @settings(max_examples=5)
    @given(
        name=st.from_regex(r"[a-z]{3,8}_[a-z]{3,8}x", fullmatch=True),
        value=st.one_of(st.booleans(), st.integers(1, 9), st.text(min_size=1, max_size=5)),
    )
    def test_unknown_fields_are_reported(self, tmp_path_factory, case, name, value):
        config = json.loads((case / "config.json").read_text())
        text = config.get("thinker_config", config).get("text_config", config)
        text[name] = value
        location = written(tmp_path_factory.mktemp("m"), config)
        try:
            result = ckpttools.maxtext_config(location)
        except ConfigError as refusal:  # Without arrays some sizes of Gemma 4 are open.
            assert "head_dim" in str(refusal)
            return
        assert [item for item in result.unmapped_fields if item.split()[0].rpartition(".")[2] == name]

    @pytest.mark.parametrize(
        ("case", "change", "what"),
        [
            ("llama3.1", {"attention_bias": True}, "attention_bias is true"),
            ("llama3.1", {"mlp_bias": True}, "mlp_bias is true"),
            ("llama3.1", {"layer_types": ["sliding_attention"] * 4}, "layer_types[{0..3}] is"),
            ("gpt-oss", {"attention_bias": False}, "attention_bias is false"),
            (
                "gpt-oss",
                {"rope_parameters": {"attention_factor": 2.0}},
                "rope_parameters.attention_factor is 2",
            ),
            ("gpt-oss", {"rope_parameters": {"mscale": 2.0, "mscale_all_dim": 1.0}}, "mscale is 2"),
            ("deepseek3", {"scoring_func": "softmax"}, 'scoring_func is "softmax"'),
            ("deepseek2", {"scoring_func": "sigmoid"}, 'scoring_func is "sigmoid"'),
            ("qwen3-next", {"full_attention_interval": 3}, "full_attention_interval is 3"),
            ("qwen3-next", {"shared_expert_intermediate_size": 96}, "shared_expert_intermediate_size is 96"),
        ],
    )
    def test_deviations_name_the_config_field(self, tmp_path, case, change, what):
        shutil.copytree(GOLDEN / case / "hf", tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors"))
        config = json.loads((tmp_path / "m" / "config.json").read_text())
        for name, value in change.items():
            config[name] = {**config.get(name, {}), **value} if isinstance(value, dict) else value
        (tmp_path / "m" / "config.json").write_text(json.dumps(config))
        result = [deviation.what for deviation in ckpttools.maxtext_config(tmp_path / "m").deviations]
        assert [item for item in result if what in item], result

    def test_missing_field_uses_transformers_default(self, tmp_path):
        config = json.loads((GOLDEN / "qwen3-moe" / "hf" / "config.json").read_text())
        (declared,) = ckpttools.maxtext_config(written(tmp_path / "m", config)).deviations
        del config["norm_topk_prob"]
        (result,) = ckpttools.maxtext_config(written(tmp_path / "m", config)).deviations
        assert declared.what == "norm_topk_prob is false"
        assert result.what == "norm_topk_prob is not set, so transformers uses false"

    def test_null_fields_count_as_stated(self, tmp_path):
        """Gemma 2 without a cap says so; where it says nothing, transformers caps."""
        config = json.loads((GOLDEN / "gemma2" / "hf" / "config.json").read_text())
        config["final_logit_softcapping"] = None
        assert given_to(written(tmp_path / "m", config))["final_logits_soft_cap"] == 0
        del config["final_logit_softcapping"]
        assert given_to(written(tmp_path / "m", config))["final_logits_soft_cap"] == 30

    def test_stated_rope_only_gets_a_default_theta(self, tmp_path):
        config = json.loads((GOLDEN / "gpt-oss" / "hf" / "config.json").read_text())
        rope = config["rope_parameters"]
        del rope["truncate"], rope["rope_theta"]
        result = given_to(written(tmp_path / "m", config))
        assert (result["rope_truncate"], result["rope_max_timescale"]) == (True, 150000)
        del config["rope_parameters"]
        result = given_to(written(tmp_path / "m", config))
        assert (result["rope_truncate"], result["rope_type"], result["rope_factor"]) == (False, "yarn", 32)

    def test_sparse_gemma3_config_is_completed(self, tmp_path):
        """No heads, no epsilon, no activation, no vocabulary, no base of the rotary embedding."""
        rope = {"factor": 8.0, "rope_type": "linear"}
        text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
        text |= {"num_hidden_layers": 34, "rope_scaling": rope, "sliding_window": 1024}
        config = {"model_type": "gemma3", "mm_tokens_per_image": 256, "text_config": text}
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "config.json").write_text(json.dumps(config))
        report = ckpttools.maxtext_config(tmp_path / "m")
        own, result = named_models()["gemma3-4b"], {setting.name: setting for setting in report.settings}
        assert [name for name in own if name in result and result[name].value != own[name]] == ["vocab_size"]
        assert result["rope_max_timescale"].value == 1000000
        assert {result[name].source for name in ("rope_max_timescale", "base_num_kv_heads", "head_dim")} == {
            f"the default of transformers, not stated in {tmp_path / 'm' / 'config.json'}"
        }

    def test_yarn_with_usual_factor_is_not_reported(self, tmp_path):
        config = json.loads((GOLDEN / "gpt-oss" / "hf" / "config.json").read_text())
        rope = config["rope_parameters"]
        rope["attention_factor"] = 0.1 * math.log(rope["factor"]) + 1
        assert ckpttools.maxtext_config(written(tmp_path / "m", config)).deviations == ()

    @pytest.mark.parametrize("case", ALL)
    def test_named_sources_exist_in_config(self, case):
        config = json.loads((case / "config.json").read_text())
        result = ckpttools.maxtext_config(case)
        sources = [setting.source.partition(": ")[2] for setting in result.settings if ": " in setting.source]
        named = [name for source in sources for name in source.split(", ")]
        assert [name for name in named if nested_value(config, name) is None] == []
        assert named

    @pytest.mark.parametrize(
        ("case", "declared"),
        {
            "deepseek3.2": "indexer_sparse_training=true",
            "qwen3-omni": "encodes each audio chunk",
        }.items(),
    )
    def test_important_notes_are_reported(self, case, declared):
        result = ckpttools.maxtext_config(GOLDEN_0_2_5 / case / "hf")
        assert declared in " ".join([*result.notes, *map(str, result.deviations)])

    def test_unsupported_number_is_refused(self, tmp_path):
        rope = {"type": "yarn", "factor": 2.5, "original_max_position_embeddings": 4096}
        config = {**LLAMA_8B, "max_position_embeddings": 10240, "rope_scaling": rope}
        with pytest.raises(ConfigError, match="does not accept this rope_factor") as caught:
            ckpttools.maxtext_config(written(tmp_path / "m", config))
        assert "an integer" in str(caught.value.expected)


class TestTowers:
    @pytest.mark.parametrize("case", TOWERS)
    def test_tower_settings_are_reported(self, case):
        result = given_to(GOLDEN_0_2_5 / case / "hf")
        expected = {"use_multimodal": True, "hidden_size_for_vit": 24, "override_model_config": True}
        assert result.items() >= {**expected, **TOWERS[case]}.items()

    @pytest.mark.parametrize("name", ["gemma3-4b", "qwen3-vl-4b"])
    def test_maxtext_model_is_named_with_its_tower(self, tmp_path, name):
        """And what its own file leaves open is said beside the name."""
        config = deepcopy(SEEING[name])
        result = ckpttools.maxtext_config(written(tmp_path / "m", config))
        assert (result.model_name, result.is_named, result.unmapped_fields) == (name, True, ())
        scan = "true" if name == "gemma3-4b" else "false"
        assert result.arguments() == (f"model_name={name}", f"scan_layers={scan}", "use_multimodal=true")
        assert ckpttools.maxtext_config(tmp_path / "m", check=result.arguments()).contradictions == ()
        config["vision_config"]["hidden_size"] *= 2
        assert not ckpttools.maxtext_config(written(tmp_path / "m", config)).is_named

    def test_run_without_towers_contradicts(self, tmp_path):
        location = written(tmp_path / "m", SEEING["gemma3-4b"])
        (result,) = ckpttools.maxtext_config(location, check=["model_name=gemma3-4b"]).contradictions
        assert (result.name, result.declared, result.expected) == ("use_multimodal", False, True)

    def test_llama4_tower_settings_are_printed(self):
        result = given_to(GOLDEN / "llama4-scout" / "hf")
        expected = {
            "model_name": "llama4-17b-16e",
            "tile_size_for_vit": 28,
            "projector_input_dim_for_vit": 32,
        }
        assert result.items() >= expected.items()

    @pytest.mark.parametrize("case", TOWERS)
    def test_model_without_towers_has_no_tower_settings(self, tmp_path, case):
        succeed("convert", "hf-to-maxtext", GOLDEN_0_2_5 / case / "hf", tmp_path / "m", "--text-only")
        result = given_to(tmp_path / "m")
        assert not [name for name in result if "_for_" in name or name in ("use_multimodal", "use_audio")]

    def test_towers_unsupported_by_maxtext_are_reported(self):
        result = ckpttools.maxtext_config(GOLDEN_0_2_5 / "gemma4-e2b" / "hf")
        assert "does not support vision_config" in " ".join(result.notes)


class TestCommandLine:
    def test_only_settings_go_to_stdout(self):
        hf = GOLDEN / "llama3.2-tied" / "hf"
        done = subprocess.run(
            [sys.executable, "-m", "ckpttools", "maxtext-config", hf],
            capture_output=True,
            text=True,
            check=True,
        )
        assert tuple(done.stdout.split()) == ckpttools.maxtext_config(hf).arguments()
        assert "32" in done.stderr

    def test_complete_command_is_checked(self):
        done = succeed("maxtext-config", GOLDEN / "qwen3" / "hf", "--command", "train")
        assert done.output.startswith("python3 -m maxtext.trainers.pre_train.train run_name=NAME")

    def test_settings_require_the_check_option(self):
        assert ckpt("maxtext-config", GOLDEN / "qwen3" / "hf", "rope_type=default").exit_code == 2
        assert ckpt("maxtext-config", GOLDEN / "qwen3" / "hf", "--check").exit_code == 2

    def test_maxtext_config_prints_json(self):
        result = json.loads(succeed("maxtext-config", GOLDEN / "qwen3" / "hf", "--json").output)
        assert {item["name"]: item["value"] for item in result["required_settings"]} == given_to(
            GOLDEN / "qwen3" / "hf"
        )


class TestRules:
    @pytest.mark.parametrize("name", families())
    def test_rules_round_trip_through_text(self, name):
        rules = families()[name].settings
        assert setting_rules(str(rules)) == rules

    @pytest.mark.parametrize("line", ["x", "x: ]", "x: config.y as {", "must x is 1", "x: y z", "a b: 1"])
    def test_invalid_rule_is_refused(self, line):
        with pytest.raises(MappingError, match="not a rule for a setting") as caught:
            setting_rules(line)
        assert caught.value.got == line

    def test_separators_in_quotes_separate_nothing(self):
        (rule,) = setting_rules('x: config.y as {"a | b": ", if ", "c": 1}').settings
        facts = [ModelFacts({"y": value}) for value in ("a | b", "c")]
        assert [rule.terms[0].of(fact) for fact in facts] == [", if ", 1]

    def test_first_applicable_rule_wins(self):
        rules = setting_rules('x: 1, if config.y is "a"\nx: config.z | 2')
        values = [settings_of_text(rules, config) for config in ({"y": "a"}, {"y": "b"}, {"y": "b", "z": 3})]
        assert values == [1, 2, 3]


@pytest.mark.parametrize(
    ("config", "location"),
    [
        ({}, None),
        ({"rope_theta": 1e4}, None),
        ({"rope_scaling": {"factor": 8.0}}, None),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling.type"),
        (
            {"text_config": {"rope_parameters": {"rope_type": "yarn"}}},
            "text_config.rope_parameters.rope_type",
        ),
    ],
)
def test_rope_type_is_found_in_any_location(config, location):
    assert ModelFacts(config).location_of("rope.type") == location


def settings_of_text(rules, config):
    facts = ModelFacts(config)
    result = (term.of(facts) for term in rules.chosen(facts)["x"].terms)
    return next(value for value in result if value is not None)


def test_model_table_lists_models_with_known_sizes():
    assert named_models()["qwen3-8b"].items() >= {"base_emb_dim": 4096, "use_qk_norm": True}.items()


def test_model_table_matches_family_settings():
    family = families()["qwen3"]
    lengths = family.table(QWEN3_8B, "config.json").sizes
    facts = ModelFacts(QWEN3_8B, {axis: size.length for axis, size in lengths.items()})
    assert matching_model(model_settings(family, facts, "config.json")) == "qwen3-8b"


def test_maxtext_config_page_is_correct(tmp_path, monkeypatch):
    shutil.copytree(GOLDEN / "llama3.1" / "hf", tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "maxtext-config.md").read_text()
    # The way back is shown for a model of real size: test_config_back.py has it.
    for line in re.findall(r"^\$ (ckpt (?!convert maxtext-to-hf).*)$", page, re.MULTILINE):
        assert ckpt(*shlex.split(line)[1:]).exit_code == ("--check" in line), line
    (example,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    exec(compile(example, "maxtext-config.md", "exec"), {})


class TestArraysNextToConfig:
    """A configuration beside arrays is theirs, or refused."""

    @pytest.mark.parametrize(
        "field, value, told",
        [
            ("num_hidden_layers", 3, "beyond the 3"),
            ("num_hidden_layers", 5, "num_hidden_layers is 5, but the arrays have 4 layers"),
            ("vocab_size", 300, "vocab 300 from"),
            ("hidden_size", 32, "embed 32 from"),
            ("num_attention_heads", 8, "heads 8 from"),
            ("tie_word_embeddings", True, "tie_word_embeddings is true"),
        ],
    )
    def test_hugging_face_weights_must_match_config(self, tmp_path, field, value, told):
        copied = shutil.copytree(GOLDEN / "llama3.1" / "hf", tmp_path / "m")
        config = json.loads((copied / "config.json").read_bytes())
        (copied / "config.json").write_text(json.dumps({**config, field: value}))
        with pytest.raises(CoverageError, match="do not match the model in the configuration") as caught:
            ckpttools.maxtext_config(copied)
        assert told in str(caught.value)
        assert "not compared with arrays" in caught.value.hint
        assert ckpttools.maxtext_config(copied / "config.json")

    @pytest.mark.parametrize("field, value", [("num_local_experts", 8), ("num_hidden_layers", 2)])
    def test_maxtext_weights_must_match_config(self, tmp_path, field, value):
        source = GOLDEN / "mixtral-8x7b" / "hf"
        config = json.loads((source / "config.json").read_bytes())
        succeed("convert", "hf-to-maxtext", source, tmp_path / "m")
        (tmp_path / "config.json").write_text(json.dumps({**config, field: value}))
        assert ckpttools.maxtext_config(tmp_path / "m")
        with pytest.raises(CoverageError, match="do not match the model in the configuration"):
            ckpttools.maxtext_config(tmp_path / "m", like=tmp_path / "config.json")


@pytest.mark.parametrize(
    ("path", "plain"),
    [("a.b", "a.b"), ("a.0", "a"), ("a.#", "a"), ("a.#.3", "a"), ("a.3.#", "a"), ("a.3.b", "a.3.b")],
)
def test_listed_fields_match_the_documented_list(path, plain):
    assert _without_item_keys(path) == plain
