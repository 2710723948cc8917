"""transformers itself loads what `maxtext-to-hf` writes: no tensor missing, none too many, all of its shapes.

Needs the extra `transformers` (torch and transformers), which the suite does without.
"""

from __future__ import annotations

import json

import pytest
from support.golden_data import FAMILIES, convert
from support.places import GOLDEN, GOLDEN_0_2_5

from ckpttools.api.conversion import Resources
from ckpttools.api.hf_to_maxtext import plan_to_maxtext
from ckpttools.api.maxtext_to_hf import plan_to_huggingface
from ckpttools.formats.registry import open_tree
from ckpttools.maxtext.to_hf import ToHuggingFace
from ckpttools.maxtext.to_maxtext import ToMaxText

torch = pytest.importorskip("torch", reason="the extra `transformers` is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")


# Models with towers that `carry` does not bring back: all of it goes through MaxText's names.
TOWERS = {
    "gemma3-vision": "vision_tower",
    "gemma4-vision": "vision_tower",
    "qwen3-vl": "visual",
    "qwen3-vl-moe": "visual",
    "qwen3-omni": "audio_tower",
    "qwen3.5": "visual",
}


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


@pytest.mark.parametrize("model", TOWERS)
def test_towers_have_the_names_and_shapes_of_transformers(tmp_path, model):
    """What transformers would begin anew, at random, it only warns of."""
    source = GOLDEN_0_2_5 / model / "hf"
    # MaxText scans no layers that take what towers' inner blocks see; talkers it has no place for.
    options = ToMaxText(scan=False, carry=True, exact=True)
    plan_to_maxtext(source, options, Resources(jobs=2)).run(tmp_path / "maxtext")
    plan_to_huggingface(tmp_path / "maxtext", ToHuggingFace(), Resources(jobs=2)).run(tmp_path / "hf")
    assert any(TOWERS[model] in str(path[0]) for path in open_tree(tmp_path / "hf").arrays)
    name = json.loads((tmp_path / "hf" / "config.json").read_bytes())["architectures"][0]
    kind = getattr(transformers, name)
    made, loaded = kind.from_pretrained(tmp_path / "hf", output_loading_info=True, dtype="auto")
    assert {what: sorted(names) for what, names in loaded.items() if names} == {}
    original = kind.from_pretrained(source, dtype="auto").state_dict()
    towers = {key: tensor for key, tensor in made.state_dict().items() if TOWERS[model] in key}
    assert towers
    for key, tensor in towers.items():
        assert torch.equal(tensor, original[key]), key
