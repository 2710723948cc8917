"""Record docs/terminal.svg, the picture in README.md: commands and their standard output.

`--check` runs them on a small model and fails if the picture has other words; its numbers are not compared.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from html import unescape
from io import StringIO
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from ckpttools.testing.models import write_model

PICTURE = Path(__file__).with_suffix(".svg")
WIDTH = 96
COMMANDS = (
    "ckpt convert Qwen3-0.6B maxtext/qwen3",
    "ckpt inspect tree maxtext/qwen3",
    "ckpt verify maxtext/qwen3 --against Qwen3-0.6B",
)
# Qwen3 0.6B's config.json.
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
SMALL = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "vocab_size": 512}


def record(config: Mapping[str, object]) -> str:
    """Run the commands on a model with random weights, and return the picture."""
    console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True)
    environment = os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "TERM": "xterm-256color"}
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory, "Qwen3-0.6B"), config)
        for command in COMMANDS:
            words = [sys.executable, "-m", "ckpttools", *command.split()[1:]]
            done = subprocess.run(
                words, cwd=directory, env=environment, text=True, capture_output=True, check=True
            )
            console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
            console.print(Text.from_ansi(done.stdout.strip("\n")))
            if command != COMMANDS[-1]:
                console.print()
    # Fonts from the network would not load in an image.
    form = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title="ckpt", code_format=form, unique_id="ckpt")


def words(picture: str) -> list[str]:
    """Return the lines of a picture without spaces, numbers and their units."""
    lines: dict[str, list[tuple[float, str]]] = {}
    for x, row, text in re.findall(r'<text [^>]*x="([\d.]+)"[^>]*url\(#ckpt-line-(\d+)\)">([^<]*)', picture):
        lines.setdefault(row, []).append((float(x), text))
    joined = (unescape("".join(text for _, text in sorted(parts))) for parts in lines.values())
    numbers = r"\d[\d.,]*(?: (?:[kMGT]i?)?B\b(?:/s)?| %)?|\s|─"
    return [re.sub(numbers, "", line.replace("\xa0", " ")) for line in joined]


def main() -> None:
    if "--check" in sys.argv:
        if words(PICTURE.read_text()) != words(record(CONFIG | SMALL)):
            sys.exit("docs/terminal.svg is not up to date: run `python docs/terminal.py`")
        return
    PICTURE.write_text(record(CONFIG))


if __name__ == "__main__":
    main()
