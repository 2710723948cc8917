"""Checks of one model directory, called directly, by doctor and by writing commands."""

import json
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from support.command_line import ckpt, doctor, hint_of
from support.locations import GOLDEN

import ckpttools
from ckpttools import DTYPES, CheckpointError, ConfigError, FormatError, Tree
from ckpttools import summary as api_summary
from ckpttools.checks import generation
from ckpttools.checks.base import LEVELS, ModelDirectory
from ckpttools.checks.registry import checks, findings
from ckpttools.core.text import format_ranges
from ckpttools.maxtext.config_differences import config_differences
from ckpttools.testing.strategies import stored

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "a" * 64 + "\nsize 17477929\n"
SIDECARS = ("tokenizer.json", "tokenizer.model", "generation_config.json", "vocab.json", "merges.txt")
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "hidden_act": "silu",
}


def arrays_of(layers=2, head=True):
    shapes = {"model.embed_tokens": (16, 8), "model.norm": (8,)} | ({"lm_head": (16, 8)} if head else {})
    for layer in range(layers):
        parts = {
            "self_attn.q_proj": (8, 8),
            "self_attn.k_proj": (4, 8),
            "self_attn.v_proj": (4, 8),
            "self_attn.o_proj": (8, 8),
            "mlp.gate_proj": (12, 8),
            "mlp.up_proj": (12, 8),
            "mlp.down_proj": (8, 12),
            "input_layernorm": (8,),
            "post_attention_layernorm": (8,),
        }
        shapes |= {f"model.layers.{layer}.{part}": shape for part, shape in parts.items()}
    random = np.random.default_rng(0)
    return {f"{key}.weight": random.standard_normal(shape, np.float32) for key, shape in shapes.items()}


def save_model(path, arrays=None, layers=2, **changes):
    """Write a randomly initialized Llama with changed configuration fields."""
    path.mkdir(parents=True)
    config = LLAMA | {"num_hidden_layers": layers} | changes
    (path / "config.json").write_text(json.dumps(config))
    save_file(arrays_of(layers) if arrays is None else arrays, path / "model.safetensors")
    return path


def reported(path, check):
    """Return the findings of one check of doctor: level and text."""
    return [(finding.level, finding.what) for finding in doctor(path).findings if finding.check == check]


def test_checks_have_names_and_summaries():
    assert [check.name for check in checks()] == sorted({check.name for check in checks()})
    assert all(check.summary and check.name == check.name.lower() for check in checks())


def test_sound_model_has_no_findings(tmp_path):
    assert [finding.what for finding in doctor(save_model(tmp_path / "m")).findings] == []


def test_checks_accept_files_in_memory():
    result = [*findings(ModelDirectory("m", {"tokenizer.json": POINTER.encode()}))]
    assert [(item.check, item.level, item.location) for item in result] == [
        ("sidecar-files", "error", "m/tokenizer.json")
    ]
    assert result[0].level in LEVELS


@pytest.mark.parametrize("name", SIDECARS)
def test_lfs_pointer_is_reported_and_never_written(tmp_path, name):
    model = save_model(tmp_path / "m")
    (model / name).write_text(POINTER)
    assert [level for level, _ in reported(model, "sidecar-files")] == ["error"]
    for write in (ckpttools.hf_to_maxtext, ckpttools.convert):
        with pytest.raises(FormatError, match=f"{name} is a Git LFS pointer"):
            write(model, tmp_path / "out")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", SIDECARS)
def test_copy_refuses_pointers_in_place_of_sidecars(tmp_path, name):
    model = save_model(tmp_path / "m")
    (model / name).write_text(POINTER)
    with pytest.raises(FormatError, match="Git LFS pointer") as refused:
        ckpttools.copy(model, tmp_path / "copy")
    assert refused.value.location == str(model / name) and "git lfs pull" in refused.value.hint
    assert not (tmp_path / "copy").exists()


def test_copy_refuses_pointers_in_a_training_step(tmp_path):
    ckpttools.hf_to_maxtext(save_model(tmp_path / "m"), tmp_path / "run")
    (config,) = (tmp_path / "run").rglob("config.json")
    (config.parent / "tokenizer.json").write_text(POINTER)
    with pytest.raises(FormatError, match="Git LFS pointer"):
        ckpttools.copy(tmp_path / "run", tmp_path / "copy")


@pytest.mark.parametrize(
    ("name", "text", "check"),
    [
        ("tokenizer.json", POINTER, "sidecar-files"),
        ("tokenizer.model", POINTER, "sidecar-files"),
        ("tokenizer.json", "{", "sidecar-json"),
        ("generation_config.json", "", "sidecar-json"),
        ("config.json", json.dumps(LLAMA | {"num_hidden_layers": 2, "layer_types": ["x"]}), "layer-lists"),
    ],
)
@pytest.mark.parametrize("level", ["", "0", "0/items"])
def test_doctor_checks_carried_files(tmp_path, name, text, check, level):
    ckpttools.hf_to_maxtext(save_model(tmp_path / "m"), tmp_path / "mt")
    (config,) = (tmp_path / "mt").rglob("config.json")
    assert doctor(tmp_path / "mt" / level).findings == ()
    (config.parent / name).write_text(text)
    assert [item for item, _ in reported(tmp_path / "mt" / level, check)] == ["error"]


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "onnx/model.onnx", "original/consolidated.00.pth", "figure.png", "x.gguf"]
)
def test_copy_reports_pointers_in_place_of_other_files(tmp_path, name):
    model = save_model(tmp_path / "m")
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_text(POINTER)
    (remark,) = ckpttools.copy(model, tmp_path / "copy").remarks
    assert f"1 file is a Git LFS pointer, not the data, and so is its copy: {name}" in remark
    assert f"git lfs pull` in {model}" in remark


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("tokenizer.json", "{", "tokenizer.json is not a JSON object"),
        ("tokenizer_config.json", "x", "tokenizer_config.json is not a JSON object"),
        ("generation_config.json", '{"eos', "generation_config.json is not a JSON object"),
        ("generation_config.json", '{"eos_token_id": 999999}', "eos_token_id 999999"),
        ("adapter_config.json", '{"peft_type": "LORA"}', "adapter files next to a complete model"),
    ],
)
def test_successful_commands_report_doctor_findings(tmp_path, name, text, what):
    model = save_model(tmp_path / "m")
    (model / name).write_text(text)
    assert any(what in item.what for item in doctor(model).findings if item.level == "error")
    for number, words in enumerate(
        [
            ("convert", "hf-to-maxtext"),
            ("convert", "to-orbax"),
            ("convert", "to-safetensors"),
            ("cast", "--dtype", "float32"),
            ("copy",),
        ]
    ):
        result = ckpt(*words, model, tmp_path / f"out{number}", "--no-progress", COLUMNS="1000")
        assert result.exit_code == 0 or "is not a JSON object" in what, result.output
        assert what in result.output, words
    (copied,) = (tmp_path / "out4").glob(name)
    assert copied.read_text() == text


