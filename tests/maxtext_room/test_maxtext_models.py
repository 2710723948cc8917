"""Every model that MaxText 0.2.5 knows a Hugging Face id of is converted, or it is said why not."""

from __future__ import annotations

import json

import pytest
from support.internals import families, family_of
from support.locations import FIXTURES

from ckpttools import ConfigError

MODELS = json.loads((FIXTURES / "maxtext-0.2.5-models.json").read_bytes())
CONVERTED = [item for item in MODELS if "family" in item]
OTHERS = [item for item in MODELS if "reason" in item]
OF_THEIR_OWN = ("default", "weaver-mini", "weaver-max")


def config(model):
    return {"model_type": model["model_type"], **model.get("config", {})}


def test_every_model_type_has_a_family_or_a_reason():
    assert len(MODELS) == len({model["model"] for model in MODELS}) == 53
    assert len(CONVERTED) + len(OTHERS) == len(MODELS)
    assert not [model for model in MODELS if "family" in model and "reason" in model]


@pytest.mark.parametrize("model", CONVERTED, ids=lambda item: item["model"])
def test_config_determines_the_family(model):
    assert family_of(config(model), "config.json") is families()[model["family"]]


@pytest.mark.parametrize(
    "model", [other for other in OTHERS if other["model"] not in OF_THEIR_OWN], ids=lambda item: item["model"]
)
def test_unsupported_models_have_no_family(model):
    with pytest.raises(ConfigError, match="no family has model_type"):
        family_of(config(model), "config.json")
