"""Record how transformers handles each damaged model. Needs torch and transformers.

    python tests/damage/verdicts.py 500 tests/damage/verdicts.json

The file has a line for each seed: "refused", "warned" or "loaded", what was reported, and the digest of the
weights that were loaded. Messages name the model's directory as MODEL.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from models import damaged


def verdict(directory: Path) -> dict[str, Any]:
    """Load a model directory with transformers and return the verdict."""
    import transformers

    result: dict[str, Any] = {"model": "loaded"}
    try:
        config = transformers.AutoConfig.from_pretrained(directory)
        names = config.architectures or []
        # A class that does not exist is ignored, as Auto classes ignore the whole field.
        automatic = transformers.AutoModelForCausalLM
        kind = getattr(transformers, names[0], automatic) if names else automatic
        model, info = kind.from_pretrained(directory, output_loading_info=True, dtype="float32")
    except Exception as error:
        result |= {"model": "refused", "why": _first_line(error, directory)}
    else:
        reported = {what: sorted(map(str, item))[:3] for what, item in info.items() if item}
        if reported:
            result |= {"model": "warned", "why": json.dumps(reported)[:200]}
        state = {name: item.detach().numpy() for name, item in model.state_dict().items()}
        if "embed_tokens.weight" in state:  # of a class without a head
            state = {f"model.{name}": item for name, item in state.items()}
        if getattr(config, "tie_word_embeddings", False):
            state.pop("lm_head.weight", None)
        if not info.get("missing_keys") and not info.get("mismatched_keys"):
            result["digest"] = digest(state)
    for what, load in (
        ("tokenizer", transformers.AutoTokenizer.from_pretrained),
        ("generation", transformers.GenerationConfig.from_pretrained),
    ):
        try:
            load(directory)
        except Exception as error:
            result[what] = _first_line(error, directory)
    return result


def _first_line(error: Exception, directory: Path) -> str:
    """Return the type and first line of an error, without the temporary directory."""
    line = f"{type(error).__name__}: {error}".split("\n")[0]
    return line.replace(str(directory), "MODEL")[:100]


def digest(arrays: dict[str, np.ndarray]) -> str:
    """Return one digest of the values of all arrays, as float32, whatever the order.

    Experts that transformers keeps as one array have the names that they have in files.
    """
    total = hashlib.sha256()
    for name, values in sorted(_one_by_one(arrays).items()):
        total.update(name.encode() + b"\0" + np.ascontiguousarray(values, np.float32).tobytes())
    return total.hexdigest()[:16]


def _one_by_one(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    single: dict[str, np.ndarray] = {}
    for name, values in arrays.items():
        at, _, last = name.rpartition(".experts.")
        if last == "gate_up_proj":
            start = at.replace("mlp", "block_sparse_moe")
            half = values.shape[1] // 2
            for number, item in enumerate(values):
                single[f"{start}.experts.{number}.w1.weight"] = item[:half]
                single[f"{start}.experts.{number}.w3.weight"] = item[half:]
        elif last == "down_proj":
            start = at.replace("mlp", "block_sparse_moe")
            single |= {f"{start}.experts.{n}.w2.weight": item for n, item in enumerate(values)}
        else:
            single[name.replace(".mlp.gate.weight", ".block_sparse_moe.gate.weight")] = values
    return single


def main() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    count, output = int(sys.argv[1]), Path(sys.argv[2])
    verdicts = {}
    for seed in range(count):
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(scratch, "model")
            damaged(seed).write(directory)
            verdicts[str(seed)] = verdict(directory)
        if seed % 50 == 0:
            sys.stderr.write(f"{seed}\n")
    lines = ",\n".join(f"{json.dumps(seed)}: {json.dumps(item)}" for seed, item in verdicts.items())
    output.write_text(f'{{"transformers": "{transformers.__version__}",\n{lines}}}\n')


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    main()