ANNEX = "/annex/objects/SHA256E-s17--" + "a" * 64 + ".model\n"
PAGE = "<!DOCTYPE html><html><title>Sign in</title>" + " " * 5000


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.model.v3", "spiece.model", "qwen.tiktoken"])
@pytest.mark.parametrize(
    ("text", "what"),
    [("", "empty"), (PAGE, "a web page"), (ANNEX, "a git-annex pointer"), (POINTER, "a Git LFS pointer")],
)
def test_undownloaded_tokenizers_are_never_written(tmp_path, name, text, what):
    model = save_model(tmp_path / "m")
    (model / name).write_text(text)
    assert [level for level, result in reported(model, "sidecar-files") if what in result] == ["error"]
    for write in (ckpttools.hf_to_maxtext, ckpttools.convert):
        with pytest.raises(FormatError, match=f"{name} is {what}"):
            write(model, tmp_path / "out")


@pytest.mark.parametrize("start", ["\n", "\n<\n", "\n{\n", "IQ== 0\n", "\0\0\0\0\0\0\0\0", "PK"])
def test_other_tokenizers_are_copied_unchanged(tmp_path, start):
    model = save_model(tmp_path / "m")
    (model / "tokenizer.model").write_text(start)
    assert doctor(model).findings == ()
    ckpttools.convert(model, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.model").read_text() == start


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "adapter_config.json"])
def test_errors_about_json_name_a_pointer(tmp_path, name):
    model = with_adapter_files(save_model(tmp_path / "m"))
    if "index" in name:
        (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    (model / name).write_text(POINTER)
    with pytest.raises(CheckpointError, match="Git LFS pointer") as refused:
        if name == "adapter_config.json":
            ckpttools.merge_adapter(model, tmp_path / "out", adapter=model)
        else:
            ckpttools.convert(model, tmp_path / "out")
    assert "git lfs pull" in refused.value.hint
    assert "git lfs pull" in " ".join(finding.hint for finding in doctor(model).findings)


@pytest.mark.parametrize("text", ["", "version 1", "see https://git-lfs.github.com", "{}"])
def test_small_sidecar_is_not_a_pointer(tmp_path, text):
    model = save_model(tmp_path / "m")
    (model / "merges.txt").write_text(text)
    assert reported(model, "sidecar-files") == []


ADAPTER = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
WRITERS = {
    "convert": lambda source, path: ckpttools.convert(source, path),
    "cast": lambda source, path: ckpttools.convert(source, path, dtype="bfloat16"),
    "select": lambda source, path: ckpttools.convert(source, path, drop=["lm_head.weight"]),
    "average": lambda source, path: ckpttools.average(source, path, others=[source]),
    "shrink": lambda source, path: ckpttools.shrink(source, path, layers=1),
    "hf_to_maxtext": lambda source, path: ckpttools.hf_to_maxtext(source, path),
    "back": lambda source, path: back_again(source, path),
}


def back_again(source, path):
    ckpttools.hf_to_maxtext(source, path.with_name("between"))
    ckpttools.maxtext_to_hf(path.with_name("between"), path, like=source)


def with_adapter_files(model, weights=True):
    (model / "adapter_config.json").write_text(json.dumps(ADAPTER))
    if weights:
        factors = {"A": (2, 8), "B": (8, 2)}
        prefix = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
        arrays = {f"{prefix}{side}.weight": np.ones(shape, np.float32) for side, shape in factors.items()}
        save_file(arrays, model / "adapter_model.safetensors")
    return model


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("writer", WRITERS)
def test_adapter_files_next_to_a_model_are_left_out(tmp_path, writer, weights):
    model = with_adapter_files(save_model(tmp_path / "m"), weights)
    assert [level for level, _ in reported(model, "adapter-files")] == ["warning" if weights else "error"]
    WRITERS[writer](model, tmp_path / "out")
    written = {path.name for path in (tmp_path / "out").rglob("*")}
    assert "config.json" in written
    assert not any(name.startswith("adapter_") for name in written)


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("name", ["", "model.safetensors"])
def test_model_next_to_adapter_files_is_identified_as_a_model(tmp_path, weights, name):
    model = with_adapter_files(save_model(tmp_path / "m"), weights)
    result = api_summary(model / name)
    assert "of llama, safetensors" in result.what
    assert not any("ckpt adapter" in command for command in result.next)


@pytest.mark.parametrize("config", [True, False])
def test_adapter_is_identified_as_an_adapter(tmp_path, config):
    adapter = with_adapter_files(save_model(tmp_path / "m"))
    (adapter / "model.safetensors").unlink()
    if not config:
        (adapter / "config.json").unlink()
    result = api_summary(adapter)
    assert result.what == "a LoRA adapter"
    assert any("merge_adapter" in command for command in result.next)


@pytest.mark.parametrize(("field", "module"), [("attention_bias", "self_attn"), ("mlp_bias", "mlp")])
def test_declared_biases_that_are_missing_are_found(tmp_path, field, module):
    """transformers 5.23 creates them and warns; a model type that does not read the field has none."""
    found = doctor(save_model(tmp_path / "m", **{field: True})).findings
    assert [item.what for item in found] == [f"{field} is true, but no array below {module} is a bias"]
    assert not doctor(save_model(tmp_path / "other", model_type="mistral", **{field: True})).findings
    name = next(name for name in arrays_of() if module in name)
    biased = {**arrays_of(), name.replace("weight", "bias"): np.zeros(8, np.float32)}
    findings_of_biased = doctor(save_model(tmp_path / "b", biased, **{field: True})).findings
    assert not any(field in item.what for item in findings_of_biased)


@pytest.mark.parametrize("name", ["hardswish", "sqrtsoftplus", "silu"])
def test_activations_of_transformers_are_accepted(tmp_path, name):
    assert not doctor(save_model(tmp_path / "m", hidden_act=name)).findings


def test_left_out_adapter_files_are_noted(tmp_path):
    model = with_adapter_files(save_model(tmp_path / "m"))
    plan = ckpttools.convert.plan(model, tmp_path / "out").plan
    assert any("adapter_model.safetensors" in remark for remark in plan.notes.remarks)


def test_adapter_itself_keeps_its_configuration(tmp_path):
    model = with_adapter_files(save_model(tmp_path / "m"))
    (model / "model.safetensors").unlink()
    for config in (True, False):
        if not config:
            (model / "config.json").unlink()
        assert reported(model, "adapter-files") == []
        ckpttools.convert(model, tmp_path / f"out{config}")
        assert (tmp_path / f"out{config}" / "adapter_config.json").exists()


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({"layer_types": [FULL]}, 1),
        ({"layer_types": [FULL] * 2}, 0),
        ({"layer_types": [FULL] * 3}, 1),
        ({"layer_types": [FULL] * 3, "num_nextn_predict_layers": 1}, 0),
        ({"layer_types": []}, 0),
        ({"layer_types": None}, 0),
        ({"mlp_layer_types": ["dense"]}, 1),
        ({"no_rope_layers": [1]}, 1),
        ({"no_rope_layers": [1] * 5}, 0),
        ({"mlp_only_layers": [0, 1]}, 0),
        ({"mlp_only_layers": [2]}, 1),
        ({"text_config": {"num_hidden_layers": 3, "layer_types": [FULL] * 2}}, 1),
        ({"vision_config": {"num_hidden_layers": 3, "layer_types": [FULL] * 4}}, 1),
        ({"thinker_config": {"text_config": {"num_hidden_layers": 3, "layer_types": [FULL]}}}, 1),
    ],
)
def test_layer_lists_have_one_entry_per_layer(changes, count):
    config = json.dumps(LLAMA | {"num_hidden_layers": 2} | changes).encode()
    result = [*findings(ModelDirectory("m", {"config.json": config}))]
    assert [item.check for item in result] == ["layer-lists"] * count


