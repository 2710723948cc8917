"""Parts of adapters: PEFT makes of them what is there, and nothing anew."""

from __future__ import annotations

import json
import re
import shutil
import warnings

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import peft_choices
from support.command_line import ckpt, succeed
from support.internals import dotted, merge_into_base, parse
from support.locations import FIXTURES

import ckpttools
from ckpttools import CheckpointError, ConfigError
from ckpttools.adapters import bases
from ckpttools.adapters.config import PeftConfig
from ckpttools.adapters.peft import modules_of, open_peft

PEFT = FIXTURES / "peft"
CONFIG = "adapter_config.json"


def base_of(case):
    return PEFT / "bases" / ("gpt-oss-float32" if case == "experts" else "llama-float32")


def names(location):
    return list(map(dotted, ckpttools.open(location).arrays))


def said_of(location):
    return json.loads((location / CONFIG).read_bytes())


def adapter_saying(tmp_path, case, **declared):
    location = tmp_path / "adapter"
    shutil.copytree(PEFT / case, location)
    (location / CONFIG).write_text(json.dumps(said_of(location) | declared))
    return location


def is_target(declared, module):
    """`check_target_module_exists` of PEFT 0.21."""
    if any(re.match(rf"(^|.*\.){saved}($|\..*)", module) for saved in declared["modules_to_save"] or ()):
        return False
    targets = declared["target_modules"]
    if isinstance(targets, str):
        return bool(re.fullmatch(targets, module))
    if module in targets:
        return True
    layers = declared["layers_to_transform"] or ()
    layer = re.match(r".*?\.[^.]*\.(?P<idx>\d+)\.", module)
    in_layers = not layers or (layer is not None and int(layer["idx"]) in layers)
    return in_layers and any(module.endswith(f".{target}") for target in targets)


def made_by_peft(declared, base):
    """Return the modules of a base that get factors."""
    weights = names(base)
    modules = {name.removesuffix(".weight") for name in weights if name.endswith(".weight")}
    result = {module for module in modules if is_target(declared, module)}
    for name in weights:
        own = re.sub(r"_(blocks|scales)$", "", name)
        if any(f".{own}".endswith(f".{target}") for target in declared["target_parameters"] or ()):
            result.add(own.rpartition(".")[0])
    return result


PARTS = [
    ("plain", "*mlp*"),
    ("plain", "*layers.0.*"),
    ("plain", "*layers.1.*v_proj*"),
    ("patterns", "*q_proj*"),
    ("patterns", "*layers.0.*"),
    ("one-layer", "*q_proj*"),
    ("dora", "*layers.1.*"),
    ("bin", "*o_proj*"),
    ("embeddings", "*embed_tokens*"),
    ("embeddings", "*lm_head*"),
    ("experts", "*layers.0.*"),
    ("experts", "*experts*"),
    ("experts", "*self_attn*"),
]


@pytest.mark.parametrize(("case", "gone"), PARTS)
def test_adapter_config_describes_remaining_parts(tmp_path, case, gone):
    part = tmp_path / "part"
    told = succeed("select", PEFT / case, part, "--drop", gone, "--to", "safetensors").output
    declared, whole = said_of(part), said_of(PEFT / case)
    assert "name only the remaining modules" in " ".join(told.split())
    assert made_by_peft(declared, base_of(case)) == {*modules_of(names(part))}
    for name in declared["modules_to_save"] or ():
        assert any(f".{name}." in item for item in names(part))
    lists = {"target_modules", "target_parameters", "modules_to_save", "rank_pattern", "alpha_pattern"}
    assert {n: v for n, v in declared.items() if n not in lists} == {
        n: v for n, v in whole.items() if n not in lists
    }
    modules = [f"{item}{more}" for item in modules_of(names(part)) for more in ("", ".gate_up_proj")]
    for field in ("rank_pattern", "alpha_pattern"):
        assert {*declared[field].items()} <= {*whole[field].items()}
        assert all(
            any(re.match(rf"(.*\.)?({key})$", module) for module in modules) for key in declared[field]
        )
    ckpttools.merge_adapter(base_of(case), tmp_path / "merged", adapter=part)


