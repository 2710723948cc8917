import errno
import re
from importlib import import_module

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command_line import ckpt
from support.locations import DOCS

from ckpttools import CheckpointError, FormatError
from ckpttools.cli import error_boundary as border
from ckpttools.core import errors
from ckpttools.core.errors import EXIT_CODES, listing, similar_names

PAGE = (DOCS / "errors.md").read_text()
CODES = {
    "UsageError": 2,
    "DestinationExistsError": 2,
    "FormatError": 3,
    "SeveralCheckpointsError": 3,
    "SourceChangedError": 3,
    "DamagedScalesError": 3,
    "ConfigError": 3,
    "UnknownNameError": 2,
    "NoSuchPathError": 2,
    "MissingPathError": 2,
    "MissingPackageError": 2,
    "MappingError": 3,
    "ShapeError": 3,
    "CoverageError": 3,
    "MemoryBudgetError": 4,
    "NoSpaceError": 4,
    "StorageError": 5,
    "OtherProcessError": 5,
}
LEAVES = {
    name: item
    for name, item in vars(errors).items()
    if isinstance(item, type) and issubclass(item, CheckpointError) and item is not CheckpointError
}


def test_every_error_has_its_exit_code():
    assert {name: item.exit_code for name, item in LEAVES.items()} == CODES


