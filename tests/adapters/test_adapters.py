"""Adapters that PEFT wrote, merged into models of both kinds, against what PEFT merges them to."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.command_line import ckpt, run, succeed
from support.hf_models import LLAMA_CONFIG, write_llama
from support.internals import NodeLines, Nodes, dotted, merge_into_base, parse, to_maxtext
from support.locations import FIXTURES
from support.trees import model, tree_with

import ckpttools
from ckpttools import CheckpointError, FormatError, ToMaxText, UsageError
from ckpttools.adapters import bases
from ckpttools.adapters.from_jax import adapter_of_maxtext, recorded_settings
from ckpttools.adapters.peft import open_peft

PEFT = FIXTURES / "peft"
CASES = {
    "plain": "llama-float32",
    "bfloat16": "llama-bfloat16",
    "patterns": "llama-float32",
    "one-layer": "llama-float32",
    "dora": "llama-float32",
    "embeddings": "llama-float32",
    "bin": "llama-float32",
    "experts": "gpt-oss-float32",
}
EVERY_CASE = pytest.mark.parametrize("case", CASES)


def base_of(case):
    return PEFT / "bases" / CASES[case]


def numbers(path):
    return {dotted(where): array.read() for where, array in ckpttools.open(path).arrays.items()}


def assert_near(built, expected, ulps=4):
    """Compare with a tolerance of a few ulp of the largest value, because PEFT adds in another order."""
    assert built.keys() == expected.keys()
    for name, array in expected.items():
        assert (built[name].dtype, built[name].shape) == (array.dtype, array.shape), name
        digits = 8 if array.dtype.name == "bfloat16" else 24
        got, there = built[name].astype(np.float64), array.astype(np.float64)
        step = 2.0 ** (np.frexp(np.max(np.abs(there)))[1] - digits)
        assert np.max(np.abs(got - there)) <= ulps * step, name


@EVERY_CASE
def test_merge_matches_peft(tmp_path, case):
    run("adapter", "merge", base_of(case), PEFT / case, tmp_path / "merged")
    expected = load_file(PEFT / "merged" / f"{case}.safetensors")
    del expected["logits"]
    assert_near(numbers(tmp_path / "merged"), expected)
    assert (tmp_path / "merged" / "config.json").is_file()


@pytest.mark.parametrize(
    ("case", "scan"),
    [("bfloat16", True), ("patterns", False), ("dora", True), ("embeddings", True), ("experts", False)],
)
def test_merge_and_convert_commute(tmp_path, case, scan):
    ckpttools.hf_to_maxtext(base_of(case), tmp_path / "maxtext", scan=scan)
    ckpttools.merge_adapter(tmp_path / "maxtext", tmp_path / "one", adapter=PEFT / case)
    ckpttools.merge_adapter(base_of(case), tmp_path / "two", adapter=PEFT / case)
    ckpttools.hf_to_maxtext(tmp_path / "two", tmp_path / "three", scan=scan)
    assert_near(numbers(tmp_path / "one"), numbers(tmp_path / "three"), ulps=1)


@pytest.mark.parametrize(
    ("case", "dtype", "native"), [("patterns", "bfloat16", False), ("dora", "float32", True)]
)
def test_quantized_base_is_dequantized_before_the_merge(tmp_path, case, dtype, native):
    """Arrays and configuration equal those of a cast followed by a merge."""
    base, adapter = tmp_path / "base", PEFT / case
    ckpttools.quantize(base_of(case), base)
    if native:
        ckpttools.hf_to_maxtext(base, tmp_path / "native", quantized="keep")
        base = tmp_path / "native"
    told = " ".join(run("adapter", "merge", base, adapter, tmp_path / "one", code=3).split())
    assert "weights are quantized" in told and "--dtype bfloat16 dequantizes them first" in told
    run("adapter", "merge", base, adapter, tmp_path / "one", "--dtype", dtype)
    ckpttools.cast(base, tmp_path / "plain", dtype=dtype)
    ckpttools.merge_adapter(tmp_path / "plain", tmp_path / "two", adapter=adapter)
    built, expected = (numbers(tmp_path / item) for item in ("one", "two"))
    assert {n: (a.dtype, a.tobytes()) for n, a in built.items()} == {
        n: (a.dtype, a.tobytes()) for n, a in expected.items()
    }
    one, two = (ckpttools.open(tmp_path / item).metadata.config for item in ("one", "two"))
    assert one == two and (native or "quantization_config" not in one)
    for item, at in ((base, "of-codes"), (tmp_path / "plain", "of-numbers")):
        if native:
            ckpttools.adapter_to_maxtext(PEFT / "plain", tmp_path / at, base=item)
        else:
            ckpttools.extract_adapter(tmp_path / "two", tmp_path / at, base=item, rank=2)
    built, expected = (numbers(tmp_path / item) for item in ("of-codes", "of-numbers"))
    assert built.keys() == expected.keys() and all((built[n] == expected[n]).all() for n in expected)


def test_unadapted_arrays_keep_their_bits(tmp_path):
    ckpttools.hf_to_maxtext(base_of("one-layer"), tmp_path / "maxtext")
    ckpttools.merge_adapter(tmp_path / "maxtext", tmp_path / "merged", adapter=PEFT / "one-layer")
    before, after = numbers(tmp_path / "maxtext"), numbers(tmp_path / "merged")
    changed = {name for name in before if before[name].tobytes() != after[name].tobytes()}
    layers = "params.params.decoder.layers"
    assert changed == {f"{layers}.mlp.wi_0.kernel", f"{layers}.self_attention.query.kernel"}
    for name in changed:
        assert before[name][:, 0].tobytes() == after[name][:, 0].tobytes(), (
            "the layer that it leaves as it is"
        )


def test_scale_minus_one_reverts_a_merge(tmp_path):
    base = base_of("plain")
    ckpttools.merge_adapter(base, tmp_path / "merged", adapter=PEFT / "plain")
    run("adapter", "merge", tmp_path / "merged", PEFT / "plain", tmp_path / "back", "--scale", "-1")
    assert_near(numbers(tmp_path / "back"), numbers(base), ulps=16)
    told = run("adapter", "merge", base, PEFT / "dora", tmp_path / "no", "--scale", "2", code=2)
    assert "sets row norms (DoRA)" in told and "--scale" in told


def test_state_dict_with_adapter_name_is_merged(tmp_path):
    """Such names contain the name of the adapter."""
    shutil.copytree(PEFT / "plain", tmp_path / "kept")
    file = tmp_path / "kept" / "adapter_model.safetensors"
    kept = {name.replace(".weight", ".default.weight"): array for name, array in load_file(file).items()}
    save_file(kept, file)
    for name in ("plain", "kept"):
        where = PEFT / name if name == "plain" else tmp_path / name
        ckpttools.merge_adapter(base_of("plain"), tmp_path / f"of-{name}", adapter=where)
    one, two = (tmp_path / f"of-{name}" / "model.safetensors" for name in ("plain", "kept"))
    assert one.read_bytes() == two.read_bytes()


def test_directory_called_0_next_to_an_adapter_is_ambiguous(tmp_path):
    """If it contains a MaxText adapter, the user must say which one to use."""
    location, base = tmp_path / "both", base_of("plain")
    shutil.copytree(PEFT / "plain", location)
    (location / "0").mkdir()
    ckpttools.merge_adapter(base, tmp_path / "one", adapter=location)
    (location / "0").rmdir()
    ckpttools.adapter_to_maxtext(location, tmp_path / "lora", base=base)
    shutil.copytree(tmp_path / "lora" / "0", location / "0")
    told = run("adapter", "merge", base, location, tmp_path / "no", code=3)
    assert "this directory has two adapters" in told and "adapter_model.safetensors or" in " ".join(
        told.split()
    )
    for name in ("adapter_model.safetensors", "0"):
        ckpttools.merge_adapter(base, tmp_path / f"of-{name}", adapter=location / name)
        assert_near(numbers(tmp_path / f"of-{name}"), numbers(tmp_path / "one"))


def changed_config(tmp_path, case="plain", **declared):
    """Return an adapter with another configuration."""
    location = tmp_path / "adapter"
    shutil.rmtree(location, ignore_errors=True)
    shutil.copytree(PEFT / case, location)
    config = json.loads((location / "adapter_config.json").read_bytes()) | declared
    (location / "adapter_config.json").write_text(json.dumps(config))
    return location


@pytest.mark.parametrize(
    ("declared", "told"),
    [
        ({"peft_type": "LOHA"}, "this kind of adapter is not supported: LOHA"),
        ({"bias": "all"}, "it trains the model's own biases"),
        ({"use_qalora": True}, "its factors apply to groups of inputs"),
        ({"layer_replication": [[0, 1], [0, 1]]}, "it has more layers than its base"),
        ({"init_lora_weights": "pissa_niter_4"}, "its base differs from the model that it names"),
        ({"r": 3}, "the configured rank is not the rank of the factors"),
        ({"lora_alpha": "much"}, "lora_alpha is not a number"),
        ({"rank_pattern": {"(": 2}}, "a key of rank_pattern is not a supported pattern"),
        (
            {"rank_pattern": {"a{99999999999999999999}": 2}},
            "a key of rank_pattern is not a supported pattern",
        ),
        (
            {"alpha_pattern": {"(" * 5000 + ")" * 5000: 2}},
            "a key of alpha_pattern is not a supported pattern",
        ),
        (
            {"alpha_pattern": {"(.*)*(.*)*(.*)*(.*)*!": 2}},
            "a key of alpha_pattern is not a supported pattern",
        ),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern is not an object"),
        ({"lora_alpha": 10**400}, "lora_alpha is not a number"),
        ({"use_rslora": "false"}, "use_rslora is neither true nor false"),
        ({"fan_in_fan_out": "no"}, "fan_in_fan_out is neither true nor false"),
        ({"use_dora": True}, "no lora_magnitude_vector"),
        ({"modules_to_save": ["lm_head"]}, "no arrays for modules_to_save, lm_head"),
        ({"modules_to_save": 1.5}, "modules_to_save is not a list of names"),
        ({"target_parameters": [None]}, "target_parameters is not a list of names"),
    ],
)
def test_unsupported_adapters_are_refused(tmp_path, declared, told):
    location = changed_config(tmp_path, **declared)
    assert told in run("adapter", "merge", base_of("plain"), location, tmp_path / "out", code=3)
    assert not (tmp_path / "out").exists()
    looked = " ".join(succeed("inspect", "tree", location).output.split())
    assert told in looked, "it can be looked at all the same"


def test_adapter_of_another_model_is_refused(tmp_path):
    told = run("adapter", "merge", base_of("plain"), PEFT / "experts", tmp_path / "out", code=3)
    assert "weights that the base does not have" in told and "mlp.experts.gate_up_proj" in told
    ckpttools.hf_to_maxtext(base_of("plain"), tmp_path / "maxtext")
    told = run("adapter", "merge", tmp_path / "maxtext", PEFT / "experts", tmp_path / "out", code=3)
    assert "weights that the base does not have" in told


def test_single_factors_are_refused(tmp_path):
    location = changed_config(tmp_path)
    arrays = load_file(location / "adapter_model.safetensors")
    arrays.pop(next(name for name in arrays if "lora_B" in name))
    save_file(arrays, location / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="a factor is missing"):
        ckpttools.merge_adapter(base_of("plain"), tmp_path / "out", adapter=location)


def test_unadapted_layers_are_reported(tmp_path):
    adapter = changed_config(tmp_path)
    arrays = load_file(adapter / "adapter_model.safetensors")
    kept = {name: item for name, item in arrays.items() if ".layers.1." not in name}
    assert kept and len(kept) < len(arrays)
    save_file(kept, adapter / "adapter_model.safetensors")
    plan = ckpttools.merge_adapter.plan(base_of("plain"), tmp_path / "out", adapter=adapter).plan
    (told,) = [remark for remark in plan.notes.remarks if remark.startswith("the adapter has no factors")]
    assert f"{(len(arrays) - len(kept)) // 2} arrays" in told and "model.layers.1." in told
    whole = ckpttools.merge_adapter.plan(base_of("plain"), tmp_path / "out", adapter=PEFT / "plain").plan
    assert not [remark for remark in whole.notes.remarks if remark.startswith("the adapter has no factors")]


def test_module_replaced_in_one_layer_leaves_other_layers_unchanged(tmp_path):
    """The other layers of a stack stay the base's own, and missing replacements are reported."""
    adapter = changed_config(tmp_path, "one-layer", modules_to_save=["1.input_layernorm", "lm_head"])
    file, norm = adapter / "adapter_model.safetensors", "model.layers.1.input_layernorm.weight"
    arrays = {**load_file(file), f"base_model.model.{norm}": np.arange(16, dtype=np.float16)}
    save_file(arrays, file)
    with pytest.raises(CheckpointError, match=r"(?s)no weights for these:.*lm_head.weight"):
        ckpttools.merge_adapter(base_of("plain"), tmp_path / "merged", adapter=adapter)
    head = numbers(base_of("plain"))["lm_head.weight"]
    save_file({**arrays, "base_model.model.lm_head.weight": head}, file)
    ckpttools.hf_to_maxtext(base_of("plain"), tmp_path / "maxtext")
    ckpttools.merge_adapter(tmp_path / "maxtext", tmp_path / "merged", adapter=adapter)
    name = "params.params.decoder.layers.pre_self_attention_layer_norm.scale"
    before, after = numbers(tmp_path / "maxtext")[name], numbers(tmp_path / "merged")[name]
    assert np.array_equal(after[:, 1], np.arange(16)) and np.array_equal(after[:, 0], before[:, 0])