@given(layers=st.sets(st.integers(0, 12), min_size=1), count=st.integers(1, 14))
def test_missing_layers_are_listed_as_ranges(layers, count):
    scale = stored(np.ones(8, np.float32), DTYPES["float32"])
    tree = Tree({(f"model.layers.{layer}.input_layernorm.weight",): scale for layer in layers})
    config = json.dumps(LLAMA | {"num_hidden_layers": count}).encode()
    model = ModelDirectory("m", {"config.json": config}, tree, is_output=True)
    missing = {*range(count)} - layers
    noun = "layer" if len(missing) == 1 else "layers"
    expected = f"there are no weights for {noun} {format_ranges(missing)} (the first layer is 0)"
    texts = [item.what for item in findings(model) if "no weights for" in item.what]
    assert [text.partition(", but ")[2] for text in texts] == [expected] * bool(missing)


def test_huge_layer_count_takes_little_memory(tmp_path):
    model = save_model(tmp_path / "m", num_hidden_layers=10**12)
    tracemalloc.start()
    try:
        text = " ".join(item.what for item in doctor(model).findings)
        assert tracemalloc.get_traced_memory()[1] < 100_000_000
    finally:
        tracemalloc.stop()
    assert "no weights for layers 2..999999999999 (the first layer is 0)" in text


