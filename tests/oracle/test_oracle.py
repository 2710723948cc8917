"""The oracle that asks MaxText and transformers themselves: one model of it; all by `make oracle`."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
from support.locations import FIXTURES, GOLDEN

import ckpttools
from ckpttools.maxtext.config import models
from oracle import cases, environments, images, results, run, settings, steps
from oracle.results import FAILED, PASSED, Finding, Row
from oracle.run import found
from oracle.worker import StepError, Worker

CASE = "llama3.1"
# What transformers made of these tokens once: MaxText alone is needed beside.
RECORDED = FIXTURES / "oracle" / CASE / "logits.npy"
# Two steps, of which the last is kept.
TRAINED = {**settings.TRAINED, "steps": 2, "checkpoint_period": 1}
MAXTEXT, TORCH = (environments.present(name) for name in (environments.MAXTEXT, environments.TORCH))


def recorded(function, *, directory, tokens, target):
    """Stands for transformers."""
    assert function == "logits" and len(tokens) == len(np.load(RECORDED))
    shutil.copy(RECORDED, target)
    return {}


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    if MAXTEXT is None:
        pytest.skip(f"no environment with MaxText: {environments.MAXTEXT}")
    directory = tmp_path_factory.mktemp("oracle")
    (directory / "work").mkdir()
    model = shutil.copytree(GOLDEN / CASE / "hf", directory / CASE / "hf")
    with Worker(MAXTEXT, "in_maxtext", directory) as maxtext:
        yield steps.Bench(CASE, True, model, directory / "work", recorded, maxtext)


def test_maxtext_logits_match_transformers(bench):
    """And a run of its own training, unstacked and stacked again, goes on to the same bits."""
    findings = found(bench, ["convert", "load", "logits", "train", "resume"])
    assert {name: item.state for name, item in findings.items()} == dict.fromkeys(findings, PASSED)
    assert float(findings["logits"].said) < cases.LIMIT


def test_maxtext_training_converts_from_hub_names(bench):
    """Stripped, unstacked, in Hugging Face's names and converted again, MaxText loads the same weights."""
    item = bench.converted / "0" / "items"
    bench.maxtext("training", settings=bench.settings(directory="more", load_parameters_path=item, **TRAINED))
    trained = bench.directory / "more" / "run" / "checkpoints"
    stripped, single, back, again = (
        bench.directory / name for name in ("stripped", "single", "back", "again")
    )
    steps.ckpt("strip-optimizer", trained, stripped)
    steps.ckpt("unstack", stripped, single)
    steps.ckpt("convert", "maxtext-to-hf", single, back, "--like", bench.model)
    steps.ckpt("convert", "hf-to-maxtext", back, again)
    weights = [
        bench.maxtext("loads", settings=bench.settings(load_parameters_path=entry / "0" / "items"))
        for entry in (stripped, again, bench.converted)
    ]
    assert all("digest" in way for weight in weights for way in weight.values())
    assert weights[0] == weights[1] != weights[2]


@pytest.mark.skipif(TORCH is None, reason=f"no environment with transformers: {environments.TORCH}")
def test_recorded_logits_match_transformers(tmp_path):
    with Worker(TORCH, "in_torch", tmp_path) as torch:
        built = tmp_path / "made.npy"
        assert not torch("logits", directory=GOLDEN / CASE / "hf", tokens=steps.tokens(CASE), target=built)
    np.testing.assert_allclose(np.load(RECORDED), np.load(built), atol=1e-5)


def test_reordered_weights_are_detected(bench, tmp_path):
    """Shapes are the same with rotary pairs in the other order: only numbers tell."""
    wrong = tmp_path / "wrong"
    steps.ckpt("convert", "hf-to-maxtext", bench.model, wrong, "--rope-layout", "halves")
    steps.loaded(bench, wrong, scanned=True)
    with pytest.raises(StepError, match="apart"):
        steps.compared(bench, bench.model, wrong)


def test_divergence_is_the_maximum_over_positions():
    one = np.log([[0.5, 0.5], [0.75, 0.25]])
    other = np.log([[0.5, 0.5], [0.5, 0.5]])
    assert steps.kl(one, one + 3) == pytest.approx(0, abs=1e-12)
    expected = 0.75 * np.log(0.75 / 0.5) + 0.25 * np.log(0.25 / 0.5)
    assert steps.kl(one, other) == pytest.approx(expected)


