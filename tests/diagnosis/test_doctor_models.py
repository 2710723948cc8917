"""`ckpt doctor` compares configuration, tokenizer and weights: each contradiction planted and named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.hf_models import write_llama
from support.locations import GOLDEN, GOLDEN_0_2_5

import ckpttools
from ckpttools.checks.generation import token_count

CHECKS = {"dtype", "layers", "vocabulary", "vocabulary-rows"}


def result(model: Path) -> dict[str, tuple[str, str]]:
    return {
        finding.check: (finding.level, finding.what)
        for finding in ckpttools.doctor(model).findings
        if finding.check in CHECKS
    }


def write(file: Path, **fields: object) -> None:
    file.write_text(json.dumps({**(json.loads(file.read_text()) if file.exists() else {}), **fields}))


@pytest.fixture
def model(tmp_path):
    write_llama(tmp_path / "m")
    tokens = {f"t{k}": k for k in range(250)}
    added = [{"id": 250 + k, "content": f"<{k}>"} for k in range(6)]
    write(tmp_path / "m/tokenizer.json", model={"type": "BPE", "vocab": tokens}, added_tokens=added)
    return tmp_path / "m"


def test_healthy_model_has_no_findings(model):
    assert result(model) == {}


@pytest.mark.parametrize(
    "hf", sorted([*GOLDEN.glob("*/hf"), *GOLDEN_0_2_5.glob("*/hf")]), ids=lambda p: p.parent.name
)
def test_models_of_every_family_are_healthy(hf):
    assert {check: item for check, item in result(hf).items() if check != "dtype"} == {}


FAULTS = [
    ("config.json", {"num_hidden_layers": 6}, "layers", "error", "no weights for layers 4..5"),
    (
        "config.json",
        {"num_hidden_layers": 3},
        "layers",
        "warning",
        "there are weights for layer 3",
    ),
    (
        "config.json",
        {"vocab_size": 300},
        "vocabulary-rows",
        "error",
        "256 rows, but config.json has vocab_size 300",
    ),
    ("config.json", {"torch_dtype": "float32"}, "dtype", "info", "most weights are bfloat16"),
    ("tokenizer.json", {"added_tokens": [{"id": 256}]}, "vocabulary", "error", "tokens up to 256"),
    ("tokenizer.json", {"model": {"vocab": [["a", 0.0]] * 257}}, "vocabulary", "error", "tokens up to 256"),
]


@pytest.mark.parametrize(
    ("file", "fields", "check", "level", "what"), FAULTS, ids=lambda item: str(item)[:30]
)
def test_contradiction_is_reported(model, file, fields, check, level, what):
    write(model / file, **fields)
    declared = result(model)
    assert declared.keys() == {check}
    assert declared[check][0] == level and what in declared[check][1]


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(("model", "vocab", "added_tokens", "id")), inner, max_size=3)
        ),
        max_leaves=8,
    )
)
def test_token_count_accepts_any_document(document):
    count = token_count({"model": document, "added_tokens": document})
    assert count is None or count > 0
