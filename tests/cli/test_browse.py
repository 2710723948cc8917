"""`ckpt browse`: what its screens show, driven by keys."""

from __future__ import annotations

import asyncio
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from support.browsing import PAGE, Browsing, recorded_page
from support.command_line import ckpt
from support.locations import GOLDEN, ORBAX
from textual import events

from ckpttools.cli.browse import OpenLine, command
from ckpttools.inspection.folding import FoldedLine
from ckpttools.inspection.tree import ArrayReport

WIDE = (150, 40)


def test_recorded_screens_are_current():
    assert recorded_page() == PAGE.read_text(), "run tests/support/browsing.py"


def test_names_cannot_control_the_screen(tmp_path: Path):
    names = ["[red]x[/red]", "line\nbreak", "\x1b[31mred", "[link=https://a.b]c", "a" * 300, "漢字", ""]
    save_file({name: np.ones(2, np.float32) for name in names}, tmp_path / "model.safetensors")
    screen = Browsing(tmp_path, size=WIDE).press("down", "down", "enter")
    for text in ("[red]x[/red]", "line\\nbreak", "\\x1b[31mred", "[link=https://a.b]c", "aaa…", "漢字"):
        assert text in screen


def test_copied_commands_quote_control_characters():
    assert command("cat", "a b", "x\n'\x1b") == r"ckpt cat 'a b' $'x\x0a\x27\x1b'"


def test_nan_is_shown_with_its_index(tmp_path: Path):
    values = np.ones((4, 5), np.float32)
    values[1, 2], values[3, 3] = np.nan, np.inf
    save_file({"weight": values, "empty": np.ones((0, 3), np.float32)}, tmp_path / "model.safetensors")
    assert "NaN or Inf: first of 2 at [1, 2]" in Browsing(tmp_path, size=WIDE).press("down", "enter")
    assert "float32[0,3]" in Browsing(tmp_path, size=WIDE).press("enter")


def test_keys_typed_at_once_reach_the_filter():
    """A terminal may deliver `/q_norm` in one piece; `q` would quit."""
    browsing = Browsing(GOLDEN / "qwen3" / "hf", size=WIDE)

    async def type_at_once() -> str:
        async with browsing.app.run_test(size=WIDE) as pilot:
            await browsing.settle()
            for key in ("slash", *"q", "underscore", *"norm"):
                browsing.app.post_message(events.Key(key, {"underscore": "_", "slash": "/"}.get(key, key)))
            await pilot.pause()
            await browsing.settle()
            return browsing.screen()

    screen = asyncio.run(type_at_once())
    assert "q_norm" in screen and "k_norm" not in screen


def test_unreadable_array_is_an_error_in_its_pane(tmp_path: Path):
    run = tmp_path / "run"
    shutil.copytree(ORBAX / "llama3.1_scanned_zarr2_noocdbt", run)
    for chunk in (run / "0" / "items").glob("*.mlp.wi_0.kernel/0.*"):
        chunk.unlink()
    browsing = Browsing(run / "0" / "items", size=WIDE)
    screen = browsing.press("slash", "text:wi_0", "enter", "end", "enter")
    assert "Error: " in screen and "wi_0" in screen
    assert "internal error" not in screen


def test_memory_limit_is_an_error_in_the_pane(tmp_path: Path):
    save_file({"weight": np.ones((64, 64), np.float32)}, tmp_path / "model.safetensors")
    screen = Browsing(tmp_path, size=WIDE, memory=64 << 20).press("enter")
    assert "Error: " in screen and "--memory 64MiB" in screen
    assert "[1. 1. 1. ... 1. 1. 1.]" in screen, "values need less memory"


def test_escape_stops_reading(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    header = b'{"weight":{"dtype":"BF16","shape":[100000,200000],"data_offsets":[0,40000000000]}}'
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 40_000_000_000)
    browsing = Browsing(path, size=WIDE)

    async def stop() -> None:
        async with browsing.app.run_test(size=WIDE) as pilot:
            await browsing.settle()
            await pilot.press("enter")
            assert browsing.app.reader.is_busy
            await pilot.press("escape")
            await asyncio.wait_for(browsing.settle(), 10)

    asyncio.run(stop())
    assert browsing.app.reader.stop()


def test_folded_layers_are_listed_one_by_one():
    keys = ("slash", "text:up_proj bfloat16", "enter")
    found = Browsing(GOLDEN / "qwen3" / "hf", size=WIDE).press(*keys)
    assert "4 of 47 arrays: up_proj bfloat16" in found
    assert "{0..3}" in found
    listed = Browsing(GOLDEN / "qwen3" / "hf", size=WIDE).press(*keys, "u", "end", "enter")
    assert "model.layers.3.mlp.up_proj.weight" in listed
    assert "norm " in listed


def test_stacked_layers_are_shown_side_by_side():
    keys = ("slash", "text:wi_0", "enter", "end", "l")
    path = GOLDEN / "llama3.1" / "maxtext_scanned" / "0" / "items"
    screen = Browsing(path, size=WIDE).press(*keys)
    assert [f"layer {number}" in screen for number in range(5)] == [True] * 4 + [False]
    layer = Browsing(path, size=WIDE).press(*keys, "down", "enter")
    assert "wi_0/kernel[:, 1]" in layer


def test_titles_of_columns_follow_the_width():
    browsing = Browsing(GOLDEN / "qwen3" / "hf", size=(200, 10))

    async def resize() -> str:
        async with browsing.app.run_test(size=(200, 10)) as pilot:
            await browsing.settle()
            await pilot.resize_terminal(100, 10)
            await browsing.settle()
            return browsing.screen()

    titles, row = asyncio.run(resize()).splitlines()[1:3]
    assert titles.index("size") + len("size") == row.index("kB") + len("kB")


def test_layer_of_a_comparison_opens_its_most_different_array(tmp_path: Path):
    for side, factor in (("a", 1), ("b", 2)):
        (tmp_path / side).mkdir()
        arrays = {
            f"model.layers.{layer}.mlp.{name}.weight": np.full((2, 3), value * factor, np.float32)
            for layer in range(2)
            for name, value in (("up_proj", 0), ("down_proj", 1))
        }
        save_file(arrays, tmp_path / side / "model.safetensors")
    screen = Browsing(tmp_path / "a", tmp_path / "b", size=WIDE).press("l", "enter")
    assert "max                   1           2" in screen


@given(
    st.sets(st.lists(st.sampled_from(["a", "b", "0", "1", "2", "x1"]), min_size=1, max_size=4).map("/".join))
)
def test_rows_stand_for_every_array_once(names: set[str]):
    names = {name for name in names if not any(other.startswith(f"{name}/") for other in names)}
    top = FoldedLine.top([ArrayReport(name, (2,), "float32", 8, "parameter") for name in names])
    for is_listed in (False, True):
        found: list[str] = []
        rows = [OpenLine(line) for line in top.children()] if names else []
        while rows:
            row = rows.pop()
            row.is_listed = is_listed and len(row.members) > 1
            if row.line.is_leaf and not row.is_listed:
                assert len(row.names()) == row.times
                found += row.names()
            else:
                rows += row.rows_below()
        assert sorted(found) == sorted(names)


def test_browse_requires_a_terminal():
    result = ckpt("browse", GOLDEN / "qwen3" / "hf")
    assert result.exit_code == 2
    assert "Error: the browser needs a terminal" in result.output
    assert "hint     `ckpt inspect tree" in result.output


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ckpttools.core.extras.find_spec", lambda name: None)
    assert "pip install 'ckpttools[browse]'" in ckpt("browse", GOLDEN / "qwen3" / "hf").output
