"""The page of a model on the hub: a stub, which says what is known and nothing else."""

from __future__ import annotations

from collections.abc import Container

CARD = "README.md"


def model_card(repo: str, source: str, files: Container[str], base: str = "") -> bytes:
    """What the page says.

    Args:
        repo: org/name.
        source: what was converted; told only if it is a model of the hub.
        files: names of files beside the weights.
        base: the model that the user says it came from; told only if it is one of the hub.
    """
    named = next((item for item in (base, source) if item.startswith("hf://")), "")
    model = "/".join(named.removeprefix("hf://").partition("@")[0].split("/")[:2])
    facts = [
        *(["library_name: transformers"] if "config.json" in files else []),
        *([f"base_model: {model}"] if model else []),
    ]
    head = "\n".join(["---", *facts, "---", ""]) if facts else ""
    built = (
        f"Converted by ckpttools from `{source}`."
        if source.startswith("hf://")
        else "Converted by ckpttools."
    )
    return f"{head}\n# {repo.partition('/')[2]}\n\n{built}\n".lstrip("\n").encode()
