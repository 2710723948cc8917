"""A `config.json` is generated from MaxText's settings and arrays if none was carried along."""

from __future__ import annotations

import json
import re
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from support.command_line import ckpt, succeed
from support.locations import GOLDEN, GOLDEN_0_2_5, HF

import ckpttools
from ckpttools import ConfigError, UsageError
from ckpttools.maxtext.config.models import defaults, named_models
from ckpttools.maxtext.config.to_hf_config import config_from_settings

# Their text is a model without a name of its own, or of another family.
WITH_TOWERS = {name for name, declared in named_models().items() if declared.get("use_mrope")}
CASES = {
    f"{location.name}/{item.parent.parent.name}": item.parent
    for location in (GOLDEN, GOLDEN_0_2_5)
    for item in sorted(location.glob("*/hf/config.json"))
    if item.parent.parent.name not in ("qwen3-vl", "qwen3-vl-moe")
}
# No configuration is made of what settings say of towers.
OF_TOWERS = (
    "mrope_section",
    "position_id_per_seconds",
    "use_audio",
    "use_mrope",
    "use_multimodal",
    "vision_encoder_block",
    "vision_output_length",
)


# Types that transformers has for text alone, where that is another.
TEXT_TYPES = {
    "kimi_k2": "deepseek_v3",
    "qwen3_omni_moe_text": "qwen3_moe",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_vl_text": "qwen3",
}


def of_config(directory, config):
    (directory / "config.json").write_text(json.dumps(config))
    return ckpttools.maxtext_config(directory / "config.json")


def values(result):
    text = (setting for setting in result.settings if not setting.name.endswith(("_for_vit", "_for_audio")))
    return {item.name: item.value for item in text if item.name not in ("scan_layers", *OF_TOWERS)}


@cache
def told_of(case):
    return ckpttools.maxtext_config(CASES[case])


@cache
def back_of(case):
    return config_from_settings(told_of(case).arguments())


class TestSettingsOnly:
    @pytest.mark.parametrize("case", CASES)
    def test_generated_config_gives_same_settings(self, tmp_path, case):
        told = told_of(case)
        built = back_of(case)
        result = of_config(tmp_path, built)
        # Towers need the code of a model of a name, where texts do not.
        named = {"model_name": told.model_name}
        named = {} if result.model_name and built["model_type"] != "deepseek_v3" else named
        assert {**values(result), **named} == {**values(told), **named}
        # What MaxText cannot do otherwise is said as it does it.
        assert [
            deviation.what
            for deviation in result.deviations
            if not re.search("embedding|equal scores", deviation.what)
        ] == []

    @pytest.mark.parametrize("case", CASES)
    def test_generated_config_has_same_model_type(self, case):
        """transformers would initialize the arrays that only another type has."""
        own = json.loads((CASES[case] / "config.json").read_text())
        text = own.get("thinker_config", own).get("text_config", own)
        built = back_of(case)["model_type"]
        assert built == TEXT_TYPES.get(text["model_type"], text["model_type"])

    def test_deepseek_v32_config_has_an_indexer(self):
        told = ckpttools.maxtext_config(GOLDEN_0_2_5 / "deepseek3" / "hf").arguments()
        without = [word for word in told if not word.startswith(("model_name", "override"))]
        with pytest.raises(ConfigError) as caught:
            config_from_settings(without)
        assert "model_name" in str(caught.value.expected)

    @pytest.mark.parametrize("case", CASES)
    def test_settings_in_a_file_give_same_config(self, tmp_path, case):
        told = told_of(case)
        file = tmp_path / "mine.yml"
        file.write_text("base_config: base.yml\n" if told.model_name else told.yaml())
        words = [str(file), *(told.arguments() if told.model_name else ())]
        assert config_from_settings(words) == back_of(case)

    @pytest.mark.parametrize("name", sorted(named_models().keys() - WITH_TOWERS))
    def test_model_name_gives_config(self, tmp_path, name):
        result = of_config(tmp_path, config_from_settings([f"model_name={name}"]))
        assert result.is_named
        assert named_models()[result.model_name] == named_models()[name]

    @pytest.mark.parametrize("name", sorted(WITH_TOWERS))
    def test_multimodal_model_name_gives_text_config(self, tmp_path, name):
        result = of_config(tmp_path, config_from_settings([f"model_name={name}"]))
        known = {
            key: value
            for key, value in named_models()[name].items()
            if key not in OF_TOWERS and "_for_" not in key
        }
        # Where nothing is stretched, nothing reads how long texts were.
        # How layers are stored is not the model's.
        known = {
            key: value
            for key, value in known.items()
            if key not in ("max_position_embeddings", "scan_layers")
        }
        built = {**defaults(), **{setting.name: setting.value for setting in result.settings}}
        assert {key: built.get(key) for key in known} == known

    @pytest.mark.parametrize("case", ["golden/gpt-oss", "golden/gemma2"])
    @settings(max_examples=10)
    @given(data=st.data())
    def test_missing_settings_are_not_invented(self, case, data):
        """A missing setting is derived from the others, or it is requested."""
        told = told_of(case).arguments()
        left_out = data.draw(st.sampled_from(told))
        words = [item for item in told if item != left_out]
        try:
            assert config_from_settings(words) == back_of(case)
        except ConfigError as error:
            assert left_out.partition("=")[0] in f"{error} {error.expected}"

    def test_all_missing_settings_are_listed(self):
        with pytest.raises(ConfigError, match="not sufficient") as caught:
            config_from_settings(["decoder_block=llama2", "base_emb_dim=64", "rope_type=default"])
        for name in ("base_mlp_dim", "head_dim", "normalization_layer_epsilon", "vocab_size"):
            assert f"{name}=VALUE" in str(caught.value.expected)
        assert "base_emb_dim" not in str(caught.value.expected)

    def test_unsupported_family_settings_are_refused(self):
        with pytest.raises(ConfigError, match=r"no config\.json of family llama matches") as caught:
            config_from_settings(["model_name=llama3.1-8b", "use_qk_norm=true"])
        assert "use_qk_norm=true (command line)" in str(caught.value.got)

    def test_layer_types_follow_the_model_name(self):
        """Gemma 4 E2B (full attention in every fifth layer) and E4B (every sixth) share a model type."""
        for name, every in {"gemma4-e2b": 5, "gemma4-e4b": 6}.items():
            built = config_from_settings([f"model_name={name}"])
            full = [k for k, kind in enumerate(built["layer_types"]) if kind == "full_attention"]
            assert full == list(range(every - 1, built["num_hidden_layers"], every))
            assert built["use_bidirectional_attention"] is None