@pytest.mark.parametrize("targets", [r".*layers\.\d+\.(mlp|self_attn)\..*_proj", "all-linear", None])
def test_target_modules_pattern_becomes_module_names(tmp_path, targets):
    adapter = adapter_saying(tmp_path, "plain", target_modules=targets)
    ckpttools.select(adapter, tmp_path / "part", drop="*layers.0.*", format="safetensors")
    assert said_of(tmp_path / "part")["target_modules"] == list(modules_of(names(tmp_path / "part")))
    ckpttools.select(adapter, tmp_path / "whole", drop=(), keep="*", format="safetensors")
    assert said_of(tmp_path / "whole")["target_modules"] == targets


def test_unqualified_parameter_targets_keep_their_modules(tmp_path):
    adapter = adapter_saying(tmp_path, "experts", target_parameters=["gate_up_proj", "down_proj"])
    ckpttools.select(adapter, tmp_path / "part", drop="*layers.1.*", format="safetensors")
    expected = [f"model.layers.0.mlp.experts.{name}" for name in ("down_proj", "gate_up_proj")]
    assert said_of(tmp_path / "part")["target_parameters"] == expected


def test_modules_to_save_lists_remaining_modules_by_path(tmp_path):
    """A full path distinguishes it from removed modules with the same name."""
    adapter = adapter_saying(tmp_path, "plain", modules_to_save=["input_layernorm", "score"])
    file = adapter / "adapter_model.safetensors"
    norm = load_file(base_of("plain") / "model.safetensors")["model.norm.weight"]
    layers = [f"base_model.model.model.layers.{n}.input_layernorm.weight" for n in range(2)]
    heads = [f"base_model.model.score.{name}" for name in ("weight", "bias")]
    save_file({**load_file(file), **dict.fromkeys([*layers, *heads], norm)}, file)
    ckpttools.select(adapter, tmp_path / "part", drop="*layers.0.input*", format="safetensors")
    saved = said_of(tmp_path / "part")["modules_to_save"]
    assert sorted(saved) == ["model.layers.1.input_layernorm", "score"]
    out = tmp_path / "half"
    told = succeed("select", adapter, out, "--drop", "*score.bias", "--to", "safetensors").output
    assert "it has only parts of score" in " ".join(told.split()) and not (out / CONFIG).exists()


def test_modules_to_save_matches_name_suffixes(tmp_path):
    """PEFT matches `norm` with `input_layernorm` as well."""
    adapter = adapter_saying(tmp_path, "plain", modules_to_save=["norm"])
    file = adapter / "adapter_model.safetensors"
    norm = load_file(base_of("plain") / "model.safetensors")["model.norm.weight"]
    layers = [f"model.layers.{n}.{name}_layernorm" for n in range(2) for name in ("input", "post_attention")]
    result = {f"base_model.model.{layer}.weight": norm for layer in (*layers, "model.norm")}
    save_file({**load_file(file), **result}, file)
    ckpttools.select(adapter, tmp_path / "part", drop="*layers.0.*", format="safetensors")
    assert said_of(tmp_path / "part")["modules_to_save"] == [*layers[2:], "model.norm"]
    ckpttools.select(adapter, tmp_path / "few", drop="*norm*", format="safetensors")
    assert said_of(tmp_path / "few")["modules_to_save"] == []
    inner = adapter_saying(tmp_path / "inner", "plain", modules_to_save=["layernorm"])
    save_file(
        {name: array for name, array in load_file(file).items() if "model.norm" not in name},
        inner / file.name,
    )
    ckpttools.merge_adapter(base_of("plain"), tmp_path / "merged", adapter=inner)