def test_results_of_earlier_steps_are_kept(tmp_path):
    path = tmp_path / "results.json"
    convert, load = Finding(PASSED, ""), Finding(FAILED, "refused")
    for findings in ({"convert": convert}, {"load": load}):
        results.put(Row(CASE, "scanned", {}, findings), path)
    row = results.read(path)[CASE, "scanned"]
    assert row.findings == {"convert": convert, "load": load}
    assert not row.passed


def test_step_is_blocked_by_an_earlier_failure():
    row = Row(CASE, "scanned", {}, {"convert": Finding(PASSED), "train": Finding(FAILED)})
    assert row.blocked("export") == "train"
    assert row.blocked("logits") == ""
    assert Row(CASE, "scanned", {}, {"convert": Finding(FAILED)}).blocked("resume") == "convert"


def test_family_selection_accepts_prefixes():
    assert cases.named([]) == list(cases.configurations())
    assert cases.named(["qwen3"]) == ["qwen3"]
    assert {"llama3.1", "llama4-scout"} <= set(cases.named(["llama"]))
    with pytest.raises(KeyError):
        cases.named(["llma"])


def test_vision_models_get_images_or_a_reason():
    for case in cases.configurations():
        config = cases.configuration(case)
        sees = any(config.get(item) for item in ("vision_config", "thinker_config"))
        shown = "images" in cases.steps_of(case, cases.UNSCANNED)
        assert sees == (shown or bool(cases.BLIND.get(case)))
    assert set(cases.BLIND) <= set(cases.configurations())


def test_deviations_refer_to_known_models():
    assert set(cases.DEVIATIONS) <= set(cases.configurations())
    for name, deviation in cases.DEVIATIONS.items():
        assert deviation.reason
        assert json.dumps(cases.configuration(name))


# Settings that are sizes, which rows make smaller.
SIZES = re.compile(
    r"base_.*|vocab_size.*|(\w+_)?head_dim|num_(decoder_layers|experts|experts_per_tok|kv_shared_layers)"
    r"|(global_)?num_kv_heads|kv_lora_rank|[oq]_lora_rank|o_groups|v_head_dim|first_num_dense_layers"
    r"|indexer_(n_heads|topk)|sliding_window_size|mhc_expansion_rate|gdn_num_(key|value)_heads"
    r"|compress_ratios|hidden_size_per_layer_input|mrope_section|d_model_for_audio|encoder_layers_for_audio"
    r"|\w+_(heads|dim)_for_audio|downsample_hidden_size_for_audio"
    r"|(image|patch|\w*hidden|intermediate)_size_for_vit|num_(hidden_layers|position_embeddings)_for_vit"
    r"|deepstack_visual_indexes_for_vit"
)
OTHERS = {
    # The limits are small, so that 288 tokens exceed them.
    "deepseek4-flash": {"max_position_embeddings", "mlp_activations_limit"},
    # MaxText's files of these models have no groups.
    "deepseek3": {"n_routing_groups", "topk_routing_group"},
    "deepseek3.2": {"n_routing_groups", "topk_routing_group"},
    "gemma3-untied": {"logits_via_embedding"},
    # The range of positions of YaRN, beyond all tokens here.
    "gpt-oss": {"max_position_embeddings"},
    "llama3.2-tied": {"logits_via_embedding", "normalize_embedding_logits"},
    "olmo3": {"rope_type"},
    "olmo3-yarn": {"rope_type"},
    # MaxText's audio tower attends within single chunks (`CHUNK_BY_CHUNK`).
    "qwen3-omni": {"n_window_infer_for_audio"},
    # The models of July 2025 have 10,000,000, those before 1,000,000.
    "qwen3-moe": {"rope_max_timescale"},
}


@pytest.mark.parametrize("case", cases.NAMED)
def test_rows_have_the_settings_of_released_models(case, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(cases.configuration(case)))
    own = ckpttools.maxtext_config(tmp_path / "config.json", scan=False).as_mapping()
    released = {**models.defaults(), **models.named_models()[cases.NAMED[case]]}
    different = {name for name, value in own.items() if name in released and released[name] != value}
    assert {item for item in different if not SIZES.fullmatch(item)} == OTHERS.get(case, set())


