"""The documentation is executed: examples run, the generated page is fresh, links lead somewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ckpttools.dtypes import DTYPES

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def code_blocks(page: Path, language: str) -> list[str]:
    blocks, inside, lines = [], False, []
    for line in page.read_text().splitlines():
        if line == f"```{language}":
            inside, lines = True, []
        elif line == "```" and inside:
            inside = False
            blocks.append("\n".join(lines) + "\n")
        elif inside:
            lines.append(line)
    return blocks


def install(directory: Path, page: str, module: str, group: str, name: str, attribute: str) -> None:
    """Lays the page's module out as an installed distribution with its entry point."""
    (directory / f"{module}.py").write_text(code_blocks(ROOT / "docs" / page, "python")[0])
    info = directory / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}:{attribute}\n")


def ckpt(*arguments: object, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(path)} if path else None
    command = [sys.executable, "-c", "from ckpttools.cli.main import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_the_commands_page_is_fresh():
    done = subprocess.run([sys.executable, ROOT / "docs" / "generate.py", "--check"], check=False)
    assert done.returncode == 0, "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = page.read_text()
    for part in text.split("](")[1:]:
        target = part.split(")")[0].split("#")[0]
        if target and "://" not in target:
            assert (page.parent / target).exists(), target


def test_a_family_can_be_added_as_the_page_says(tmp_path):
    from safetensors.numpy import save_file

    install(tmp_path, "add-a-family.md", "my_family", "ckpttools.families", "tiny", "FAMILY")
    model = tmp_path / "hf"
    model.mkdir()
    sizes = {"num_layers": 2, "hidden_size": 8, "vocab_size": 16}
    config = {"model_type": "tiny", "tie_word_embeddings": True, **sizes}
    (model / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    tensors = {"embed.weight": rng.standard_normal((16, 8), np.float32)}
    for layer in range(2):
        tensors[f"layers.{layer}.up.weight"] = rng.standard_normal((24, 8), np.float32)
        tensors[f"layers.{layer}.down.weight"] = rng.standard_normal((8, 24), np.float32)
    save_file(tensors, model / "model.safetensors")
    assert "tiny" in ckpt("families", path=tmp_path).stdout
    done = ckpt("convert", "hf-to-maxtext", model, tmp_path / "out", path=tmp_path)
    assert done.returncode == 0, done.stderr

    import ckpttools

    tree = ckpttools.open(tmp_path / "out")
    stacked = tree["params", "params", "decoder", "layers", "mlp", "wi", "kernel"].read()
    parts = [tensors[f"layers.{layer}.up.weight"].T for layer in range(2)]
    assert np.array_equal(stacked, np.stack(parts, axis=1))


def test_a_format_can_be_added_as_the_page_says(tmp_path):
    page = "add-a-format.md"
    install(tmp_path, page, "npy_format", "ckpttools.formats", "npy", "FORMAT")
    (tmp_path / "test_npy_format.py").write_text(code_blocks(ROOT / "docs" / page, "python")[1])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_npy_format.py"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def test_the_added_format_is_found_and_is_what_it_says(tmp_path, monkeypatch):
    install(tmp_path, "add-a-format.md", "npy_format", "ckpttools.formats", "npy", "FORMAT")
    monkeypatch.syspath_prepend(tmp_path)
    import npy_format

    from ckpttools.ir.tree import Metadata, Tree
    from ckpttools.testing.conformance import write
    from ckpttools.testing.strategies import noise, stored

    dtype = DTYPES["float32"]
    truth = noise((3, 4), dtype)
    write(Tree({("a", "w"): stored(truth, dtype)}, Metadata()), npy_format.NpyWriter(), tmp_path / "out")
    assert np.array_equal(np.load(tmp_path / "out" / "0.npy"), truth.view(dtype.numpy))
    done = ckpt("inspect", "tree", tmp_path / "out", path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "npy" in done.stdout
    assert "float32[3,4]" in done.stdout


def test_a_plug_in_that_cannot_be_loaded_is_named_and_breaks_nothing(tmp_path):
    install(tmp_path, "add-a-family.md", "my_family", "ckpttools.families", "tiny", "FAMILY")
    (tmp_path / "my_family.py").write_text("raise RuntimeError('boom')\n")
    done = ckpt("families", path=tmp_path)
    assert done.returncode == 0
    assert "llama" in done.stdout
    assert "my_family" in done.stderr
    assert "boom" in done.stderr


def test_every_command_has_an_example():
    page = (ROOT / "docs" / "cli.md").read_text()
    for section in page.split("\n## ")[1:]:
        assert "Example:" in section, section.splitlines()[0]