@pytest.mark.parametrize("types", [[FULL] * 2, [FULL] * 5, [FULL, SLIDING, FULL, FULL]])
@pytest.mark.parametrize("writer", ["convert", "cast"])
def test_written_layer_types_match_the_layers(tmp_path, writer, types):
    model = save_model(tmp_path / "m", layers=3, layer_types=types)
    WRITERS[writer](model, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["layer_types"] == [*types, FULL][:3]


@pytest.mark.parametrize("types", [[FULL] * 2, [FULL] * 5, [FULL, SLIDING, FULL, FULL], [FULL, SLIDING]])
def test_conversion_refuses_mismatched_layer_types(tmp_path, types):
    model = save_model(tmp_path / "m", layers=3, layer_types=types)
    expected = f"layer_types has {len(types)} entries, and num_hidden_layers is 3"
    with pytest.raises(FormatError, match=expected):
        WRITERS["back"](model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unknown_layer_types_are_never_invented(tmp_path):
    model = save_model(tmp_path / "m", layers=3, layer_types=[FULL, SLIDING])
    with pytest.raises(FormatError, match="layer_types has 2 entries, and num_hidden_layers is 3"):
        WRITERS["convert"](model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def with_names(arrays, rename):
    return {rename(name): array for name, array in arrays.items()}


def body(prefix):
    """Replace the prefix `model.` of all names except those of the head."""
    return lambda name: prefix + name.removeprefix("model.") if name.startswith("model.") else name


NAMES = {
    "flat": body(""),
    "transformer": body("transformer."),
    "backbone": body("backbone."),
    "language_model.model": body("language_model.model."),
    "sentence transformers": body("0.auto_model."),
    "module": "module.{}".format,
    "_orig_mod": "_orig_mod.{}".format,
    "model.model": "model.{}".format,
    "language_model": "language_model.{}".format,
    "module.language_model": "module.language_model.{}".format,
    "policy": "policy.{}".format,
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("names", NAMES)
def test_prefixed_names_are_recognized(tmp_path, names, tied):
    plain = arrays_of(head=not tied)
    source = save_model(tmp_path / "m", with_names(plain, NAMES[names]), tie_word_embeddings=tied)
    ckpttools.hf_to_maxtext(source, tmp_path / "mt")
    ckpttools.maxtext_to_hf(tmp_path / "mt", tmp_path / "back")
    result = load_file(tmp_path / "back" / "model.safetensors")
    assert result.keys() == plain.keys()
    assert all(np.array_equal(result[name], plain[name]) for name in plain)


@pytest.mark.parametrize("layers", [2])
@pytest.mark.parametrize(
    "change",
    [
        lambda arrays: arrays | {f"ref.{name}": item for name, item in arrays.items()},
        lambda arrays: {f"a.{n}": a for n, a in arrays.items()} | {f"b.{n}": a for n, a in arrays.items()},
        lambda arrays: with_names(arrays, lambda name: name.replace("q_proj", "query")),
        lambda arrays: {"layers.0.mlp.up_proj.weight": arrays["model.layers.0.mlp.up_proj.weight"]} | arrays,
    ],
)
def test_ambiguous_names_are_refused_without_advice_to_drop_the_model(tmp_path, change, layers):
    source = save_model(tmp_path / "m", change(arrays_of(layers)))
    with pytest.raises(CheckpointError) as refused:
        ckpttools.hf_to_maxtext(source, tmp_path / "mt")
    assert not (tmp_path / "mt").exists()
    assert reported(source, "coverage")
    if "query" in str(refused.value):
        assert "drop" not in (refused.value.hint or "")


def test_hint_does_not_drop_a_model_with_unknown_names(tmp_path):
    source = save_model(tmp_path / "m", with_names(arrays_of(), lambda name: name.replace(".", "_")))
    with pytest.raises(CheckpointError) as refused:
        ckpttools.hf_to_maxtext(source, tmp_path / "mt")
    assert "drop" not in (refused.value.hint or "")


UNMATCHED = {
    "cos": lambda arrays: arrays.update({"cos": np.ones(2, np.float32)}),
    "rotary_emb.freqs": lambda arrays: arrays.update({"rotary_emb.freqs": np.ones(2, np.float32)}),
    "layers.0.extra": lambda arrays: arrays.update({"model.layers.0.extra": np.ones(2, np.float32)}),
    "layers.2.": lambda arrays: arrays.update({"model.layers.2.mlp.up_proj.weight": np.ones((12, 8), "f4")}),
    "model.norm.weight": lambda arrays: arrays.pop("model.norm.weight"),
    "up_proj.weight": lambda arrays: arrays.pop("model.layers.1.mlp.up_proj.weight"),
    "q_proj.weight": lambda arrays: arrays.update(
        {"model.layers.0.self_attn.q_proj.weight": np.ones((8, 4), "f4")}
    ),
    "lm_head.weight": lambda arrays: arrays.pop("lm_head.weight"),
}


def remarks_of(source, path, **options):
    return ckpttools.convert.plan(source, path, **options).plan.notes.remarks


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"names": "hub"}])
@pytest.mark.parametrize("name", UNMATCHED)
def test_writers_report_arrays_that_do_not_match_the_configuration(tmp_path, name, options):
    arrays = arrays_of()
    UNMATCHED[name](arrays)
    source = save_model(tmp_path / "m", arrays)
    (remark,) = (item for item in remarks_of(source, tmp_path / "out", **options) if "do not match" in item)
    assert "do not match config.json" in remark and name in remark


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layers": 3},
        {"architectures": ["LlamaModel"]},
        {"model_type": "unknown"},
        {"auto_map": {"AutoModel": "x.Y"}},
        {"tie_word_embeddings": True},
    ],
)
def test_writers_report_nothing_for_matching_models(tmp_path, changes):
    arrays = arrays_of(changes.get("layers", 2))
    if "auto_map" in changes or "model_type" in changes:
        arrays |= {"score.weight": np.ones((3, 8), np.float32)}
    source = save_model(tmp_path / "m", arrays, **changes)
    assert not any("do not match" in item for item in remarks_of(source, tmp_path / "out"))


def test_writers_do_not_report_arrays_the_user_drops(tmp_path):
    source = save_model(tmp_path / "m")
    for options in ({"drop": ["lm_head.weight"]}, {"keep": ["model.layers.*"]}):
        assert not any("do not match" in item for item in remarks_of(source, tmp_path / "out", **options))


HEADS = {
    "LlamaModel": {},
    "LlamaForSequenceClassification": {"score.weight": (3, 8)},
    "LlamaForTokenClassification": {"score.weight": (3, 8), "score.bias": (3,)},
    "LlamaForQuestionAnswering": {"qa_outputs.weight": (2, 8), "qa_outputs.bias": (2,)},
    "LlamaForRewardModel": {"v_head.weight": (1, 8)},
}


@pytest.mark.parametrize(
    ("architecture", "prefix"), [("LlamaModel", ""), *((name, "model.") for name in HEADS)]
)
def test_backbones_are_identified(tmp_path, architecture, prefix):
    head = {name: np.ones(shape, np.float32) for name, shape in HEADS[architecture].items()}
    arrays = with_names(arrays_of(head=False), body(prefix)) | head
    source = save_model(tmp_path / "m", arrays, architectures=[architecture], tie_word_embeddings=False)
    ((level, what),) = reported(source, "coverage")
    assert level == "info" and f"{architecture}, without lm_head.weight" in what
    with pytest.raises(CheckpointError) as refused:
        ckpttools.hf_to_maxtext(source, tmp_path / "mt")
    assert ("this is a backbone" in refused.value.hint) == (not head)
    assert all(name in refused.value.hint for name in head)
    ckpttools.hf_to_maxtext(source, tmp_path / "mt", tied="drop", drop=list(head))
    ckpttools.maxtext_to_hf(tmp_path / "mt", tmp_path / "back")
    result = load_file(tmp_path / "back" / "model.safetensors")
    assert all(np.array_equal(result[name], values) for name, values in arrays_of(head=False).items())


