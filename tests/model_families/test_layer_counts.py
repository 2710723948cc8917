"""Layer counts that MaxText supports only with scan_layers=false."""

import copy
import json
import shutil

import numpy as np
import pytest
from oracle.cases import configuration
from safetensors.numpy import save_file

import ckpttools
from ckpttools import ConfigError, CoverageError, UsageError

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
    """Return the config.json of a case with another number of layers."""
    config = copy.deepcopy(configuration(case))
    text = config.get("text_config", config)
    text["num_hidden_layers"] = count
    text |= {name: (text[name] * 3)[:count] for name in LISTS if text.get(name)}
    text.pop("moe_layers", None)
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(("case", "count"), [(case, count) for case in COUNTS for count in COUNTS[case]])
def test_incomplete_cycle_is_converted_unscanned(tmp_path, case, count):
    config = written(tmp_path / "config.json", case, count)
    ckpttools.synth(config, tmp_path / "hf")
    ckpttools.hf_to_maxtext(tmp_path / "hf", tmp_path / "mt", scan=False, text_only=True)
    keys = {str(key) for path in ckpttools.open(tmp_path / "mt").arrays for key in path}
    names = {key for key in keys if key.startswith("layers_")}
    assert names == {f"layers_{number}" for number in range(count)}
    result = ckpttools.verify(tmp_path / "mt", against=tmp_path / "hf")
    assert result.equal or "visual" in str(result)
    assert ckpttools.maxtext_config(tmp_path / "mt").as_mapping()["scan_layers"] is False


@pytest.mark.parametrize("case", COUNTS)
def test_incomplete_cycle_is_not_scanned(tmp_path, case):
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


@pytest.mark.parametrize(
    ("case", "is_configured"), [*((case, True) for case in COUNTS), ("gpt-oss", False), ("olmo3", False)]
)
def test_stack_refuses_an_incomplete_cycle(tmp_path, case, is_configured):
    ckpttools.synth(written(tmp_path / "config.json", case, COUNTS[case][-1]), tmp_path / "hf")
    ckpttools.hf_to_maxtext(tmp_path / "hf", tmp_path / "mt", scan=False, text_only=True)
    family = None
    if not is_configured:
        shutil.rmtree(next((tmp_path / "mt").rglob("hf")))
        family = ckpttools.maxtext_config(tmp_path / "hf").family
    with pytest.raises(UsageError, match=r"complete cycles of layers, and .* left over"):
        ckpttools.stack(tmp_path / "mt", tmp_path / "stacked", family=family)
    assert not (tmp_path / "stacked").exists()


@pytest.mark.parametrize(("case", "count"), [("gemma3", 8), ("olmo3", 4), ("deepseek4", 5)])
def test_stack_accepts_layers_that_maxtext_scans(tmp_path, case, count):
    ckpttools.synth(written(tmp_path / "config.json", case, count), tmp_path / "hf")
    ckpttools.hf_to_maxtext(tmp_path / "hf", tmp_path / "mt", scan=False, text_only=True)
    ckpttools.stack(tmp_path / "mt", tmp_path / "stacked")
    ckpttools.hf_to_maxtext(tmp_path / "hf", tmp_path / "scanned", text_only=True)
    assert ckpttools.verify(tmp_path / "stacked", against=tmp_path / "scanned").equal


@pytest.mark.parametrize(("count", "scan"), [(1, True), (1, False), (2, False), (2, True)])
def test_deepseek_v4_with_fewer_layers_than_tables_is_converted(tmp_path, count, scan):
    config = written(tmp_path / "config.json", "deepseek4", count)
    ckpttools.synth(config, tmp_path / "hf")
    ckpttools.hf_to_maxtext(tmp_path / "hf", tmp_path / "mt", scan=scan)
    keys = {str(key) for path in ckpttools.open(tmp_path / "mt").arrays for key in path}
    assert {key for key in keys if key.startswith("layers_")} == {f"layers_{n}" for n in range(count)}
    # MaxText builds as many of these layers as it is told, whatever the number of layers.
    assert ckpttools.maxtext_config(tmp_path / "mt").as_mapping()["first_num_hash_layers"] == count
    assert ckpttools.verify(tmp_path / "mt", against=tmp_path / "hf").equal
    ckpttools.maxtext_to_hf(tmp_path / "mt", tmp_path / "back")
    assert ckpttools.verify(tmp_path / "back", against=tmp_path / "hf").equal


@pytest.mark.parametrize(("case", "count", "index"), [("gemma4-moe", 8, 7), ("qwen3-next", 6, 5)])
def test_error_names_the_layer_of_another_kind(tmp_path, case, count, index):
    config = json.loads(written(tmp_path / "config.json", case, count).read_text())
    text = config.get("text_config", config)
    kinds = text["layer_types"]
    full, other = "full_attention", kinds[0]
    text["layer_types"] = [*kinds[:index], full]
    ckpttools.synth(config_at(tmp_path / "config.json", config), tmp_path / "hf")
    # As transformers makes the layer: with the arrays of another one that attends to everything.
    tree = {
        ".".join(map(str, path)): array.read()
        for path, array in ckpttools.open(tmp_path / "hf").arrays.items()
    }
    source = kinds.index(full)
    layer = {
        name: value for name, value in tree.items() if f".layers.{source}." in name and "vision" not in name
    }
    kept = {
        name: value for name, value in tree.items() if f".layers.{index}." not in name or "vision" in name
    }
    moved = {name.replace(f".layers.{source}.", f".layers.{index}."): value for name, value in layer.items()}
    save_file(
        {name: np.asarray(value, np.float32) for name, value in (kept | moved).items()},
        tmp_path / "hf" / "model.safetensors",
    )
    for scan in (True, False):
        if scan and case == "qwen3-next":
            continue
        with pytest.raises(CoverageError) as refused:
            ckpttools.hf_to_maxtext(tmp_path / "hf", tmp_path / "mt", scan=scan, text_only=True)
        assert f'layer_types[{index}] is "{full}" instead of "{other}"' in refused.value.hint
    (finding,) = [item for item in ckpttools.doctor(tmp_path / "hf").findings if item.check == "coverage"]
    assert finding.level == "info"
    result = [deviation.what for deviation in ckpttools.maxtext_config(tmp_path / "config.json").deviations]
    assert any(f"layer_types[{index}] is" in what for what in result)


def config_at(path, config):
    path.write_text(json.dumps(config))
    return path


def test_shrink_refuses_an_incomplete_cycle_of_stacked_layers(tmp_path):
    ckpttools.synth(written(tmp_path / "config.json", "olmo3", 8), tmp_path / "hf")
    ckpttools.hf_to_maxtext(tmp_path / "hf", tmp_path / "mt")
    with pytest.raises(ConfigError, match="complete cycles of layers, and 2 layers would be left") as refused:
        ckpttools.shrink(tmp_path / "mt", tmp_path / "small", layers=6)
    assert "layers=4 or layers=8 fits" in refused.value.hint
    ckpttools.hf_to_maxtext(tmp_path / "hf", tmp_path / "single", scan=False)
    ckpttools.shrink(tmp_path / "single", tmp_path / "small", layers=6)
    assert ckpttools.maxtext_config(tmp_path / "small").as_mapping()["base_num_decoder_layers"] == 6
