"""Patterns of somebody else: what they match, and that none takes for ever."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from ckpttools.core import bounded_regex as patterns
from ckpttools.core.bounded_regex import PatternError, is_match

ENDLESS = "([a-z]+)+!"


@pytest.mark.parametrize(
    ("pattern", "text", "below", "expected"),
    [
        ("q_proj", "q_proj", False, True),
        ("q_proj", "a.q_proj", False, False),
        ("q_proj", "a.q_proj", True, True),
        ("q_proj", "a.xq_proj", True, False),
        ("a|b", "c.b", True, True),
        (r"(?!.*vision).*\.(q|k)_proj", "model.k_proj", False, True),
        (r"(?!.*vision).*\.(q|k)_proj", "vision.k_proj", False, False),
    ],
)
def test_pattern_matches_expected_names(pattern: str, text: str, below: bool, expected: bool):
    assert is_match(pattern, text, below=below) is expected


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("(", "unterminated"),
        ("a{99999999999999999999}", "too large"),
        ("(" * 5000 + ")" * 5000, "nested too deeply"),
    ],
)
def test_invalid_pattern_is_refused(pattern: str, told: str):
    with pytest.raises(PatternError, match=told):
        is_match(pattern, "a")


def test_endless_match_ends_and_timers_keep_running(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(patterns, "_SECONDS", 0.1)
    rung: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: rung.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(PatternError, match="can match in too many ways"):
            is_match(ENDLESS, "a" * 60)
        end = time.monotonic() + 5
        while not rung and time.monotonic() < end:
            time.sleep(0.01)
        assert rung == [signal.SIGALRM]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_patterns_match_in_other_threads():
    result: list[bool] = []
    thread = threading.Thread(target=lambda: result.append(is_match("(a*)b", "aab")))
    thread.start()
    thread.join()
    assert result == [True]
