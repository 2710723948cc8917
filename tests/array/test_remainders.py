"""Layers that are no whole cycles, or less than one: the same arrays in all layouts have the same names."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.golden_data import leaves_by_package
from support.internals import StackAsModel, to_maxtext
from support.locations import GOLDEN

import ckpttools
from ckpttools import ToMaxText, Tree, UnstackLayers

_TEXT_LAYER = re.compile(r"language_model\.(?:model\.)?layers\.(\d+)\.")
_TOWER = re.compile("vision|multi_modal")
# Both have a cycle of six layers.
EVERY = pytest.mark.parametrize("count", [1, 3, 6, 7])
FAMILIES = pytest.mark.parametrize("family", ["gemma3", "gemma4-moe"])


def with_layers(model: Path, count: int) -> Tree:
    """The first layers of a model, as a model of its own."""
    tree = ckpttools.open(model)
    config = json.loads(json.dumps(tree.metadata.config))
    config["text_config"]["num_hidden_layers"] = count
    if "layer_types" in config["text_config"]:
        config["text_config"]["layer_types"] = config["text_config"]["layer_types"][:count]
    numbers = {path: _TEXT_LAYER.search(str(path[0])) for path in tree}
    kept = {path: item for path, item in tree.items() if not (n := numbers[path]) or int(n[1]) < count}
    return Tree(kept, replace(tree.metadata, config=config))


@EVERY
@FAMILIES
def test_remaining_layers_are_compared_by_layer(family, count):
    source = with_layers(GOLDEN / family / "hf", count)
    stacked, single = (to_maxtext(source, ToMaxText(text_only=True, scan=s)).state for s in (True, False))
    text = Tree(
        {path: item for path, item in source.items() if not _TOWER.search(str(path[0]))}, source.metadata
    )
    for one, other in ((stacked, single), (stacked, text), (single, stacked)):
        assert ckpttools.verify(one, other).equal
        assert ckpttools.diff(one, other).equal
    result = ckpttools.verify(stacked, source), ckpttools.diff(stacked, source)
    for differing in (result[0].differences, result[1].arrays):
        assert differing and all(_TOWER.search(item.name) for item in differing)
    assert ckpttools.hash(stacked).parameters == ckpttools.hash(single).parameters
    assert len({array.name for array in ckpttools.hash(stacked).arrays if "layers_" in array.name}) >= count
    apart = UnstackLayers()(stacked).tree
    assert leaves_by_package(apart) == leaves_by_package(single)
    assert leaves_by_package(StackAsModel()(apart).tree) == leaves_by_package(stacked)