def test_complete_model_is_not_accepted_as_adapter(tmp_path):
    told = run("adapter", "merge", base_of("plain"), base_of("plain"), tmp_path / "out", code=3)
    assert "this is not an adapter" in told


def test_adapter_without_its_config_is_reported(tmp_path):
    (tmp_path / "adapter").mkdir()
    shutil.copy(PEFT / "plain/adapter_model.safetensors", tmp_path / "adapter")
    told = run("adapter", "merge", base_of("plain"), tmp_path / "adapter", tmp_path / "out", code=3)
    assert "without its adapter_config.json" in told and "copy adapter_config.json" in told


def test_merge_note_names_both_bases(tmp_path):
    told = run("adapter", "merge", base_of("plain"), PEFT / "plain", tmp_path / "out", "--dry-run")
    assert f"merged into {base_of('plain')}" in " ".join(told.split())
    name = base_of("plain").name
    for base, is_told in ((f"me/{name}", False), (f"dbfs:/{name}/", False), ("azureml://models/x", True)):
        adapter = changed_config(tmp_path, "plain", base_model_name_or_path=base)
        told = run("adapter", "merge", base_of("plain"), adapter, tmp_path / "out", "--dry-run")
        assert ("merged into" in told) == is_told, "the directory has its name"


def test_conversion_notes_adapter_of_another_model(tmp_path):
    base, named = base_of("plain"), {"base_model_name_or_path": "me/other"}
    adapter = changed_config(tmp_path, "plain", **named)
    there = run("adapter", "to-maxtext", adapter, tmp_path / "lora", "--base", base)
    back = run("adapter", "to-peft", tmp_path / "lora", tmp_path / "back", "--base", base)
    for told in (there, back):
        assert f"names me/other as its base, and is converted as one of {base}" in " ".join(told.split())
    own = changed_config(tmp_path, "plain", base_model_name_or_path=f"me/{base.name}")
    for where in (base, base / "model.safetensors"):
        assert "as its base" not in run("adapter", "merge", where, own, tmp_path / "out", "--dry-run")
    run("convert", "hf-to-maxtext", base, tmp_path / base.name)
    where = tmp_path / base.name
    assert "as its base" not in run("adapter", "merge", where, own, tmp_path / "out", "--dry-run")


