"""What transformers does, in its own environment: tiny models with random weights, and logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from serving import serve

# Models of which transformers has no class of their own: the one whose computation is theirs.
_COMPUTED_AS = {"kimi_k2": "deepseek_v3"}


def versions() -> dict[str, str]:
    return {"torch": torch.__version__, "transformers": transformers.__version__}


def configuration(directory: str) -> Any:
    raw = json.loads((Path(directory) / "config.json").read_bytes())
    kind = raw.pop("model_type")
    if kind in _COMPUTED_AS:
        return transformers.AutoConfig.for_model(_COMPUTED_AS[kind], **raw)
    return transformers.AutoConfig.from_pretrained(directory)


def model_class(config: Any) -> Any:
    return getattr(transformers, config.architectures[0])


def make(directory: str, seed: int) -> int:
    """Writes float32 weights beside the config.json of a directory; returns how many numbers they are.

    They keep activations near 1: by what transformers begins with, logits would hardly differ.
    """
    config = configuration(directory)
    raw = (Path(directory) / "config.json").read_bytes()
    # What some begin with is random, too.
    torch.manual_seed(seed)
    model = model_class(config)(config).float()
    drawn = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if name.endswith("tid2eid"):
            tensor.copy_(_experts(tensor, config.n_routed_experts, drawn))
        if not tensor.is_floating_point():
            continue
        noise = torch.randn(tensor.shape, generator=drawn)
        # Of a convolution over patches, all but the first axis are summed.
        summed = tensor[0].numel() if tensor.ndim > 3 else tensor.shape[-1]
        tensor.copy_(noise * summed**-0.5 if tensor.ndim > 1 else tensor + 0.1 * noise)
    model.save_pretrained(directory)
    _publish(Path(directory), config.model_type)
    # As it was said: transformers writes it with what it has filled in.
    (Path(directory) / "config.json").write_bytes(raw)
    return sum(tensor.numel() for tensor in model.parameters())


# Names that transformers writes, and those of published files, which it reads as well.
_PUBLISHED = {
    "kimi_k25": {
        "language_model.model.blocks.": "language_model.model.layers.",
        "model.mm_projector.": "mm_projector.",
    }
}


def _publish(directory: Path, model_type: str) -> None:
    """Gives tensors the names that published files have."""
    for file in directory.glob("*.safetensors") if model_type in _PUBLISHED else ():
        tensors = load_file(file)
        for theirs, published in _PUBLISHED[model_type].items():
            names = {
                name: published + name.removeprefix(theirs) for name in tensors if name.startswith(theirs)
            }
            tensors = {names.get(name, name): each for name, each in tensors.items()}
        save_file(tensors, file, metadata={"format": "pt"})


def _experts(table: torch.Tensor, experts: int, drawn: torch.Generator) -> torch.Tensor:
    """The experts of each token, none of them twice; transformers begins with the first alone."""
    return torch.rand(len(table), experts, generator=drawn).argsort(-1)[:, : table.shape[1]]


def logits(
    directory: str, tokens: list[int], target: str, inputs: dict[str, str] | None = None
) -> dict[str, list[str]]:
    """Writes (tokens, vocabulary) of float32; returns the tensors that were missing or of the wrong shape.

    Args:
        directory: of the model.
        tokens: of one text.
        target: the file that is written.
        inputs: what else the model takes: name of the argument -> file of an array.
    """
    model, loaded = _loaded(directory)
    np.save(target, _computed(model, tokens, inputs).numpy())
    return {what: sorted(map(str, names)) for what, names in loaded.items() if names}


def shaken(directory: str, tokens: list[int], inputs: dict[str, str] | None = None) -> float:
    """How far logits move at most when weights do by half a unit in the last place, of 8 draws."""
    model, _ = _loaded(directory)
    plain, drawn = _computed(model, tokens, inputs), torch.Generator().manual_seed(0)
    weights = [(each, each.clone()) for each in model.state_dict().values() if each.is_floating_point()]
    moved = 0.0
    for _ in range(8):
        for each, weight in weights:
            each.copy_(weight * (1 + (2 * torch.rand(each.shape, generator=drawn) - 1) * 2**-24))
        moved = max(moved, float((_computed(model, tokens, inputs) - plain).abs().max()))
    return moved


def _loaded(directory: str) -> tuple[Any, dict[str, Any]]:
    config = configuration(directory)
    model, loaded = model_class(config).from_pretrained(
        directory, config=config, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    # Of a model that speaks, the part that thinks.
    return getattr(model, "thinker", model).eval(), loaded


@torch.no_grad()
def _computed(model: Any, tokens: list[int], inputs: dict[str, str] | None) -> torch.Tensor:
    more = {name: torch.from_numpy(np.load(file)) for name, file in (inputs or {}).items()}
    return model(torch.tensor([tokens]), **more).logits[0].float()


if __name__ == "__main__":
    serve({"versions": versions, "make": make, "logits": logits, "shaken": shaken})
