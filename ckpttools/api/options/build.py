"""Options of functions that build models: averages, smaller and random models."""

from __future__ import annotations

from ckpttools.api.options import (
    DTYPE,
    FAMILY,
    LIKE,
    MAX_HEADER_BYTES,
    MAX_INDEX_BYTES,
    PREFER_RANK,
    count,
    with_help,
)
from ckpttools.api.options.convert import SCAN
from ckpttools.core.errors import UsageError
from ckpttools.core.options import Option, any_text, switch
from ckpttools.transforms.mean_weights import DECAYS


def parse_numbers(text: str) -> list[float]:
    """Parse comma-separated numbers.

    Raises:
        UsageError: An item is not a number.
    """
    try:
        return [float(item) for item in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{text!r} is not a list of numbers, such as 1,0.5,-0.5.") from error


AVERAGE = (
    Option(
        "steps",
        any_text,
        None,
        "Steps of one run: numbers and ranges, separated by commas. 1000..5000/500 is every 500th, which "
        "must all exist; 1000..5000 all finished steps in the range.",
        "STEPS",
        flag="--steps",
    ),
    count("last", "Average the latest N finished steps of one run."),
    Option(
        "weights",
        parse_numbers,
        None,
        "One weight for each checkpoint, in order. Default: equal weights.",
        "W,W,…",
    ),
    Option(
        "ema",
        float,
        None,
        "Weight the checkpoints like a moving average with this decay, such as 0.9.",
        "B",
        least=None,
    ),
    Option(
        "decay",
        tuple(DECAYS),
        None,
        "Weight the checkpoints to emulate a learning rate that decays to zero this way.",
    ),
    Option("normalize", bool, True, "Divide by the sum of the weights, or return the weighted sum."),
    Option(
        "parameters",
        any_text,
        None,
        "Average this subtree of a training state instead of its parameters: its key, such as "
        "opt_state/1/ema, or ema for the only one.",
        "KEY",
    ),
    switch(
        "force",
        "Average models whose config.json files describe different computations, such as another RoPE "
        "scaling or activation. The result has the config.json of the last model.",
    ),
    DTYPE,
)
AVERAGE_READING = (MAX_HEADER_BYTES, MAX_INDEX_BYTES, PREFER_RANK)


def parse_layers(text: str) -> int | list[int]:
    """Parse a number of layers, or a list of layer indexes.

    Raises:
        UsageError: The text is neither.
    """
    try:
        if text.isdecimal():
            return int(text)
        return [int(item) for item in text.split(",") if item]
    except ValueError as error:
        raise UsageError(f"{text!r} is neither a number nor a list such as 0,1,5.") from error


SHRINK = (
    Option(
        "layers",
        parse_layers,
        None,
        "Keep the first N layers, or the layers with these comma-separated numbers.",
        "N|N,N,…",
    ),
    count("experts", "Keep the first N experts of each layer."),
    count("vocab", "Keep the first N tokens; the tokenizer is unchanged."),
    with_help(LIKE, "The original model of a MaxText checkpoint without a stored config.json."),
    with_help(FAMILY, "The model's family. Default: that of config.json."),
    DTYPE,
)
SYNTH = (
    Option("seed", int, 0, "Random seed; the same seed gives the same bits.", "N", least=None),
    Option("names", ("huggingface", "maxtext"), "huggingface", "Framework whose names and layout to write."),
    with_help(SCAN, "For MaxText: stack the layers."),
    with_help(DTYPE, "Dtype of the weights. Default: bfloat16."),
)
