"""How many modules a command imports: each costs startup time, and readers follow them."""

import subprocess
import sys
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[2] / "fixtures" / "golden" / "qwen3" / "hf"

COUNT = """
import atexit, sys

def report():
    print(*(name for name in sys.modules if name.partition(".")[0] == "ckpttools"), file=sys.stderr)

atexit.register(report)
from ckpttools.cli.main import main
main()
"""


def imported_modules(*arguments: object) -> list[str]:
    """Run a command, and return the modules of the package that it imports."""
    words = [sys.executable, "-c", COUNT, *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return done.stderr.splitlines()[-1].split()


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    destination = tmp_path_factory.mktemp("converted") / "maxtext"
    return destination, imported_modules("convert", "hf-to-maxtext", GOLDEN, destination)


def test_inspect_tree_imports_few_modules():
    assert len(imported_modules("inspect", "tree", GOLDEN)) < 165


def test_conversion_imports_few_modules(converted: tuple[Path, list[str]]):
    assert len(converted[1]) < 265


def test_diff_imports_few_modules(converted: tuple[Path, list[str]]):
    assert len(imported_modules("diff", GOLDEN, converted[0])) < 200


def test_plain_model_imports_only_its_format_and_family():
    modules = imported_modules("inspect", "tree", GOLDEN)
    assert "ckpttools.formats.orbax.format" not in modules
    assert "ckpttools.quantized.schemes" not in modules
    assert "ckpttools.model_families.qwen3" in modules
    assert "ckpttools.model_families.gemma3" not in modules