@pytest.mark.parametrize("words", [("quantize",), ("shrink", "--layers", "1")])
def test_shrink_refuses_adapters(words, tmp_path):
    command, *options = words
    told = run(command, PEFT / "plain", tmp_path / "out", *options, code=3)
    assert "this is a LoRA adapter of tiny/llama, not a complete model" in told
    assert not (tmp_path / "out").exists()


def test_unreadable_adapter_is_reported_in_one_line(tmp_path):
    tensors = load_file(PEFT / "plain/adapter_model.safetensors")
    adapter = changed_config(tmp_path, "plain")
    doubled = {name.replace(".weight", ".other.weight"): array for name, array in tensors.items()}
    save_file({**tensors, **doubled}, adapter / "adapter_model.safetensors")
    result = ckpttools.inspect(adapter).adapter
    assert result is not None and result.problem is not None and "\n" not in result.problem
    text = succeed("inspect", "tree", adapter).output
    assert "it is not read: these arrays belong to several adapters" in text and "\\n" not in text


def test_unmappable_adapter_hint_merges_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = run("adapter", "to-maxtext", PEFT / "dora", "out", "--base", base_of("dora"), code=3)
    command = told.partition("instead: `ckpt ")[2].partition("`")[0]
    succeed(*command.split())
    assert ckpttools.inspect("DST").families


def test_inspect_describes_peft_adapter():
    result = ckpttools.inspect(PEFT / "patterns").adapter
    assert result is not None and result.problem is None
    assert (result.base_model, result.alpha, result.features) == ("tiny/llama", 6, ("rslora",))
    assert result.ranks == {1: 1, 2: 7, 3: 2} and result.targets["down_proj"] == 2
    assert ckpttools.inspect(base_of("plain")).adapter is None
    text = succeed("inspect", "tree", PEFT / "dora").output
    assert "a LoRA of tiny/llama" in text and "rank        2, alpha 6, dora" in text


def test_inspect_against_compares_adapter_with_base(tmp_path):
    against = ckpttools.inspect(PEFT / "experts", against=base_of("experts")).comparison
    assert against is not None and against.is_same and against.num_compared == 12
    text = run_different("inspect", "tree", PEFT / "experts", "--against", base_of("plain"))
    assert "4 names are not expected" in text
    ckpttools.hf_to_maxtext(base_of("plain"), tmp_path / "maxtext")
    assert ckpttools.inspect(PEFT / "plain", against=tmp_path / "maxtext").comparison.is_same


def run_different(*words):
    from support.command_line import ckpt

    result = ckpt(*words)
    assert result.exit_code == 1, result.output
    return result.output