class TestExitCodes:
    """docs/errors.md and `ckpt --help` say of every exit code what the program says."""

    def test_exit_code_page_lists_every_error(self):
        declared = {}
        for line in PAGE.splitlines():
            cells = line.split(" | ")
            if line.startswith("| ") and cells[0][2:].isdigit():
                declared[int(cells[0][2:])] = cells[1:]
        assert list(declared) == list(EXIT_CODES)
        for code, (meaning, named) in declared.items():
            assert meaning.startswith(EXIT_CODES[code])
            errors = {name for name, item in LEAVES.items() if item.exit_code == code}
            assert set(re.findall(r"`(\w+Error)`", named)) == errors

    def test_help_lists_exit_codes(self):
        lines = ckpt("help", "exit-codes").stdout.splitlines()
        for code, meaning in EXIT_CODES.items():
            assert any(line.split(maxsplit=1)[0] == str(code) and meaning in line for line in lines)

    @pytest.mark.parametrize(
        ("end", "code", "text"),
        [
            (ZeroDivisionError("division by zero"), 70, "ZeroDivisionError: division by zero"),
            (SystemError(), 70, "please report it"),
            (MemoryError("9.4 GiB"), 4, "9.4 GiB"),
            (RuntimeError("can't start new thread"), 4, "can't start new thread"),
            (ImportError("libjax.so: failed to map segment from shared object"), 4, "ulimit"),
            (RecursionError("maximum recursion depth exceeded"), 4, "nested too deeply"),
            (OSError(errno.ENOMEM, "Cannot allocate memory"), 4, "ulimit"),
            (OSError(errno.ENOSPC, "No space left on device"), 4, "is full"),
            (OSError(errno.EDQUOT, "Disk quota exceeded"), 4, "is full"),
            (OSError(errno.EIO, "Input/output error", "x.bin"), 5, "at       x.bin"),
            (PermissionError(errno.EACCES, "Permission denied", "x.bin"), 5, "mode bits"),
            (BrokenPipeError(errno.EPIPE, "Broken pipe"), 141, ""),
            (KeyboardInterrupt(), 130, "Stopped."),
            (EOFError(), 70, "EOFError"),
        ],
    )
    def test_unexpected_exceptions_have_a_message_and_exit_code(self, monkeypatch, end, code, text):
        def fail(*_):
            raise end

        monkeypatch.setattr("ckpttools.formats.known_formats.formats", fail)
        result = ckpt("formats")
        assert (result.exit_code, text in result.stderr) == (code, True)
        assert "Traceback" not in result.stderr

    def test_traceback_is_shown_on_demand(self, monkeypatch):
        monkeypatch.setattr("ckpttools.formats.known_formats.formats", lambda: 1 // 0)
        assert "in <lambda>" in ckpt("--traceback", "formats").stderr


@pytest.mark.parametrize("kind", LEAVES.values(), ids=LEAVES)
def test_error_text_has_all_details(kind):
    error = kind("it is wrong", location="model.safetensors", got=3, expected=[4], hint="fetch it again")
    assert str(error) == (
        "it is wrong\n  at       model.safetensors\n  expected [4]\n  got      3\n  hint     fetch it again"
    )
    assert (error.message, error.location, error.got, error.expected) == (
        "it is wrong",
        "model.safetensors",
        "3",
        "[4]",
    )
    assert error.args == ("it is wrong",)
    assert kind.__doc__


def test_missing_error_details_take_no_line():
    assert str(CheckpointError("it is wrong")) == "it is wrong"
    assert CheckpointError("it is wrong", got=0, hint="go on").details() == [("got", "0"), ("hint", "go on")]


@given(st.lists(st.text("ab", min_size=1, max_size=3), max_size=40), st.integers(1, 30))
def test_listing_names_or_counts_every_item(items, limit):
    lines = listing(items, limit).split("\n")[1:]
    assert [line.strip() for line in lines[:limit]] == items[:limit]
    left = [line.strip() for line in lines[limit:]]
    assert len(left) == (len(items) > limit)
    assert not left or left[0].startswith(f"… and {len(items) - limit} more")


def test_near_names_are_suggested():
    assert similar_names("lama", ["qwen2", "llama"]) == ["llama"]
    assert similar_names("zzz", ["qwen2", "llama"]) == []
    assert len(similar_names("qwen", ["qwen2", "qwen3", "qwen4", "qwen5"], 2)) == 2


def test_error_can_be_moved_to_another_location():
    error = errors.FormatError("cut short", location="a", got=3, expected=4, hint="copy it again")
    moved = error.at("b")
    assert type(moved) is errors.FormatError and str(moved) == str(error).replace("at       a", "at       b")
    assert error.at(hint="give up").details() == [*error.details()[:3], ("hint", "give up")]
    assert error.location == "a" and error.hint == "copy it again"


class TestErrorLines:
    """Sentences fit the terminal; what is to be copied, and whatever goes into a pipe, stays whole."""

    ERROR = FormatError(
        "this is a sentence that is longer than the terminal is wide" + listing(["x" * 60]),
        location="/some/where/" + "long/" * 10,
        expected="words and more words, until the end of the line is reached and another begins",
        hint="do this or that, and then `ckpt doctor '/some where/with a name' --fix merge` says more of it",
    )

    def test_terminal_errors_are_wrapped(self):
        lines = border._error_lines(self.ERROR, 50)
        whole = [line for line in lines if len(line) > 50]
        assert [line.split()[0] for line in whole] == ["x" * 60, "at", "`ckpt"]
        assert " ".join(" ".join(lines).split()) == " ".join(f"Error: {self.ERROR}".split())

    def test_command_without_backticks_is_not_wrapped(self):
        hint = "ckpt convert maxtext-to-hf '/some where' DST converts it to a Hugging Face checkpoint"
        lines = border._error_lines(FormatError("no", hint=hint + "\n         mkdir NEW && cp -r a b"), 40)
        assert lines[1:] == [f"  hint     {hint}", "         mkdir NEW && cp -r a b"]

    def test_piped_errors_are_not_wrapped(self):
        assert "\n".join(border._error_lines(self.ERROR, None)) == f"Error: {self.ERROR}"


def test_missing_package_is_not_an_internal_error():
    with pytest.raises(ModuleNotFoundError) as caught:
        import_module("a_package_that_nobody_has")
    error = border._translate_click(caught.value)
    assert error is not None and error.exit_code == 2
    assert error.message == "the Python package a_package_that_nobody_has is not installed"


def test_byte_counts_are_formatted_alike_in_all_errors():
    error = CheckpointError(
        "wrong", got="a file of 1234567 bytes", expected="999 to 12,345 bytes, or 4096 bytes"
    )
    lines = [
        "wrong",
        "  expected 999 to 12,345 bytes, or 4,096 bytes",
        "  got      a file of 1,234,567 bytes",
    ]
    assert str(error).splitlines() == lines
    assert error.got == "a file of 1234567 bytes"
