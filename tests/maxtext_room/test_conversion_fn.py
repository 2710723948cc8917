"""A family's rows as the function that MaxText calls on weights it has loaded."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.golden_data import FAMILIES, GOLDEN_VERSION, MULTIMODAL, SCAN_NAMES, described, golden_arrays
from support.locations import GOLDEN

import ckpttools
from ckpttools import CoverageError, ToMaxText


def weights(family):
    return load_file(GOLDEN / family / "hf" / "model.safetensors")


def flat(nested, path=()):
    for key, value in nested.items():
        if isinstance(value, dict):
            yield from flat(value, (*path, key))
        else:
            yield "/".join((*path, key)), value


@pytest.mark.parametrize("scan", [True, False], ids=SCAN_NAMES.get)
@pytest.mark.parametrize("family", FAMILIES)
def test_conversion_function_matches_maxtext(family, scan):
    options = ToMaxText(scan=scan, text_only=family in MULTIMODAL, maxtext=GOLDEN_VERSION)
    convert = ckpttools.family_conversion_fn(GOLDEN / family / "hf", options)
    built = {path: described(np.asarray(array)) for path, array in flat(convert(weights(family)))}
    expected = golden_arrays(family, scan)
    del expected["step"]
    assert built == expected


def test_jax_arrays_and_parsed_config_are_accepted():
    import jax.numpy as jnp

    config = json.loads((GOLDEN / "qwen3" / "hf" / "config.json").read_bytes())
    convert = ckpttools.family_conversion_fn(config)
    built = convert({name: jnp.asarray(array) for name, array in weights("qwen3").items()})
    kernel = built["params"]["params"]["decoder"]["layers"]["mlp"]["wo"]["kernel"]
    assert (
        described(np.asarray(kernel))
        == golden_arrays("qwen3", True)["params/params/decoder/layers/mlp/wo/kernel"]
    )


def test_weights_of_another_model_are_refused():
    convert = ckpttools.family_conversion_fn(GOLDEN / "qwen3" / "hf")
    with pytest.raises(CoverageError, match="the loaded weights"):
        convert(weights("qwen2.5"))