@pytest.mark.parametrize("case", ["dora", "experts"])
def test_plan_file_reproduces_a_merge(case):
    tree = ckpttools.merge_adapter.plan(base_of(case), "/nowhere/out", adapter=PEFT / case).plan.tree
    files = []
    lines = NodeLines(lambda source: files.append(source) or len(files) - 1)
    told = {path: lines.number(array) for path, array in tree.arrays.items()}
    again = Nodes([line.encode() for line in lines.lines], files.__getitem__)
    for path, number in told.items():
        assert again.array(number).read().tobytes() == tree.arrays[path].read().tobytes(), path


@pytest.mark.parametrize(
    ("case", "layout", "scan"),
    [
        ("plain", "training", False),
        ("patterns", "restore", True),
        ("one-layer", "training", True),
        ("bfloat16", "restore", False),
        ("plain", "converter", True),
    ],
)
def test_adapter_converts_to_maxtext_and_back(tmp_path, case, layout, scan):
    flag = "--scan" if scan else "--no-scan"
    words = ("adapter", "to-maxtext", PEFT / case, tmp_path / "maxtext", "--base", base_of(case))
    told = run(*words, "--layout", layout, flag)
    is_read = "lora.enable_lora=true lora.lora_module_path='decoder/.*(" in " ".join(told.split())
    assert is_read == (layout != "converter")
    run("adapter", "to-peft", tmp_path / "maxtext", tmp_path / "back", "--base", base_of(case))
    for name, adapter in (("one", PEFT / case), ("two", tmp_path / "back"), ("three", tmp_path / "maxtext")):
        ckpttools.merge_adapter(base_of(case), tmp_path / name, adapter=adapter)
    one = numbers(tmp_path / "one")
    assert_near(numbers(tmp_path / "two"), one)
    assert_near(numbers(tmp_path / "three"), one)


def test_adapter_round_trip_keeps_bits(tmp_path):
    """Except those of the query, which MaxText scales."""
    ckpttools.adapter_to_maxtext(PEFT / "plain", tmp_path / "maxtext", base=base_of("plain"))
    ckpttools.adapter_to_peft(tmp_path / "maxtext", tmp_path / "back", base=base_of("plain"), base_name="b")
    before = load_file(PEFT / "plain" / "adapter_model.safetensors")
    after = load_file(tmp_path / "back" / "adapter_model.safetensors")
    assert before.keys() == after.keys()
    differing = {name for name in before if before[name].tobytes() != after[name].tobytes()}
    assert all(name.endswith("q_proj.lora_B.weight") for name in differing)
    declared = json.loads((tmp_path / "back" / "adapter_config.json").read_bytes())
    assert (declared["r"], declared["lora_alpha"], declared["base_model_name_or_path"]) == (2, 6, "b")
    assert set(declared["target_modules"]) == {*(f"{name}_proj" for name in "qkvo"), *MLP}


MLP = ("gate_proj", "up_proj", "down_proj")


def test_maxtext_base_decides_the_scan_axis(tmp_path):
    ckpttools.hf_to_maxtext(base_of("plain"), tmp_path / "base", scan=False)
    ckpttools.adapter_to_maxtext(PEFT / "plain", tmp_path / "adapter", base=tmp_path / "base")
    tree = ckpttools.open(tmp_path / "adapter")
    assert "decoder/layers_1/mlp/wo/kernel_lora_a/value" in tree
    assert tree.metadata.custom["scan_layers"] is False
    assert tree.metadata.custom["lora"]["lora_rank"] == 2 and tree.metadata.custom["lora"]["lora_alpha"] == 6


def test_scale_is_stored_in_alpha(tmp_path):
    words = ("--base", base_of("plain"), "--scale", "0.5")
    run("adapter", "to-maxtext", PEFT / "plain", tmp_path / "half", *words)
    assert ckpttools.open(tmp_path / "half").metadata.custom["lora"]["lora_alpha"] == 3
    run("adapter", "to-peft", tmp_path / "half", tmp_path / "quarter", *words)
    assert json.loads((tmp_path / "quarter" / "adapter_config.json").read_bytes())["lora_alpha"] == 1.5


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("dora", "it sets row norms (DoRA)"),
        ("embeddings", "it replaces the complete array"),
        ("experts", "its factors do not belong to a linear layer (experts)"),
    ],
)
def test_unmappable_adapters_are_refused(tmp_path, case, told):
    words = ("adapter", "to-maxtext", PEFT / case, tmp_path / "out", "--base", base_of(case))
    declared = run(*words, code=3)
    assert told in declared and "ckpt adapter merge" in declared and not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", ["intermediate_size", "hidden_size", "num_attention_heads"])
def test_mismatched_factors_are_not_padded(tmp_path, size):
    """Names match the base; only ranks are padded with zeros."""
    config = json.loads((base_of("plain") / "config.json").read_bytes())
    write_llama(tmp_path / "base", **{**config, "dtype": "float32", size: config[size] * 2})
    declared = run(
        "adapter", "to-maxtext", PEFT / "plain", tmp_path / "out", "--base", tmp_path / "base", code=3
    )
    assert "do not fit the base's weight" in declared and not (tmp_path / "out").exists()


def test_unrecorded_alpha_must_be_given(tmp_path):
    """Tunix does not record alpha."""
    ckpttools.adapter_to_maxtext(PEFT / "plain", tmp_path / "noted", base=base_of("plain"))
    tree = ckpttools.open(tmp_path / "noted")
    bare = tree.with_metadata(custom={})
    with pytest.raises(CheckpointError, match="does not record its alpha"):
        ckpttools.adapter_to_peft(bare, tmp_path / "out", base=base_of("plain"))
    ckpttools.adapter_to_peft(bare, tmp_path / "out", base=base_of("plain"), alpha=6)
    ckpttools.adapter_to_peft(tree, tmp_path / "same", base=base_of("plain"))
    one, two = (
        json.loads((tmp_path / name / "adapter_config.json").read_bytes()) for name in ("out", "same")
    )
    names = [item.pop("base_model_name_or_path") for item in (one, two)]
    assert one == two and names == [str(base_of("plain")), "tiny/llama"]
    ckpttools.adapter_to_peft(tree, tmp_path / "again", base=base_of("plain"), alpha=6)
    with pytest.raises(UsageError, match=r"a different alpha[^@]*\n +expected 6 "):
        ckpttools.adapter_to_peft(tree, tmp_path / "other", base=base_of("plain"), alpha=3)
    # What this writes it replaces, its configuration as well, and nothing that lies beside.
    words = "adapter", "to-peft", tmp_path / "noted", tmp_path / "again", "--base", base_of("plain")
    assert "allow its replacement with --overwrite" in run(*words, code=2)
    assert "28 arrays" in run(*words, "--overwrite")
    (tmp_path / "again" / "notes.txt").touch()
    assert "not part of the checkpoint: notes.txt" in run(*words, "--overwrite", code=2)