def test_adapter_with_saved_head_keeps_its_config(tmp_path):
    """PEFT 0.21 saves the head if `target_modules` names `lm_head`."""
    targets = [*said_of(PEFT / "plain")["target_modules"], "lm_head"]
    adapter = adapter_saying(tmp_path, "plain", target_modules=targets)
    file = adapter / "adapter_model.safetensors"
    head = load_file(base_of("plain") / "model.safetensors")["lm_head.weight"]
    result = {
        "base_layer.weight": head,
        "lora_A.weight": head[:2].copy(),
        "lora_B.weight": head[:, :2].copy(),
    }
    save_file(
        load_file(file) | {f"base_model.model.lm_head.{name}": item for name, item in result.items()}, file
    )
    ckpttools.select(adapter, tmp_path / "part", drop="*v_proj*", format="safetensors")
    assert {item.name for item in (tmp_path / "part").iterdir()} == {CONFIG, file.name}
    declared = said_of(tmp_path / "part")["target_modules"]
    assert "lm_head" in declared and "v_proj" not in declared
    assert "contains LoRA adapters" not in succeed("inspect", "tree", adapter).output


def test_only_modules_with_factors_are_matched():
    """Matching 23,000 modules with as many names took three minutes."""
    declared = {"target_modules": "(no pattern"}
    assert PeftConfig(declared, "here").parameters_of("q_proj") == set()
    with pytest.raises(ConfigError, match="target_modules"):
        PeftConfig({**declared, "target_parameters": ["w1"]}, "here").parameters_of("q_proj")


def test_fully_trained_modules_get_no_factors(tmp_path):
    targets = ["q_proj", "embed_tokens", "lm_head"]
    adapter = adapter_saying(tmp_path, "embeddings", target_modules=targets)
    ckpttools.select(adapter, tmp_path / "part", drop="*lm_head*", format="safetensors")
    declared = said_of(tmp_path / "part")
    assert (declared["target_modules"], declared["modules_to_save"]) == (targets[:2], [])


@pytest.mark.parametrize(
    ("case", "gone", "why"),
    [
        ("plain", "*q_proj.lora_B*", "it has only parts of model.layers.{0..1}.self_attn.q_proj"),
        ("dora", "*magnitude*", "it has only parts of"),
        ("experts", "*experts.base_layer*", "it has only parts of model.layers.{0..1}.mlp.experts"),
        ("embeddings", "*lora*", "it has no factors"),
    ],
)
def test_incomplete_adapter_parts_lose_their_config(tmp_path, case, gone, why):
    out = tmp_path / "part"
    told = " ".join(succeed("select", PEFT / case, out, "--drop", gone, "--to", "safetensors").output.split())
    assert f"{CONFIG} is left out, because the remaining arrays are not an adapter: {why}" in told
    assert [item.name for item in out.iterdir()] == ["adapter_model.safetensors"]
    assert "PeftModel" not in told


def test_config_follows_parts_to_other_formats(tmp_path):
    """The configuration is copied and describes the part."""
    ckpttools.convert(PEFT / "plain", tmp_path / "orbax", drop="*mlp*", format="orbax")
    ckpttools.convert(tmp_path / "orbax", tmp_path / "half", drop="*layers.0.*", format="safetensors")
    assert made_by_peft(said_of(tmp_path / "half"), base_of("plain")) == {
        f"model.layers.1.self_attn.{item}_proj" for item in "qkvo"
    }


def test_unsupported_config_is_copied_with_a_remark(tmp_path):
    adapter = adapter_saying(tmp_path, "plain", bias="lora_only")
    plan = ckpttools.select.plan(adapter, tmp_path / "part", drop="*mlp*", format="safetensors").plan
    told = " ".join(plan.notes.remarks)
    assert f"{CONFIG} describes the complete adapter, including the arrays that are left out" in told
    shutil.rmtree(adapter)
    adapter_saying(tmp_path, "plain", target_modules={"q_proj": 1})
    with pytest.raises(ConfigError, match="target_modules"):
        ckpttools.select.plan(adapter, tmp_path / "part", drop="*mlp*", format="safetensors")