@pytest.mark.parametrize("prefix", ["", "model."])
def test_language_models_without_a_head_are_damaged(tmp_path, prefix):
    arrays = with_names(arrays_of(head=False), body(prefix))
    source = save_model(tmp_path / "m", arrays, tie_word_embeddings=False)
    assert [level for level, _ in reported(source, "coverage")] == ["error"]
    with pytest.raises(CheckpointError) as refused:
        ckpttools.hf_to_maxtext(source, tmp_path / "mt")
    assert ("this is a backbone" in refused.value.hint) == (not prefix)


@pytest.mark.parametrize("lost", ["norm.weight", "layers.1.mlp.up_proj.weight"])
def test_backbones_missing_an_array_are_damaged(tmp_path, lost):
    arrays = with_names(arrays_of(head=False), body(""))
    del arrays[lost]
    source = save_model(tmp_path / "m", arrays, architectures=["LlamaModel"], tie_word_embeddings=False)
    with pytest.raises(CheckpointError) as refused:
        ckpttools.hf_to_maxtext(source, tmp_path / "mt")
    assert "this is a backbone" not in (refused.value.hint or "")
    assert not doctor(source).healthy


BUFFERS = {
    "freqs_cis": np.ones((8, 2), np.complex64),
    "model.freqs_cos": np.ones((8, 2), np.float32),
    "model.rotary_emb.inv_freq": np.ones(2, np.float32),
    "model.rotary_emb.original_inv_freq": np.ones(2, np.float32),
    "model.layers.0.self_attn.rotary_emb.cos_cached": np.ones((1, 1, 8, 4), np.float32),
    "model.layers.0.self_attn.rotary_emb.sin_cached": np.ones((1, 1, 8, 4), np.float32),
    "model.layers.0.self_attn.bias": np.ones((1, 1, 8, 8), np.bool_),
    "model.layers.0.self_attn.masked_bias": np.array(-1e4, np.float32),
    "model.position_ids": np.arange(8)[None],
    "rope.freqs": np.ones(2, np.float32),
    "model.causal_mask": np.tril(np.ones((8, 8), np.bool_)),
    "model.layers.0.self_attn.pos_embeddings.cache": np.ones((8, 2, 2), np.float32),
}
# Names that a module could give to values that it learns.
LEARNED = {
    "model.layers.0.self_attn.q_proj.bias": np.ones(8, np.float32),
    "model.layers.0.self_attn.bias": np.ones((8, 8), np.float32),
    "model.position_ids": np.ones((1, 8), np.float32),
    "model.mask": np.ones((4, 8), np.float32),
    "model.cache": np.ones(8, np.float32),
    "model.rotary_emb.freqs": np.ones(2, np.float32),
    "model.layers.0.mlp.up_proj.mask": np.ones((8, 8), np.bool_),
    "model.layers.0.mlp.up_proj.bias": np.ones((1, 1, 8, 8), np.float32),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_buffers_are_reported_and_left_out(tmp_path, name):
    plain = arrays_of()
    source = save_model(tmp_path / "m", plain | {name: BUFFERS[name]})
    assert [level for level, _ in reported(source, "buffers")] == ["info"]
    assert reported(source, "coverage") == []
    ckpttools.hf_to_maxtext(source, tmp_path / "mt")
    ckpttools.maxtext_to_hf(tmp_path / "mt", tmp_path / "back")
    ckpttools.convert(source, tmp_path / "hub", names="hub")
    for written in ("back", "hub"):
        assert {path[0] for path in ckpttools.open(tmp_path / written).arrays} == {*plain}


META = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "tok_embeddings",
    "lm_head": "output",
    "model.norm": "norm",
    "model.layers": "layers",
}
# As torchtitan, torchtune and Meta's own code save them.
META_BUFFERS = {
    "freqs_cis": np.ones((8, 2), np.complex64),
    "model.freqs_cis": np.ones((8, 2), np.complex64),
    "freqs_cis in pairs": np.ones((8, 2, 2), np.float32),
    "rope.freqs": np.ones(2, np.float32),
    "rope.cache": np.ones((8, 4), np.float32),
    "rope_cache": np.ones((8, 4), np.float32),
    "layers.0.attention.inner_attention.rope.freqs": np.ones(2, np.float32),
    "layers.0.attention.rotary_emb.cos_cached": np.ones((8, 4), np.float32),
    "layers.1.attention.rotary_emb.inv_freq": np.ones(2, np.float32),
    "layers.0.attention.mask": np.tril(np.ones((1, 1, 8, 8), np.float32)),
}


def with_meta_names(name):
    for old in sorted(META, key=len, reverse=True):
        name = name.replace(old, META[old])
    return name


@pytest.mark.parametrize("name", META_BUFFERS)
def test_buffers_of_other_trainers_are_left_out(tmp_path, name):
    plain = arrays_of()
    buffer = {name.partition(" ")[0]: META_BUFFERS[name]}
    source = save_model(tmp_path / "m", with_names(plain, with_meta_names) | buffer)
    assert [level for level, _ in reported(source, "buffers")] == ["info"]
    ckpttools.convert(source, tmp_path / "hub", names="hub")
    ckpttools.hf_to_maxtext(source, tmp_path / "mt")
    ckpttools.maxtext_to_hf(tmp_path / "mt", tmp_path / "back")
    for written in ("hub", "back"):
        result = load_file(tmp_path / written / "model.safetensors")
        assert result.keys() == plain.keys()
        assert np.array_equal(result["lm_head.weight"], plain["lm_head.weight"])