@pytest.mark.parametrize("base", ["memory://adapters/base", base_of("plain")], ids=["memory", "local"])
def test_wrong_adapter_inputs_are_explained(tmp_path, base):
    """Sources are a directory and a store; both the command and its plan are checked."""
    if str(base).startswith("memory"):
        ckpttools.copy(base_of("plain"), base)
    merge = "adapter", "merge", base, PEFT / "plain", tmp_path / "out"
    planned = json.loads(run(*merge, "--dry-run", "--json"))
    assert (planned["source"], planned["arrays"]) == (str(base), 21) and not (tmp_path / "out").exists()
    exchanged = run("adapter", "merge", PEFT / "plain", base, tmp_path / "out", "--json", code=3)
    assert f"`ckpt adapter merge BASE {PEFT / 'plain'} DST` merges it into one" in exchanged
    assert f"`ckpt {base}` identifies it" in run("adapter", "merge", base, base, tmp_path / "o", code=3)
    assert "the original model of a MaxText checkpoint" in run(*merge, "--like", base, "--dry-run", code=2)
    assert "unknown family 'lama'" in run(*merge, "--family", "lama", code=2)
    assert "DST is in ADAPTER" in run(*merge[:-1], PEFT / "plain" / "out", "--dry-run", code=2)
    ckpttools.merge_adapter(base, tmp_path / "out", adapter=PEFT / "plain")
    extract = "adapter", "extract", tmp_path / "out", base, "memory://adapters/extracted", "--rank", 2
    done = run(*extract, "--overwrite")
    assert "PEFT reads disks and the Hub: `ckpt copy memory://adapters/extracted DIR`" in done
    ckpttools.merge_adapter(base, tmp_path / "twice", adapter="memory://adapters/extracted")
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "twice"))
    assert all(np.allclose(one[name], two[name], atol=1e-6) for name in one)


LAYERS = 3


def legacy(rank):
    """Return an adapter in the layout of MaxText's inference engine, for three layers."""
    random = np.random.default_rng(0)
    shapes = {
        "query": ((32, LAYERS, rank), (rank, LAYERS, 4, 16)),
        "out": ((4, LAYERS, 16, rank), (rank, LAYERS, 32)),
    }
    leaves = {}
    for name, both in shapes.items():
        for which, shape in zip("ab", both, strict=True):
            values = random.standard_normal(shape).astype(np.float32)
            leaves["decoder", "layers", "self_attention", name, f"lora_{which}.kernel"] = values
    return leaves


@pytest.mark.parametrize("rank", [2, LAYERS])
def test_inference_engine_factors_are_merged(tmp_path, rank):
    """They have the axes of kernels; one rank equals the number of layers."""
    write_llama(
        tmp_path / "hf", num_hidden_layers=LAYERS, hidden_size=32, num_attention_heads=4, dtype="float32"
    )
    leaves = legacy(rank)
    # The engine wants the configuration two directories above the weights.
    saved(leaves, tmp_path / "a")
    declared = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "base_model_name_or_path": "me/base"}
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(declared))
    ckpttools.merge_adapter(tmp_path / "hf", tmp_path / "merged", adapter=tmp_path / "a")
    built, before = numbers(tmp_path / "merged"), numbers(tmp_path / "hf")
    for layer in range(LAYERS):
        a, b = (leaves["decoder", "layers", "self_attention", "out", f"lora_{x}.kernel"] for x in "ab")
        expected = (a[:, layer].reshape(-1, rank) @ b[:, layer]).T
        name = f"model.layers.{layer}.self_attn.o_proj.weight"
        assert np.allclose(built[name] - before[name], expected, atol=1e-5)


def saved(leaves, location):
    """Save a checkpoint of these arrays."""
    tree = tree_with(leaves)
    return ckpttools.convert(tree, location, format="orbax").destination


def test_inspect_describes_maxtext_adapter(tmp_path):
    ckpttools.adapter_to_maxtext(PEFT / "plain", tmp_path / "adapter", base=base_of("plain"))
    result = ckpttools.inspect(tmp_path / "adapter").adapter
    assert result is not None and (result.ranks, result.alpha) == ({2: 7}, 6)
    assert result.targets["query"] == 1
    against = ckpttools.inspect(tmp_path / "adapter", against=base_of("plain")).comparison
    assert against.is_same


def test_factors_without_a_module_are_reported(tmp_path):
    save_file({f"wi_lora_{which}": np.ones((2, 2), "f4") for which in "ab"}, tmp_path / "a.safetensors")
    result = ckpttools.inspect(tmp_path / "a.safetensors").adapter
    assert result is not None and (result.ranks, result.targets) == ({2: 1}, {"wi": 1})


def test_ambiguous_factor_axes_are_refused(tmp_path):
    """If layers, inputs and ranks have the same length, the first axis is ambiguous."""
    write_llama(tmp_path / "hf", num_hidden_layers=3, hidden_size=3, num_attention_heads=1, head_dim=4)
    leaves = {}
    for which, shape in (("a", (3, 3, 3)), ("b", (3, 3, 4))):
        path = ("decoder", "layers", "self_attention", "query", f"kernel_lora_{which}", "value")
        leaves[path] = np.ones(shape, np.float32)
    adapter = saved(leaves, tmp_path / "a")
    with pytest.raises(CheckpointError, match="do not show which axes"):
        ckpttools.merge_adapter(tmp_path / "hf", tmp_path / "out", adapter=adapter, alpha=1)


