"""transformers itself loads what `maxtext-to-hf` writes: no tensor missing, none too many, all of its shapes.

Needs the extra `transformers` (torch and transformers), which the suite does without.
"""

from __future__ import annotations

import json

import pytest
from support.golden_data import FAMILIES, convert
from support.places import GOLDEN

from ckpttools.api.conversion import Resources
from ckpttools.api.maxtext_to_hf import plan_to_huggingface
from ckpttools.maxtext.to_hf import ToHuggingFace

torch = pytest.importorskip("torch", reason="the extra `transformers` is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Golden models, there and back again."""

    def export(family):
        directory = tmp_path_factory.mktemp(family)
        convert(directory / "maxtext", family, carry=True)
        source = directory / "maxtext"
        plan_to_huggingface(source, ToHuggingFace(), Resources(jobs=2)).run(directory / "hf")
        return directory / "hf"

    return export


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_transformers_takes_every_tensor(exported, family):
    directory = exported(family)
    name = json.loads((directory / "config.json").read_bytes())["architectures"][0]
    kind = getattr(transformers, name)
    model, loaded = kind.from_pretrained(directory, output_loading_info=True, dtype="auto")
    assert {what: sorted(names) for what, names in loaded.items() if names} == {}
    original = kind.from_pretrained(GOLDEN / family / "hf", dtype="auto").state_dict()
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, original[key]), key


@pytest.mark.parametrize("family", FAMILIES)
def test_the_configuration_alone_makes_a_model_of_these_shapes(exported, family):
    """Without weights, on the meta device: the names that the model asks for are those in the files."""
    directory = exported(family)
    config = transformers.AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    loaded = type(model).from_pretrained(directory, output_loading_info=True, dtype="auto")[1]
    assert not loaded["missing_keys"]
    assert not loaded["unexpected_keys"]
    assert not loaded["mismatched_keys"]