@pytest.mark.parametrize("name", LEARNED)
def test_learned_values_are_never_treated_as_buffers(tmp_path, name):
    source = save_model(tmp_path / "m", arrays_of() | {name: LEARNED[name]})
    assert reported(source, "buffers") == []
    assert [level for level, _ in reported(source, "coverage")] == ["error"]
    with pytest.raises(CheckpointError):
        ckpttools.hf_to_maxtext(source, tmp_path / "mt")


@pytest.mark.parametrize(
    "damage",
    [
        lambda arrays: arrays.pop("model.norm.weight"),
        lambda arrays: arrays.pop("model.layers.1.mlp.up_proj.weight"),
        lambda arrays: arrays.update({"model.norm.weight": np.ones(9, np.float32)}),
        lambda arrays: arrays.update({"model.layers.0.mlp.up_proj.weight": np.ones((8, 12), np.float32)}),
        lambda arrays: arrays.update({"model.layers.0.extra.weight": np.ones(8, np.float32)}),
        lambda arrays: arrays.update({"model.layers.2.input_layernorm.weight": np.ones(8, np.float32)}),
        lambda arrays: arrays.pop("lm_head.weight"),
        lambda arrays: arrays.update({"n": arrays.pop("model.norm.weight")}),
    ],
)
def test_doctor_reports_inputs_that_a_conversion_refuses(tmp_path, damage):
    arrays = arrays_of()
    damage(arrays)
    source = save_model(tmp_path / "m", arrays)
    with pytest.raises(CheckpointError):
        ckpttools.hf_to_maxtext(source, tmp_path / "mt")
    assert [level for level, _ in reported(source, "coverage")] == ["error"]


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
DIFFERENT = {
    "rope_theta": {"rope_theta": 5e5},
    "rope_scaling": {"rope_scaling": YARN},
    "rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "norm epsilon": {"rms_norm_eps": 1e-6},
    "activation": {"hidden_act": "gelu"},
    "heads": {"num_attention_heads": 4, "head_dim": 2},
    "windows": {"sliding_window": 8},
    "layer types": {"layer_types": [FULL, "sliding_attention"]},
    "type": {"model_type": "mistral", "architectures": ["MistralForCausalLM"]},
    "attention scale": {"query_pre_attn_scalar": 16},
    "softcap": {"final_logit_softcapping": 30.0},
    "known and unknown": {"rms_norm_eps": 1e-6, "new_multiplier": 2.0},
}
UNKNOWN = {"new_multiplier": 2.0, "use_new_norm": True, "new_mode": "fast"}
SAME = {
    "names and versions": {"_name_or_path": "org/x", "transformers_version": "5.0.0"},
    "dtype": {"torch_dtype": "bfloat16", "dtype": "bfloat16"},
    "tokens": {"eos_token_id": [1, 2], "bos_token_id": 0, "pad_token_id": 3},
    "training": {"attention_dropout": 0.1, "initializer_range": 0.1, "use_cache": False},
    "default stated": {
        "attention_bias": False,
        "mlp_bias": False,
        "head_dim": 4,
        "pretraining_tp": 1,
        "tie_word_embeddings": False,
    },
    "layer types stated": {"layer_types": [FULL, FULL]},
    "head_dim not stated": {"head_dim": None},
    "null": {"rope_scaling": None, "sliding_window": None},
    "rope of transformers 5": {
        "rope_theta": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "window that is off": {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1},
    "positions": {"max_position_embeddings": 99},
    "activation by another name": {"hidden_act": "swish"},
    "rope_theta not stated": {"rope_theta": None},
    "base of transformers 5 not stated": {"rope_theta": None, "rope_parameters": {"rope_type": "default"}},
}


def assert_refused_unless_forced(models, path, reason="compute different functions"):
    with pytest.raises(ConfigError, match=reason):
        ckpttools.average(models[0], path, others=models[1:])
    assert not path.exists()
    ckpttools.average(models[0], path, others=models[1:], force=True)
    assert path.exists()


@pytest.mark.parametrize("difference", DIFFERENT)
def test_average_refuses_configs_that_compute_differently(tmp_path, difference):
    models = [save_model(tmp_path / "a"), save_model(tmp_path / "b", **DIFFERENT[difference])]
    assert_refused_unless_forced(models, tmp_path / "mean")


@pytest.mark.parametrize("field", UNKNOWN)
def test_average_reports_unknown_fields_as_uncertain(tmp_path, field):
    models = [save_model(tmp_path / "a"), save_model(tmp_path / "b", **{field: UNKNOWN[field]})]
    reason = rf"unknown fields, which may change(.|\n)*{field}: not stated and .* \(unknown field\)"
    assert_refused_unless_forced(models, tmp_path / "mean", reason)


@pytest.mark.parametrize("missing", [["hidden_act"], ["rope_theta"], ["hidden_act", "rope_theta"]])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "deepseek_v3", "qwen3_moe"])
def test_absent_config_fields_have_transformers_defaults(kind, missing):
    stated = {**LLAMA, "model_type": kind}
    silent = {name: value for name, value in stated.items() if name not in missing}
    assert config_differences(silent, stated) == []
    other = {**stated, "hidden_act": "gelu", "rope_theta": 3e4}
    assert {difference.name.rpartition(".")[2] for difference in config_differences(silent, other)} == {
        "hidden_act",
        "rope_theta",
    }


# Defaults of transformers 5.23 -> the types with them, in none of which the neutral value is the default.
NOT_NEUTRAL = {
    ("norm_topk_prob", False, True): ["qwen3_next", "deepseek_v3", "deepseek_v32", "deepseek_v4", "kimi_k25"],
    ("rope_interleave", False, True): ["deepseek_v3", "kimi_k25"],
    ("routed_scaling_factor", 1.0, 1.5): ["deepseek_v4"],
    ("hc_eps", 0.0, 1e-6): ["deepseek_v4"],
    ("attn_temperature_tuning", False, True): ["llama4_text", "llama4"],
    ("use_qk_norm", False, True): ["llama4_text"],
    ("attn_scale", 1.0, 0.1): ["llama4_text"],
    ("attention_bias", False, True): ["gpt_oss"],
    ("attention_bias", True, False): ["llama", "qwen3", "gemma4_text"],
    ("swiglu_alpha", 1.0, 1.702): ["gpt_oss"],
    ("swiglu_limit", 1.0, 7.0): ["gpt_oss"],
}