@pytest.mark.parametrize(("case", "gone"), PARTS)
def test_peft_loads_parts_without_warnings(tmp_path, case, gone):
    """PEFT finds every module that it creates, without a warning."""
    peft = pytest.importorskip("peft", reason="the extra `transformers` is not installed")
    transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
    ckpttools.select(PEFT / case, tmp_path / "part", drop=gone, format="safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(base_of(case))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        built = peft.PeftModel.from_pretrained(model, str(tmp_path / "part"))
    assert [
        item for item in told if "missing" in str(item.message) or "did not match" in str(item.message)
    ] == []
    assert {*modules_of(built.state_dict())} == {*modules_of(names(tmp_path / "part"))}


@pytest.mark.parametrize(("layout", "scan"), [("restore", True), ("training", True), ("restore", False)])
def test_maxtext_module_path_matches_remaining_modules(tmp_path, layout, scan):
    """MaxText creates factors for every module that its pattern matches."""
    built = tmp_path / "made"
    options = {"base": base_of("plain"), "layout": layout, "scan": scan}
    ckpttools.adapter_to_maxtext(PEFT / "plain", built, **options)
    told = succeed("select", built, tmp_path / "part", "--drop", "*query*", "--drop", "*mlp*").output
    expected = "decoder/.*(self_attention/key|self_attention/out|self_attention/value)"
    assert f"lora_module_path is {expected} now" in " ".join(told.split())
    declared = ckpttools.open(tmp_path / "part").metadata.custom["lora"]
    before = ckpttools.open(built).metadata.custom["lora"]
    assert declared == {**before, "lora_module_path": expected}
    assert f"lora.lora_module_path='{expected}'" in told
    ckpttools.select(built, tmp_path / "same", keep="*lora*")
    assert ckpttools.open(tmp_path / "same").metadata.custom["lora"] == before
    ckpttools.select(built, tmp_path / "halves", drop="*lora_a*")
    assert ckpttools.open(tmp_path / "halves").metadata.custom["lora"] == before


def test_merge_matches_peft_for_random_configs(tmp_path):
    """`fixtures/make_peft_choices.py` recorded which weights PEFT 0.21.2 changes."""
    recorded = json.loads((PEFT / "choices.json").read_bytes())
    peft_choices.write_base(tmp_path / "base")
    base = bases.open_base(ckpttools.open(tmp_path / "base"))
    refused = []
    for seed, expected in enumerate(recorded):
        config = peft_choices.draw_adapter(tmp_path / str(seed), seed)
        try:
            tree = merge_into_base(base, open_peft(parse(tmp_path / str(seed)))).tree
        except CheckpointError as error:
            # PEFT ignores an adapter none of whose factors apply; a merge of nothing is refused here.
            if not isinstance(expected, str):
                assert "applies none of the stored factors" in str(error), (seed, config)
                refused.append(seed)
            continue
        assert not isinstance(expected, str), (seed, config, expected)
        changed, probe = peft_choices.result({dotted(at): item.read() for at, item in tree.arrays.items()})
        assert changed == expected[0] and probe == pytest.approx(expected[1], abs=0.02), (seed, config)
    assert len(recorded) == 200 and len(refused) < 8


@pytest.mark.parametrize("use_dora", [True, False])
def test_dora_base_weights_without_magnitudes_are_refused(tmp_path, use_dora):
    """PEFT 0.21.2 scales them by the norm of the weights that they replace."""
    peft_choices.write_base(tmp_path / "base")
    base = bases.open_base(ckpttools.open(tmp_path / "base"))
    module = "model.layers.0.self_attn.k_proj"
    config = {"target_modules": ["k_proj", "o_proj"], "use_dora": use_dora}
    ranks = {
        name: 2 for name in peft_choices.MODULES if name.endswith(("k_proj", "o_proj")) and name != module
    }
    whole = [f"{module}.base_layer.weight"]
    peft_choices.write_adapter(tmp_path / "adapter", config, ranks, whole, is_dora=use_dora)
    if use_dora:
        with pytest.raises(ConfigError, match="base weight without a magnitude"):
            open_peft(parse(tmp_path / "adapter"))
    else:
        assert merge_into_base(base, open_peft(parse(tmp_path / "adapter"))).tree.arrays


def write_choice(location, ranks=None, whole=(), **config):
    modules = peft_choices.MODULES if ranks is None else ranks
    peft_choices.write_adapter(location, config, dict.fromkeys(modules, 2), whole)
    return location


@pytest.mark.parametrize(
    ("config", "skipped"),
    [
        ({"target_modules": ["q_proj"]}, {"target_modules": 40}),
        ({"target_modules": r".*\.[qk]_proj"}, {"target_modules": 34}),
        ({"target_modules": "all-linear"}, {"target_modules": 4}),
        ({"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0]}, {"layers_to_transform": 8}),
        ({"target_modules": ["proj", "up_proj"], "exclude_modules": ["mlp.up_proj"]}, None),
        ({"target_modules": "all-linear", "exclude_modules": r".*\.0\..*"}, {"exclude_modules": 14}),
        ({"target_modules": ["q_proj"], "layers_to_transform": 1, "layers_pattern": "layers"}, {}),
        ({"target_modules": ["q_proj"], "layers_to_transform": 1, "layers_pattern": "h"}, None),
        ({"target_modules": ["layers.1.mlp.up_proj"]}, {"target_modules": 44}),
        ({"target_modules": None}, None),
        ({"target_modules": []}, None),
    ],
)
def test_commands_report_skipped_factors(tmp_path, config, skipped):
    adapter = write_choice(tmp_path / "adapter", **config)
    peft_choices.write_base(base := tmp_path / "base")
    report = ckpttools.inspect(adapter).adapter
    if skipped is None:
        assert report.problem
        refused = ckpt("adapter", "merge", base, adapter, tmp_path / "merged")
        assert refused.exit_code == 3 and not (tmp_path / "merged").exists()
        result = ckpttools.doctor(adapter).findings
        assert any(item.level == "error" and "adapter" in item.location for item in result)
        return
    assert skipped.items() <= report.skipped.items()
    field = next(iter(report.skipped))
    told = succeed("adapter", "merge", base, adapter, tmp_path / "merged").output
    assert f"{field} in adapter_config.json leaves out" in " ".join(told.split())
    assert "PEFT ignores" in " ".join(succeed("inspect", "tree", adapter).output.split())
    assert any("which PEFT ignores" in finding.what for finding in ckpttools.doctor(adapter).findings)
    only_linear = all(
        item in ("target_modules", "layers_to_transform", "exclude_modules") for item in report.skipped
    )
    if only_linear:
        words = ("adapter", "to-maxtext", adapter, tmp_path / "lora", "--base", base, "--no-scan")
        assert f"{field} in adapter_config.json" in " ".join(succeed(*words).output.split())


def test_select_does_not_restore_skipped_factors(tmp_path):
    """PEFT applies complete paths in target_modules regardless of layers_to_transform."""
    config = {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0, 1]}
    adapter = write_choice(tmp_path / "adapter", **config)
    succeed(
        "select", adapter, tmp_path / "part", "--drop", "*layers.0.self_attn.q_proj*", "--to", "safetensors"
    )
    targets = PeftConfig(said_of(tmp_path / "part"), "part")
    applied = {module for module in modules_of(names(tmp_path / "part")) if targets.is_target(module)}
    assert applied == {
        "model.layers.1.self_attn.q_proj",
        "model.layers.0.self_attn.v_proj",
        "model.layers.1.self_attn.v_proj",
    }


def test_dora_uses_the_norm_of_the_replaced_weight(tmp_path):
    whole = ["model.layers.0.self_attn.q_proj.base_layer.weight"]
    config = {"target_modules": ["q_proj"], "use_dora": True}
    ranks = {"model.layers.0.self_attn.q_proj": 2}
    peft_choices.write_adapter(tmp_path / "adapter", config, ranks, whole, is_dora=True)
    peft_choices.write_base(tmp_path / "base")
    ckpttools.merge_adapter(tmp_path / "base", tmp_path / "merged", adapter=tmp_path / "adapter")
    built = load_file(tmp_path / "merged" / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    weight = stored[f"{name}.base_layer.weight"] + 1.5 * (
        stored[f"{name}.lora_B.weight"] @ stored[f"{name}.lora_A.weight"]
    )
    lengths = stored[f"{name}.lora_magnitude_vector"] / np.linalg.norm(weight, axis=1)
    assert np.allclose(built, weight * lengths[:, None], atol=1e-5)
