"""Missing config fields get the defaults of transformers, unless the arrays contradict them."""

from __future__ import annotations

import copy
import json
from functools import cache

import pytest
from oracle.cases import configurations
from oracle.silent import stating
from support.internals import (
    Describer,
    FlagRule,
    ModelFiles,
    Stored,
    family_named,
    family_of,
    to_huggingface,
    to_maxtext,
)
from support.locations import FIXTURES

import ckpttools
from ckpttools import DTYPES, CheckpointError, CoverageError, Metadata, ToHuggingFace, ToMaxText, Tree
from ckpttools.mapping.sizes import nested_value, states_field
from ckpttools.maxtext.model_config import config_for_weights, text_config
from ckpttools.model_families.hf_defaults import default_fields
from ckpttools.testing.models import shapes_of
from ckpttools.testing.strategies import UnreadableFile

# What transformers takes for each field that is left out of a model's configuration; tests/oracle/silent.py.
ANSWERS = json.loads((FIXTURES / "silent.json").read_bytes())
# Whether transformers ties the head for values of the whole model and of its text part; the same script.
TIED = json.loads((FIXTURES / "tied.json").read_bytes())
REFUSED = "refused"
# To MaxText with layers stacked or apart, and back. Each field of a model is left out in one of these ways:
# all 1,362 cases take 20 seconds.
WAYS = ("stacked", "apart", "back")
LEFT_OUT = [
    (case, name, WAYS[(k + j) % len(WAYS)])
    for k, (case, fields) in enumerate(ANSWERS.items())
    for j, name in enumerate(fields)
]
BF16 = DTYPES["bfloat16"]


@cache
def config_of(case):
    return json.loads(configurations()[case].read_bytes())


@cache
def tensors(case):
    """Return the arrays of a model from its files, or synthetic ones if only its configuration exists."""
    directory = configurations()[case].parent
    if list(directory.glob("*.safetensors")):
        return ckpttools.open(directory).arrays
    return {
        (name,): Stored(shape, BF16, UnreadableFile(name, 1 << 40), 0)
        for name, shape in shapes_of(config_of(case)).items()
    }


def maxtext(case, config, way):
    """Return a case in MaxText, without its towers if they prevent scanning."""
    tree = Tree(tensors(case), Metadata(location="model", config=config))
    family = family_of(config, "c")
    is_scanned = way == "stacked" and not family.no_scan_reason
    text_only = is_scanned and bool(family.unscanned_with_towers)
    return to_maxtext(tree, ToMaxText(scan=is_scanned, text_only=text_only, leaves_out=True))


@cache
def whole(case):
    """Return the same for the case's own configuration."""
    return maxtext(case, config_of(case), "stacked")


def converted(case, config, way):
    """Plan the conversion of a case's arrays with a configuration; None if it is refused."""
    try:
        if way == "back":
            built = whole(case)
            files = ModelFiles(config=config, spelling=built.spelling)
            state = to_huggingface(built.state, ToHuggingFace(), files).tree
        else:
            state = maxtext(case, config, way).state
    except CheckpointError:
        return None
    describer = Describer(lambda source: (source.path, ""))
    return [(path, list(describer.lines(array))) for path, array in state.arrays.items()]


def with_field(config, name, *value):
    """Return a configuration with a field set or removed."""
    built = copy.deepcopy(config)
    *parents, last = name.split(".")
    inner = built
    for parent in parents:
        inner = inner[parent]
    inner.pop(last)
    inner.update(dict.fromkeys([last], *value) if value else {})
    return built


@pytest.mark.parametrize("way", ["apart", "back"])
@pytest.mark.parametrize("case", ANSWERS)
def test_stated_fields_are_converted(case, way):
    assert converted(case, config_of(case), way) is not None


@pytest.mark.parametrize("case, name, way", LEFT_OUT)
def test_missing_field_gets_the_transformers_default(case, name, way):
    answer, config = ANSWERS[case][name], config_of(case)
    result = converted(case, with_field(config, name), way)
    if result is not None:
        assert answer != REFUSED
        assert result == converted(case, with_field(config, name, answer), way)


@pytest.mark.parametrize("case", TIED)
def test_head_is_tied_if_transformers_ties_it(case):
    rule = family_of(config_of(case), "c").flags["tied"]
    assert len(TIED[case]) == (9 if "_config" in str(config_of(case)) else 3)
    for whole, text, expected in TIED[case]:
        config = stating(config_of(case), whole, text)
        assert rule.read(config, "c").value == expected, (whole, text)


