"""Options as data: what they take and refuse, the flags that are made of them, and who announces some."""

from __future__ import annotations

import sys

import click
import pytest
from click.testing import CliRunner

from ckpttools.array.tree import Tree
from ckpttools.cli.declared import declared, made
from ckpttools.core.budget import parse_size
from ckpttools.core.errors import CheckpointError, MappingError, UsageError
from ckpttools.core.options import Option, parsed
from ckpttools.core.plugins import announced, load_group
from ckpttools.formats.base import Writable
from ckpttools.formats.registry import faults_in, formats, writable, writer_options
from ckpttools.transforms import registry

SIZE = Option("most_bytes", parse_size, "2KiB", "A size.")
SWITCH = Option("fast", bool, True, "A switch.")
CHOICE = Option("kind", ("a", "b"), "a", "One of two.")
NUMBER = Option("count", int, None, "A number.")
POSITIVE = Option("every", int, 2, "A number that divides.", "N", least=1)
TEXT = Option("label", str, None, "A text.")
ALL = (SIZE, SWITCH, CHOICE, NUMBER, TEXT, POSITIVE)


def test_values_are_what_is_meant_or_refused():
    said = {"most_bytes": "1MiB", "fast": False, "kind": "b", "count": 0, "label": "x", "every": 3}
    assert parsed(ALL, said, tuple, "") == {**said, "most_bytes": 1 << 20}
    defaults = {"most_bytes": 2048, "fast": True, "kind": "a", "count": None, "label": None, "every": 2}
    assert parsed(ALL, {}, tuple, "") == defaults
    assert SIZE.parsed(3) == 3
    wrong = [(SIZE, "lots"), (SIZE, 0), (SWITCH, 1), (CHOICE, "c"), (NUMBER, -1), (NUMBER, True), (TEXT, "")]
    for option, value in wrong:
        with pytest.raises(UsageError):
            option.parsed(value)
    assert POSITIVE.parsed(1) == 1
    with pytest.raises(UsageError) as caught:
        POSITIVE.parsed(0)
    assert caught.value.wanted == "a whole number from 1 on"


def test_an_option_of_another_may_be_said_as_long_as_it_asks_for_nothing():
    assert parsed([SIZE], {"fast": True, "count": None}, lambda: ALL, "")["most_bytes"] == 2048
    for said in ({"fast": False}, {"kind": "b"}, {"nobodys": None}):
        with pytest.raises(UsageError, match="it is not so") as caught:
            parsed([SIZE], said, lambda: ALL, "it is not so")
        assert caught.value.wanted == "none but most_bytes"


def test_flags_are_made_of_them_and_hand_on_what_is_said():
    seen = []

    def body(**own):
        seen.append(own)

    command = made("x", "Does it.", body, declared(ALL))
    assert CliRunner().invoke(command, ["--most-bytes", "1MiB", "--fast", "--count", "3"]).exit_code == 0
    assert seen == [{"most_bytes": "1MiB", "fast": True, "count": 3}]
    wrong = ("--most-bytes=lots", "--kind=c", "--count=-1", "--every=0", "--label=")
    for words in ([each] for each in wrong):
        assert CliRunner().invoke(command, words).exit_code == 2
    help = CliRunner().invoke(command, ["--help"]).output
    for text in (
        "Does it.",
        "Example:\n    ckpt x SRC DST",
        "--fast / --no-fast",
        "[a|b]",
        "[default: 2KiB]",
        "x>=1",
    ):
        assert text in help
    with pytest.raises(UsageError, match="declares options that all commands have") as caught:
        made("x", "Does it.", body, declared(ALL), click.option("--fast"))
    assert caught.value.got == "--fast"


def test_a_transform_that_is_nearly_there_is_named(monkeypatch):
    monkeypatch.setattr(registry, "transforms", lambda: {"every-layer": None})
    for name, hint in (("every-leyer", "did you mean 'every-layer'?"), ("zzz", registry.GROUP)):
        with pytest.raises(UsageError, match=f"there is no transform {name!r}") as caught:
            registry.transform_named(name, {})
        assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("made", "said", "got"),
    [
        (lambda every: lambda tree: [][every], {"every": 3}, "IndexError: list index out of range"),
        (lambda every: lambda tree: int("x"), {}, "ValueError: invalid literal for int()"),
        (lambda every: {}[every], {}, "KeyError: 2"),
        (lambda every: lambda tree: tree, {}, "<Tree: 0 arrays"),
    ],
)
def test_a_transform_of_a_package_that_fails_is_named(monkeypatch, made, said, got):
    made.options = [POSITIVE]
    monkeypatch.setattr(registry, "transforms", lambda: {"every-layer": made})
    with pytest.raises(MappingError, match="the transform every-layer") as caught:
        Tree({}).pipe(registry.transform_named("every-layer", said))
    assert got in caught.value.got
    assert caught.value.exit_code == 3


def test_what_a_transform_of_a_package_raises_on_purpose_is_its_own(monkeypatch):
    def refuse(tree):
        raise UsageError("not this one")

    monkeypatch.setattr(registry, "transforms", lambda: {"picky": lambda: refuse})
    with pytest.raises(UsageError, match="not this one"):
        Tree({}).pipe(registry.transform_named("picky", {}))


def test_formats_say_what_they_can_do():
    assert set(writable()) == {"orbax", "safetensors", "zarr3"} < set(formats())
    assert {each.name for each in writer_options()} >= {"item", "compression", "separator"}
    assert not isinstance(object(), Writable)


def test_what_a_format_raises_while_it_looks_for_faults_is_one_of_them():
    class Failing:
        looks_for = "nothing"

        def faults(self, path, options):
            yield CheckpointError("one")
            raise CheckpointError("two")

    assert [each.message for each in faults_in(Failing(), None, None)] == ["one", "two"]


def test_nobody_is_asked_where_no_package_announces_anything(tmp_path, monkeypatch):
    assert announced("ckpttools.nothing") == []
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ckpttools.nothing]\nparser = ckpttools.core.budget:parse_size\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert load_group("ckpttools.nothing") == {"parser": parse_size}
    monkeypatch.setattr(sys, "path", [str(tmp_path / "nowhere")])
    assert announced("ckpttools.nothing") == []