def test_uncommitted_changes_are_marked(monkeypatch):
    declared = {"rev-parse": "0123abcd9", "status": ""}
    monkeypatch.setattr(run, "_git", lambda *words: declared[words[0]])
    assert run.commit() == "0123abcd9"
    declared["status"] = " M ckpttools/api/load.py"
    assert run.commit() == "0123abcd9+"
    monkeypatch.setattr(run, "_git", lambda *words: "")
    assert run.commit() == ""


SHOWN = [case for case in cases.configurations() if "images" in cases.steps_of(case, cases.UNSCANNED)]


@pytest.mark.parametrize("case", SHOWN)
def test_images_are_placed_among_tokens(case):
    prompt = images.prompt(cases.configuration(case))
    tokens = np.array(prompt.tokens)
    (locations,) = np.nonzero(tokens == prompt.placeholder)
    assert (np.diff(locations) == 1).all() and 0 < locations[0] < locations[-1] < len(tokens) - 1
    assert prompt.positions.shape[1] == len(tokens)
    pixels = prompt.torch["pixel_values"]
    assert np.array_equal(np.sort(pixels, axis=None), np.sort(prompt.pixels, axis=None))


def test_image_positions_are_rows_and_columns():
    time, row, column = images.prompt(cases.configuration("qwen3-vl")).positions[0].T
    grid = slice(12, 28)
    assert (time[grid] == 12).all()
    assert row[grid].tolist() == [12 + k // 4 for k in range(16)]
    assert column[grid].tolist() == [12 + k % 4 for k in range(16)]
    for item in (time, row, column):
        assert item[:12].tolist() == list(range(12))
        assert item[28:31].tolist() == [16, 17, 18]


def test_audio_positions_continue_after_the_image():
    prompt = images.prompt(cases.configuration("qwen3-omni"))
    (heard,) = np.nonzero(np.array(prompt.tokens) == prompt.sound.placeholder)
    assert len(heard) == 26 and prompt.sound.features.shape == (1, 16, 200)
    positions = prompt.positions[0]
    assert (positions[heard] == np.arange(68, 94)[:, None]).all()
    assert (positions[heard[0] - 1] == 67).all()
    assert (positions == prompt.torch["position_ids"][:, 0].T).all()


def test_image_patches_carry_their_positions():
    """Gemma 4: column before row."""
    prompt = images.prompt(cases.configuration("gemma4-vision"))
    patches, locations = prompt.torch["pixel_values"][0], prompt.torch["image_position_ids"][0]
    for number in (0, 61, 2519):
        column, row = locations[number]
        there = prompt.pixels[0, 0, row * 16 : row * 16 + 16, column * 16 : column * 16 + 16]
        assert (patches[number] == there.ravel()).all()


def test_scanned_text_models_get_no_images():
    assert "images" not in cases.steps_of("qwen3-vl", cases.SCANNED)
    assert "images" not in cases.steps_of("llama3.1", cases.UNSCANNED)


def test_text_only_is_inferred_from_the_checkpoint(tmp_path):
    """A configuration promises towers, with which MaxText scans no layers."""
    model = cases.configurations()["qwen3-vl"].parent
    item = tmp_path / "text"
    steps.ckpt("convert", "hf-to-maxtext", model, item, "--scan", "--text-only")
    for scanned, declared in ((True, "scan_layers=true"), (False, "scan_layers=false")):
        told = settings.of(model, scanned, tmp_path, item)
        assert [entry for entry in told if entry.startswith("scan_layers=")] == [declared]
        assert not any(entry.startswith(("model_name=", "load_parameters_path=")) for entry in told)
    with pytest.raises(StepError, match="does not scan"):
        settings.of(model, True, tmp_path)


def test_table_rows_refer_to_known_models():
    rows = results.read()
    assert {family for family, _ in rows} <= set(cases.configurations())
    assert {layers for _, layers in rows} <= set(cases.LAYERS)
    assert all(set(row.findings) <= set(cases.steps_of(*key)) for key, row in rows.items())
    assert all(finding.date for row in rows.values() for finding in row.findings.values())
