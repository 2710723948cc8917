"""Terms of messages: the same text for Python and for the command line; data never becomes a term."""

from __future__ import annotations

import pickle
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.internals import printable, render

from ckpttools import LaterStepWarning, UsageError
from ckpttools.cli.message_terms import FlagTerms
from ckpttools.core.dataclass import dataclass
from ckpttools.core.errors import list_with_count
from ckpttools.core.message_terms import (
    PLAN,
    action,
    call,
    error_in_plan,
    location,
    option,
    option_names,
    quoted_option,
    rename_option,
    render_all,
    repeated_option,
    retry_term,
    with_options,
)
from ckpttools.core.text import TERM_START, printable_text

# Delimiters and payloads of terms as any process writes them, and other characters that names may have.
PRIVATE = "".join(map(chr, (0xE000, 0xE001, *range(0xE130, 0xE13A), *range(0xE15B, 0xE17E))))
NAMES = st.text(st.sampled_from("ab\"'\\ \n\x1b{}$" + PRIVATE), max_size=40)


def flags(text: str) -> str:
    return render(text, FlagTerms())


@pytest.mark.parametrize(
    ("term", "python", "command_line"),
    [
        (option("scan_axis"), "`scan_axis`", "--scan-axis"),
        (option("scan_axis", 0), "scan_axis=0", "--scan-axis 0"),
        (option("overwrite", True), "overwrite=True", "--overwrite"),
        (option("scan", False), "scan=False", "--no-scan"),
        (option("reference", False), "reference=False", "--copy"),
        (option("zarr3", False), "zarr3=False", "--zarr2"),
        (option("tied", "drop"), 'tied="drop"', "--tied drop"),
        (option("rank", "N"), "rank=N", "--rank N"),
        (option("dtype_map", {"*": "int8"}), 'dtype_map={"*": "int8"}', "--dtype-map '*=int8'"),
        (quoted_option("keep", "*.bias"), 'keep="*.bias"', "--keep '*.bias'"),
        (repeated_option("drop", ["a.*"]), 'drop="a.*"', "--drop 'a.*'"),
        (repeated_option("drop", ["a.*", "b"]), 'drop=["a.*", "b"]', "--drop 'a.*' --drop 'b'"),
        (location("destination"), "`destination`", "DST"),
        (retry_term(), "make the same call again", "run the same command again"),
        (call("remap"), "ckpttools.remap", "ckpt remap"),
        (action("doctor", "a b"), '`ckpttools.doctor("a b")`', "`ckpt doctor 'a b'`"),
        (call("plan_status", PLAN), 'ckpttools.plan_status("PLAN")', "ckpt run PLAN --status"),
        (call("run_part", "p", "0/1"), 'ckpttools.run_part("p", "0/1")', "ckpt run p --part 0/1"),
        (
            call("merge_adapter", "BASE", "DST", adapter="it", alpha="ALPHA"),
            'ckpttools.merge_adapter("BASE", "DST", adapter="it", alpha=ALPHA)',
            "ckpt adapter merge BASE it DST --alpha ALPHA",
        ),
        (
            call("convert", "m", "DST", format="safetensors", names="hub", drop=["x.*"], like=None),
            'ckpttools.convert("m", "DST", format="safetensors", names="hub", drop=["x.*"])',
            "ckpt convert to-safetensors m DST --names hub --drop 'x.*'",
        ),
        (
            call("list_saves", ["a", "OTHER_HOST…"]),
            'ckpttools.list_saves(["a", "OTHER_HOST…"])',
            "ckpt assemble a OTHER_HOST… --list",
        ),
        (
            call("hash", "m", names="maxtext"),
            'ckpttools.hash("m", names="maxtext")',
            "ckpt hash m --as maxtext",
        ),
        (call("inspect.names", "m"), 'ckpttools.inspect("m")', "ckpt inspect tree m --flat"),
        (with_options("{tied} or {scan}"), "`tied` or `scan`", "--tied or --scan"),
    ],
    # Terms differ between processes.
    ids=lambda text: "" if TERM_START in text else text,
)
def test_terms_render_for_python_and_the_command_line(term: str, python: str, command_line: str):
    assert render(term) == python
    assert flags(term) == command_line


def test_shell_quotes_values():
    hostile = "it's $(touch x)"
    assert shlex.split(flags(quoted_option("keep", hostile))) == ["--keep", hostile]
    assert shlex.split(flags(call("select", hostile, "DST", drop=[hostile]))) == [
        *("ckpt", "select", hostile, "DST", "--drop", hostile)
    ]


def test_error_renders_python_terms_and_keeps_the_originals():
    error = UsageError("it exists", got=option("tied"), hint=f"use {option('overwrite', True)}")
    assert str(error) == "it exists\n  got      `tied`\n  hint     use overwrite=True"
    assert error.hint == "use overwrite=True" and error.details()[1] == ("hint", error.hint)
    assert flags(error.raw.hint or "") == "use --overwrite"
    again = pickle.loads(pickle.dumps(error.at(hint=option("resume"))))
    assert again.raw.got == option("tied") and again.hint == "`resume`" and error.hint == "use overwrite=True"
    assert TERM_START not in repr(UsageError(option("tied")))


def test_warning_renders_python_terms():
    assert str(LaterStepWarning(f"name it with {option('step')}")) == "name it with `step`"


@given(NAMES)
def test_names_are_never_parsed_as_terms(name: str):
    text = f"{name}: use {option('overwrite', True)}, {name}"
    assert render(text) == f"{name}: use overwrite=True, {name}"
    shown = printable_text(render(printable(text)))
    assert shown.isprintable() and not set(shown) & set(PRIVATE)
    assert shown == f"{printable(name)}: use overwrite=True, {printable(name)}"
    assert option_names(text) == ["overwrite"]


@given(NAMES)
def test_names_in_terms_are_escaped(name: str):
    term = call("select", name, "DST", drop=[name])
    for shown in (render(term), flags(term)):
        assert shown.isprintable()
    assert render(term) in printable_text(render(f"see {term}"))


def test_terms_survive_listing_and_folding():
    text = list_with_count("wrong", [f"layers.{k}: {option('scan_axis', 0)}" for k in range(3)])
    assert "layers.{0..2}: scan_axis=0" in render(text)


def test_error_in_plan_names_the_plan():
    with pytest.raises(UsageError) as caught, error_in_plan("my plan"):
        raise UsageError("no", hint=f"{option('overwrite', True)}; {action('plan_status', PLAN)}")
    assert caught.value.hint == 'a plan made with overwrite=True; `ckpttools.plan_status("my plan")`'
    assert flags(caught.value.raw.hint or "") == "a plan made with --overwrite; `ckpt run 'my plan' --status`"


def test_option_can_be_renamed():
    assert render(rename_option(f"say {option('like', 'HF_DIR')}", "like", "model")) == 'say model="HF_DIR"'


@dataclass(frozen=True, slots=True)
class Facts:
    """Some facts."""

    texts: tuple[str, ...]
    other: object = None


def test_results_are_rendered_without_changing_them():
    Facts.__module__ = "ckpttools.api.facts"
    facts = Facts((option("tied"),), {"a": [Facts((retry_term(),))]})
    shown = render_all(facts)
    assert shown == Facts(("`tied`",), {"a": [Facts(("make the same call again",))]})
    assert facts.texts == (option("tied"),)
    assert render_all(shown) is shown
