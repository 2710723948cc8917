"""Known deviations of MaxText from transformers, for checkpoints that carry their configuration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from ckpttools.checks.base import ModelCheck, ModelDirectory, ModelFinding
from ckpttools.core.errors import CheckpointError
from ckpttools.formats.base import SIDECARS, ReadOptions
from ckpttools.formats.registry import open_tree
from ckpttools.maxtext.config.deviations import deviations
from ckpttools.maxtext.config.observed_model import observe_model
from ckpttools.maxtext.config.report import Discrepancy
from ckpttools.maxtext.view import view_of
from ckpttools.stores.registry import parse


def _check(model: ModelDirectory) -> Iterator[ModelFinding]:
    for deviation in _deviations(model):
        yield ModelFinding(
            "info",
            CHECK.name,
            model.location,
            f"MaxText computes this model differently than transformers: {deviation.what}",
            "; ".join(filter(None, (deviation.reason, deviation.effect))),
            deviation.remedy or "compare results with transformers before you rely on them",
        )


def _deviations(model: ModelDirectory) -> list[Discrepancy]:
    """Return the deviations of a MaxText checkpoint; none if it cannot be read, which other checks report."""
    location = parse(model.location)
    if model.is_output or model.tree is not None or location.name != SIDECARS:
        return []
    with suppress(CheckpointError):
        tree = open_tree(location.parent, ReadOptions())
        if view_of(tree).is_maxtext:
            observed = observe_model(tree, None, None)
            return list(deviations(observed.family, observed.facts))
    return []


CHECK = ModelCheck(
    "deviations",
    "known differences between MaxText and transformers",
    _check,
    consumer="MaxText",
)
