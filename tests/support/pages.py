"""Commands of the documentation, run as a page gives them."""

from __future__ import annotations

import re
import shlex

from support.command_line import ckpt
from support.locations import DOCS


def run_page(name: str) -> list[str]:
    """Runs every `$ ckpt …` of a page in this directory, one after the other; what each printed."""
    printed = []
    for line in re.findall(r"^\$ ckpt (.*)$", (DOCS / name).read_text(), re.MULTILINE):
        result = ckpt(*shlex.split(line))
        assert result.exit_code == 0, f"{line}\n{result.output}"
        printed.append(result.output)
    return printed
