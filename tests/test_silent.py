"""What a configuration does not say is what transformers takes for it, or the arrays contradict it."""

from __future__ import annotations

import copy
import json
from functools import cache

import pytest
from oracle.cases import configurations
from support.places import FIXTURES

from ckpttools.array.fingerprint import Describer
from ckpttools.array.nodes import Stored
from ckpttools.array.tree import Metadata, Tree
from ckpttools.core.dtypes import DTYPES
from ckpttools.core.errors import CheckpointError, CoverageError
from ckpttools.families.family import FlagRule
from ckpttools.families.registry import family_named, family_of
from ckpttools.families.silent import silent_fields
from ckpttools.formats.registry import open_tree
from ckpttools.mapping.sizes import nested, states
from ckpttools.maxtext.model_config import text_config, true_config
from ckpttools.maxtext.to_maxtext import ToMaxText, to_maxtext
from ckpttools.testing.models import shapes_of
from ckpttools.testing.refusing import Refusing

# What transformers takes for each field that is left out of a model's configuration; tests/oracle/silent.py.
ANSWERS = json.loads((FIXTURES / "silent.json").read_bytes())
REFUSED = "refused"
LEFT_OUT = [(case, name) for case, fields in ANSWERS.items() for name in fields]
BF16 = DTYPES["bfloat16"]


@cache
def config_of(case):
    return json.loads(configurations()[case].read_bytes())


@cache
def tensors(case):
    """The arrays of a model, as its files have them, or where it is a configuration alone, as they would."""
    directory = configurations()[case].parent
    if list(directory.glob("*.safetensors")):
        return open_tree(directory).arrays
    return {
        (name,): Stored(shape, BF16, Refusing(name, 1 << 40), 0)
        for name, shape in shapes_of(config_of(case)).items()
    }


def converted(case, config):
    """What a conversion would do with the arrays of a case beside a configuration; None where it refuses."""
    tree = Tree(tensors(case), Metadata(place="model", config=config))
    try:
        state = to_maxtext(tree, ToMaxText(scan=False, leaves_out=True)).state
    except CheckpointError:
        return None
    describer = Describer(lambda source: (source.path, ""))
    return [(path, list(describer.lines(array))) for path, array in state.arrays.items()]


def with_field(config, name, *value):
    """A configuration with a field as given, or without it."""
    made = copy.deepcopy(config)
    *parents, last = name.split(".")
    inner = made
    for parent in parents:
        inner = inner[parent]
    inner.pop(last)
    inner.update(dict.fromkeys([last], *value) if value else {})
    return made


@pytest.mark.parametrize("case", ANSWERS)
def test_every_model_is_converted_with_what_it_says(case):
    assert converted(case, config_of(case)) is not None


@pytest.mark.parametrize("case, name", LEFT_OUT)
def test_a_field_that_is_left_out_is_what_transformers_takes_for_it(case, name):
    answer, config = ANSWERS[case][name], config_of(case)
    found = converted(case, with_field(config, name))
    if found is not None:
        assert answer != REFUSED
        assert found == converted(case, with_field(config, name, answer))


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
    def test_arrays_that_contradict_silence_name_the_field(self, case, name, means):
        tree = Tree(tensors(case), Metadata(place="model", config=with_field(config_of(case), name)))
        with pytest.raises(CoverageError) as caught:
            to_maxtext(tree, ToMaxText(scan=False, leaves_out=True))
        assert f"no {name}, which means {means} to transformers" in str(caught.value)

    def test_arrays_that_end_early_name_the_size(self):
        config = {**config_of("llama3.1"), "num_hidden_layers": 6}
        with pytest.raises(CoverageError) as caught:
            to_maxtext(Tree(tensors("llama3.1"), Metadata(place="model", config=config)), ToMaxText())
        assert "layers.4.input_layernorm.weight is wanted with layer 6 from" in caught.value.hint


class TestParts:
    def test_fields_are_where_a_configuration_has_its_text_model(self):
        assert silent_fields({"model_type": "llama"})["hidden_size"] == 4096
        text = silent_fields({"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2"}})
        assert text["text_config"]["first_k_dense_replace"] == 3
        assert "hidden_size" not in text
        assert "vision_config" not in text
        thinker = {"text_config": {}, "audio_config": {}}
        whole = silent_fields({"model_type": "qwen3_omni_moe", "thinker_config": thinker})
        assert whole["thinker_config"]["audio_config"]["d_model"] == 1280
        assert whole["thinker_config"]["tie_word_embeddings"] is False

    def test_heads_are_tied_as_the_whole_model_says(self):
        tied = silent_fields({"model_type": "kimi_k25", "text_config": {"model_type": "deepseek_v3"}})
        assert tied["tie_word_embeddings"] is True
        assert "tie_word_embeddings" not in tied["text_config"]

    def test_a_text_model_alone_says_what_the_whole_one_meant(self):
        (alone,) = (each for each in family_named("qwen3-vl-moe").spellings if each.name == "text")
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
    def test_what_is_written_says_how_heads_are_tied_where_transformers_looks(self, case, tied):
        config, rule = config_of(case), family_of(config_of(case), "c").flags["tied"]
        for left_out in range(len(rule.field) + 1):
            silent = config
            for name in rule.field[:left_out]:
                silent = with_field(silent, name) if states(silent, name) else silent
            made = true_config(silent, {}, tied, tied_by=rule).config
            assert rule.read(made, "c").value == tied
            assert {nested(made, name) for name in rule.field} <= {tied, None}

    def test_null_is_not_silence(self):
        made = silent_fields({"model_type": "mistral", "num_key_value_heads": None})
        assert "num_key_value_heads" not in made
        rule = FlagRule(("q_lora_rank",))
        assert rule.read({"model_type": "deepseek_v3"}, "c").value
        assert not rule.read({"model_type": "deepseek_v3", "q_lora_rank": None}, "c").value

    def test_of_unknown_types_nothing_is_known(self):
        assert silent_fields({"model_type": "kimi_k2"}) == {}
        assert silent_fields({"model_type": ["llama"]}) == {}
        assert family_of({"model_type": "gemma4"}, "c").name == "gemma4-small"
