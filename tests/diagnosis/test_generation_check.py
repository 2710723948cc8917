"""`ckpt doctor` on what ends a text: `generation_config.json` against the tokenizer beside it."""

import json
import shutil
from pathlib import Path

import pytest
from support.command_line import ckpt
from support.locations import ROOT

HUB = ROOT / "fixtures/torch/trainers/hub"


def declared(tmp_path, generation=None, **settings):
    """What doctor says of a model whose files say this."""
    model = tmp_path / "m"
    shutil.copytree(HUB, model)
    for name, changes in (("generation_config.json", generation or {}), ("tokenizer_config.json", settings)):
        written = json.loads((model / name).read_text()) | changes
        (model / name).write_text(json.dumps(written))
    return " ".join(ckpt("doctor", model).output.split())


def test_consistent_generation_config_is_healthy(tmp_path):
    """Two ends, of which one is the tokenizer's, as of chat models."""
    assert "configuration OK" in declared(tmp_path)


@pytest.mark.parametrize(
    ("generation", "settings", "says"),
    [
        ({"eos_token_id": 3}, {}, "eos_token_id 3, and the tokenizer's eos_token '</s>' is 2"),
        (
            {},
            {"eos_token": {"content": "<unk>"}},
            "eos_token_id 2, 3, and the tokenizer's eos_token '<unk>' is 4",
        ),
        ({"eos_token_id": [2, 99]}, {}, "eos_token_id 99, and config.json has vocab_size 64"),
        ({"pad_token_id": 64}, {}, "pad_token_id 64, and config.json has vocab_size 64"),
    ],
)
def test_inconsistent_generation_config_is_reported(tmp_path, generation, settings, says):
    assert says in declared(tmp_path, generation, **settings)


def test_unknown_token_id_is_reported(tmp_path):
    model = tmp_path / "m"
    shutil.copytree(HUB, model)
    tokens = json.loads((model / "tokenizer.json").read_text())
    del tokens["model"]["vocab"]["w63"]
    (model / "tokenizer.json").write_text(json.dumps(tokens))
    (model / "generation_config.json").write_text('{"eos_token_id": [2, 63]}')
    assert "the tokenizer has no token of this id" in ckpt("doctor", model).output
    (model / "generation_config.json").write_text("{")
    assert "generation_config.json" in ckpt("doctor", model).output


def test_added_tokens_of_sentencepiece_are_checked(tmp_path):
    """As of SentencePiece: what was added to it is listed."""
    model = tmp_path / "m"
    shutil.copytree(HUB, model)
    (model / "tokenizer.json").rename(model / "tokenizer.model")
    added = {"added_tokens_decoder": {"2": {"content": "</s>"}, "x": {}}, "eos_token": "</s>"}
    (model / "tokenizer_config.json").write_text(json.dumps(added))
    assert "[generation]" not in ckpt("doctor", model).output
    (model / "generation_config.json").write_text('{"eos_token_id": 63}')
    told = " ".join(ckpt("doctor", model).output.split())
    assert "eos_token_id 63, and the tokenizer's eos_token '</s>' is 2" in told and "no token of" not in told
    (model / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (model / "vocab.json").write_text('{"</s>": 7}')
    assert "eos_token '</s>' is 7" in " ".join(ckpt("doctor", model).output.split())


TOKENLESS = (
    *("[]", "{}", "nothing", '{"model": 3, "added_tokens": [3]}'),
    '{"model": {"vocab": {"a": [1], "b": {}}}}',
)


@pytest.mark.parametrize("content", TOKENLESS)
def test_uninformative_tokenizers_are_ignored(tmp_path, content):
    model = tmp_path / "m"
    shutil.copytree(HUB, model)
    (model / "tokenizer.json").write_text(content)
    assert "[generation]" not in ckpt("doctor", model).output


def test_end_token_from_config_alone_is_checked(tmp_path):
    model = Path(shutil.copytree(HUB, tmp_path / "m"))
    (model / "generation_config.json").unlink()
    assert "structure and configuration OK" in ckpt("doctor", model).output
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "eos_token_id": [2, 64]}))
    told = " ".join(ckpt("doctor", model).output.split())
    assert "eos_token_id 64, and config.json has vocab_size 64" in told and "1 warning" in told
