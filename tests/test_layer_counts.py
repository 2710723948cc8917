"""Numbers of layers that MaxText builds with scan_layers=false and does not scan."""

import copy
import json

import pytest
from oracle.cases import configuration

import ckpttools
from ckpttools.core.errors import ConfigError, UsageError

# MaxText 0.2.5 builds each of these (`create_nnx_abstract_model`); scanned, it leaves the last layers out, or
# puts them where no checkpoint of ours has them.
COUNTS = {
    "gpt-oss": (1, 5),
    "llama4-scout": (1, 6),
    "olmo3": (3, 6),
    "qwen3-next": (2, 5),
    "qwen3.5": (6,),
    "deepseek4": (6,),
}
LISTS = ("layer_types", "mlp_layer_types", "compress_ratios", "no_rope_layers")


def written(path, case, count):
    """A config.json of a case with another number of layers."""
    config = copy.deepcopy(configuration(case))
    text = config.get("text_config", config)
    text["num_hidden_layers"] = count
    text |= {name: (text[name] * 3)[:count] for name in LISTS if text.get(name)}
    text.pop("moe_layers", None)
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(("case", "count"), [(case, count) for case in COUNTS for count in COUNTS[case]])
def test_layers_of_an_incomplete_cycle_are_converted_one_by_one(tmp_path, case, count):
    config = written(tmp_path / "config.json", case, count)
    ckpttools.synth(config, tmp_path / "hf")
    ckpttools.hf_to_maxtext(tmp_path / "hf", tmp_path / "mt", scan=False, text_only=True)
    keys = {str(key) for path in ckpttools.open(tmp_path / "mt").arrays for key in path}
    names = {key for key in keys if key.startswith("layers_")}
    assert names == {f"layers_{number}" for number in range(count)}
    found = ckpttools.verify(tmp_path / "mt", against=tmp_path / "hf")
    assert found.equal or "visual" in str(found)
    assert ckpttools.maxtext_config(tmp_path / "mt").as_mapping()["scan_layers"] is False


@pytest.mark.parametrize("case", COUNTS)
def test_layers_of_an_incomplete_cycle_are_not_scanned(tmp_path, case):
    config = written(tmp_path / "config.json", case, COUNTS[case][-1])
    ckpttools.synth(config, tmp_path / "hf")
    with pytest.raises(ConfigError, match=r"complete cycles of layers, and .* left over") as refused:
        ckpttools.hf_to_maxtext.plan(tmp_path / "hf", tmp_path / "mt", text_only=True)
    assert "scan=False" in refused.value.hint
    assert ckpttools.maxtext_config(config).as_mapping()["scan_layers"] is False
    with pytest.raises(UsageError, match="complete cycles"):
        ckpttools.maxtext_config(config, scan=True)


def test_nested_rotary_embeddings_of_deepseek_v4_are_read(tmp_path):
    config = copy.deepcopy(configuration("deepseek4"))
    for name in ("rope_theta", "compress_rope_theta", "rope_scaling"):
        config.pop(name, None)
    plain = {"rope_type": "default", "partial_rotary_factor": 0.125}
    nested = {"main": {**plain, "rope_theta": 12345.0}, "compress": {**plain, "rope_theta": 54321.0}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "rope_theta": 7.0, "rope_parameters": nested}))
    given = ckpttools.maxtext_config(path).as_mapping()
    assert (given["rope_max_timescale"], given["compressed_rope_max_timescale"]) == (12345, 54321)
    path.write_text(json.dumps({**config, "rope_theta": 7.0, "compress_rope_theta": 9.0}))
    given = ckpttools.maxtext_config(path).as_mapping()
    assert (given["rope_max_timescale"], given["compressed_rope_max_timescale"]) == (7, 9)