class TestCheckpoints:
    # Qwen 3 with experts: MaxText always renormalizes, and the model does not.
    @pytest.mark.parametrize("case", ["llama3.1", "gemma2", "deepseek2"])
    @pytest.mark.parametrize("scan", ["--scan", "--no-scan"])
    def test_sizes_come_from_arrays(self, tmp_path, case, scan):
        hf = GOLDEN / case / "hf"
        succeed("convert", "hf-to-maxtext", hf, tmp_path / "m", scan, "--text-only")
        told = values(ckpttools.maxtext_config(hf))
        self.forget(tmp_path / "m")
        shown = ("base_emb_dim", "base_num_query_heads", "vocab_size", "base_num_decoder_layers")
        words = [f"{name}={json.dumps(value)}" for name, value in told.items() if name not in shown]
        succeed(
            "convert",
            "maxtext-to-hf",
            tmp_path / "m",
            tmp_path / "hf",
            "--maxtext-config",
            "'" + "' '".join(words) + "'",
        )
        assert values(ckpttools.maxtext_config(tmp_path / "hf")) == told
        with (
            safe_open(next(hf.glob("*.safetensors")), "np") as expected,
            safe_open(tmp_path / "hf" / "model.safetensors", "np") as built,
        ):
            # As the text model has them, whatever the model it came from had before them.
            names = {name.replace("language_model.model.", "model.") for name in expected.keys()}  # noqa: SIM118
            assert set(built.keys()) <= names

    def test_contradicting_size_is_refused(self, tmp_path):
        told = ckpttools.maxtext_config(HF)
        self.built(tmp_path / "m")
        words = " ".join([*told.arguments(), "base_emb_dim=128"])
        done = ckpt("convert", "maxtext-to-hf", tmp_path / "m", tmp_path / "hf", "--maxtext-config", words)
        assert done.exit_code == 3
        assert "base_emb_dim=128 (command line)" in done.output
        assert "base_emb_dim=64 (the arrays)" in done.output
        assert not (tmp_path / "hf").exists()

    def test_settings_next_to_a_config_are_refused(self, tmp_path):
        succeed("convert", "hf-to-maxtext", HF, tmp_path / "m")
        with pytest.raises(UsageError, match="exists"):
            ckpttools.maxtext_to_hf(tmp_path / "m", tmp_path / "hf", maxtext_config=["rope_type=yarn"])

    def test_tower_models_require_a_config(self, tmp_path):
        hf = GOLDEN_0_2_5 / "gemma3-vision" / "hf"
        told = ckpttools.maxtext_config(hf).arguments()
        succeed("convert", "hf-to-maxtext", hf, tmp_path / "m", "--no-scan")
        self.forget(tmp_path / "m")
        with pytest.raises(ConfigError, match="do not describe towers"):
            ckpttools.maxtext_to_hf(tmp_path / "m", tmp_path / "hf", maxtext_config=told)
        ckpttools.maxtext_to_hf(tmp_path / "m", tmp_path / "hf", maxtext_config=told, names="text")
        config = json.loads((tmp_path / "hf" / "config.json").read_text())
        assert (config["model_type"], config["architectures"]) == ("gemma3_text", ["Gemma3ForCausalLM"])

    def built(self, location):
        succeed("convert", "hf-to-maxtext", HF, location)
        self.forget(location)

    def forget(self, location):
        for item in location.rglob("config.json"):
            item.unlink()