@pytest.mark.parametrize("part", ["", "text_config"])
@pytest.mark.parametrize(
    ("kind", "field", "value", "default"),
    [
        *((kind, *case) for case, kinds in NOT_NEUTRAL.items() for kind in kinds),
        *((kind, "layer_types", [FULL, "sliding_attention"], [FULL, FULL]) for kind in ("llama", "qwen2")),
    ],
)
def test_absent_config_fields_equal_only_their_default(kind, field, value, default, part):
    silent, stated, other = ({"model_type": kind, **item} for item in ({}, {field: default}, {field: value}))
    if part:
        silent, stated, other = ({"model_type": "x", part: item} for item in (silent, stated, other))
    assert config_differences(silent, stated) == []
    for one in (silent, stated):
        (result,) = config_differences(one, other)
        assert result.name.rpartition(".")[2] == field
        assert result.is_known


@pytest.mark.parametrize("value", [0, 0.0, 1.0, False, "", [], True, 2])
@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("llama", "new_field"),
        ("deepseek_v4", "num_hash_layers"),
        ("new_type", "norm_topk_prob"),
        ("qwen3_next", "layer_types"),
    ],
)
def test_absent_config_fields_without_a_known_default_differ(kind, field, value):
    (result,) = config_differences({"model_type": kind}, {"model_type": kind, field: value})
    assert "not stated" in str(result)
    assert "no known default" in str(result) or "unknown field" in str(result)


@pytest.mark.parametrize("kind", ["qwen3_next", "gpt_oss", "gemma3_text", "olmo3", "new_type"])
def test_hybrid_models_do_not_default_to_full_attention(kind):
    assert config_differences({"model_type": kind}, {"model_type": kind, "layer_types": [FULL, FULL]})


