"""Settings of an adapter that are printed, as MaxText's parsers read them."""

import pytest
import yaml
from support.places import FIXTURES

import ckpttools
from ckpttools.api.next_steps import next_steps

PEFT = FIXTURES / "peft"


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A tree of an adapter that MaxText restores."""
    path = tmp_path_factory.mktemp("converted") / "adapter"
    ckpttools.adapter_to_maxtext(PEFT / "plain", path, base=PEFT / "bases" / "llama-float32")
    return ckpttools.open(path)


def printed(tree, path, **stated):
    """What is printed for an adapter whose metadata states this."""
    ckpttools.convert(tree.with_metadata(custom={"scan_layers": True, "lora": stated}), path, format="orbax")
    return next_steps(path).uses


@pytest.mark.parametrize("alpha", [16, 16.0, 1e1, 0.5, 1e-5, 2.5e-7, 1e22, 1 / 3])
def test_alpha_is_printed_so_that_yaml_reads_the_same_number(converted, tmp_path, alpha):
    (line,) = printed(converted, tmp_path / "a", lora_rank=2, lora_alpha=alpha)
    (said,) = (each.partition("=")[2] for each in line.split() if each.startswith("lora.lora_alpha="))
    assert yaml.safe_load(said) == float(said) == alpha


@pytest.mark.parametrize(
    ("stated", "phrase"),
    [
        ({"lora_rank": 2}, "does not state alpha: add lora.lora_alpha=ALPHA"),
        ({"lora_rank": 2, "lora_alpha": None}, "does not state alpha"),
        ({}, "does not state alpha"),
        ({"lora_rank": 2, "lora_alpha": 0.0}, "alpha is 0"),
        ({"lora_rank": 2, "lora_alpha": -16.0}, "alpha is -16.0, and MaxText refuses a negative alpha"),
    ],
)
def test_alpha_that_maxtext_cannot_apply_is_reported(converted, tmp_path, stated, phrase):
    line, note = printed(converted, tmp_path / "a", **stated)
    assert "lora.lora_rank=2" in line and "lora_alpha=-" not in line
    assert phrase in note
