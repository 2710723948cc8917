"""The oracle that asks MaxText and transformers themselves: one model of it; all by `make oracle`."""

from __future__ import annotations

import json

import numpy as np
import pytest
from oracle import cases, environments, results, steps
from oracle.results import FAILED, PASSED, Finding, Row
from oracle.run import found, made
from oracle.worker import StepError, Worker

CASE = "llama3.1"
PYTHONS = environments.present()
REASON = f"no environments with MaxText and transformers: {environments.MAXTEXT}, {environments.TORCH}"


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    if PYTHONS is None:
        pytest.skip(REASON)
    directory = tmp_path_factory.mktemp("oracle")
    (directory / "work").mkdir()
    with (
        Worker(PYTHONS.torch, "in_torch", directory) as torch,
        Worker(PYTHONS.maxtext, "in_maxtext", directory) as maxtext,
    ):
        model = made(CASE, directory, torch)
        yield steps.Bench(CASE, True, model, directory / "work", torch, maxtext)


def test_maxtext_computes_with_a_converted_model_what_transformers_does(bench):
    findings = found(bench, ["convert", "load", "logits"])
    assert {name: each.state for name, each in findings.items()} == dict.fromkeys(findings, PASSED)
    assert float(findings["logits"].said) < cases.LIMIT


def test_weights_in_another_order_are_noticed(bench, tmp_path):
    """Shapes are the same with rotary pairs in the other order: only numbers tell."""
    wrong = tmp_path / "wrong"
    steps.ckpt("convert", "hf-to-maxtext", bench.model, wrong, "--rope-layout", "halves")
    steps.loaded(bench, wrong, scanned=True)
    with pytest.raises(StepError, match="apart"):
        steps.compared(bench, bench.model, wrong)


def test_divergence_is_that_of_the_worst_position():
    one = np.log([[0.5, 0.5], [0.75, 0.25]])
    other = np.log([[0.5, 0.5], [0.5, 0.5]])
    assert steps.kl(one, one + 3) == pytest.approx(0, abs=1e-12)
    wanted = 0.75 * np.log(0.75 / 0.5) + 0.25 * np.log(0.25 / 0.5)
    assert steps.kl(one, other) == pytest.approx(wanted)


def test_steps_that_were_run_earlier_stay_in_the_table(tmp_path):
    path = tmp_path / "results.json"
    convert, load = Finding(PASSED, ""), Finding(FAILED, "refused")
    for findings in ({"convert": convert}, {"load": load}):
        results.put(Row(CASE, "scanned", {}, findings), path)
    row = results.read(path)[CASE, "scanned"]
    assert row.findings == {"convert": convert, "load": load}
    assert not row.passed


def test_a_step_is_blocked_by_the_one_that_failed_before_it():
    row = Row(CASE, "scanned", {}, {"convert": Finding(PASSED), "train": Finding(FAILED)})
    assert row.blocked("export") == "train"
    assert row.blocked("logits") == ""
    assert Row(CASE, "scanned", {}, {"convert": Finding(FAILED)}).blocked("resume") == "convert"


def test_families_are_named_or_begun():
    assert cases.named([]) == list(cases.configurations())
    assert cases.named(["qwen3"]) == ["qwen3"]
    assert {"llama3.1", "llama4-scout"} <= set(cases.named(["llama"]))
    with pytest.raises(KeyError):
        cases.named(["llma"])


def test_what_maxtext_computes_otherwise_is_said_of_models_that_there_are():
    assert set(cases.DEVIATIONS) <= set(cases.configurations())
    for name, deviation in cases.DEVIATIONS.items():
        assert deviation.reason
        assert json.dumps(cases.configuration(name))


def test_rows_of_the_table_are_of_models_that_there_are():
    rows = results.read()
    assert {family for family, _ in rows} <= set(cases.configurations())
    assert {layers for _, layers in rows} <= set(cases.LAYERS)
    assert all(set(row.findings) <= set(steps.ALL) for row in rows.values())