def test_layers_first_factors_with_equal_rank_are_refused(tmp_path):
    """In the inference engine, B begins with the rank; in other layouts, with the layers."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA_CONFIG | {"num_hidden_layers": 3}))
    tree = model(json.loads(config.read_bytes()), 0)
    state = to_maxtext(tree, ToMaxText(scan_axis=0)).state
    base = bases.open_base(state, like=config)
    leaves = {}
    for which, shape in (("a", (3, 64, 3)), ("b", (3, 3, 128))):
        path = ("decoder", "layers", "mlp", "wi_0", f"kernel_lora_{which}", "value")
        leaves[path] = np.ones(shape, np.float32)
    with pytest.raises(CheckpointError, match="do not show which axes"):
        adapter_of_maxtext(base, tree_with(leaves), alpha=1)


def test_non_finite_scale_is_refused(tmp_path):
    base, adapter = base_of("plain"), PEFT / "plain"
    ckpttools.adapter_to_maxtext(adapter, tmp_path / "maxtext", base=base)
    for words in (
        ("merge", base, adapter, tmp_path / "no", "--scale", "nan"),
        ("to-maxtext", adapter, tmp_path / "no", "--base", base, "--scale", "inf"),
        ("to-peft", tmp_path / "maxtext", tmp_path / "no", "--base", base, "--scale", "nan"),
        ("to-peft", tmp_path / "maxtext", tmp_path / "no", "--base", base, "--alpha", "nan"),
        # Times the adapter's own scale beyond float64.
        ("merge", base, adapter, tmp_path / "no", "--scale", "1e308"),
        ("to-maxtext", adapter, tmp_path / "no", "--base", base, "--scale", "1e308"),
        ("to-peft", tmp_path / "maxtext", tmp_path / "no", "--base", base, "--scale", "1e308"),
    ):
        assert "must be a finite number" in run("adapter", *words, code=2)


def test_weight_with_two_factor_pairs_is_refused():
    base, adapter = bases.open_base(ckpttools.open(base_of("plain"))), open_peft(parse(PEFT / "plain"))
    twice = replace(adapter, factors=(*adapter.factors, adapter.factors[0]))
    with pytest.raises(FormatError, match="changes these weights more than once") as refused:
        merge_into_base(base, twice)
    assert adapter.factors[0].name in str(refused.value)


@pytest.mark.parametrize(
    ("declared", "alpha"),
    [({"use_rslora": True}, 6 * 2**0.5), ({}, 6), ({"alpha_pattern": {"q_proj": 3}}, None)],
)
def test_peft_config_next_to_maxtext_factors_is_used(tmp_path, declared, alpha):
    """A PEFT configuration from MaxText's converter is used completely or refused."""
    ckpttools.adapter_to_maxtext(PEFT / "plain", tmp_path / "adapter", base=base_of("plain"))
    tree = ckpttools.open(tmp_path / "adapter").with_metadata(custom={})
    config = json.loads((PEFT / "plain" / "adapter_config.json").read_bytes()) | declared
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    if alpha is None:
        with pytest.raises(CheckpointError, match="different ranks or alphas for some modules"):
            recorded_settings(tree)
    else:
        assert recorded_settings(tree) == {"lora_rank": 2, "lora_alpha": pytest.approx(alpha)}


def test_rslora_alpha_is_converted_with_a_remark(tmp_path):
    for declared, is_told in ((True, True), (False, False)):
        adapter = changed_config(tmp_path, "plain", use_rslora=declared)
        told = run(
            "adapter", "to-maxtext", adapter, tmp_path / "out", "--base", base_of("plain"), "--dry-run"
        )
        assert ("the alpha gives the scale of rsLoRA" in " ".join(told.split())) == is_told


def test_duplicate_and_missing_arrays_are_refused(tmp_path):
    adapter = changed_config(tmp_path)
    file = adapter / "adapter_model.safetensors"
    plain = load_file(file)
    named = {name.replace(".weight", ".other.weight"): 2 * array for name, array in plain.items()}
    apart = {
        name.replace(".weight", ".bob.weight" if "v_proj" in name else ".alice.weight"): array
        for name, array in plain.items()
    }
    lengths = {next(iter(plain)).replace("lora_A.weight", "lora_magnitude_vector"): np.ones(16, np.float32)}
    diverged = {**plain, next(iter(plain)): next(iter(plain.values())) * np.float32(np.nan)}
    for arrays, told in [
        ({**plain, **named}, "several"),
        (apart, "several adapters.*\n.*lora_A.alice.weight\n.*lora_[AB].bob.weight"),
        (diverged, "NaN or infinity.*\n.*down_proj.weight, A"),
        ({}, "no arrays"),
        ({**plain, **lengths}, "a lora_mag"),
    ]:
        save_file(arrays, file)
        with pytest.raises(CheckpointError, match=told):
            ckpttools.merge_adapter.plan(base_of("plain"), tmp_path / "merged", adapter=adapter)


def test_inspect_names_setting_that_loads_adapter(tmp_path):
    ckpttools.adapter_to_maxtext(PEFT / "plain", tmp_path / "lora", base=base_of("plain"))
    told = " ".join(succeed(tmp_path / "lora").output.split())
    assert "lora.lora_restore_path" in told and "load_parameters_path" not in told


def test_expert_parameters_without_module_names_are_merged(tmp_path):
    """PEFT 0.21 creates them for target_modules that name expert projections."""
    declared = json.loads((PEFT / "experts" / "adapter_config.json").read_bytes())
    bare = {
        "target_parameters": ["down_proj", "gate_up_proj"],
        "r": 1,
        "lora_alpha": 3,
        "rank_pattern": {r".*\.gate_up_proj": 2, r".*\.down_proj": 2, "self_attn.*": 2},
        "alpha_pattern": {r".*\.gate_up_proj": 6, r".*\.down_proj": 6, "self_attn.*": 6},
    }
    assert declared["r"] == 2 and declared["lora_alpha"] == 6
    whole = numbers(PEFT / "merged" / "experts.safetensors")
    del whole["logits"]
    for targets in (declared["target_modules"], r".*\.self_attn\..*"):
        adapter = changed_config(tmp_path, "experts", **declared | bare | {"target_modules": targets})
        ckpttools.merge_adapter(base_of("experts"), tmp_path / "merged", adapter=adapter, overwrite=True)
        assert_near(numbers(tmp_path / "merged"), whole)


