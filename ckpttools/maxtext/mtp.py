"""Multi-token-prediction (MTP) layers after the last layer, and the fields that state their number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FIELDS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


def prediction_layers(config: Mapping[str, Any]) -> int:
    """Return how many MTP layers a configuration states; 0 if it states no number."""
    stated = (config.get(name) for name in FIELDS)
    return sum(number for number in stated if isinstance(number, int))
