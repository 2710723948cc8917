"""Terms of messages never leave the process as they are stored: not in text, JSON, results or files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command_line import ckpt
from support.locations import FIXTURES, GOLDEN, HF, ORBAX, TRAINED

import ckpttools
from ckpttools.core.text import TERM_START

RAW = re.compile("[\ue000\ue001\ue100-\ue1ff]|\\\\ue[01]", re.ASCII)
STARTS = (TERM_START.encode(), json.dumps(TERM_START)[1:-1].encode())
SCANNED = GOLDEN / "llama3.1" / "maxtext_scanned"
PEFT = FIXTURES / "peft" / "plain"
COMMANDS = [
    (HF,),
    (TRAINED,),
    (PEFT,),
    ("convert", "hf-to-maxtext", SCANNED, "OUT"),
    ("convert", "hf-to-maxtext", PEFT, "OUT"),
    ("convert", "hf-to-maxtext", HF, "OUT", "--drop", "nothing.*"),
    ("convert", "hf-to-maxtext", HF, "OUT", "--family", "lama"),
    ("convert", "hf-to-maxtext", HF, "OUT", "--resume"),
    ("convert", "maxtext-to-hf", SCANNED, "OUT", "--dry-run", "--json"),
    ("convert", "to-safetensors", TRAINED, "OUT"),
    ("strip-optimizer", SCANNED, "OUT"),
    ("select", HF, "OUT"),
    ("cast", HF, "OUT"),
    ("stack", HF, "OUT"),
    ("unstack", HF, "OUT"),
    ("quantize", SCANNED, "OUT"),
    ("average", HF, "OUT"),
    ("verify", HF),
    ("verify", HF, "--against", SCANNED),
    ("diff", HF, PEFT),
    ("hash", HF, "--whole"),
    ("doctor", ORBAX / "unfinished_commit_file"),
    ("doctor", PEFT, "--json"),
    ("doctor", "--list"),
    ("inspect", "chunks", SCANNED),
    ("inspect", "report", SCANNED, "OUT.html", "--no-stats"),
    ("plan", "cast", HF, "OUT", "--dtype", "float16", "-o", "plan"),
    ("run", "plan", "--publish"),
    ("run", "plan", "--status", "--json"),
    ("ls", HF),
    ("prune", TRAINED, "--keep-last", "1"),
    ("families",),
]


@pytest.mark.parametrize(
    "words", COMMANDS, ids=lambda words: "-".join(map(str, words[:2])).rpartition("/")[2]
)
def test_commands_print_and_write_no_raw_terms(words: tuple[object, ...], tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if words[0] == "run":
        assert ckpt("plan", "cast", HF, "OUT", "--dtype", "float16", "-o", "plan").exit_code == 0
    result = ckpt(*words)
    assert not RAW.search(result.output), result.output
    for path in tmp_path.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert not any(start in content for start in STARTS), path


def texts(value: object, depth: int = 0) -> Iterator[str]:
    """Yield the strings in a result, those of its properties too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.items():
            yield from texts(item, depth)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts(item, depth)
    elif type(value).__module__.startswith("ckpttools.") and depth < 4:
        for name in dir(type(value)):
            if not name.startswith("_") and not callable(getattr(type(value), name, None)):
                try:
                    item = getattr(value, name)
                except Exception:
                    continue
                yield from texts(item, depth + 1)


@pytest.mark.parametrize(
    "call",
    [
        lambda: ckpttools.summary(HF),
        lambda: ckpttools.summary(TRAINED),
        lambda: ckpttools.doctor(PEFT),
        lambda: ckpttools.doctor(ORBAX / "unfinished_commit_file"),
        lambda: ckpttools.inspect(SCANNED),
        lambda: ckpttools.chunks(SCANNED),
        lambda: ckpttools.verify(SCANNED, HF),
        lambda: ckpttools.diff(HF, PEFT),
        lambda: ckpttools.ls(TRAINED),
        lambda: ckpttools.families(),
        lambda: ckpttools.maxtext_config(HF),
        lambda: ckpttools.plan_training(HF, hosts=1, mode="emergency", keep=3),
    ],
)
def test_python_sees_no_raw_terms(call):
    try:
        result = call()
    except ckpttools.CheckpointError as error:
        result = [str(error), repr(error), error.details(), error.args]
    for text in texts(result):
        assert not RAW.search(text), text


def test_planned_work_has_no_raw_terms(tmp_path: Path):
    planned = ckpttools.maxtext_to_hf.plan(SCANNED, tmp_path / "out", like=HF)
    for text in texts([planned.plan.notes, planned.plan.remarks]):
        assert not RAW.search(text), text