def test_duplicate_saved_modules_must_be_equal(tmp_path):
    """With embeddings and modules_to_save, PEFT saves the trained module twice and the base's once."""
    adapter = changed_config(tmp_path, "embeddings")
    file = adapter / "adapter_model.safetensors"
    plain = load_file(file)
    head = plain["base_model.model.lm_head.weight"]
    more = {
        "base_model.model.lm_head.modules_to_save.weight": head,
        "base_model.model.lm_head.original_module.weight": np.zeros_like(head),
    }
    save_file({**plain, **more}, file)
    for name, arrays in [("plain", plain), ("saved", {**plain, **more}), ("dumped", plain | more)]:
        if name == "dumped":
            del arrays["base_model.model.lm_head.weight"]
        save_file(arrays, file)
        ckpttools.merge_adapter(base_of("embeddings"), tmp_path / name, adapter=adapter)
    plain, *others = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "saved", "dumped")
    )
    assert others == [plain, plain]
    name = "base_model.model.lm_head.modules_to_save.weight"
    save_file({**load_file(file), "base_model.model.lm_head.weight": head, name: head + 1}, file)
    with pytest.raises(FormatError, match=r"lm_head\.weight, with different values"):
        ckpttools.merge_adapter.plan(base_of("embeddings"), tmp_path / "no", adapter=adapter)


def test_saved_head_of_a_tied_model_is_accepted(tmp_path):
    tied = write_llama(tmp_path / "base", tie_word_embeddings=True, dtype="float32")
    table = tied["model.embed_tokens.weight"] * 2
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2}))
    names = [f"base_model.model.{name}" for name in ("model.embed_tokens.weight", "lm_head.weight")]
    file = adapter / "adapter_model.safetensors"
    save_file(dict.fromkeys(names, table), file)
    ckpttools.merge_adapter(tmp_path / "base", tmp_path / "merged", adapter=adapter)
    built = numbers(tmp_path / "merged")
    assert "lm_head.weight" not in built
    np.testing.assert_array_equal(built["model.embed_tokens.weight"], table)
    save_file(dict(zip(names, (table, table + 1), strict=True)), file)
    with pytest.raises(FormatError, match="output head, but in the base"):
        ckpttools.merge_adapter.plan(tmp_path / "base", tmp_path / "no", adapter=adapter)


def mixture_adapter(location, random, layers=4, inner=2):
    """Return PEFT 0.21's adapter for all linear layers of a Mixtral, and its changes in float64."""
    modules = {
        "mlp.experts.base_layer": ("gate_up_proj", 2 * inner, 256, 64),
        "mlp.experts": ("down_proj", inner, 64, 128),
        "mlp.gate": ("weight", inner, LOCAL_EXPERTS, 64),
    }
    arrays, added = {}, {}
    for layer, (module, (name, rank, outputs, inputs)) in itertools.product(range(layers), modules.items()):
        count = 1 if name == "weight" else LOCAL_EXPERTS
        a = random.normal(0, 0.3, (rank * count, inputs)).astype("f4")
        b = random.normal(0, 0.3, (outputs, rank * count)).astype("f4")
        path = f"base_model.model.model.layers.{layer}.{module}"
        arrays |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
        both = a.reshape(count, rank, -1).astype("f8"), b.reshape(-1, rank, count).astype("f8")
        added[layer, name] = 1.5 * np.einsum("eri,ore->eoi", *both)
    location.mkdir()
    save_file(arrays, location / "adapter_model.safetensors")
    declared = {
        "peft_type": "LORA",
        "r": inner,
        "lora_alpha": 3,
        "target_modules": ["q_proj"],
        "target_parameters": ["gate.weight", "down_proj", "gate_up_proj"],
        "rank_pattern": {r".*\.gate_up_proj": 2 * inner},
        "alpha_pattern": {r".*\.gate_up_proj": 6},
    }
    (location / "adapter_config.json").write_text(json.dumps(declared))
    return added


LOCAL_EXPERTS = 3


def test_fused_expert_adapter_fits_a_base_with_single_experts(tmp_path):
    random = np.random.default_rng(1)
    config = LLAMA_CONFIG | {"model_type": "mixtral", "num_local_experts": LOCAL_EXPERTS}
    added = mixture_adapter(tmp_path / "adapter", random)
    base = {
        name: array.astype("f4")
        for name, array in write_llama(tmp_path / "base", dtype="float32").items()
        if ".mlp." not in name
    }
    expected = {}
    for layer in range(4):
        above = f"model.layers.{layer}.block_sparse_moe"
        changes = {f"{above}.gate.weight": added[layer, "weight"][0]}
        for expert in range(LOCAL_EXPERTS):
            w1, w3 = np.split(added[layer, "gate_up_proj"][expert], 2)
            own = zip(("w1", "w2", "w3"), (w1, added[layer, "down_proj"][expert], w3), strict=True)
            changes |= {f"{above}.experts.{expert}.{name}.weight": item for name, item in own}
        base |= {name: random.normal(0, 1, item.shape).astype("f4") for name, item in changes.items()}
        expected |= {name: base[name] + item for name, item in changes.items()}
    save_file(base, tmp_path / "base" / "model.safetensors")
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    ckpttools.merge_adapter(tmp_path / "base", tmp_path / "merged", adapter=tmp_path / "adapter")
    assert_near(numbers(tmp_path / "merged"), base | {name: a.astype("f4") for name, a in expected.items()})
    assert ckpttools.inspect(tmp_path / "adapter", against=tmp_path / "base").comparison.is_same


def test_mismatched_family_is_refused(tmp_path):
    base, adapter, lora = base_of("plain"), PEFT / "plain", tmp_path / "lora"
    ckpttools.hf_to_maxtext(base, tmp_path / "maxtext")
    ckpttools.adapter_to_maxtext(adapter, lora, base=base, family="llama")
    calls = [
        (ckpttools.merge_adapter, tmp_path / "maxtext", {"adapter": adapter}),
        (ckpttools.merge_adapter, base, {"adapter": lora}),
        (ckpttools.adapter_to_maxtext, adapter, {"base": base}),
        (ckpttools.adapter_to_maxtext, adapter, {"base": tmp_path / "maxtext"}),
        (ckpttools.adapter_to_peft, lora, {"base": base}),
    ]
    for call, source, declared in calls:
        with pytest.raises(CheckpointError, match="would give the arrays other values") as refused:
            call.plan(source, tmp_path / "no", family="mistral", **declared)
        assert "leave" in str(refused.value) and "model_type" in str(refused.value)
        with pytest.raises(CheckpointError, match="do not match the model"):
            call.plan(source, tmp_path / "no", family="gemma2", **declared)
        call.plan(source, tmp_path / "yes", family="llama", **declared)