@pytest.mark.parametrize("kind", ["deepseek_v4", "gemma3_text", "olmo3", "llama"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_top_level_rope_theta_counts_only_if_used(kind, is_nested):
    """Some classes ignore the base in `rope_parameters`, unless it is given for each part."""
    names = ("main", "compress") if kind == "deepseek_v4" else (FULL, "sliding_attention")
    rope = {"rope_type": "default", "rope_theta": 1e4}
    one = {"model_type": kind, "rope_parameters": dict.fromkeys(names, rope) if is_nested else rope}
    at_top = not is_nested and kind != "llama"
    result = config_differences({**one, "rope_theta": 5e4}, {**one, "rope_theta": 7.0})
    assert bool(result) == at_top


@pytest.mark.parametrize(
    ("kind", "older", "newer"),
    [
        (
            "gemma3_text",
            {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
            {FULL: {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}},
        ),
        (
            "gemma3_text",
            {"rope_scaling": {"type": "linear", "factor": 8}},
            {
                FULL: {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
                "sliding_attention": {"rope_theta": 1e4},
            },
        ),
        (
            "olmo3",
            {"rope_scaling": YARN},
            {FULL: {**YARN, "rope_theta": 5e5}, "sliding_attention": {"rope_theta": 5e5}},
        ),
    ],
)
def test_older_and_newer_rotary_configs_compare_equal(kind, older, newer):
    one, other = {"model_type": kind, **older}, {"model_type": kind, "rope_parameters": newer}
    assert config_differences(one, other) == []
    for layers in newer:
        changed = {**newer, layers: {**newer[layers], "rope_theta": 7e5}}
        (result,) = config_differences(one, {**other, "rope_parameters": changed})
        assert result.name.endswith("rope_theta") and result.is_known


@pytest.mark.parametrize("difference", ["rope_theta", "norm epsilon"])
def test_average_reads_configs_carried_by_maxtext_checkpoints(tmp_path, difference):
    models = [save_model(tmp_path / "a"), save_model(tmp_path / "b", **DIFFERENT[difference])]
    built = [tmp_path / f"{model.name}-maxtext" for model in models]
    for model, path in zip(models, built, strict=True):
        ckpttools.hf_to_maxtext(model, path)
    assert_refused_unless_forced(built, tmp_path / "mean")


@pytest.mark.parametrize("difference", SAME)
def test_average_accepts_irrelevant_config_differences(tmp_path, difference):
    models = [save_model(tmp_path / "a"), save_model(tmp_path / "b", **SAME[difference])]
    ckpttools.average(models[0], tmp_path / "mean", others=models[1:])
    ckpttools.average(models[1], tmp_path / "other", others=models[:1])


def run_in(directory, command):
    done = subprocess.run(
        ["bash", "-ec", command], cwd=directory, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("rows", "head_rows", "vocab", "is_reported"),
    [(16, 16, 16, False), (16, 16, 12, True), (16, 16, 20, True), (16, 12, 16, True), (20, 20, 16, True)],
)
def test_doctor_reports_rows_beyond_vocabulary(tmp_path, rows, head_rows, vocab, is_reported):
    tables = {"model.embed_tokens.weight": rows, "lm_head.weight": head_rows}
    arrays = arrays_of() | {name: np.ones((count, 8), np.float32) for name, count in tables.items()}
    source = save_model(tmp_path / "m", arrays, vocab_size=vocab)
    assert [level for level, _ in reported(source, "vocabulary-rows")] == ["error"] * is_reported


def test_hint_commands_keep_or_trim_extra_rows(tmp_path):
    source = save_model(tmp_path / "m", vocab_size=12)
    (result,) = (finding for finding in doctor(source).findings if finding.check == "vocabulary-rows")
    run_in(tmp_path, result.command)
    assert doctor(source).healthy
    assert "--vocab 12" in result.hint
    ckpttools.shrink(source, tmp_path / "trimmed", vocab=12)
    assert doctor(tmp_path / "trimmed").healthy
    kept, whole = (load_file(path / "model.safetensors") for path in (tmp_path / "trimmed", source))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert np.array_equal(kept[name], whole[name][:12])


def test_empty_arrays_are_refused_with_a_drop_command(tmp_path):
    source = tmp_path / "z" / "model.safetensors"
    source.parent.mkdir()
    save_file({"a": np.zeros((0, 4), np.float32), "b": np.ones(4, np.float32)}, source)
    with pytest.raises(FormatError) as refused:
        ckpttools.convert(source.parent, tmp_path / "out", format="orbax")
    command = hint_of(refused.value).split(": ")[1].partition("; ")[0].replace("DST", str(tmp_path / "kept"))
    assert command.startswith("ckpt select ")
    run_in(tmp_path, f"{sys.executable} -m ckpttools {command.removeprefix('ckpt ')}")
    assert list(ckpttools.open(tmp_path / "kept").arrays) == [("b",)]


@pytest.mark.parametrize("code", ["U128", "I4", "BF8", "F128", "C128", "E4M3", "NF4", "Q4_0", "", "F8"])
def test_unknown_dtype_codes_get_no_hint_of_another_width(tmp_path, code):
    header = json.dumps({"w": {"dtype": code, "shape": [8], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(FormatError, match="unknown dtype") as refused:
        ckpttools.open(tmp_path)
    assert "did you mean" not in refused.value.hint and "pip install" in refused.value.hint


@pytest.mark.parametrize("names", NAMES)
def test_all_commands_recognize_the_same_names(tmp_path, names):
    plain = arrays_of()
    reference = save_model(tmp_path / "reference", plain)
    source = save_model(tmp_path / "m", with_names(plain, NAMES[names]))
    ckpttools.convert(source, tmp_path / "hub", names="hub")
    assert load_file(tmp_path / "hub" / "model.safetensors").keys() == plain.keys()
    ckpttools.hf_to_maxtext(source, tmp_path / "mt")
    assert ckpttools.diff(source, reference).equal
    assert ckpttools.diff(tmp_path / "mt", source).equal
    assert ckpttools.verify(tmp_path / "mt", against=source).equal
    changed = plain | {"model.norm.weight": plain["model.norm.weight"] + 1}
    other = save_model(tmp_path / "other", with_names(changed, NAMES[names]))
    assert not ckpttools.diff(other, reference).equal
    assert not ckpttools.verify(tmp_path / "mt", against=other).equal


OUTPUT_CHECKS = {
    "config-values",
    "dtype",
    "generation",
    "layer-lists",
    "layers",
    "quantization",
    "vocabulary-rows",
}


def write_back(source, path, **options):
    ckpttools.hf_to_maxtext(source, path / "maxtext", **options)
    return ckpttools.maxtext_to_hf(path / "maxtext", path / "out", like=source)


OUTPUTS = {
    "maxtext": lambda source, path, dtype: write_back(source, path, dtype=dtype),
    "unscanned": lambda source, path, dtype: write_back(source, path, dtype=dtype, scan=False),
    "safetensors": lambda source, path, dtype: ckpttools.convert(source, path / "out", dtype=dtype),
    "hub": lambda source, path, dtype: ckpttools.convert(source, path / "out", dtype=dtype, names="hub"),
    "cast": lambda source, path, dtype: ckpttools.cast(source, path / "out", dtype=dtype or "float16"),
    "shrink": lambda source, path, dtype: ckpttools.shrink(source, path / "out", vocab=64, dtype=dtype),
}


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    family=st.sampled_from(sorted(path.name for path in GOLDEN.iterdir() if (path / "hf").is_dir())),
    writer=st.sampled_from(sorted(OUTPUTS)),
    dtype=st.sampled_from([None, "float32", "bfloat16", "float16"]),
)
def test_outputs_agree_with_their_configuration(tmp_path, family, writer, dtype):
    path = tmp_path / f"{family}-{writer}-{dtype}"
    if path.exists():
        return
    source = GOLDEN / family / "hf"
    before = {finding.check for finding in doctor(source).findings}
    OUTPUTS[writer](source, path, dtype)
    result = {finding.check: finding.what for finding in doctor(path / "out").findings}
    assert not {check: what for check, what in result.items() if check in OUTPUT_CHECKS}, (before, result)


CHANGES_OF_SIDECARS = {
    "eos": ("generation_config.json", {"eos_token_id": 16}, "eos_token_id 16"),
    "one of several": ("generation_config.json", {"eos_token_id": [1, 99]}, "eos_token_id 99"),
    "bos": ("generation_config.json", {"bos_token_id": 17}, "bos_token_id 17"),
    "pad": ("generation_config.json", {"pad_token_id": 4000}, "pad_token_id 4000"),
}


@pytest.mark.parametrize("change", CHANGES_OF_SIDECARS)
def test_writers_and_doctor_report_token_ids_beyond_the_vocabulary(tmp_path, change):
    name, settings_of_file, expected = CHANGES_OF_SIDECARS[change]
    source = save_model(tmp_path / "m")
    (source / name).write_text(json.dumps(settings_of_file))
    assert [level for level, what in reported(source, "generation") if expected in what] == ["error"]
    assert sum(expected in item for item in remarks_of(source, tmp_path / "out")) == 1


def test_writers_report_layers_that_the_output_lacks(tmp_path):
    arrays = {name: item for name, item in arrays_of().items() if "layers.1." not in name}
    source = save_model(tmp_path / "m", arrays)
    assert reported(source, "layers")[0][0] == "error"
    assert sum("no weights for layer 1" in item for item in remarks_of(source, tmp_path / "out")) == 1


def test_writers_do_not_parse_the_tokenizer(tmp_path, monkeypatch):
    source = save_model(tmp_path / "m")
    (source / "generation_config.json").write_text('{"eos_token_id": 3}')
    (source / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 400}}}))
    assert reported(source, "vocabulary") and reported(source, "generation")
    parsed = []
    monkeypatch.setattr(generation, "listed_tokens", lambda document: parsed.append(document) or ())
    ckpttools.convert(source, tmp_path / "out")
    assert parsed == []
