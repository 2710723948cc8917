"""Quickstart and recipes: every command runs, in the order of the page."""

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.command_line import ckpt
from support.locations import DOCS, GOLDEN

import ckpttools

# Commands that end with exit code 1 because they find differences.
DIFFERENCES = ("diff",)


def blocks(page: str, language: str) -> str:
    """Return the code of a page in one language."""
    found = re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    return "".join(found)


def commands(page: str) -> list[list[str]]:
    """Return the `ckpt` commands of a page."""
    lines = blocks(page, "console").splitlines()
    found = (line.removeprefix("$ ckpt ") for line in lines if line.startswith("$ ckpt "))
    return [shlex.split(os.path.expandvars(line), comments=True) for line in found]


def write_training_run(model: Path, run: Path) -> None:
    """Write two steps of a training run that starts from a model."""
    ckpttools.hf_to_maxtext(model, "start")
    arrays = ckpttools.open("start").arrays
    for step in (100, 200):
        moved = {path: array.to_numpy().astype("f4") * (1 + step / 1e4) for path, array in arrays.items()}
        params = nested({path[1:]: array for path, array in moved.items() if path[0] == "params"})
        moments = {"count": np.int32(step), "mu": params, "nu": params}
        tree = {"params": params, "opt_state": moments, "step": np.int32(step)}
        ckpttools.save(tree, run / str(step), level="step")


def nested(arrays: dict[tuple[str, ...], np.ndarray]) -> dict[str, object]:
    """Return nested dictionaries of arrays by path."""
    result: dict[str, object] = {}
    for (*parents, name), array in arrays.items():
        node = result
        for key in parents:
            node = node.setdefault(key, {})
        node[name] = array
    return result


@pytest.mark.parametrize(
    ("page", "model", "run"),
    [
        ("quickstart.md", "qwen3", "runs/tuned/checkpoints"),
        ("../README.md", "MODEL", "RUN"),
        ("recipes.md", "MODEL", "RUN"),
        ("from-maxtext.md", "MODEL", "RUN"),
        ("from-orbax.md", "MODEL", "RUN"),
        ("from-mergekit.md", "MODEL", "RUN"),
    ],
)
def test_commands_of_a_page_run(page, model, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    shutil.copytree(GOLDEN / "qwen3" / "hf", model)
    (tmp_path / model / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {}}}))
    write_training_run(tmp_path / model, tmp_path / run)
    for words in commands(page):
        redirected = words.index(">") if ">" in words else len(words)
        done = ckpt(*words[:redirected])
        allowed = (0, 1) if words[0] in DIFFERENCES else (0,)
        assert done.exit_code in allowed, f"ckpt {' '.join(words)}\n{done.output}"
    if page.startswith(("from-", "..")):
        exec(blocks(page, "python"), {"__name__": "page"})
