"""Sessions of `ckpt browse` without a terminal. As a script, it records the screens in docs/browse.md again.

A comment before each screen has its size, the path, and the keys that lead to it:

    <!-- screen 80x24: models/qwen3 | down enter -->
"""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import chdir
from functools import partial
from pathlib import Path

import ml_dtypes  # noqa: F401  # safetensors finds bfloat16 here.
from safetensors.numpy import load_file, save_file

from ckpttools.cli.browse import Session, open_location
from ckpttools.cli.browser import Browser
from ckpttools.stores.registry import parse

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "browse.md"
SCREEN = re.compile(r"(<!-- screen (\d+)x(\d+): (\S+) \|(.*?)-->\n+```text\n)(.*?)(?=```\n)", re.DOTALL)
# Directory of the examples -> fixture.
EXAMPLES = {"models/qwen3": "golden/qwen3/hf", "run": "orbax/maxtext_run/checkpoints"}


class Browsing:
    """A browser that is driven by keys."""

    # A process that has run many tests is larger than the default limit.
    def __init__(self, path: object, against: object = None, *, size: tuple[int, int], memory: int = 1 << 36):
        other = None if against is None else parse(str(against))
        session = Session(memory, None, None, {})
        first = partial(open_location, session, parse(str(path)), None, other)
        self.app, self._size = Browser(session, first, str(path)), size

    def press(self, *keys: str) -> str:
        """Return the screen after these keys; `text:` precedes text to type."""
        return asyncio.run(self._press(keys))

    async def _press(self, keys: Sequence[str]) -> str:
        async with self.app.run_test(size=self._size) as pilot:
            await self.settle()
            for key in keys:
                if key.startswith("text:"):
                    # Faster than pressing a key for each character.
                    self.app._prompt.value = key[5:]
                else:
                    await pilot.press(key)
                await self.settle()
            return self.screen()

    async def settle(self) -> None:
        """Wait until nothing is read and all messages are processed."""
        await asyncio.sleep(0.01)
        while self.app.reader.is_busy:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.02)
        # The status line is updated ten times a second.
        self.app._show_progress()
        await asyncio.sleep(0.02)

    def screen(self) -> str:
        """Return the text on the screen."""
        strips = self.app.screen._compositor.render_strips()
        return "".join(f"{strip.text.rstrip()}\n" for strip in strips)


def recorded_page() -> str:
    """Return the page with its screens recorded again."""
    with tempfile.TemporaryDirectory() as directory, chdir(directory):
        for name, fixture in EXAMPLES.items():
            shutil.copytree(ROOT / "fixtures" / fixture, name)
        saved = time.time_ns() - 3 * 3600 * 10**9
        for path in Path("run").glob("*/_CHECKPOINT_METADATA"):
            text = re.sub(r'("commit_timestamp_nsecs": )\d+', rf"\g<1>{saved}", path.read_text())
            path.write_text(text)
        _write_tuned(Path("models/qwen3"), Path("models/tuned"))
        return SCREEN.sub(_record, PAGE.read_text())


def _write_tuned(source: Path, destination: Path) -> None:
    """Write a model whose later layers have changed more."""
    destination.mkdir()
    arrays = load_file(source / "model.safetensors")
    for name, values in arrays.items():
        layer = re.search(r"layers\.(\d+)\.mlp", name)
        if layer is not None:
            arrays[name] = (values.astype("float32") * (1 + 0.03 * int(layer[1]))).astype(values.dtype)
    save_file(arrays, destination / "model.safetensors")
    shutil.copy(source / "config.json", destination)


def _record(match: re.Match[str]) -> str:
    browsing = Browsing(match[4], size=(int(match[2]), int(match[3])))
    return match[1] + browsing.press(*match[5].split())


if __name__ == "__main__":
    PAGE.write_text(recorded_page())