def test_rewritten_adapters_stay_loadable_by_peft(tmp_path):
    """Every command writes the configuration next to one weights file that PEFT finds."""
    base, source = base_of("bin"), PEFT / "bin"
    built = ["adapter_config.json", "adapter_model.safetensors"]
    stored = tmp_path / "stored"
    succeed("convert", "to-orbax", source, stored)
    for name, (words, options) in {
        "converted": (("convert", "to-safetensors", source), ()),
        "of-file": (
            ("convert", "to-safetensors", source / "adapter_model.bin"),
            ("--max-shard-size", "100B"),
        ),
        "cast": (("cast", PEFT / "plain"), ("--dtype", "float64")),
        "selected": (("select", source), ("--keep", "*", "--to", "safetensors")),
        "back": (("convert", "to-safetensors", stored), ()),
        "experts": (("convert", "to-safetensors", PEFT / "experts"), ()),
    }.items():
        succeed(*words, tmp_path / name, *options)
        assert sorted(item.name for item in (tmp_path / name).iterdir()) == built, name
        succeed(*words, tmp_path / name, *options, "--overwrite")
        config = (tmp_path / name / built[0]).read_bytes()
        case = {"cast": "plain", "experts": "experts"}.get(name, "bin")
        assert config == (PEFT / case / built[0]).read_bytes()
        ckpttools.merge_adapter(base_of(case), tmp_path / f"{name}-merged", adapter=tmp_path / name)
    ckpttools.merge_adapter(base, tmp_path / "merged", adapter=source)
    expected = numbers(tmp_path / "merged")
    for name in ("converted", "of-file", "selected", "back"):
        assert_near(numbers(tmp_path / f"{name}-merged"), expected, ulps=0)


@pytest.mark.parametrize("before", ["base_model.model.", "base_model.model.model.layers.0."])
@pytest.mark.parametrize("wrapper", ["_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."])
def test_wrapped_module_names_are_accepted(tmp_path, wrapper, before):
    """`save_pretrained` writes such names for compiled or sharded models."""
    adapter = changed_config(tmp_path)
    file = adapter / "adapter_model.safetensors"
    plain = load_file(file)
    save_file({name.replace(before, before + wrapper): array for name, array in plain.items()}, file)
    ckpttools.merge_adapter(base_of("plain"), tmp_path / "merged", adapter=adapter)
    ckpttools.merge_adapter(base_of("plain"), tmp_path / "expected", adapter=PEFT / "plain")
    assert_near(numbers(tmp_path / "merged"), numbers(tmp_path / "expected"), ulps=0)
    assert ckpttools.inspect(adapter, against=base_of("plain")).comparison.is_same


def test_unknown_settings_are_reported(tmp_path):
    def remarks(case, **declared):
        adapter = changed_config(tmp_path, case, **declared)
        plan = ckpttools.merge_adapter.plan(base_of(case), tmp_path / "merged", adapter=adapter).plan
        return " ".join(plan.notes.remarks)

    assert "unknown settings" not in "".join(remarks(case) for case in CASES)
    told = remarks("plain", use_later_kind=True, other_kind=False)
    assert "adapter_config.json has unknown settings" in told and "use_later_kind" in told


def test_tied_head_factors_are_accepted(tmp_path):
    """With PEFT's `ensure_weight_tying`, the head's factors are the table's, transposed."""
    write_llama(tmp_path / "base", tie_word_embeddings=True, dtype="float32")
    random = np.random.default_rng(3)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    declared = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "ensure_weight_tying": True}
    declared["target_modules"] = ["embed_tokens"]
    (adapter / "adapter_config.json").write_text(json.dumps(declared))
    a, b = (random.normal(0, 1, shape).astype("f4") for shape in ((2, 256), (64, 2)))
    above, head = "base_model.model.model.embed_tokens", "base_model.model.lm_head"
    table = {f"{above}.lora_embedding_A": a, f"{above}.lora_embedding_B": b}
    tied = {f"{head}.lora_A.weight": b.T.copy(), f"{head}.lora_B.weight": a.T.copy()}
    for name, arrays in [("table", table), ("tied", {**table, **tied})]:
        save_file(arrays, adapter / "adapter_model.safetensors")
        ckpttools.merge_adapter(tmp_path / "base", tmp_path / name, adapter=adapter)
    assert_near(numbers(tmp_path / "tied"), numbers(tmp_path / "table"), ulps=0)
    assert ckpttools.inspect(adapter, against=tmp_path / "base").comparison.is_same
    save_file(
        {**table, **{name: array * 2 for name, array in tied.items()}}, adapter / "adapter_model.safetensors"
    )
    with pytest.raises(FormatError, match="output head, but in the base"):
        ckpttools.merge_adapter.plan(tmp_path / "base", tmp_path / "no", adapter=adapter)


@pytest.mark.parametrize("layout", ["restore", "training", "converter"])
def test_model_commands_refuse_maxtext_adapters(tmp_path, layout):
    lora = tmp_path / "lora"
    ckpttools.adapter_to_maxtext(PEFT / "plain", lora, base=base_of("plain"), layout=layout)
    for words in (("maxtext-config", lora), ("shrink", lora, tmp_path / "small", "--layers", "1")):
        told = ckpt(*words).stderr
        assert "this is a LoRA adapter, without the parameters of its model" in told
        assert f"ckpt adapter merge BASE {lora}/0/items MODEL` merges it" in told


def test_stack_commands_refuse_peft_adapters(tmp_path):
    for command in ("stack", "unstack"):
        told = run(command, PEFT / "plain", tmp_path / "no", code=3)
        assert "this is a LoRA adapter of tiny/llama, with PEFT's names" in told
        assert f"`ckpt adapter to-maxtext {PEFT / 'plain'} DST --base BASE` stacks its layers" in told
    other = changed_config(tmp_path, peft_type="IA3")
    told = run("stack", other, tmp_path / "no", code=3)
    assert "to-maxtext" not in told and "merge_and_unload" in told