class TestMessages:
    @pytest.mark.parametrize(
        "case, name, means",
        [
            ("llama3.1", "num_hidden_layers", 32),
            ("mistral-7b", "num_key_value_heads", 8),
            ("mixtral-8x7b", "num_local_experts", 8),
            ("deepseek3", "first_k_dense_replace", 3),
            ("deepseek2", "q_lora_rank", 1536),
            ("gemma4-moe", "text_config.hidden_size_per_layer_input", 256),
            ("gemma4-vision", "vision_config.standardize", "false"),
            ("qwen3-vl", "tie_word_embeddings", "false"),
        ],
    )
    def test_contradicted_default_error_names_the_field(self, case, name, means):
        tree = Tree(tensors(case), Metadata(location="model", config=with_field(config_of(case), name)))
        with pytest.raises(CoverageError) as caught:
            to_maxtext(tree, ToMaxText(scan=False, leaves_out=True))
        assert f"no {name}, for which transformers uses {means}" in str(caught.value)

    def test_missing_layers_error_names_the_size_field(self):
        config = {**config_of("llama3.1"), "num_hidden_layers": 6}
        with pytest.raises(CoverageError) as caught:
            to_maxtext(Tree(tensors("llama3.1"), Metadata(location="model", config=config)), ToMaxText())
        assert "num_hidden_layers is 6, but the arrays have 4 layers" in caught.value.hint


class TestParts:
    def test_fields_are_read_from_the_text_config(self):
        assert default_fields({"model_type": "llama"})["hidden_size"] == 4096
        text = default_fields({"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2"}})
        assert text["text_config"]["first_k_dense_replace"] == 3
        assert "hidden_size" not in text
        assert "vision_config" not in text
        thinker = {"text_config": {}, "audio_config": {}}
        whole = default_fields({"model_type": "qwen3_omni_moe", "thinker_config": thinker})
        assert whole["thinker_config"]["audio_config"]["d_model"] == 1280
        assert whole["thinker_config"]["tie_word_embeddings"] is False

    def test_top_level_config_decides_tied_heads(self):
        tied = default_fields({"model_type": "kimi_k25", "text_config": {"model_type": "deepseek_v3"}})
        assert tied["tie_word_embeddings"] is True
        assert "tie_word_embeddings" not in tied["text_config"]

    def test_extracted_text_config_states_inherited_defaults(self):
        (alone,) = (
            spelling for spelling in family_named("qwen3-vl-moe").spellings if spelling.name == "text"
        )
        whole = {"model_type": "qwen3_vl_moe", "text_config": {"num_experts": 8, "head_dim": None}}
        text = text_config(whole, alone)
        assert text["num_key_value_heads"] == 16  # 4 to Qwen 3 with experts
        assert text["rope_theta"] == 500000
        assert "num_local_experts" not in text
        for name in ("rope_parameters", "rope_scaling"):
            stated = {**whole["text_config"], name: {"rope_theta": 7, "rope_type": "default"}}
            assert "rope_theta" not in text_config({**whole, "text_config": stated}, alone)

    @pytest.mark.parametrize("tied", [True, False])
    @pytest.mark.parametrize("case", [case for case in ANSWERS if "_config" in str(config_of(case))])
    def test_written_config_declares_tied_heads(self, case, tied):
        config, rule = config_of(case), family_of(config_of(case), "c").flags["tied"]
        for left_out in range(len(rule.field) + 1):
            silent = config
            for name in rule.field[:left_out]:
                silent = with_field(silent, name) if states_field(silent, name) else silent
            built = config_for_weights(silent, {}, tied, tied_by=rule).config
            assert rule.read(built, "c").value == tied
            assert {nested_value(built, name) for name in rule.field} <= {tied, None}

    def test_null_fields_count_as_stated(self):
        built = default_fields({"model_type": "mistral", "num_key_value_heads": None})
        assert "num_key_value_heads" not in built
        rule = FlagRule(("q_lora_rank",))
        assert rule.read({"model_type": "deepseek_v3"}, "c").value
        assert not rule.read({"model_type": "deepseek_v3", "q_lora_rank": None}, "c").value

    def test_unknown_types_have_no_defaults(self):
        assert default_fields({"model_type": "kimi_k2"}) == {}
        assert default_fields({"model_type": ["llama"]}) == {}
        assert family_of({"model_type": "gemma4"}, "c").name == "gemma4-small"
