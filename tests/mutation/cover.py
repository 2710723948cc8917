"""A plugin of pytest that notes which functions of the package each test enters, and how long it takes.

    python -m pytest -p mutation.cover --cover-to FILE tests/array/test_tree.py

FILE gets JSON: test -> its seconds and the functions that it enters, `file:qualified name`. What other
processes do is not seen. The first test that needs a cached value or a fixture stands for all that share it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType

import pytest
from hypothesis import Phase, settings

import ckpttools

_ROOT = Path(ckpttools.__file__).parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cover-to", type=Path, required=True)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Cover(config.getoption("--cover-to")))
    # conftest.py has chosen its own before, and tests are read later: few examples tell what is entered.
    few = (Phase.explicit, Phase.generate)
    settings.register_profile("cover", settings.default, max_examples=10, phases=few)
    settings.load_profile("cover")


class Cover:
    """Entered code by test; a set of code objects costs least while tests run."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._entered: dict[str, set[CodeType]] = defaultdict(set)
        self._seconds: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        add = self._entered[item.nodeid].add

        def note(frame: FrameType, event: str, argument: object) -> None:
            add(frame.f_code)

        began = _cpu()
        threading.settrace(note)
        sys.settrace(note)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            self._seconds[item.nodeid] = _cpu() - began

    def pytest_sessionfinish(self) -> None:
        built = {
            test: {"seconds": round(self._seconds[test], 3), "functions": sorted(_functions(codes))}
            for test, codes in self._entered.items()
        }
        self._target.write_text(json.dumps(built))


def _cpu() -> float:
    """Seconds of this process and of those it has waited for."""
    return sum(os.times()[:4])


def _functions(codes: set[CodeType]) -> set[str]:
    package = f"{_ROOT / 'ckpttools'}/"
    return {
        f"{Path(code.co_filename).relative_to(_ROOT)}:{code.co_qualname.partition('.<locals>')[0]}"
        for code in codes
        if code.co_filename.startswith(package)
    }
