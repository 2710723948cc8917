"""Install the wheel with pip, uv and pipx into fresh environments, and run `ckpt demo` in each.

    python tests/releases/installs.py dist/ckpttools-*.whl [PYTHON ...]

Prints the seconds that the installation took, the size of the environment, and whether the demo ended well.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import which

PYTHONS = ("python3.11", "python3.12", "python3.13")


def with_pip(python: str, wheel: Path, directory: Path) -> Path:
    """Return the `ckpt` of a new virtual environment."""
    run(python, "-m", "venv", directory)
    run(directory / "bin" / "python", "-m", "pip", "install", "--quiet", wheel)
    return directory / "bin" / "ckpt"


def with_uv(python: str, wheel: Path, directory: Path) -> Path:
    """Return the `ckpt` of `uv tool install`."""
    places = {"UV_TOOL_DIR": str(directory / "tools"), "UV_TOOL_BIN_DIR": str(directory / "bin")}
    run("uv", "tool", "install", "--quiet", "--python", python, wheel, **places)
    return directory / "bin" / "ckpt"


def with_pipx(python: str, wheel: Path, directory: Path) -> Path:
    """Return the `ckpt` of `pipx install`."""
    places = {"PIPX_HOME": str(directory / "tools"), "PIPX_BIN_DIR": str(directory / "bin")}
    run("pipx", "install", "--quiet", "--python", python, wheel, **places)
    return directory / "bin" / "ckpt"


def run(*words: str | Path, **environment: str) -> None:
    """Run a command; raise with its output if it fails."""
    paths = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        [*map(str, words)],
        env={**os.environ, "PATH": paths, **environment},
        cwd=tempfile.gettempdir(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))}\n{done.stdout}{done.stderr}")


def size_of(directory: str) -> float:
    """Return the size of all files below a directory, in MB."""
    files = (item for item in Path(directory).rglob("*") if item.is_file() and not item.is_symlink())
    return sum(item.stat().st_size for item in files) / 1e6


def install_all(wheel: Path, pythons: list[str]) -> Iterator[str]:
    """Yield a line for each installation."""
    ways: dict[str, Callable[[str, Path, Path], Path]] = {"pip": with_pip, "uv": with_uv, "pipx": with_pipx}
    for python in pythons:
        for name, install in ways.items():
            with tempfile.TemporaryDirectory() as directory:
                begun = time.monotonic()
                command = install(which(python) or python, wheel.absolute(), Path(directory) / "new")
                seconds = time.monotonic() - begun
                run(command, "demo")
                yield f"{python}  {name:<5} {seconds:5.0f} s  {size_of(directory):5.0f} MB  demo passed"


if __name__ == "__main__":
    for line in install_all(Path(sys.argv[1]), sys.argv[2:] or [*PYTHONS]):
        print(line, flush=True)
